"""`stage evaluate`: how useful the release is, measured on real images. Local: outside the guarantee, never to be shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stages.common import ARTIFACTS, CARD, CardPath, Config, DryRun, describe, input_option, load_plan, progress, read_public_counts, state_dir

if TYPE_CHECKING:
    from sfumato.images import ImageSet
    from sfumato.resolved import StagePlan


def evaluate(
    config: Config = None,
    out: Annotated[Path, typer.Option("--out", help="Directory for the plots and the table.")] = Path("evaluation"),
    metrics: Annotated[Path, typer.Option("--metrics", help="File for the numbers.")] = Path("metrics.json"),
    card: CardPath = CARD,
    synthesize: Annotated[Path, input_option("synthesize")] = ARTIFACTS / "synthesize",
    auxiliary: Annotated[Path, input_option("auxiliary")] = ARTIFACTS / "auxiliary",
    pretrain: Annotated[Path, input_option("pretrain")] = ARTIFACTS / "pretrain",
    finetune: Annotated[Path, input_option("finetune")] = ARTIFACTS / "finetune",
    count: Annotated[Path, input_option("count")] = ARTIFACTS / "count",
    dry_run: DryRun = False,
) -> None:
    """Local: train classifiers on synthetic images, test them on the real hold-out. Nothing of it may be released."""
    plan = load_plan("evaluate", config)
    models = {"auxiliary": auxiliary, "pretrain": pretrain, "finetune": finetune}
    if dry_run:
        return describe(plan, {"card": card, "synthesize": synthesize, **{name: models[name] for name in plan.settings.stages}}, metrics)
    if not plan.enabled:
        metrics.unlink(missing_ok=True)
        return
    from sfumato.artifacts import read_artifact
    from sfumato.images import load_images, replace_file
    from sfumato.metrics.evaluation import evaluate_release, plot_accuracy
    from sfumato.prepared import read_card
    from sfumato.privacy.charge import open_local
    from sfumato.training.threads import settle_threads

    settle_threads()
    read_artifact(synthesize, "synthesize")
    synthetic = {"release": load_images(synthesize, plan.classes)}
    for name in plan.settings.stages:
        synthetic[name] = draw_alone(plan, name, models[name], synthesize, count)
    train, holdout = open_local(state_dir(), read_card(card), "evaluate")
    found = evaluate_release(synthetic, train, holdout, plan.settings, lambda what: typer.echo(f"evaluate: {what}", err=True))
    out.mkdir(parents=True, exist_ok=True)
    plot_accuracy(found, out / "accuracy.png")
    replace_file(out / "accuracy.csv", accuracy_table(found).encode())
    replace_file(metrics, (json.dumps(found, indent=1) + "\n").encode())
    show(found)


def draw_alone(plan: StagePlan, name: str, model: Path, synthesize: Path, count: Path) -> ImageSet:
    """Images of one model alone, drawn as the release draws them, so that one sees what each stage bought."""
    from sfumato.artifacts import read_artifact
    from sfumato.images import ImageSet, as_uint8
    from sfumato.synthesis import draw_from

    read_artifact(model, name)
    settings = load_plan("synthesize", None).settings
    priors = read_public_counts(read_artifact(count, "count"), plan).priors if settings.labels == "prior" else None
    with progress(f"evaluate: drawing from {name}") as report:
        images, labels = draw_from(name, model, plan.settings.images, settings, priors, 0, report)
    return ImageSet(as_uint8(images), labels.numpy(), plan.classes)


def accuracy_table(found: dict) -> str:
    lines = ["model,trained_on,accuracy,std"]
    for name, values in found.items():
        if isinstance(values, dict):
            lines += [f"{name}: {model},{name},{row['mean']:.4f},{row['std']:.4f}" for model, row in values.items() if model != "frechet"]
    return "\n".join(lines) + "\n"


def show(found: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    sets = [name for name, values in found.items() if isinstance(values, dict)]
    classifiers = [name for name in found[sets[0]] if name != "frechet"]
    table = Table("trained on", *classifiers, f"Fréchet distance, {found[sets[0]]['frechet']['space']}", title="Accuracy on the real hold-out, % (local)")
    for name in sets:
        cells = [f"{100 * found[name][c]['mean']:.1f} ± {100 * found[name][c]['std']:.1f}" for c in classifiers]
        table.add_row(name, *cells, f"{found[name]['frechet']['value']:.2f}")
    Console().print(table)
