"""`stage init`: from a folder of images to a project that `dvc repro` runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from sfumato import __version__, errors
from sfumato.errors import ConfigError, explained
from sfumato.settings.data import GROUP, IMAGE, OUTER, SEVERAL, Data, Groups
from sfumato.settings.fields import Size, both_sides, by, part_of, size_of
from sfumato.settings.params import Params
from sfumato.storage.documents import read_json
from sfumato.storage.files import replace_file, write_local
from stages.plan import show_budget, show_minutes, show_risk, show_settings_for_ever
from stages.screen import numbers_table, say, table_console
from stages.state import PROPOSAL, git, state_dir

if TYPE_CHECKING:
    from sfumato.data.survey import Survey
    from sfumato.planning.proposal import Known, Proposal

MINUTES = 30.0
FEWEST = 10  # pictures of a class, to learn from or held out, below which it is pointed out
GROUPS_QUESTION = "Which are whose (a pattern around the id in a file's name, such as ^(P\\d+)_, or a CSV file)"
QUESTIONS = {  # by the option that the answer is of
    "groups": "Which are whose, as --groups says it; or `alone`",
    "classes": "The classes, as a,b,c; or `all` that were found",
    "label": "The column of the labels",
    "span": "Values shown as black and white, such as 0,4095",
}
NAMED = "the names of files repeat their beginnings, as several pictures of one person do"
FOLDER_HELP = (
    "Folder of images: one folder a class, or train/, val/ (joins train/) and test/, each laid out so; or a table "
    "labels.csv, metadata.csv, .jsonl or .parquet beside them; or tar files (WebDataset); or an .npz, as MedMNIST's; "
    "or Parquet with pictures inside, as hubs have them; or a zip of any of these."
)
LABEL_HELP = "The column of the labels in metadata.csv, .jsonl or .parquet; of tar files, the key in .json."
CLASSES_HELP = "The classes, which are published: a,b,c; or `all` that are found, your word that none is a person."
ALONE_HELP = "Your word that each image without an id is the only one of its person."
SIDE_HELP = "Pixels stored and released, at most their own: 64, or rows x columns, 96x128. Default: as minutes allow."
SIZE_HELP = "Public, rounded number of images. Default: their number to one digit, which is published."
GROUPS_HELP = (
    "Protect persons with all their images: a pattern whose one group in parentheses is the id in a file's name, a "
    "CSV file with the columns file and group, a column beside the labels (an array of the .npz), class/person or "
    "person/class for folders in folders."
)
RANGE_HELP = "Values of black and white, if pictures have more than 8 bits (16 bits, DICOM): 0,4095, say. Public."
SINGLE_HELP = "Your word that no two images are of one person; reports quote it."
FIT_HELP = "Images in other proportions: crop to the middle, or pad with black."
SKIP_HELP = "Share of the pictures, such as 1%, that may be broken: they are left out. Default: none, all are refused."
EVALUATE_HELP = "Judge the release on real images, in a quarter of the minutes at most; or leave them to the release."
NAME_HELP = "The name that the odometer counts by, for ever. Default: that of the folder."


def init(
    folder: Annotated[Path, typer.Argument(help=FOLDER_HELP)],
    epsilon: Annotated[float | None, typer.Option(min=0.0, help="The privacy budget, the owner's decision.")] = None,
    groups: Annotated[str | None, typer.Option(help=GROUPS_HELP)] = None,
    alone: Annotated[bool, typer.Option("--alone", help=ALONE_HELP)] = False,
    one_image_each: Annotated[bool, typer.Option("--one-image-each", help=SINGLE_HELP)] = False,
    shown: Annotated[str | None, typer.Option("--range", help=RANGE_HELP)] = None,
    label_column: Annotated[str | None, typer.Option(help=LABEL_HELP)] = None,
    classes: Annotated[str | None, typer.Option(help=CLASSES_HELP)] = None,
    skip: Annotated[float, typer.Option(parser=part_of, help=SKIP_HELP, metavar="SHARE")] = 0.0,
    fit: Annotated[str, typer.Option(help=FIT_HELP, metavar="crop|pad")] = "crop",
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Time there is, on this machine.")] = None,
    size: Annotated[str | None, typer.Option(help=SIDE_HELP)] = None,
    size_hint: Annotated[int | None, typer.Option(min=3, help=SIZE_HELP)] = None,
    dataset_id: Annotated[str | None, typer.Option(help=NAME_HELP)] = None,
    public: Annotated[Path | None, typer.Option(help="Folder of public images, one folder a class.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate/--no-evaluate", help=EVALUATE_HELP)] = True,
    out: Annotated[Path, typer.Option(help="Folder of the project.")] = Path("."),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take the defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files of an earlier project.")] = False,
) -> None:
    """Local: look at a folder of images, and write a project whose parameters fit them, ε and the minutes."""
    from sfumato.data.sources.imagefolder import list_folder
    from sfumato.planning.project import project_files
    from sfumato.planning.proposal import Known, read_table, rounded_size, sizes_of

    folder, out = folder.expanduser().resolve(), out.expanduser().resolve()
    public = public and public.expanduser().resolve()
    check_places(folder, public, out, force)
    if epsilon is None and yes:
        raise ConfigError("--epsilon is missing: it is the owner's decision, and has no default (docs: choose ε)")
    asked = size_of_text(size)
    if fit not in ("crop", "pad"):
        raise ConfigError(f"--fit={fit}: give crop or pad")
    decided = {"epsilon": epsilon, "dataset-id": dataset_id, "minutes": minutes, "size-hint": size_hint}
    ask = Questions(yes, [f"--{name}" for name, value in decided.items() if value is None])
    said = {"groups": groups, "alone": alone, "label": label_column, "classes": classes, "span": shown, "skip": skip}
    found = look(folder, said, ask)
    if found.groups is not None and one_image_each:
        raise ConfigError("--one-image-each says that no two images are of one person, and --groups or FOLDER who is")
    shorter, longer = sorted(both_sides(asked or 0))
    if shorter > max(found.side, 8) or longer > max(found.longer, 8):
        raise ConfigError(f"--size={size} is more than most images have, and they are not enlarged: give less")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.stem if folder.is_file() else folder.name).strip("-._")[:64]
    named = named_before(folder)
    name = ask.text("Name of the dataset, for ever", dataset_id, named or plain or "images")
    if named not in (None, name):
        remedy = "keep that name, under which their costs add up, or move images of other people to another folder"
        text = f"--dataset-id {name}: images of {folder} are counted as {named!r} already: {remedy}"
        raise errors.public(ConfigError(text))
    budget = ask.number("Privacy budget ε", epsilon, None)
    if found.groups is None and not one_image_each:
        if found.named and yes:
            words = f"--groups '{found.named}' protects persons; --one-image-each is your word that it is not so"
            raise ConfigError(f"{NAMED}: {words}")
        if found.named:
            say(f"{NAMED}, which {found.named} finds")
        if ask.agreed("Can two images be of one person?", bool(found.named)):
            said["groups"] = ask.text(GROUPS_QUESTION, None, found.named)
            found = look(folder, said, ask)
        else:
            one_image_each = not yes
    time = ask.number("Minutes that a run may take on this machine", minutes, MINUTES)
    units, what = (found.images, "sensitive images") if found.persons is None else (found.persons, "persons")
    kept = units if found.held_out is not None else units * (1 - Data().holdout_fraction)
    question = f"How many {what}, roughly (published with the release)"

    sides = (asked,) if asked else sizes_of(found.side, found.longer, found.proportion, read_table())
    known = Known(
        dataset_id=name,
        path=str(folder),
        side=max(sides, key=both_sides),
        channels=3 if found.colour else 1,
        size_hint=size_hint or int(ask.text(question, None, rounded_size(round(kept)))),
        epsilon=budget,
        minutes=time,
        unit=GROUP if found.groups is not None else IMAGE if one_image_each else None,
        groups=found.groups.model_dump(exclude_defaults=True) if found.groups else None,
        data=found.data | ({"fit": "pad"} if fit == "pad" else {}),
        public=str(public) if public else None,
        public_images=len(list_folder(public, "--public").train) if public else 0,
        evaluate=evaluate,
    )
    (proposed, *others), table = proposals_for(known, sides, len(found.classes))
    costs = show(proposed, known, found, table, size_hint is None)
    sizes = show_sizes(known, proposed, others)
    if not ask.agreed("Write the project?"):
        raise typer.Exit(1)
    write(project_files(proposed.own, notes(size_hint is None), proposed.seconds / 60, __version__), out, force)
    keep: dict[str, Any] = {
        "images": found.images,
        "persons": found.persons,
        "protects": protected(known),
        "sizes": sizes,
    }
    keep |= {"classes": dict(zip(found.classes, found.counts, strict=True)), "budget": costs, "seconds": table}
    write_local(out / PROPOSAL, json.dumps(keep).encode())  # for `stage serve`
    begin_repository(out)
    say(f"\nwritten to {out}. Next: {'' if out == Path.cwd() else f'cd {out} && '}dvc repro")


def look(folder: Path, said: dict[str, Any], ask: Questions) -> Survey:
    """What the folder holds. said: the options of `survey`. What only the owner can decide is asked, and joins them."""
    from sfumato.data.layout import ASKED
    from sfumato.data.survey import survey

    while True:
        try:
            classes = said["classes"] and tuple(part.strip() for part in said["classes"].split(","))
            read = {"groups": groups_of(said["groups"]), "classes": classes, "span": range_of(said["span"])}
            found = survey(folder, **said | read, state=state_dir())
            show_understood(found)
            return found
        except ASKED as unclear:
            if ask.yes:
                raise
            print(unclear, file=sys.stderr)  # on a terminal only, since sensitive files were opened
            answer = ask.text(QUESTIONS[unclear.option], None, unclear.proposed)
            said |= {"alone": True} if answer == "alone" else {unclear.option: answer}


# --- what the owner is asked ------------------------------------------------------------------------------------------


class Questions:
    """Takes what is given and asks for the rest, or takes the default under --yes. lacking: options not given."""

    def __init__(self, yes: bool, lacking: Sequence[str]) -> None:
        self.yes = yes
        self.lacking = ", ".join([*lacking, "--groups or --one-image-each"])

    def text(self, question: str, given: Any, default: Any, kind: type | None = None) -> Any:
        if given is not None:
            return given
        return default if self.yes else self.answer(typer.prompt, question, default=default, type=kind)

    def answer(self, ask: Callable[..., Any], question: str, **options: Any) -> Any:
        """What somebody answers. Raises ConfigError where nobody can, as without a terminal."""
        try:
            return ask(question, err=True, **options)
        except typer.Abort as abort:
            if isinstance(abort.__context__, EOFError):
                text = f"nobody answers here: give {self.lacking}, or --yes for the defaults"
                raise errors.public(ConfigError(text)) from abort
            raise

    def number(self, question: str, given: float | None, default: float | None) -> float:
        value: float | None = self.text(question, given, default, float)
        if value is None or not 0 < value < float("inf"):
            raise errors.public(ConfigError(f"{question}: must be a positive number, got {value}"))
        return value

    def agreed(self, question: str, default: bool = True) -> bool:
        return default if self.yes else self.answer(typer.confirm, question, default=default)


def named_before(folder: Path) -> str | None:
    """The dataset id under which images of this very folder are counted."""
    from sfumato.data.prepare import ORIGIN

    origins = sorted((state_dir() / "data").glob(f"*/{ORIGIN}"))
    return next((file.parent.name for file in origins if read_json(file).get("path") == str(folder)), None)


def groups_of(text: str | None) -> Groups | None:
    """Which images are whose, as `--groups` says: a CSV file, a column, the order of folders, or a pattern."""
    if text is None:
        return None
    if text in ("class/person", "person/class"):
        return Groups(folder=OUTER if text == "person/class" else True)
    if Path(text).expanduser().is_file() or text.lower().endswith(".csv"):
        return Groups(csv=str(Path(text).expanduser().resolve()))
    if "(" not in text:  # it is no pattern around an id
        return Groups(column=text)
    from sfumato.data.layout import Unclear

    try:
        return Groups(pattern=text)
    except ValidationError as error:
        raise Unclear(f"--groups={text}: {error.errors()[0]['msg'].removeprefix('Value error, ')}", "groups") from error


def range_of(text: str | None) -> tuple[float, float] | None:
    """The values of black and white, as `--range` gives them: two numbers with a comma between."""
    if text is None:
        return None
    with explained(ConfigError, lambda _: f"--range={text}: give two numbers, such as 0,4095", causes=(ValueError,)):
        low, high = (float(part) for part in text.split(","))
    return low, high


def size_of_text(text: str | None) -> Size | None:
    """The size that `--size` names: the side of squares, or rows x columns."""
    if text is None:
        return None
    form = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", text)
    size = form and (int(form[1]), int(form[2] or form[1]))
    if not size or min(size) < 8:
        raise ConfigError(f"--size={text}: give 8 pixels a side or more, as in 64 or 192x256")
    return size_of(size)


def check_places(folder: Path, public: Path | None, out: Path, force: bool) -> None:
    """Raise ConfigError if git would take the images, or if files would be overwritten."""
    for images in filter(None, (folder, public)):
        if out == images or out in images.parents or images in out.parents:
            remedy = "run from another folder, or name one with --out"
            raise ConfigError(
                f"the project {out} and {images} lie in one another, where git would take the images: {remedy}"
            )
    if public == folder:
        raise ConfigError(f"--public {public} holds the sensitive images: name a folder of public ones, or none")
    there = [name for name in ("params.yaml", "dvc.yaml") if (out / name).exists()]
    if there and not force:
        raise ConfigError(f"{out} holds {' and '.join(there)} already: name another folder with --out, or give --force")


# --- what is proposed -------------------------------------------------------------------------------------------------


def proposals_for(known: Known, sides: Sequence[Size], classes: int) -> tuple[list[Proposal], dict[str, float | None]]:
    """The proposals for these sides, the chosen one first, and its seconds of each stage."""
    from sfumato.planning.estimate import expected_seconds
    from sfumato.planning.proposal import proposals

    def stages_of(params: Params) -> dict[str, float | None]:
        shape = (known.channels, *both_sides(params.data.size or known.side))
        return expected_seconds(params, shape, classes, state_dir(), known.public_images)

    found = proposals(known, sides, lambda params: {name: value or 0.0 for name, value in stages_of(params).items()})
    return found, stages_of(found[0].params)


def show(proposed: Proposal, known: Known, found: Survey, table: dict[str, float | None], counted: bool) -> dict:
    """What was seen, what is proposed and why, its cost in ε and minutes, what becomes public. Returns the budget."""
    from sfumato.data.sources.splits import VALIDATION, split_of
    from sfumato.planning.proposal import proposed_card
    from sfumato.planning.resolve import make_plan, warnings_of
    from sfumato.privacy.odometer import Odometer

    params = proposed.params
    split = "test/" if found.held_out is not None else f"{params.data.holdout_fraction:.0%} of them, drawn by a key"
    named = "labels, any number of them an image" if params.data.labels == SEVERAL else "classes"
    say(f"images   {'colour' if found.colour else 'grey'}, {len(found.classes)} {named}")
    say(f"hold-out {split}")
    if joined := [part.name for part in split_of(Path(known.path))[0] if part.name.casefold() in VALIDATION]:
        say(f"         {', '.join(joined)}/ joins the training images: nothing is chosen by it")
    say(f"protects {protected(known)}")
    say(f"recipe   {params.recipe}: {proposed.row}")
    public = f"that the dataset exists, its class names ({', '.join(found.classes[:5])}"
    public += f" and {len(found.classes) - 5} more)" if len(found.classes) > 5 else ")"
    public += ", which are the labels that occur" if "classes" in found.data else ""
    say(f"public   {public}, the shape of its images, and privacy.size_hint={known.size_hint}")
    if counted:
        what = "persons" if known.unit == GROUP else "images"
        say(f"         size_hint is the number of {what} to one digit: if it must not be known, give --size-hint")
    made = make_plan(params, proposed_card(params, found.classes, found.held_out is not None))
    show_budget(made)
    show_risk(made)
    for warning in warnings_of(params, made.budget["delta"], len(found.classes)):
        say(f"warning: {warning}")
    show_settings_for_ever(params)
    show_minutes(params, table)
    if known.unit == GROUP:
        say("the minutes are those of one image a person: queries take longer where persons have more")
    if Odometer(state_dir(), known.dataset_id).opened():
        say(f"warning: dataset {known.dataset_id!r} has a history here already: what was spent on it counts on")
    return made.budget


def show_understood(found: Survey) -> None:
    """What the folder was taken for, as a small tree with counts: private, and so on a terminal only."""
    if sys.stderr.isatty():
        by = f", by column {found.data['label_column']}" if "label_column" in found.data else ""
        say(f"local    {found.images} images in {len(found.classes)} classes{by}")
        for name, count in zip(found.classes, found.counts, strict=True):
            say(f"         ├─ {name}: {count}{', too few to learn from' if count < FEWEST else ''}")
        if found.groups is not None:
            say(f"         ├─ {found.persons} persons, by {way_of(found.groups)}")
        held = round(Data().holdout_fraction * found.images) if found.held_out is None else found.held_out
        few = ", too few for a verdict" if held < FEWEST * len(found.classes) else ""
        way = "drawn by a key, about" if found.held_out is None else "test/,"
        say(f"         └─ hold-out: {way} {held} images{few}")


def show_sizes(known: Known, proposed: Proposal, others: Sequence[Proposal]) -> list[tuple[str, ...]]:
    """A row a size: its minutes, and the release's probable usefulness; and what would help. Returns rows to keep."""
    from sfumato.planning.forecast import advice, forecast

    what = "persons" if known.unit == GROUP else "images"
    several = known.data.get("labels") == SEVERAL  # nothing was measured with these
    kind = "chosen" if known.public else "colour" if known.channels == 3 else "grey"
    columns = "pixels a side", "minutes", "more help up to", "usefulness (two of three public sets)"
    rows = list[tuple[str, ...]]()
    table = numbers_table("sizes, of which --size chooses", *columns, words=columns[3:])
    for one in sorted([proposed, *others], key=lambda one: both_sides(one.own["data"]["size"]), reverse=True):
        size = one.params.data.size or known.side
        pixels = f"{size}" if isinstance(size, int) else by(size)
        expected = "unknown" if several else forecast(kind, known.size_hint * known.epsilon, one.grown)
        minutes = f"{one.seconds / 60:.0f}" if one.enough else f"{one.seconds / 60:.0f} at least"
        mark = "proposed " if one is proposed else ""
        table.add_row(f"{mark}{pixels}", minutes, f"{math.ceil(one.whole)}", expected)
        rows.append((f"{mark}{pixels}", expected, minutes))
    table_console().print(table)
    if not several:
        say(f"forecast {advice(kind, known.size_hint, known.epsilon, what)}")
    return rows


