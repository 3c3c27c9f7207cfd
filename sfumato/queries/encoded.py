"""What a map makes of each sensitive image, computed once and kept in the state directory: queries draw it instead."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.data.store import Card, have_latents, latents_key, write_latents
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.privacy.authorize import open_local
from sfumato.runtime import distributed


def encoder_of(map: nn.Module, arguments: Mapping[str, Any]) -> str:
    """A digest of all that decides a map: its arguments and its state."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
    for name, tensor in sorted(map.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def ensure_encoded(
    function: Callable[[Tensor], Tensor],
    encoder: str,
    where: torch.device,
    state: Path,
    card: Card,
    progress: Callable[[], AbstractContextManager[Callable[[int, int], None]]],
) -> str:
    """The key of the rows that a charge shall draw in the images' place, computed now where they are not there yet.

    function: (B, C, H, W) on the device `where` -> (B, d); encoder: what stands for it, `encoder_of`.
    Local work outside the guarantee: journalled, kept in the state directory, and nothing of it is shown but how many
    parts of 100 are done. A row is a function of its image alone.
    """
    key = latents_key(card, encoder)
    if distributed.is_main() and not have_latents(state, card, key):
        matters = place_matters(function, card.shape, where)
        open_local(state, card, "features")
        with progress() as report:
            write_latents(state, card, key, lambda images: rows_alone(function, images.to(where), matters), report)
    return distributed.broadcast_object(key)  # the others wait until the rows are there
