"""`stage utility`: the longer utility protocol on a release. Local, and outside the pipeline, for it takes long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sfumato.errors import ConfigError
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.files import csv_text, replace_file, write_json
from stages.runner import (
    ARTIFACTS,
    CARD,
    EVALUATION,
    CardPath,
    Config,
    DryRun,
    check_local,
    input_option,
    load_plan,
    show_local,
    state_dir,
)

if TYPE_CHECKING:
    from sfumato.evaluation.downstream import Schedule
    from sfumato.evaluation.protocol import Setting

PARTS = ("sizes", "ensemble", "selection")
SIZES = (1000, 5000, 20_000, 60_000)

OUT_HELP = "Directory for utility.json, utility.csv, selection.csv and utility.png."
SIZES_HELP = "Numbers of synthetic images. Default: those of 1000, 5000, 20000, 60000 that there are."
RETRAIN_HELP = "Also train every setting of the grid on real images."
STEPS_HELP = "Gradient steps of every training. Default: as evaluate trains on the largest size."


def utility(
    config: Config = None,
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = EVALUATION,
    card: CardPath = CARD,
    synthesize: Annotated[Path, input_option("synthesize")] = ARTIFACTS / "synthesize",
    parts: Annotated[str, typer.Option(help="Which of sizes, ensemble, selection.")] = ",".join(PARTS),
    classifiers: Annotated[str, typer.Option(help="Classifiers of the curve and the ensembles.")] = "cnn",
    sizes: Annotated[str | None, typer.Option(help=SIZES_HELP)] = None,
    members: Annotated[int, typer.Option("--ensemble", min=2, help="Classifiers in an ensemble.")] = 5,
    grid_classifiers: Annotated[str, typer.Option(help="Classifiers of the grid.")] = "lr,mlp,cnn",
    rates: Annotated[str, typer.Option(help="Factors on their learning rates.")] = "0.01,0.1,0.3,1,3",
    decays: Annotated[str, typer.Option("--weight-decays", help="Their weight decays.")] = "0,0.1",
    retrain: Annotated[bool, typer.Option("--retrain", help=RETRAIN_HELP)] = False,
    steps: Annotated[int | None, typer.Option(min=1, help=STEPS_HELP)] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Refuse to start what would take longer.")] = 60.0,
    dry_run: DryRun = False,
) -> None:
    """Local: accuracy by number of images, ensembles, and whether models rank alike on synthetic and real images."""
    plan = load_plan("evaluate", config)
    wanted = words(parts, "--parts", PARTS)
    if dry_run:
        typer.echo(
            f"reads   {synthesize}, {card} (sensitive and hold-out images)\n"
            f"writes  {out / 'utility.json'} and tables and a plot (local)\ncharges nothing"
        )
        return
    from sfumato.data.images import load_images
    from sfumato.data.prepare import secret_key
    from sfumato.data.store import read_card
    from sfumato.evaluation.classifiers import NAMES
    from sfumato.evaluation.comparison import identity
    from sfumato.evaluation.plots import plot_protocol
    from sfumato.evaluation.protocol import accuracy_by_size, check_time, ensemble, grid, model_selection, subset
    from sfumato.evaluation.scores import check_classes, check_fits, schedule_from
    from sfumato.privacy.authorize import open_local
    from sfumato.runtime.compute import configure_processor

    check_local("--out", out / "utility.json")
    configure_processor()
    read_artifact(synthesize, "synthesize")
    release, seeds = load_images(synthesize, plan.classes), plan.settings.seeds
    counts = [size for size in SIZES if size <= len(release)] or [len(release)]
    if sizes is not None:
        counts = whole_numbers(sizes, "--sizes")
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
    planned = trainings(wanted, names, settings, schedules, len(counts) * len(seeds), members, retrain)
    expected = check_time(planned, plan.shape, len(plan.classes), minutes)
    say(f"about {expected:.0f} minutes")
    for size in counts:
        check_classes(f"{size} images of the release", subset(release, size))

    train, holdout = open_local(state_dir(), read_card(card), "utility")
    key, version = secret_key(state_dir(), plan.dataset_id), read_card(card).version
    for name, image_set in {"release": release, "real training": train, "hold-out": holdout}.items():
        check_fits(name, image_set, train)
    belongs_to = identity(replace(plan, settings=asked), key, version, train, holdout, None, synthesize)
    found: dict = {"scope": "local", "identity": belongs_to}
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
    write_json(out / "utility.json", found)
    for file, text in tables(found).items():
        replace_file(out / file, text.encode())
    if found.keys() & {"sizes", "selection"}:
        plot_protocol(found, out / "utility.png")
    show_local(screen_tables(found), out / "utility.json")
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
    times = curve * ("sizes" in wanted) + members * ("ensemble" in wanted)
    planned = [(name, schedules[name], times) for name in names]
    if "selection" in wanted:
        planned += [(setting.classifier, schedules[setting.classifier], 2 if retrain else 1) for setting in settings]
    return [row for row in planned if row[2]]


def words(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    """The names of a comma-separated option. Raises ConfigError where one is not known, or there is none."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    odd = [word for word in found if word not in known]
    if odd or not found:
        wrong = f"{odd[0]!r} is not known" if odd else "nothing is named"
        raise ConfigError(f"{option} {text!r}: {wrong}, expected some of {', '.join(known)}")
    return list(dict.fromkeys(found))


