"""Sfumato: labelled synthetic images from sensitive ones, with a ledger of the privacy they cost.

`sfumato.load_release(folder)` gives a release as arrays and needs nothing but NumPy: what it takes is imported when it
is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfumato.release.loading import Release, load_release

__version__ = "0.2.0"
__all__ = ["Release", "__version__", "load_release"]


def __getattr__(name: str) -> Any:
    if name not in ("Release", "load_release"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sfumato.release import loading

    return getattr(loading, name)
