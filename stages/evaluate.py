"""`stage evaluate`: how useful and how faithful the release is, measured on real images. Local: outside the guarantee, never to be shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stages.common import (
    ARTIFACTS,
    CARD,
    EVALUATION,
    CardPath,
    Config,
    DryRun,
    describe,
    input_option,
    load_plan,
    progress,
    read_public_counts,
    state_dir,
    table_console,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sfumato.data.images import ImageSet
    from sfumato.evaluation.extractors import Extractor
    from sfumato.resolved import StagePlan

DRAWN_PER_CLASS = {"glyphs": 200, "procedural": 2000}  # what the embedded feature network is trained on


def evaluate(
    config: Config = None,
    out: Annotated[Path, typer.Option("--out", help="Directory for the plots and the table.")] = EVALUATION,
    metrics: Annotated[Path, typer.Option("--metrics", help="File for the numbers.")] = Path("metrics.json"),
    card: CardPath = CARD,
    synthesize: Annotated[Path, input_option("synthesize")] = ARTIFACTS / "synthesize",
    auxiliary: Annotated[Path, input_option("auxiliary")] = ARTIFACTS / "auxiliary",
    pretrain: Annotated[Path, input_option("pretrain")] = ARTIFACTS / "pretrain",
    finetune: Annotated[Path, input_option("finetune")] = ARTIFACTS / "finetune",
    count: Annotated[Path, input_option("count")] = ARTIFACTS / "count",
    central: Annotated[Path, input_option("central")] = ARTIFACTS / "central",
    ledger: Annotated[
        Path,
        typer.Option("--ledger", help="Ledger of the release, by which `stage compare` finds these numbers again."),
    ] = Path("ledger.json"),
    complexity: Annotated[
        bool,
        typer.Option("--complexity", help="Also entropy and texture of central, auxiliary, released and real images."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Local: train classifiers on synthetic images, test them on the real hold-out, compare features. Nothing of it may be released."""
    plan = load_plan("evaluate", config)
    models = {"auxiliary": auxiliary, "pretrain": pretrain, "finetune": finetune}
    if dry_run:
        real = state_dir() / "data" / plan.dataset_id
        describe(
            plan,
            {
                "card": card,
                "synthesize": synthesize,
                **{name: models[name] for name in plan.settings.stages},
                "real images": real,
                "ledger": ledger,
            },
            metrics,
        )
        return typer.echo(f"and the folder {out}: local, not to be shared")
    if not plan.enabled:
        metrics.unlink(missing_ok=True)
        return
    from sfumato.artifacts import read_artifact
    from sfumato.compute import settle_processor
    from sfumato.data.images import load_images, replace_file
    from sfumato.data.store import read_card
    from sfumato.evaluation.plots import plot_accuracy
    from sfumato.evaluation.scores import evaluate_release
    from sfumato.privacy.charge import open_local

    settle_processor()
    read_artifact(synthesize, "synthesize")
    synthetic = {"release": load_images(synthesize, plan.classes)}
    extractor = feature_space(plan)  # before anything slow: a weights file may be missing
    for name in plan.settings.stages:
        synthetic[name] = draw_alone(plan, name, models, count)
    train, holdout = open_local(state_dir(), read_card(card), "evaluate")
    cache = state_dir() / "cache" / "features"
    found = evaluate_release(synthetic, train, holdout, plan.settings, extractor, cache, say)
    found["identity"] = identity(plan, train, holdout, extractor, synthesize)
    if complexity:
        found["complexity"] = complexity_table(plan, train, synthetic["release"], central, auxiliary)
    out.mkdir(parents=True, exist_ok=True)
    plot_accuracy(found, out / "accuracy.png")
    if extractor is not None:
        say("plots")
        plot_features(extractor, synthetic["release"], train, cache, out)
    replace_file(out / "accuracy.csv", accuracy_table(found).encode())
    replace_file(out / "per_class.csv", class_table(found).encode())
    replace_file(metrics, (json.dumps(found, indent=1) + "\n").encode())
    keep(found, ledger)
    for warning in found["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    show(found)


def say(what: str) -> None:
    typer.echo(f"evaluate: {what}", err=True)


def feature_space(plan: StagePlan) -> Extractor | None:
    """The extractor of the plan; None where no fidelity is asked for."""
    if not plan.settings.metrics:
        return None
    from sfumato.evaluation.extractors import build_extractor

    def drawn() -> tuple[ImageSet, str]:
        from sfumato.data.rendered import drawn_set

        source: Literal["glyphs", "procedural"] = "glyphs" if plan.shape[0] == 1 else "procedural"
        say(f"feature network on drawn images ({source})")
        return drawn_set(source, plan.shape, DRAWN_PER_CLASS[source]), source

    return build_extractor(plan.settings, plan.shape, drawn)


def identity(
    plan: StagePlan, train: ImageSet, holdout: ImageSet, extractor: Extractor | None, synthesize: Path
) -> dict[str, str]:
    """What the numbers belong to: equal entries, comparable numbers. Digests of real images are keyed: without the key they say nothing."""
    from sfumato.data.prepare import fingerprint, secret_key
    from sfumato.evaluation.classifiers import DEEP, NETWORKS
    from sfumato.evaluation.comparison import directory_hash

    settings, key = plan.settings, secret_key(state_dir(), plan.dataset_id)
    deep = {name: network for name, network in NETWORKS[settings.schedule].items() if name in settings.classifiers}
    amount = (
        f"{settings.steps} steps"
        if settings.steps
        else "50 epochs"
        if settings.schedule == "paper" and deep
        else f"{settings.epochs} epochs"
    )
    return {
        "dataset": plan.dataset_id,
        "data": fingerprint(train, key),
        "holdout": fingerprint(holdout, key),
        "extractor": extractor.digest if extractor else "none",
        "reference": settings.reference,
        "training": f"{settings.schedule}, {amount}, {settings.choice} epoch",
        "networks": ", ".join(f"{name}: {deep[name]}" for name in DEEP if name in deep) or "none of the deep ones",
        "release": directory_hash(synthesize),
    }


def keep(found: dict, ledger: Path) -> None:
    """A private copy of the numbers in the state directory, under the release they are of: other runs of the pipeline overwrite metrics.json."""
    from sfumato.errors import BudgetError
    from sfumato.evaluation.comparison import keep_evaluation
    from sfumato.privacy.ledger import read_ledger

    try:
        content = read_ledger(ledger)
    except BudgetError:
        return  # not run by the pipeline: there is no experiment to find the numbers for
    keep_evaluation(state_dir(), found | {"ledger": content})


def plot_features(extractor: Extractor, release: ImageSet, train: ImageSet, cache: Path, out: Path) -> None:
    from sfumato.evaluation.cache import features_of
    from sfumato.evaluation.plots import plot_embedding, plot_neighbours
    from sfumato.evaluation.scores import SEARCHED, some

    shown, searched = some(release), some(train, SEARCHED)
    features, real = features_of(extractor, shown.images, cache), features_of(extractor, searched.images, cache)
    plot_neighbours(shown, searched, features, real, out / "neighbours.png")
    plot_embedding(shown, searched, features, real, out / "embedding.png", extractor.name)


def complexity_table(plan: StagePlan, train: ImageSet, release: ImageSet, central: Path, auxiliary: Path) -> dict:
    """Entropy and texture complexity of the images of every step, from the simplest; steps that are switched off are left out."""
    import numpy as np
    import torch

    from sfumato.artifacts import read_artifact
    from sfumato.data.images import as_uint8, load_images
    from sfumato.evaluation.metrics.complexity import complexity
    from sfumato.evaluation.scores import some
    from sfumato.warmup.central_images import central_training_set

    images = {}
    if read_artifact(central, "central").enabled:
        found = sorted(central.glob("*.npy"))[0]  # mean.npy or mode.npy
        images["central"] = as_uint8(
            central_training_set(torch.from_numpy(np.load(found, allow_pickle=False)), found.stem, plan.shape, 0)[0]
        )
    if read_artifact(auxiliary, "auxiliary").enabled:
        images["auxiliary"] = some(load_images(auxiliary, plan.classes)).images
    images |= {"release": some(release).images, "real": some(train).images}
    return {name: complexity(array) for name, array in images.items()}


def draw_alone(plan: StagePlan, name: str, models: Mapping[str, Path], count: Path) -> ImageSet:
    """Images of one model alone, drawn as the release draws them, so that one sees what each stage bought."""
    from sfumato.artifacts import read_artifact
    from sfumato.data.images import ImageSet, as_uint8
    from sfumato.release.synthesis import draw_from

    read_artifact(models[name], name)
    settings = load_plan("synthesize", None).settings
    priors = read_public_counts(read_artifact(count, "count"), plan).priors if settings.labels == "prior" else None
    with progress(f"evaluate: drawing from {name}") as report:
        images, labels = draw_from(name, models, plan.settings.images, settings, priors, 0, report, plan.shape)
    return ImageSet(as_uint8(images), labels.numpy(), plan.classes)


def accuracy_table(found: dict) -> str:
    lines = ["model,trained_on,accuracy,std"]
    for name, values in scored(found).items():
        lines += [f"{name}: {model},{name},{row['mean']:.4f},{row['std']:.4f}" for model, row in values.items()]
    return "\n".join(lines) + "\n"


def class_table(found: dict) -> str:
    import csv
    from io import StringIO

    table = StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("trained_on", "classifier", "class", "accuracy", "std"))
    for name, values in scored(found).items():
        for model, row in values.items():
            writer.writerows(
                (name, model, one["class"], f"{one['mean']:.4f}", f"{one['std']:.4f}") for one in row["per_class"]
            )
    return table.getvalue()


