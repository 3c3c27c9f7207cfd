"""What a charge may draw instead of pixels: latents of the sensitive images, or what a feature map makes of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from sfumato.data.store import Card, Encode, have_latents, latents_key, write_latents
from sfumato.privacy.authorize import open_local
from sfumato.runtime import distributed


def ensure_latents(
    state: Path,
    card: Card,
    encoder: str,
    purpose: str,
    load: Callable[[], Encode],
    progress: Callable[[], AbstractContextManager[Callable[[int, int], None]]],
) -> str:
    """The key of the latents of the images, encoded now if they do not exist.

    Local work outside the guarantee: it is journalled, kept in the state directory, and shows only how many parts of
    100 are done. encoder: a digest of all that decides a latent; purpose: for the journal; load: gives what encodes.
    """
    key = latents_key(card, encoder)
    if distributed.is_main() and not have_latents(state, card, key):
        encode = load()
        open_local(state, card, purpose)
        with progress() as report:
            write_latents(state, card, key, encode, report)
    return distributed.broadcast_object(key)  # the others wait until the latents are there
