"""`stage utility`: the longer utility protocol on a release. Local, and outside the pipeline, for it takes long."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stages.runner import (
    ARTIFACTS,
    CARD,
    EVALUATION,
    CardPath,
    Config,
    DryRun,
    input_option,
    load_plan,
    state_dir,
    table_console,
)

if TYPE_CHECKING:
    from sfumato.evaluation.downstream import Schedule
    from sfumato.evaluation.protocol import Setting

PARTS = ("sizes", "ensemble", "selection")
SIZES = (1000, 5000, 20_000, 60_000)


def utility(
    config: Config = None,
    out: Annotated[
        Path, typer.Option("--out", help="Directory for utility.json, utility.csv, selection.csv and utility.png.")
    ] = EVALUATION,
    card: CardPath = CARD,
    synthesize: Annotated[Path, input_option("synthesize")] = ARTIFACTS / "synthesize",
    parts: Annotated[str, typer.Option("--parts", help="Which of sizes, ensemble, selection.")] = ",".join(PARTS),
    classifiers: Annotated[
        str, typer.Option("--classifiers", help="Classifiers of the curve and the ensembles.")
    ] = "cnn",
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes", help="Numbers of synthetic images. Default: those of 1000, 5000, 20000, 60000 that there are."
        ),
    ] = None,
    members: Annotated[int, typer.Option("--ensemble", min=2, help="Classifiers in an ensemble.")] = 5,
    grid_classifiers: Annotated[
        str, typer.Option("--grid-classifiers", help="Classifiers of the grid.")
    ] = "lr,mlp,cnn",
    rates: Annotated[str, typer.Option("--rates", help="Factors on their learning rates.")] = "0.01,0.1,0.3,1,3",
    decays: Annotated[str, typer.Option("--weight-decays", help="Their weight decays.")] = "0,0.1",
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Also train every setting of the grid on real images.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Gradient steps of every training. Default: as evaluate trains on the largest size."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0, help="Refuse to start what would take longer.")] = 60.0,
    dry_run: DryRun = False,
) -> None:
    """Local: accuracy by number of images, ensembles, and whether models rank alike on synthetic and real images."""
    from sfumato.errors import ConfigError

    plan = load_plan("evaluate", config)
    wanted = words(parts, "--parts", PARTS)
    if dry_run:
        typer.echo(
            f"reads   {synthesize}, {card} (sensitive and hold-out images)\n"
            f"writes  {out / 'utility.json'} and tables and a plot (local)\ncharges nothing"
        )
        return
    from sfumato.artifacts import read_artifact
    from sfumato.compute import settle_processor
    from sfumato.data.images import load_images
    from sfumato.data.prepare import secret_key
    from sfumato.data.store import read_card
    from sfumato.evaluation.classifiers import NAMES
    from sfumato.evaluation.comparison import identity
    from sfumato.evaluation.plots import plot_protocol
    from sfumato.evaluation.protocol import accuracy_by_size, check_time, ensemble, grid, model_selection, subset
    from sfumato.evaluation.scores import check_classes, check_fits, schedule_from
    from sfumato.files import replace_file
    from sfumato.privacy.opening import open_local

    settle_processor()
    read_artifact(synthesize, "synthesize")
    release, seeds = load_images(synthesize, plan.classes), plan.settings.seeds
    counts = (
        whole_numbers(sizes, "--sizes")
        if sizes is not None
        else [size for size in SIZES if size <= len(release)] or [len(release)]
    )
    if max(counts) > len(release):
        raise ConfigError(
            f"--sizes {max(counts)}: the release holds {len(release)} images. "
            "Raise synthesize.count and run `stage synthesize`, or name smaller sizes"
        )
    names, gridded = words(classifiers, "--classifiers", NAMES), words(grid_classifiers, "--grid-classifiers", NAMES)
    settings = grid(gridded, numbers(rates, "--rates"), numbers(decays, "--weight-decays", zero=True))
    asked = plan.settings.model_copy(
        update={"steps": steps or plan.settings.steps, "classifiers": tuple(dict.fromkeys([*names, *gridded]))}
    )
    schedules = {name: schedule_from(asked, name, max(counts)) for name in asked.classifiers}
    expected = check_time(
        trainings(wanted, names, settings, schedules, len(counts) * len(seeds), members, retrain),
        plan.shape,
        len(plan.classes),
        minutes,
    )
    say(f"about {expected:.0f} minutes")
    for size in counts:
        check_classes(f"{size} images of the release", subset(release, size))

    train, holdout = open_local(state_dir(), read_card(card), "utility")
    key, version = secret_key(state_dir(), plan.dataset_id), read_card(card).version
    for name, image_set in {"release": release, "real training": train, "hold-out": holdout}.items():
        check_fits(name, image_set, train)
    found: dict = {
        "scope": "local",
        "identity": identity(replace(plan, settings=asked), key, version, train, holdout, None, synthesize),
    }
    found["steps"] = {name: schedule.steps for name, schedule in schedules.items()}
    largest = subset(release, max(counts))
    if "sizes" in wanted:
        found["sizes"] = {
            name: accuracy_by_size(name, release, holdout, sorted(counts), schedules[name], seeds, say)
            for name in names
        }
    if "ensemble" in wanted:
        found["ensemble"] = {name: ensemble(name, largest, holdout, schedules[name], members, say) for name in names}
    if "selection" in wanted:
        bases = [schedules[setting.classifier] for setting in settings]
        found["selection"] = model_selection(settings, bases, largest, holdout, train if retrain else None, say)
    replace_file(out / "utility.json", (json.dumps(found, indent=1) + "\n").encode())
    for file, lines in tables(found).items():
        replace_file(out / file, ("\n".join(lines) + "\n").encode())
    if found.keys() & {"sizes", "selection"}:
        plot_protocol(found, out / "utility.png")
    show(found)
    typer.echo(f"{out / 'utility.json'}: local, not to be shared", err=True)


def say(what: str) -> None:
    typer.echo(f"utility: {what}", err=True)


def trainings(
    wanted: list[str],
    names: list[str],
    settings: list[Setting],
    schedules: dict[str, Schedule],
    curve: int,
    members: int,
    retrain: bool,
) -> list[tuple[str, Schedule, int]]:
    """All that will be trained: (classifier, schedule, how many). curve: sizes times seeds."""
    planned = [
        (name, schedules[name], curve * ("sizes" in wanted) + members * ("ensemble" in wanted)) for name in names
    ]
    if "selection" in wanted:
        planned += [(setting.classifier, schedules[setting.classifier], 2 if retrain else 1) for setting in settings]
    return [row for row in planned if row[2]]


def words(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    """The names of a comma-separated option. Raises ConfigError where one is not known, or there is none."""
    from sfumato.errors import ConfigError

    found = [word.strip() for word in text.split(",") if word.strip()]
    odd = [word for word in found if word not in known]
    if odd or not found:
        raise ConfigError(
            f"{option} {text!r}: {f'{odd[0]!r} is not known' if odd else 'nothing is named'}, "
            f"expected some of {', '.join(known)}"
        )
    return list(dict.fromkeys(found))


def numbers(text: str, option: str, *, zero: bool = False) -> list[float]:
    """The numbers of a comma-separated option, all positive (or not negative). Raises ConfigError for anything else."""
    from sfumato.errors import ConfigError

    try:
        found = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or not all(0 < value < 1e9 or (zero and value == 0) for value in found):
        raise ConfigError(
            f"{option} {text!r}: expected {'numbers from 0' if zero else 'positive numbers'} with commas between them"
        )
    return list(dict.fromkeys(found))


def whole_numbers(text: str, option: str) -> list[int]:
    from sfumato.errors import ConfigError

    found = numbers(text, option)
    if not all(value.is_integer() for value in found):
        raise ConfigError(f"{option} {text!r}: expected whole numbers with commas between them")
    return [int(value) for value in found]


def tables(found: dict) -> dict[str, list[str]]:
    """The lines of each CSV file."""
    written = {}
    if "sizes" in found or "ensemble" in found:
        written["utility.csv"] = ["classifier,images,members,accuracy,std"]
        for name, rows in found.get("sizes", {}).items():
            written["utility.csv"] += [f"{name},{row['images']},1,{row['mean']:.4f},{row['std']:.4f}" for row in rows]
        written["utility.csv"] += [
            f"{name},{row['images']},{row['members']},{row['accuracy']:.4f},"
            for name, row in found.get("ensemble", {}).items()
        ]
    if "selection" in found:
        rows = found["selection"]["settings"]
        written["selection.csv"] = [
            ",".join(rows[0]),
            *(
                ",".join(f"{v:.4f}" if k in ("synthetic", "real", "retrained") else str(v) for k, v in row.items())
                for row in rows
            ),
        ]
    return written


def show(found: dict) -> None:
    from rich.table import Table

    console = table_console()
    for name in dict.fromkeys([*found.get("sizes", {}), *found.get("ensemble", {})]):
        table = Table("images", "classifiers", "accuracy, %", title=f"{name} on the real hold-out (local)")
        for row in found.get("sizes", {}).get(name, ()):
            table.add_row(str(row["images"]), "1", f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}")
        if row := found.get("ensemble", {}).get(name):
            table.add_row(str(row["images"]), f"{row['members']} together", f"{100 * row['accuracy']:.1f}")
        console.print(table)
    if chosen := found.get("selection"):
        table = Table(
            "by synthetic images",
            "against",
            "Spearman",
            "Kendall",
            "rank of the chosen",
            "what it lacks, %",
            title=f"Model selection, {len(chosen['settings'])} settings (local)",
        )
        for end, against in (("", "the same models on real images"), ("_retrained", "models trained on real images")):
            if f"spearman{end}" in chosen:
                row = {key: chosen[f"{key}{end}"] for key in ("spearman", "kendall", "rank", "regret")}
                table.add_row(
                    f"setting {chosen['chosen'] + 1}",
                    against,
                    f"{row['spearman']:.3f}",
                    f"{row['kendall']:.3f}",
                    str(row["rank"]),
                    f"{100 * row['regret']:.2f}",
                )
        console.print(table)
