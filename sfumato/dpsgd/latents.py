"""The latents of the sensitive images, for a public model that is fine-tuned on them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sfumato.data.store import Card, have_latents, latents_key, write_latents
from sfumato.diffusion.denoiser import Denoiser
from sfumato.privacy.authorize import open_local
from sfumato.runtime import distributed


def ensure_latents(
    model: Denoiser,
    state: Path,
    card: Card,
    load_codec: Callable[[], Any],
    progress: Callable[[], AbstractContextManager[Callable[[int, int], None]]],
) -> str | None:
    """The key of the latents that a charge samples for `model`, encoded now if they do not exist; None for pixels.

    Local work outside the guarantee: it is journalled, kept in the state directory, and shows only how many parts of
    100 are done. load_codec: its `encode` maps images to latents.
    """
    if model.encoder is None:
        return None
    key = latents_key(card, model.encoder)
    if distributed.is_main() and not have_latents(state, card, key):
        codec = load_codec()
        open_local(state, card, "latents")
        with progress() as report:
            write_latents(state, card, key, codec.encode, report)
    return distributed.broadcast_object(key)  # the others wait until the latents are there