def protected(known: Known) -> str:
    """The unit of privacy, in words."""
    if known.groups:
        return f"each person with all their images, whose ids are found by: {way_of(Groups(**known.groups))}"
    if known.unit == IMAGE:
        return "each image; it is your word that no two are of one person"
    return "each image; a person with several is not protected as one (--groups, or --one-image-each if none has)"


def way_of(groups: Groups) -> str:
    """Where ids of persons are found, in words."""
    (way, value), *_ = groups.model_dump(exclude_defaults=True).items()
    folder = "a folder each, with those of classes inside" if value == OUTER else "a folder each, in each class"
    ways = {"folder": folder, "array": "`groups` beside the images", "dicom": "DICOM's PatientID"}
    return ways.get(way, f"{way} {value}") + (", and each image without one for itself" if groups.alone else "")


def notes(counted: bool) -> dict[str, str]:
    """Comments of `params.yaml`, by the section that they stand above."""
    published = "size_hint, the number of images or persons rounded to one digit, is published with the release\n"
    spent = "epsilon is spent on the first release; privacy.lifetime_epsilon allows further ones"
    return {
        "data": "dataset_id keeps its name for ever: the odometer counts by it",
        "privacy": f"{published if counted else ''}{spent}",
        "public": "free, and without any guarantee of their own: none of them was made from sensitive images",
    }


