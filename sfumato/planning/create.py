"""A project for a folder of images: what its owner wants and is asked, what is proposed, and the files of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sfumato import errors
from sfumato.data.layout import ASKED, Unclear
from sfumato.data.prepare import ORIGIN
from sfumato.data.sources.imagefolder import list_folder
from sfumato.data.sources.splits import VALIDATION, split_of
from sfumato.data.survey import Survey, survey
from sfumato.errors import ConfigError, explained
from sfumato.planning.project_files import Say, project_files, unsaid, write_project
from sfumato.settings.data import GROUP, IMAGE, OUTER, SEVERAL, Data, Groups
from sfumato.settings.fields import Size, both_sides, by, part_of, size_of
from sfumato.settings.params import Params
from sfumato.settings.stages import PROPOSAL
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_local

if TYPE_CHECKING:
    from sfumato.planning.kept import Plan
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
PUBLISHED = "size_hint, the number of images or persons rounded to one digit, is published with the release\n"
NOTES = {  # comments of `params.yaml`, by the section that they stand above
    "data": "dataset_id keeps its name for ever: the odometer counts by it",
    "privacy": "epsilon is spent on the first release; privacy.lifetime_epsilon allows further ones",
    "public": "free, and without any guarantee of their own: none of them was made from sensitive images",
}


class Owner:
    """Decides what was not given: is asked, or takes the defaults.

    ask: asks a question, with a default and the type of the answer, or None for yes and no; None: nobody is asked;
    see: shows a line that only the owner may read.
    """

    def __init__(self, ask: Callable[[str, Any, type | None], Any] | None = None, see: Say = unsaid) -> None:
        self.ask, self.see = ask, see

    def answer(self, question: str, default: Any, kind: type | None = str) -> Any:
        return default if self.ask is None else self.ask(question, default, kind)

    def number(self, question: str, given: float | None, default: float | None) -> float:
        value = self.answer(question, default, float) if given is None else given
        if value is None or not 0 < value < math.inf:
            raise errors.public(ConfigError(f"{question}: must be a positive number, got {value}"))
        return float(value)


@dataclass(frozen=True, kw_only=True)
class Proposed:
    """A project that is not written yet.

    known: what is public; survey: of the images, private; chosen: of the proposals, and the others by size; seconds: of
    each stage; plan: of the chosen one; counted: whether the published number of images is theirs, rounded.
    """

    out: Path
    known: Known
    survey: Survey
    chosen: Proposal
    others: Sequence[Proposal]
    seconds: dict[str, float | None]
    plan: Plan
    counted: bool

    def write(self, say: Say, *, force: bool = False, more: Mapping[str, Any] | None = None) -> None:
        """Write the files of the project, and begin its repository.

        force: replace those of an earlier one; more: sections of `params.yaml` beside the proposed ones.
        """
        notes = NOTES | ({"privacy": PUBLISHED + NOTES["privacy"]} if self.counted else {})
        files = project_files({**self.chosen.own, **(more or {})}, notes, self.chosen.seconds / 60, version("sfumato"))
        write_project(self.out, files, say, force=force)
        survey = self.survey
        seen: dict[str, Any] = {"images": survey.images, "persons": survey.persons, "protects": protected(self.known)}
        seen["classes"] = dict(zip(survey.classes, survey.counts, strict=True))
        seen |= {"sizes": list(size_rows(self)), "budget": self.plan.budget, "seconds": self.seconds}
        write_local(self.out / PROPOSAL, json.dumps(seen).encode())  # for `stage serve`


def propose_project(
    out: Path,
    images: Path,
    owner: Owner,
    state: Path,
    *,
    epsilon: float | None = None,
    groups: str | None = None,
    alone: bool = False,
    one_image_each: bool = False,
    range: str | None = None,
    label_column: str | None = None,
    classes: str | None = None,
    skip: float | str = 0.0,
    fit: str = "crop",
    minutes: float | None = None,
    size: int | str | None = None,
    size_hint: int | None = None,
    dataset_id: str | None = None,
    public: str | Path | None = None,
    evaluate: bool = True,
    force: bool = False,
) -> Proposed:
    """Look at a folder of images, and find the parameters that fit them, ε and the minutes. Writes and spends nothing.

    out: the project's folder; state: the private state directory; of the others `stage init --help` says more. Raises
    ConfigError or DataError, as `survey` does and for what does not fit.
    """
    folder, out = images.expanduser().resolve(), out.expanduser().resolve()
    public = Path(public).expanduser().resolve() if public else None
    check_places(folder, public, out, force)
    if epsilon is None and owner.ask is None:
        raise ConfigError("--epsilon is missing: it is the owner's decision, and has no default (docs: choose ε)")
    asked = size_of_text(size)
    if fit not in ("crop", "pad"):
        raise ConfigError(f"--fit={fit}: give crop or pad")
    said = {"groups": groups, "alone": alone, "label": label_column, "classes": classes, "span": range, "skip": skip}
    found = look(folder, said, owner, state)
    if found.groups is not None and one_image_each:
        raise ConfigError("--one-image-each says that no two images are of one person, and --groups or FOLDER who is")
    shorter, longer = sorted(both_sides(asked or 0))
    if shorter > max(found.side, 8) or longer > max(found.longer, 8):
        raise ConfigError(f"--size={size} is more than most images have, and they are not enlarged: give less")
    name = choose_name(folder, dataset_id, owner, state)
    epsilon = owner.number("Privacy budget ε", epsilon, None)
    if found.groups is None and not one_image_each:
        if said_groups := ask_for_groups(found, owner):
            found = look(folder, said | {"groups": said_groups}, owner, state)
        one_image_each = not said_groups and owner.ask is not None
    minutes = owner.number("Minutes that a run may take on this machine", minutes, MINUTES)
    # slow to import: pictures that cannot be used are named first
    from sfumato.planning.proposal import Known, read_table, sizes_of

    sides = (asked,) if asked else sizes_of(found.side, found.longer, found.proportion, read_table())
    known = Known(
        dataset_id=name,
        path=str(folder),
        side=max(sides, key=both_sides),
        channels=3 if found.colour else 1,
        size_hint=size_hint or ask_for_size(found, owner),
        epsilon=epsilon,
        minutes=minutes,
        unit=GROUP if found.groups is not None else IMAGE if one_image_each else None,
        groups=found.groups.model_dump(exclude_defaults=True) if found.groups else None,
        data=found.data | ({"fit": "pad"} if fit == "pad" else {}),
        public=str(public) if public else None,
        public_images=len(list_folder(public, "--public").train) if public else 0,
        evaluate=evaluate,
    )
    return proposed_for(known, found, sides, out, state, counted=size_hint is None)


def proposed_for(
    known: Known, found: Survey, sides: Sequence[Size], out: Path, state: Path, *, counted: bool
) -> Proposed:
    """The proposals for these sizes, and the plan of the chosen one."""
    from sfumato.planning import estimate
    from sfumato.planning.proposal import proposals, proposed_card
    from sfumato.planning.resolve import make_plan

    def seconds_of(params: Params) -> dict[str, float | None]:
        shape = (known.channels, *both_sides(params.data.size or known.side))
        return estimate.expected_seconds(params, shape, len(found.classes), state, known.public_images)

    chosen, *others = proposals(known, sides, lambda params: {k: v or 0.0 for k, v in seconds_of(params).items()})
    return Proposed(
        out=out,
        known=known,
        survey=found,
        chosen=chosen,
        others=others,
        seconds=seconds_of(chosen.params),
        plan=make_plan(chosen.params, proposed_card(chosen.params, found.classes, found.held_out is not None)),
        counted=counted,
    )


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


# --- what the owner is asked ------------------------------------------------------------------------------------------


def look(folder: Path, said: dict[str, Any], owner: Owner, state: Path) -> Survey:
    """What the folder holds. said: the options of `survey`. What only the owner can decide is asked, and joins them."""
    while True:
        try:
            classes = said["classes"] and tuple(part.strip() for part in said["classes"].split(","))
            read = {"groups": groups_of(said["groups"]), "classes": classes, "span": range_of(said["span"])}
            found = survey(folder, **said | read | {"skip": part_of(said["skip"])}, state=state)
            for line in understood(found):
                owner.see(line)
            return found
        except ASKED as unclear:
            if owner.ask is None:
                raise
            owner.see(str(unclear))
            answer = owner.answer(QUESTIONS[unclear.option], unclear.proposed)
            said |= {"alone": True} if answer == "alone" else {unclear.option: answer}


def choose_name(folder: Path, given: str | None, owner: Owner, state: Path) -> str:
    """The dataset id. Raises ConfigError if images of this very folder are counted under another one."""
    origins = sorted((state / "data").glob(f"*/{ORIGIN}"))
    before = next((file.parent.name for file in origins if read_json(file).get("path") == str(folder)), None)
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.stem if folder.is_file() else folder.name).strip("-._")[:64]
    name = given or owner.answer("Name of the dataset, for ever", before or plain or "images")
    if before not in (None, name):
        remedy = "keep that name, under which their costs add up, or move images of other people to another folder"
        text = f"--dataset-id {name}: images of {folder} are counted as {before!r} already: {remedy}"
        raise errors.public(ConfigError(text))
    return str(name)


def ask_for_groups(found: Survey, owner: Owner) -> str | None:
    """Which images are whose, if two can be of one person. Raises ConfigError if it seems so and nobody is asked."""
    if found.named and owner.ask is None:
        words = f"--groups '{found.named}' protects persons; --one-image-each is your word that it is not so"
        raise ConfigError(f"{NAMED}: {words}")
    if found.named:
        owner.see(f"{NAMED}, which {found.named} finds")
    persons = owner.answer("Can two images be of one person?", bool(found.named), None)
    return owner.answer(GROUPS_QUESTION, found.named) if persons else None


def ask_for_size(found: Survey, owner: Owner) -> int:
    """The rounded number of images, or of persons, that are not held out: it is published."""
    from sfumato.planning.proposal import rounded_size

    units, what = (found.images, "sensitive images") if found.persons is None else (found.persons, "persons")
    kept = units if found.held_out is not None else units * (1 - Data().holdout_fraction)
    return int(owner.answer(f"How many {what}, roughly (published with the release)", rounded_size(round(kept))))


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


def size_of_text(text: int | str | None) -> Size | None:
    """The size that `--size` names: the side of squares, or rows x columns."""
    if text is None:
        return None
    form = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", str(text))
    size = form and (int(form[1]), int(form[2] or form[1]))
    if not size or min(size) < 8:
        raise ConfigError(f"--size={text}: give 8 pixels a side or more, as in 64 or 192x256")
    return size_of(size)


# --- what it comes to, in words ---------------------------------------------------------------------------------------


def understood(found: Survey) -> Iterator[str]:
    """What the folder was taken for, as a small tree with counts: private."""
    by = f", by column {found.data['label_column']}" if "label_column" in found.data else ""
    yield f"local    {found.images} images in {len(found.classes)} classes{by}"
    for name, count in zip(found.classes, found.counts, strict=True):
        yield f"         ├─ {name}: {count}{', too few to learn from' if count < FEWEST else ''}"
    if found.groups is not None:
        yield f"         ├─ {found.persons} persons, by {way_of(found.groups)}"
    held = round(Data().holdout_fraction * found.images) if found.held_out is None else found.held_out
    few = ", too few for a verdict" if held < FEWEST * len(found.classes) else ""
    way = "drawn by a key, about" if found.held_out is None else "test/,"
    yield f"         └─ hold-out: {way} {held} images{few}"


def summary(made: Proposed) -> Iterator[str]:
    """What was seen, what is proposed and why, and what becomes public."""
    known, found, params = made.known, made.survey, made.chosen.params
    split = "test/" if found.held_out is not None else f"{params.data.holdout_fraction:.0%} of them, drawn by a key"
    named = "labels, any number of them an image" if params.data.labels == SEVERAL else "classes"
    yield f"images   {'colour' if found.colour else 'grey'}, {len(found.classes)} {named}"
    yield f"hold-out {split}"
    if joined := [part.name for part in split_of(Path(known.path))[0] if part.name.casefold() in VALIDATION]:
        yield f"         {', '.join(joined)}/ joins the training images: nothing is chosen by it"
    yield f"protects {protected(known)}"
    yield f"recipe   {params.recipe}: {made.chosen.row}"
    if params.synthesize.choose:
        yield "         public images join the drawn ones, if students of both mixtures then agree with the teacher"
    public = f"that the dataset exists, its class names ({', '.join(found.classes[:5])}"
    public += f" and {len(found.classes) - 5} more)" if len(found.classes) > 5 else ")"
    public += ", which are the labels that occur" if "classes" in found.data else ""
    yield f"public   {public}, the shape of its images, and privacy.size_hint={known.size_hint}"
    if made.counted:
        what = "persons" if known.unit == GROUP else "images"
        yield f"         size_hint is the number of {what} to one digit: if it must not be known, give --size-hint"


def warnings(made: Proposed, state: Path) -> Iterator[str]:
    """What weakens the guarantee, what must be set before the first run, and what was spent before."""
    from sfumato.planning.make import settings_for_ever_lines
    from sfumato.planning.resolve import warnings_of
    from sfumato.privacy.odometer import Odometer

    params, known = made.chosen.params, made.known
    for warning in warnings_of(params, made.plan.budget["delta"], len(made.survey.classes)):
        yield f"warning: {warning}"
    yield from settings_for_ever_lines(params)
    if known.unit == GROUP:
        yield "the minutes are those of one image a person: queries take longer where persons have more"
    if Odometer(state, known.dataset_id).opened():
        yield f"warning: dataset {known.dataset_id!r} has a history here already: what was spent on it counts on"


def expected_kind(made: Proposed) -> str | None:
    """The public runs that its usefulness is forecast by; None for several labels, with which nothing was measured."""
    if made.known.data.get("labels") == SEVERAL:
        return None
    if set(made.chosen.params.synthesize.sources) == {"select"}:
        return "chosen"
    return "colour" if made.known.channels == 3 else "grey"


def size_rows(made: Proposed) -> Iterator[tuple[str, str, str, str]]:
    """Of each size, the largest first: its pixels, its minutes, up to how many more help, and its usefulness."""
    from sfumato.planning.forecast import forecast

    known, kind = made.known, expected_kind(made)
    for one in sorted([made.chosen, *made.others], key=lambda one: both_sides(one.own["data"]["size"]), reverse=True):
        size = one.params.data.size or known.side
        pixels = f"{size}" if isinstance(size, int) else by(size)
        minutes = f"{one.seconds / 60:.0f}" if one.enough else f"{one.seconds / 60:.0f} at least"
        mark = "proposed " if one is made.chosen else ""
        expected = forecast(kind, known.size_hint * known.epsilon, one.grown) if kind else "unknown"
        yield f"{mark}{pixels}", minutes, f"{math.ceil(one.whole)}", expected


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
