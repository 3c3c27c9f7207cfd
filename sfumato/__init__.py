"""Sfumato: labelled synthetic images from sensitive ones, with a ledger of the privacy they cost."""

__version__ = "0.2.0"