def scored(found: dict) -> dict[str, dict]:
    """The accuracies of every set of images, by the set's name."""
    from sfumato.evaluation.plots import accuracies

    return {
        name: accuracies(values) for name, values in found.items() if isinstance(values, dict) and accuracies(values)
    }


def show(found: dict) -> None:
    from rich.table import Table

    console = table_console()
    sets = {name: found[name] for name in scored(found)}
    classifiers = list(next(iter(scored(found).values())))
    table = Table("trained on", *classifiers, title="Accuracy on the real hold-out, % (local)")
    for name, values in sets.items():
        table.add_row(name, *(f"{100 * values[c]['mean']:.1f} ± {100 * values[c]['std']:.1f}" for c in classifiers))
    console.print(table)
    release = scored(found)["release"]
    table = Table("class", *classifiers, title="The release, class by class, % (local)")
    for rows in zip(*(release[name]["per_class"] for name in classifiers), strict=True):
        table.add_row(rows[0]["class"], *(f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}" for row in rows))
    console.print(table)
    compared = {name: values["fidelity"] for name, values in sets.items() if "fidelity" in values}
    if compared:
        first = next(iter(compared.values()))
        shown = [key for key, value in first.items() if isinstance(value, float) and not key.endswith("_std")]
        table = Table(
            "metric", *compared, title=f"Fidelity to the real {first['reference']} images in {first['space']} (local)"
        )
        for key in shown:
            table.add_row(
                key.replace("_", " "), *(f"{values[key]:.4g}" if key in values else "–" for values in compared.values())
            )
        console.print(table)
    if "complexity" in found:
        table = Table("images", "entropy", "texture complexity", title="Complexity, nats (local)")
        for name, row in found["complexity"].items():
            table.add_row(name, f"{row['entropy']:.3f}", f"{row['texture_complexity']:.3f}")
        console.print(table)