# --- the project ------------------------------------------------------------------------------------------------------


def write(files: dict[str, str], out: Path, force: bool) -> None:
    """Write the files that are not there. With `force`, an earlier project's parameters and pipeline are replaced."""
    for name, text in files.items():
        path = out / name
        if name in (".gitignore", ".gitattributes") and path.exists():
            there = path.read_text(encoding="utf-8").splitlines()
            missing = [line for line in text.splitlines() if line not in there]
            text = "".join(f"{line}\n" for line in there + missing)
        elif path.exists() and name not in ("params.yaml", "dvc.yaml") and not force:
            say(f"{name} is there already, and stays")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())


def begin_repository(out: Path) -> None:
    """A git repository, if there is none, and DVC's folder in it."""
    if shutil.which("git") is None:
        say("git is not installed: the project has no history, so others cannot check its ledger")
    elif git("-C", str(out), "rev-parse", "--git-dir")[0] != 0:
        git("init", "-q", str(out))
    if (out / ".dvc").is_dir():
        return
    options = ["--no-scm"] if shutil.which("git") is None else [] if (out / ".git").exists() else ["--subdir"]
    for words in (["init", "-q", *options], ["config", "core.analytics", "false"]):
        call = [sys.executable, "-m", "dvc", *words]
        done = subprocess.run(call, cwd=out, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"`dvc {' '.join(words)}` failed in {out}: {done.stderr.strip()}")
