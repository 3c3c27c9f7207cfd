"""What `saliency` and `finetune` do beyond their own work where the network is a public text-to-image model: encode once, settle the chunk, estimate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stages.common import progress, state_dir

if TYPE_CHECKING:
    from sfumato.resolved import StagePlan


def ensure_latents(card: Path, pretrain: Path) -> str | None:
    """The key of the latents that the charge shall draw, encoded now where they are not there yet; None for a network of our own.

    Local work outside the guarantee: journalled, kept in the state directory, nothing of it is shown.
    """
    from sfumato.public_model.network import is_latent, load_codec, read_reference

    if not is_latent(pretrain):
        return None
    from sfumato.compute import device
    from sfumato.data.latents import have_latents, latents_key, write_latents
    from sfumato.data.store import read_card
    from sfumato.privacy.charge import open_local

    public, reference = read_card(card), read_reference(pretrain)
    key = latents_key(public, f"{reference['parts']['vae']['sha256']} at {reference['image_size']}")
    if not have_latents(state_dir(), public, key):
        codec = load_codec(pretrain, device())
        open_local(state_dir(), public, "latents")
        with progress("encoding the images, once", clock=False) as report:
            write_latents(state_dir(), public, key, codec.encode, report)
    return key


def settled(plan: StagePlan) -> Any:
    """The stage's settings, with the images at a time chosen by this machine's memory for a public model."""
    if plan.model is None or plan.model.directory is None:
        return plan.settings
    from sfumato.dpsgd.memory import settle_chunk

    return settle_chunk(plan.settings, plan.model, len(plan.classes))


def show_memory(plan: StagePlan) -> None:
    """A line of --dry-run: what the stage will take, or why that cannot be said here. Nothing for a network of our own."""
    if not plan.enabled or plan.model is None or plan.model.directory is None:
        return
    typer.echo(f"memory  {memory_line(plan.model, len(plan.classes), plan.settings)}")


def memory_line(model: Any, classes: int, settings: Any) -> str:
    from sfumato.dpsgd.memory import estimate
    from sfumato.errors import SfumatoError

    try:
        return str(estimate(model, classes, settings))
    except SfumatoError as error:
        return f"not known here: {error}"