def numbers(text: str, option: str, *, zero: bool = False) -> list[float]:
    """The numbers of a comma-separated option, all positive (or not negative). Raises ConfigError for anything else."""
    try:
        found = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or not all(0 < value < 1e9 or (zero and value == 0) for value in found):
        what = "numbers from 0" if zero else "positive numbers"
        raise ConfigError(f"{option} {text!r}: expected {what} with commas between them")
    return list(dict.fromkeys(found))


def whole_numbers(text: str, option: str) -> list[int]:
    found = numbers(text, option)
    if not all(value.is_integer() for value in found):
        raise ConfigError(f"{option} {text!r}: expected whole numbers with commas between them")
    return [int(value) for value in found]


def tables(found: dict) -> dict[str, str]:
    """The text of each CSV file."""
    written = {}
    if "sizes" in found or "ensemble" in found:
        sizes = ((name, row) for name, rows in found.get("sizes", {}).items() for row in rows)
        lines = [{"classifier": name, "members": 1, "accuracy": row["mean"]} | row for name, row in sizes]
        lines += [{"classifier": name, "std": None} | row for name, row in found.get("ensemble", {}).items()]
        columns = {"classifier": "", "images": "", "members": "", "accuracy": ".4f", "std": ".4f"}
        written["utility.csv"] = csv_text(lines, columns)
    if "selection" in found:
        rows, shares = found["selection"]["settings"], ("synthetic", "real", "retrained")
        written["selection.csv"] = csv_text(rows, {key: ".4f" if key in shares else "" for key in rows[0]})
    return written


def screen_tables(found: dict) -> Iterator[Table]:

    from sfumato.evaluation.tables import percent

    for name in dict.fromkeys([*found.get("sizes", {}), *found.get("ensemble", {})]):
        table = Table("images", "classifiers", "accuracy, %", title=f"{name} on the real hold-out (local)")
        for row in found.get("sizes", {}).get(name, ()):
            table.add_row(str(row["images"]), "1", percent(row))
        if row := found.get("ensemble", {}).get(name):
            table.add_row(str(row["images"]), f"{row['members']} together", f"{100 * row['accuracy']:.1f}")
        yield table
    if chosen := found.get("selection"):
        heads = ("by synthetic images", "against", "Spearman", "Kendall", "rank of the chosen", "what it lacks, %")
        table = Table(*heads, title=f"Model selection, {len(chosen['settings'])} settings (local)")
        for end, against in (("", "the same models on real images"), ("_retrained", "models trained on real images")):
            if f"spearman{end}" in chosen:
                spearman, kendall, rank, regret = (
                    chosen[f"{key}{end}"] for key in ("spearman", "kendall", "rank", "regret")
                )
                numbers = (f"{spearman:.3f}", f"{kendall:.3f}", str(rank), f"{100 * regret:.2f}")
                table.add_row(f"setting {chosen['chosen'] + 1}", against, *numbers)
        yield table
