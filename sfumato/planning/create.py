"""A project for a folder of images: what its owner wants and is asked, what is proposed, and the files of it."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sfumato import errors
from sfumato.data.duplicates import ORIGIN
from sfumato.data.layout import Unclear
from sfumato.data.sources.imagefolder import list_folder
from sfumato.data.sources.splits import VALIDATION, split_of, words_in
from sfumato.data.survey import Survey, survey
from sfumato.errors import ConfigError, SfumatoError, explained
from sfumato.planning.project_files import Say, project_files, unsaid, write_project
from sfumato.settings.data import GROUP, IMAGE, OUTER, SEVERAL, Data, Groups
from sfumato.settings.fields import Size, both_sides, by, part_of, size_of
from sfumato.settings.params import Params
from sfumato.settings.stages import PROPOSAL
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_local

if TYPE_CHECKING:
    from sfumato.planning.kept import Plan
    from sfumato.planning.proposal import Proposal

NOTES = {  # comments of `params.yaml`, by the section that they stand above
    "data": "dataset_id is permanent: the odometer counts under this name",
    "privacy": "epsilon is spent by the first release; privacy.lifetime_epsilon allows further ones",
    "public": "using them costs no privacy, and no guarantee covers them: none was made from sensitive images",
}


@dataclass(frozen=True)
class Owner:
    """Decides what was not given: is asked, or takes the defaults.

    ask: asks a question, with a default and the type of the answer, or None for yes and no; None: nobody is asked;
    see: shows a line that only the owner may read.
    """

    ask: Callable[[str, Any, type | None], Any] | None = None
    see: Say = unsaid

    def answer(self, question: str, default: Any, kind: type | None = str) -> Any:
        return default if self.ask is None else self.ask(question, default, kind)

    def number(self, question: str, given: float | None, default: float | None) -> float:
        if given is None:
            given = self.answer(question, default, float)
        if given is None or not 0 < given < math.inf:
            raise errors.public(ConfigError(f"{question}: must be a positive number, got {given}"))
        return float(given)


@dataclass(frozen=True, kw_only=True)
class Proposed:
    """A project that is not written yet.

    survey: of the images, private; chosen: of the proposals, and the others by size; seconds: of each stage; plan: of
    the chosen one; counted: whether the published number of images is theirs, rounded.
    """

    out: Path
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
        notes = dict(NOTES)
        if self.counted:
            size = "size_hint, the number of images or persons rounded to one digit, is published with the release"
            notes["privacy"] = f"{size}\n{NOTES['privacy']}"
        files = project_files({**self.chosen.content, **(more or {})}, notes, self.chosen.seconds / 60)
        write_project(self.out, files, say, force=force)
        seen = self.survey
        shown: dict[str, Any] = {"images": seen.images, "persons": seen.persons}
        shown |= {"classes": dict(zip(seen.classes, seen.counts, strict=True)), "budget": self.plan.budget}
        shown |= {"protects": protected(self.chosen.params), "sizes": list(size_rows(self)), "seconds": self.seconds}
        write_local(self.out / PROPOSAL, json.dumps(shown).encode())  # for `stage serve`


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
    folder = images.expanduser().resolve()
    out = out.expanduser().resolve()
    public = Path(public).expanduser().resolve() if public else None
    check_places(folder, public, out, force)
    if epsilon is None and owner.ask is None:
        raise ConfigError("--epsilon is missing: the owner must choose it, and it has no default (docs: choose ε)")
    if fit not in ("crop", "pad"):
        raise ConfigError(f"--fit={fit}: expected crop or pad")
    asked = size_of_text(size)
    said = {"groups": groups, "alone": alone, "label": label_column, "classes": classes, "span": range, "skip": skip}
    seen = look(folder, said, owner, state)
    if seen.groups is not None and one_image_each:
        raise ConfigError(
            "--one-image-each contradicts --groups (or the folder layout), which assigns several images to a person"
        )
    shorter, longer = sorted(both_sides(asked or 0))
    if shorter > max(seen.side, 8) or longer > max(seen.longer, 8):
        raise ConfigError(f"--size={size} is larger than most images, and they are not enlarged: choose a smaller size")
    name = choose_name(folder, dataset_id, owner, state)
    epsilon = owner.number("Privacy budget ε", epsilon, None)
    seen, unit = look_for_persons(seen, folder, said, owner, state, one_image_each)
    wanted = {
        "dataset_id": name,
        "path": str(folder),
        "epsilon": epsilon,
        "minutes": owner.number("Minutes that a run may take on this machine", minutes, 30.0),
        "size_hint": size_hint or ask_for_size(seen, owner),
        "unit": unit,
        "data": seen.data | ({"fit": fit} if fit == "pad" else {}),
        "evaluate": evaluate,
    }
    return propose_for(seen, asked, public, out, state, counted=size_hint is None, **wanted)


def propose_for(
    seen: Survey, asked: Size | None, public: Path | None, out: Path, state: Path, *, counted: bool, **wanted: Any
) -> Proposed:
    """The proposals for what was seen and is wanted, and the plan of the chosen one. wanted: of `Known`."""
    # slow to import: pictures that cannot be used are named first
    from sfumato.planning import estimate
    from sfumato.planning.proposal import PROPOSALS, Known, proposals, proposed_card, sizes_of
    from sfumato.planning.resolve import make_plan

    sides = (asked,) if asked else sizes_of(seen.side, seen.longer, seen.proportion)
    if seen.groups is not None:
        wanted["data"]["groups"] = seen.groups.model_dump(exclude_defaults=True)
    if public is not None:
        wanted |= {"public": str(public), "public_images": len(list_folder(public, "--public").train)}
    words = {word for name in seen.classes for word in re.split(r"[\W_]+", name.lower())}
    wanted["sided"] = not words.isdisjoint(PROPOSALS["sided"])
    largest = max(sides, key=both_sides)
    known = Known(side=largest, longer=seen.longer, channels=3 if seen.colour else 1, **wanted)

    def seconds_of(params: Params) -> dict[str, float | None]:
        shape = (known.channels, *both_sides(params.data.size or known.side))
        return estimate.expected_seconds(params, shape, len(seen.classes), state, known.public_images)

    chosen, *others = proposals(known, sides, lambda params: {k: v or 0.0 for k, v in seconds_of(params).items()})
    return Proposed(
        out=out,
        survey=seen,
        chosen=chosen,
        others=others,
        seconds=seconds_of(chosen.params),
        plan=make_plan(chosen.params, proposed_card(chosen.params, seen.classes, seen.held_out is not None)),
        counted=counted,
    )


def check_places(folder: Path, public: Path | None, out: Path, force: bool) -> None:
    """Raise ConfigError if there is no folder, if git would take the images, or if files would be overwritten."""
    for images in filter(None, (folder, public)):
        if not images.exists():
            raise ConfigError(f"{images} does not exist: name the folder of the images")
        if out == images or out in images.parents or images in out.parents:
            raise ConfigError(
                f"the project folder {out} overlaps {images}, so git would track the images: run from another folder, "
                "or name one with --out"
            )
    if public == folder:
        raise ConfigError(
            f"--public {public} contains the sensitive images: name a folder of public ones, or leave it out"
        )
    there = [name for name in ("params.yaml", "dvc.yaml") if (out / name).exists()]
    if there and not force:
        raise ConfigError(
            f"{out} already contains {' and '.join(there)}: name another folder with --out, or use --force"
        )


def look(folder: Path, said: dict[str, Any], owner: Owner, state: Path) -> Survey:
    """What the folder holds. said: the options of `survey`. What only the owner can decide is asked, and joins them."""
    questions = {  # by the option that the answer is of
        "groups": "How do I find each image's person? (same syntax as --groups, or `alone`)",
        "classes": "What are the class names? (a,b,c; or `all` to use all that were found)",
        "label": "Which column contains the labels?",
        "span": "Which values are shown as black and white? (such as 0,4095)",
    }
    while True:
        try:
            classes = said["classes"] and tuple(part.strip() for part in said["classes"].split(","))
            read = {"groups": groups_of(said["groups"]), "classes": classes, "span": range_of(said["span"])}
            seen = survey(folder, **said | read | {"skip": part_of(said["skip"])}, state=state)
            for line in understood(seen):
                owner.see(line)
            return seen
        except SfumatoError as unclear:
            if owner.ask is None or unclear.option is None:
                raise
            owner.see(str(unclear))
            answer = owner.answer(questions[unclear.option], unclear.proposed)
            said |= {"alone": True} if answer == "alone" else {unclear.option: answer}


def choose_name(folder: Path, given: str | None, owner: Owner, state: Path) -> str:
    """The dataset id. Raises ConfigError if images of this very folder are counted under another one."""
    origins = sorted((state / "data").glob(f"*/{ORIGIN}"))
    before = next((file.parent.name for file in origins if read_json(file).get("path") == str(folder)), None)
    spelled = unicodedata.normalize("NFKD", folder.stem if folder.is_file() else folder.name)  # ö as o and a mark
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", re.sub("[\u0300-\u036f]", "", spelled)).strip("-._")[:64]
    name = given or owner.answer(
        "Dataset name (permanent: the privacy budget is counted under it)", before or plain or "images"
    )
    if before not in (None, name):
        text = (
            f"--dataset-id {name}: the images in {folder} are already counted as {before!r}. Keep that name, so that "
            "their costs add up, or move images of other people to another folder"
        )
        raise errors.public(ConfigError(text))
    return str(name)


def look_for_persons(
    seen: Survey, folder: Path, said: dict[str, Any], owner: Owner, state: Path, one_image_each: bool
) -> tuple[Survey, str | None]:
    """What is seen with the persons that the owner names, and the unit of privacy. said: as of `look`."""
    if seen.groups is None and not one_image_each:
        said["groups"] = ask_for_groups(seen, owner)
        if said["groups"]:
            seen = look(folder, said, owner, state)
        one_image_each = owner.ask is not None
    if seen.groups is not None:
        return seen, GROUP
    if one_image_each:
        return seen, IMAGE
    return seen, None


def ask_for_groups(seen: Survey, owner: Owner) -> str | None:
    """How each image's person is found, if two can be of one. Raises ConfigError if it seems so and nobody is asked.

    Where something repeats, the default is to protect persons; without a proposal there is none.
    """
    likely: bool | None = False
    pattern = None
    if found := seen.repeats:
        pattern = found.groups
        likely = bool(pattern) or None
        way = f"--groups '{pattern}'"
        if pattern is None:
            way = "--groups with a pattern, a column or a CSV file"
        if owner.ask is None:
            raise ConfigError(
                f"{found.why}. Use {way} to protect people, or --one-image-each to confirm that no person appears twice"
            )
        owner.see(found.why)
        for name, person in found.examples:
            owner.see(f"         {name} would show person {person}")
        if found.persons:
            owner.see(f"         {found.persons} persons, by the pattern {pattern}")
    if owner.answer("Can the same person appear in more than one image?", likely, None):
        way = "a pattern that captures the id in file names, such as ^(P\\d+)_, or a CSV file"
        return owner.answer(f"Which images belong to the same person? ({way})", pattern)
    return None


def ask_for_size(seen: Survey, owner: Owner) -> int:
    """The rounded number of images, or of persons, that are not held out: it is published."""
    from sfumato.planning.proposal import rounded_size

    what = "sensitive images" if seen.persons is None else "persons"
    units: float = seen.persons or seen.images
    if seen.held_out is None:
        units *= 1 - Data().holdout_fraction
    return int(
        owner.answer(f"About how many {what} are there? (published with the release)", rounded_size(round(units)))
    )


def groups_of(text: str | None) -> Groups | None:
    """Which images are whose, as `--groups` says: a CSV file, a column, the order of folders, or a pattern."""
    if text is None:
        return None
    if text == "class/person":
        return Groups(folder=True)
    if text == "person/class":
        return Groups(folder=OUTER)
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
    with explained(
        ConfigError, lambda _: f"--range={text}: expected two numbers, such as 0,4095", causes=(ValueError,)
    ):
        low, high = (float(part) for part in text.split(","))
    return low, high


def size_of_text(text: int | str | None) -> Size | None:
    """The size that `--size` names: the side of squares, or rows x columns."""
    if text is None:
        return None
    form = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", str(text))
    size = form and (int(form[1]), int(form[2] or form[1]))
    if not size or min(size) < 8:
        raise ConfigError(f"--size={text}: expected 8 pixels per side or more, such as 64 or 192x256")
    return size_of(size)


def understood(seen: Survey) -> Iterator[str]:
    """What the folder was taken for, as a small tree with counts: private."""
    by = f", by column {seen.data['label_column']}" if "label_column" in seen.data else ""
    yield f"local    {seen.images} images in {len(seen.classes)} classes{by}"
    for name, count in zip(seen.classes, seen.counts, strict=True):
        yield f"         ├─ {name}: {count}{', too few to learn from' if count < 10 else ''}"
    if seen.groups is not None:
        yield f"         ├─ {seen.persons} persons, by {seen.groups.words}"
    for person, count in seen.largest:
        yield f"         ├─ person {person}: {count} images, one of the largest numbers"
    way = "test/,"
    held = seen.held_out
    if held is None:
        way = "drawn by a key, about"
        held = round(Data().holdout_fraction * seen.images)
    few = ", too few for a verdict" if held < 10 * len(seen.classes) else ""
    yield f"         └─ hold-out: {way} {held} images{few}"


def summary(made: Proposed) -> Iterator[str]:
    """What was seen, what is proposed and why, and what becomes public."""
    classes = made.survey.classes
    params = made.chosen.params
    colours = "colour" if made.survey.colour else "grey"
    named = "labels, any number per image" if params.data.labels == SEVERAL else "classes"
    yield f"images   {colours}, {len(classes)} {named}"
    drawn = f"{params.data.holdout_fraction:.0%} of them, drawn by a key"
    yield f"hold-out {drawn if made.survey.held_out is None else 'test/'}"
    trained = [part.name for part in split_of(Path(str(params.data.path)))[0]]
    if joined := [name for name in trained if {*words_in(name)} & {*VALIDATION}]:
        yield f"         {', '.join(joined)}/ is added to the training images: no choice is made by it"
    yield f"protects {protected(params)}"
    yield f"recipe   {params.recipe}: {made.chosen.row}"
    if params.synthesize.choose:
        yield "         public images are added if a classifier trained with them agrees with the teacher as well"
    more = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
    occurring = ", the labels that occur" if "classes" in made.survey.data else ""
    names = f"its class names ({', '.join(classes[:5])}{more}){occurring}, the shape of its images"
    yield f"public   that the dataset exists, {names}, and privacy.size_hint={params.privacy.size}"
    if made.counted:
        what = "persons" if params.privacy.unit == GROUP else "images"
        yield f"         size_hint is the number of {what}, rounded to one digit: to publish another, use --size-hint"


def warnings(made: Proposed, state: Path) -> Iterator[str]:
    """What weakens the guarantee, what must be set before the first run, and what was spent before."""
    from sfumato.planning.make import settings_for_ever_lines
    from sfumato.planning.resolve import warnings_of
    from sfumato.privacy.odometer import Odometer

    params = made.chosen.params
    for warning in warnings_of(params, made.plan.budget["delta"], len(made.survey.classes)):
        yield f"warning: {warning}"
    yield from settings_for_ever_lines(params)
    if params.privacy.unit == GROUP:
        yield "the minutes assume one image per person: queries take longer if persons have more"
    if Odometer(state, params.data.name).opened():
        yield f"warning: dataset {params.data.name!r} already has charges on this machine, which still count"


def size_rows(made: Proposed) -> Iterator[list[str]]:
    """Of each size, the largest first: its pixels, its minutes, up to how many more help, and its usefulness."""
    from sfumato.planning.forecast import forecast

    for one in sorted([made.chosen, *made.others], key=lambda one: both_sides(one.params.data.size or 0), reverse=True):
        size = one.params.data.size or 0
        privacy = one.params.privacy
        mark = "proposed " if one is made.chosen else ""
        pixels = f"{size}" if isinstance(size, int) else by(size)
        minutes = f"{one.seconds / 60:.0f}{'' if one.enough else ' at least'}"
        useful = forecast(one.kind, privacy.size * privacy.epsilon, one.left) if one.kind else "unknown"
        yield [mark + pixels, minutes, f"{math.ceil(one.whole)}", useful]


def protected(params: Params) -> str:
    if params.data.groups:
        return f"each person with all their images; ids are found by {params.data.groups.words}"
    if params.privacy.unit == IMAGE:
        return "each image (you confirmed that no two images show the same person)"
    return "each image, but not a person with several (use --groups, or --one-image-each if no person has several)"
