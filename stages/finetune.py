"""`stage finetune`: DP-SGD on the sensitive images, resumable after a kill at no further cost."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from stages.common import (
    ARTIFACTS,
    CARD,
    EVALUATION,
    CardPath,
    Config,
    DryRun,
    Out,
    close_charge,
    describe,
    input_option,
    load_plan,
    open_stage_charge,
    progress,
    read_public_counts,
)
from stages.latents import ensure_latents, settled, show_memory

if TYPE_CHECKING:
    from sfumato.artifacts import Artifact
    from sfumato.dpsgd.run import DPSGD
    from sfumato.privacy.charge import Charge
    from sfumato.resolved import StagePlan


class Curve(Protocol):
    """What `sfumato.evaluation.convergence` measures."""

    def resume(self, run: Path, used: int) -> None: ...
    def measure(self, model: Any, average: Any, step: int) -> Any: ...
    def text(self) -> str: ...


def finetune(
    config: Config = None,
    out: Out = None,
    card: CardPath = CARD,
    pretrain: Annotated[Path, input_option("pretrain")] = ARTIFACTS / "pretrain",
    saliency: Annotated[Path, input_option("saliency")] = ARTIFACTS / "saliency",
    count: Annotated[Path, input_option("count")] = ARTIFACTS / "count",
    dry_run: DryRun = False,
) -> None:
    """Query: train the synthesizer, or the chosen part of it, on the sensitive images by DP-SGD."""
    plan, out = load_plan("finetune", config), out or ARTIFACTS / "finetune"
    from sfumato.config import SALIENT

    salient = plan.settings.trainable in SALIENT
    if dry_run:
        describe(
            plan,
            {"card": card, "pretrain": pretrain, "count": count} | ({"saliency": saliency} if salient else {}),
            out,
        )
        return show_memory(plan)
    from sfumato.artifacts import check_out, read_artifact, write_empty, writing
    from sfumato.data.images import replace_file

    if not plan.enabled:
        return write_empty(out, "finetune")
    from sfumato.compute import device, settle_processor
    from sfumato.diffusion.ema import ema_model
    from sfumato.diffusion.unet import save_model
    from sfumato.dpsgd.checkpoint import drop_checkpoints
    from sfumato.dpsgd.lora import base_file, load_base, merge, save_adapter
    from sfumato.dpsgd.run import DPSGD
    from sfumato.dpsgd.trainable import ADAPTED, check_trained, choose_trainable, flat
    from sfumato.public_model.network import LatentDiffusion, save_trained

    settle_processor()
    inputs = [
        read_artifact(pretrain, "pretrain"),
        read_artifact(count, "count"),
        *([read_artifact(saliency, "saliency")] if salient else []),
    ]
    check_out(out, "finetune")
    latents = ensure_latents(card, pretrain)
    model = load_base(pretrain).to(device())
    ranking = read_ranking(inputs[2], plan.settings.debias) if salient else None
    names = choose_trainable(model, plan.settings, ranking, plan.seed)
    before = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    arguments = json.loads((pretrain / "config.json").read_text(encoding="utf-8"))
    assert plan.mechanism is not None and plan.model is not None
    public_batch = plan.mechanism.sample_rate * read_public_counts(inputs[1], plan).total
    trainer = DPSGD(model, settled(plan), public_batch=public_batch, label_dropout=plan.model.label_dropout)
    curve = open_curve(plan, card)
    opened = resume_or_open(plan, card, inputs, out, trainer, latents)
    if opened is None:
        return
    charge, log = opened
    if curve is not None:
        curve.resume(charge.run, charge.used)
    train(plan, charge, trainer, log, curve)
    ema_model(model, trainer.ema.average)
    check_trained(before, model, names)
    with writing(out, "finetune", inputs, [charge.record], local=curve is not None) as directory:
        content = {
            "set": plan.settings.trainable,
            "trained": names,
            "parameters": sum(before[name].numel() for name in names),
        }
        (directory / "trainable.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if plan.settings.trainable in ADAPTED:
            save_adapter(model, directory, base_file(pretrain))
        else:
            merge(model)  # of the set "noisy", whose base is no longer that of pretrain
            if isinstance(model, LatentDiffusion):
                save_trained(
                    model,
                    flat(ranking) if ranking and plan.settings.trainable == "noisy" else names,
                    directory,
                    pretrain,
                )
            else:
                save_model(model, arguments, directory)
        lines = ["step,learning_rate,noised_gradient_norm,epsilon"]
        lines += [
            f"{row['step']},{row['learning_rate']:g},{row['noised_gradient_norm']:.6g},{row['epsilon']:.6g}"
            for row in log
        ]
        (directory / "log.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if curve is not None:
        replace_file(
            EVALUATION / "convergence.csv", curve.text().encode()
        )  # not into the artifact: DVC would put its hash into git
    close_charge(charge, out)
    drop_checkpoints(charge.run)


def read_ranking(saliency: Artifact, debias: bool) -> list[list[str]] | None:
    """The parameters of each candidate, the most salient first; None where `saliency` is switched off."""
    from sfumato.errors import DataError

    if not saliency.enabled:
        return None
    file = saliency.path / "saliency.json"
    try:
        ranking = json.loads(file.read_text(encoding="utf-8"))["ranked"]["debiased" if debias else "raw"]
        return [[str(name) for name in names] for names in ranking]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({error}): run `stage saliency` again") from error


def resume_or_open(
    plan: StagePlan, card: Path, inputs: list[Artifact], out: Path, trainer: DPSGD, latents: str | None
) -> tuple[Charge, list[dict]] | None:
    """The charge and the public log so far. A run that a kill left open goes on at its last durable step; from anywhere else it is a new charge."""
    from sfumato.dpsgd.checkpoint import load_checkpoint

    while True:
        charge = open_stage_charge(
            plan,
            card,
            inputs,
            out,
            f"{plan.settings.steps} steps of DP-SGD",
            "max_grad_norm: the clipped gradient of one image",
            resumable=True,
            latents=latents,
        )
        if charge is None:
            return None
        if charge.used == 0:
            return charge, []
        found = load_checkpoint(charge.run, charge.record["id"], charge.used)
        if found is not None:
            trainer.load_state(found[0])
            typer.echo(
                f"finetune: resuming run {charge.record['id'][:8]} after step {charge.used}: no further charge",
                err=True,
            )
            return charge, found[1]
        typer.echo(
            f"finetune: run {charge.record['id'][:8]} has lost its checkpoint of step {charge.used}: it stays spent, a new charge starts",
            err=True,
        )
        charge.abandon()


def open_curve(plan: StagePlan, card: Path) -> Curve | None:
    """What compares samples with real images while training; None where that is off, and then nothing but the charge reads them."""
    if not plan.settings.convergence:
        return None
    # by name: its code is no part of what is released, so a change of a metric does not make this plan another one
    return import_module("stages.convergence").open_curve(plan, card)


def train(plan: StagePlan, charge: Charge, trainer: DPSGD, log: list[dict], curve: Curve | None = None) -> None:
    """All steps left. Rows reach the log, and the screen the progress, only once their checkpoint is on disk."""
    from sfumato.diffusion.unet import UNet
    from sfumato.dpsgd.checkpoint import drop_checkpoints, save_checkpoint
    from sfumato.privacy.accountant import epsilon_and_order, rdp_curve
    from sfumato.privacy.events import Mechanism

    mechanism = plan.mechanism
    assert mechanism is not None and plan.delta is not None
    per_step = rdp_curve(
        Mechanism(noise_multiplier=mechanism.noise_multiplier, sample_rate=mechanism.sample_rate).event
    )
    with progress("finetune", clock=False) as report:
        report(charge.used, charge.uses)
        while charge.used < charge.uses:
            row = trainer.step(charge)
            log.append({**row, "epsilon": epsilon_and_order(per_step * charge.used, plan.delta)[0]})
            if charge.used % plan.settings.checkpoint_every == 0 or charge.used == charge.uses:
                save_checkpoint(charge.run, charge.record["id"], charge.used, trainer.state(), log)
                charge.durable()
                drop_checkpoints(charge.run, keep=charge.used)
                report(charge.used, charge.uses)
            if curve is not None and charge.used in plan.settings.convergence:
                assert isinstance(trainer.model, UNet)  # the plan of a public model names no such steps
                curve.measure(trainer.model, trainer.ema.average, charge.used)
