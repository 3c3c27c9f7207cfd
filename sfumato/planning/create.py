"""Create a project from a folder of images: survey the images, ask the owner, propose parameters,
and write the files.
"""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sfumato import errors
from sfumato.data.duplicates import ORIGIN
from sfumato.data.sources import check_there
from sfumato.data.sources.imagefolder import list_folder
from sfumato.data.sources.splits import VALIDATION, split_of, words_in
from sfumato.data.survey import Survey
from sfumato.data.survey import survey as survey_images
from sfumato.errors import ConfigError, DataError, SfumatoError, Spelling
from sfumato.planning.project_files import check_state, project_files, workflow_place, write_project
from sfumato.runtime.progress import Say, discard
from sfumato.settings.data import GROUP, IMAGE, SEVERAL, Data, Groups
from sfumato.settings.fields import Size, both_sides, by
from sfumato.settings.options import InitOptions
from sfumato.settings.params import Params
from sfumato.settings.stage import PROPOSAL
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_local

if TYPE_CHECKING:
    from sfumato.planning.kept import Plan
    from sfumato.planning.proposal import Proposal, ProposalRequest

NOTES = {  # Comments above the sections of `params.yaml`
    "data": "dataset_id is permanent: the odometer counts all charges under this name",
    "privacy": (
        "the first release spends epsilon; privacy.lifetime_epsilon can allow further releases"
    ),
    "public": (
        "public images cost no privacy, and the guarantee does not cover them; the owner declares "
        "that none was made from sensitive images"
    ),
}

USUAL_EPSILON = 5.0  # The prompt proposes this ε. It is used only if the owner accepts it


@dataclass(frozen=True)
class Owner:
    """The owner, who answers questions about options that were not given.

    ask: function that takes a question, a default answer and the type of the answer, and returns
    the answer. For a yes-or-no question, the type is None. If there is no one to answer, `ask`
    itself is None, and each answer is the default;
    see: function that shows the owner a line that no one else may read;
    spelling: function that takes an option's name, such as size_hint, and returns its form in this
    front end: on the command line with dashes, in Python unchanged.
    """

    ask: Callable[[str, object, type | None], Any] | None = None
    see: Say = discard
    spelling: Spelling = str

    def answer(self, question: str, default: object, kind: type | None = str) -> Any:
        if self.ask is None:
            return default
        return self.ask(question, default, kind)

    def option(
        self, options: InitOptions, name: str, question: str, default: object, kind: type = str
    ) -> Any:
        """Return the value of an option. If it was not given, ask until the answer is valid."""
        while getattr(options, name) is None:
            answer = self.answer(question, default, kind)
            try:
                options = replace(options, **{name: answer})
            except ConfigError as mistake:
                if self.ask is None:
                    raise
                self.see(mistake.spelled(self.spelling))
        return getattr(options, name)


@dataclass(frozen=True, kw_only=True)
class Proposed:
    """A project that is not written yet.

    survey: survey of the images, which is private;
    chosen: the chosen proposal; others: the proposals for other sizes;
    seconds: expected seconds of each stage;
    plan: plan of the chosen proposal;
    counted: True if the published number of images or persons is the program's rounded count, and
    the owner did not set this number as an option;
    spelling: see `Owner`.
    """

    out: Path
    survey: Survey
    chosen: Proposal
    others: Sequence[Proposal]
    seconds: dict[str, float | None]
    plan: Plan
    counted: bool
    spelling: Spelling

    def write(
        self, say: Say, *, force: bool = False, more: Mapping[str, object] | None = None
    ) -> None:
        """Write the files of the project, and create its repository.

        force: replace the files of an earlier project; more: sections to add to the proposed
        `params.yaml`.
        """
        notes = dict(NOTES)
        if self.counted:
            size = (
                "size_hint, the number of images or persons rounded to one significant digit, is "
                "published with the release"
            )
            notes["privacy"] = f"{size}\n{NOTES['privacy']}"
        content = {**self.chosen.content, **(more or {})}
        files = project_files(content, notes, self.chosen.seconds / 60, workflow_place(self.out))
        write_project(self.out, files, say, force=force)
        survey = self.survey
        proposal = {
            "images": survey.images,
            "persons": survey.persons,
            "classes": dict(zip(survey.classes, survey.counts, strict=True)),
            "budget": self.plan.budget,
            "protects": protection_text(self),
            "sizes": list(size_rows(self)),
            "seconds": self.seconds,
        }
        # `stage serve` shows this file
        write_local(self.out / PROPOSAL, json.dumps(proposal).encode())


def propose_project(options: InitOptions, owner: Owner, state: Path) -> Proposed:
    """Survey a folder of images, and choose parameters that suit the images, ε and the allowed
    minutes.

    Spends nothing, and writes only caches in the state directory.

    state: the private state directory. Raises the errors of `survey`, and ConfigError or DataError
    if an option does not match the images.
    """
    check_places(options)
    check_state(options.out, state)
    if options.epsilon is None and owner.ask is None:
        raise ConfigError(
            "{option.epsilon} is missing, and has no default: choose a value (see “Choose ε” in "
            "the documentation)",
            option="epsilon",
        )
    options, survey = survey_and_ask(options, owner, state)
    if options.groups is not None and options.one_image_each:
        raise ConfigError(
            "{option.one_image_each} states that no person has two images, but {option.groups} "
            "assigns images to persons: use only one of the two",
            option="one_image_each",
        )
    if survey.groups is not None and options.one_image_each:
        raise ConfigError(
            "{option.one_image_each} states that no person has two images, but the layout of the "
            "images assigns them to persons: leave out {option.one_image_each}",
            option="one_image_each",
        )
    check_size(options.size, survey)
    name = choose_name(options, owner, state)
    if options.epsilon is None:
        owner.see(
            "ε limits what anyone can learn about one person or image: ε = 1 protects strongly, ε "
            "above 10 hardly at all."
        )
        owner.see(
            "You choose ε, and the first run spends it. A smaller ε makes the images less useful."
        )
    epsilon = owner.option(options, "epsilon", "Privacy budget ε", USUAL_EPSILON, float)
    survey, unit = look_for_persons(survey, options, owner, state)
    minutes = owner.option(
        options, "minutes", "Minutes that a run may take on this machine", 30.0, float
    )
    size_hint = choose_size_hint(options, survey, owner)

    # This import is slow, so it comes after the checks that report unusable pictures
    from sfumato.planning.proposal import ProposalRequest, are_sided, sizes_of

    public_images = 0
    if options.public is not None:
        public_images = len(list_folder(options.public, owner.spelling("public")).train)
    facts = survey.facts
    sides = (
        (options.size,) if options.size else sizes_of(facts.side, facts.longer, facts.proportion)
    )
    request = ProposalRequest(
        dataset_id=name,
        path=str(options.images),
        side=max(sides, key=both_sides),
        longer=facts.longer,
        channels=3 if facts.colour else 1,
        size_hint=size_hint,
        epsilon=epsilon,
        minutes=minutes,
        unit=unit,
        data=survey.data,
        fit=options.fit,
        groups=survey.groups,
        public=str(options.public) if options.public else None,
        public_images=public_images,
        evaluate=options.evaluate,
        sided=are_sided(survey.classes),
    )
    return propose_for(request, sides, survey, options, owner, state)


def propose_for(
    request: ProposalRequest,
    sides: Sequence[Size],
    survey: Survey,
    options: InitOptions,
    owner: Owner,
    state: Path,
) -> Proposed:
    """Make a proposal for each size, and the plan of the chosen proposal."""
    from sfumato.planning import estimate
    from sfumato.planning.proposal import proposals, proposed_card
    from sfumato.planning.resolve import make_plan

    def seconds_of(params: Params) -> dict[str, float | None]:
        shape = (request.channels, *both_sides(params.data.size or request.side))
        return estimate.expected_seconds(
            params, shape, len(survey.classes), state, request.public_images
        )

    chosen, *others = proposals(
        request, sides, lambda params: {k: v or 0.0 for k, v in seconds_of(params).items()}
    )
    return Proposed(
        out=options.out,
        survey=survey,
        chosen=chosen,
        others=others,
        seconds=seconds_of(chosen.params),
        plan=make_plan(
            chosen.params, proposed_card(chosen.params, survey.classes, survey.held_out is not None)
        ),
        # If the owner gave the number, a note would reveal that it is the program's rounded count
        counted=options.size_hint is None and request.size_hint == rounded_count(survey),
        spelling=owner.spelling,
    )


def check_places(options: InitOptions) -> None:
    """Raise ConfigError unless the images and the project folder are usable.

    The images must exist, and their folders must not overlap the project folder, because git would
    track the images. The public images must be in another folder than the sensitive ones. DVC must
    accept the path of the project folder, and it must be possible to write there. Unless
    `options.force` is set, the project folder must not contain a project yet.
    """
    out = options.out
    check_project_path(out)
    for option, images in (("images", options.images), ("public", options.public)):
        if images is not None:
            check_images_folder(option, images, out)
    if options.public == options.images:
        raise ConfigError(
            "{option.public} {public} contains the sensitive images: name a folder of public "
            "images, or leave out {option.public}",
            option="public",
            public=options.public,
        )
    existing_folder = next(path for path in (out, *out.parents) if path.exists())
    if not existing_folder.is_dir() or not os.access(existing_folder, os.W_OK):
        raise ConfigError(
            "the project folder {out} cannot be created: {place} is not a folder to which you may "
            "write. Name another folder with {option.out}",
            option="out",
            out=out,
            place=existing_folder,
        )
    existing_files = [name for name in ("params.yaml", "dvc.yaml") if (out / name).exists()]
    if existing_files and not options.force:
        raise ConfigError(
            "{out} already contains {there}: name another folder with {option.out}, or use "
            "{option.force} to replace the files",
            option="out",
            out=out,
            there=" and ".join(existing_files),
        )


def check_project_path(out: Path) -> None:
    """Raise ConfigError unless DVC accepts the path of the project folder."""
    if {*"{}"} & {*str(out)}:
        raise ConfigError(
            "the path of the project folder, {out}, contains braces, which DVC cannot use: run "
            "from another folder, or name one with {option.out}",
            option="out",
            out=out,
        )
    if not is_utf_8(out):
        raise ConfigError(
            "the path of the project folder, {out}, contains bytes that are not UTF-8, which DVC "
            "cannot use: run from another folder, or name one with {option.out}",
            option="out",
            out=out,
        )


def is_utf_8(path: Path) -> bool:
    return not any("\udc80" <= letter <= "\udcff" for letter in str(path))


def check_images_folder(option: str, images: Path, out: Path) -> None:
    """Raise ConfigError unless a folder of images exists, params.yaml can contain its path, and the
    project folder does not overlap it.
    """
    if not images.exists():
        fix = "name the folder of the images"
        if any(part.endswith(":") for part in images.parts[1:]):  # a URL
            fix = (
                "if it is a URL, copy a few of its files into a folder, name that folder, and set "
                "data.path to the URL afterwards"
            )
        raise ConfigError("{images} does not exist: {fix}", option=option, images=images, fix=fix)
    if not is_utf_8(images):
        raise ConfigError(
            "{images} contains bytes that are not UTF-8, which params.yaml cannot contain: rename "
            "the folder or file, for example with convmv",
            option=option,
            images=images,
        )
    if out == images or out in images.parents or images in out.parents:
        raise ConfigError(
            "the project folder {out} overlaps {images}, so git would track the images: run from "
            "another folder, or name one with {option.out}",
            option="out",
            out=out,
            images=images,
        )


def check_size(size: Size | None, survey: Survey) -> None:
    """Raise ConfigError if most images are smaller than the requested size."""
    if size is None:
        return
    rows, columns = both_sides(size)
    facts = survey.facts
    if min(rows, columns) > max(facts.side, 8) or max(rows, columns) > max(facts.longer, 8):
        raise ConfigError(
            "{option.size}={size} is larger than most images, and images are not enlarged: choose "
            "a smaller size",
            option="size",
            size=rows if rows == columns else f"{rows}x{columns}",
        )


def survey_and_ask(options: InitOptions, owner: Owner, state: Path) -> tuple[InitOptions, Survey]:
    """Survey the images, and ask the owner whenever the layout is ambiguous.

    Returns the options with the owner's answers, and the survey.
    """
    while True:
        try:
            survey = survey_images(options, state)
        except SfumatoError as ambiguity:
            if owner.ask is None or not ambiguity.undecided:
                raise
            options = ask_about(ambiguity, options, owner)
        else:
            for line in survey_lines(survey):
                owner.see(line)
            return options, survey


def ask_about(ambiguity: SfumatoError, options: InitOptions, owner: Owner) -> InitOptions:
    """Show an ambiguity to the owner, and ask how to resolve it.

    Returns the options with the answer.
    """
    owner.see(ambiguity.spelled(owner.spelling))
    return ask_option(str(ambiguity.option), ambiguity.proposed, options, owner)


def ask_option(option: str, default: object, options: InitOptions, owner: Owner) -> InitOptions:
    """Ask the owner for an option until the answer is valid. Return the options with the answer."""
    questions = {
        "groups": (
            "How do I find each image's person? (a pattern such as ^(P\\d+)_, a CSV file, the name "
            "of a column, or class/person or person/class for two levels of folders; or `alone`, "
            "if each image without an id is the only image of its person)"
        ),
        "classes": "What are the class names? (a,b,c; or `all` to use all names that were found)",
        "label_column": "Which column contains the labels?",
        "range": "Which pixel values are black and white? (such as 0,4095)",
        "volume": "Which volumes should be used? (such as suffix=T1w)",
    }
    answer = owner.answer(questions[option], default)
    if option == "groups" and answer == "alone":
        return replace(options, alone=True)
    try:
        new_options = replace(options, **{option: answer})
        check_there(str(options.images), new_options.groups)
    except ConfigError as mistake:
        return ask_about(mistake, options, owner)
    except DataError as mistake:  # a CSV file that does not exist
        owner.see(mistake.spelled(owner.spelling))
        return ask_option(option, default, options, owner)
    return new_options


def confirm_companions(survey: Survey, owner: Owner) -> None:
    """Raise ConfigError if pictures look like masks or thumbnails of others, unless the owner
    confirms that they are separate pictures.
    """
    if survey.companions is None:
        return
    name, original = survey.companions.example
    total = survey.images + (survey.held_out or 0)
    text = (
        f"{survey.companions.count} of {total} pictures look like masks, annotations or thumbnails "
        f"of other pictures (for example, {name} of {original})"
    )
    owner.see(text)
    question = "Are they separate pictures that should be used for training?"
    if owner.ask is None or not owner.answer(question, False, None):
        raise ConfigError(
            f"{text}. Move them out of the folder, or rename them if they are separate pictures"
        )


def choose_name(options: InitOptions, owner: Owner, state: Path) -> str:
    """Choose the dataset id.

    Raises ConfigError if charges on images of this folder are already counted under another id.
    """
    folder = options.images
    origins = sorted((state / "data").glob(f"*/{ORIGIN}"))
    earlier_id = next(
        (file.parent.name for file in origins if read_json(file).get("path") == str(folder)), None
    )
    # Ö becomes O and a combining mark, which is removed below
    letters = unicodedata.normalize("NFKD", folder.stem if folder.is_file() else folder.name)
    ascii_name = re.sub(r"[^A-Za-z0-9._-]+", "-", re.sub("[\u0300-\u036f]", "", letters))
    default = ascii_name.strip("-._")[:64]
    name: str = owner.option(
        options,
        "dataset_id",
        "Dataset name (permanent: the privacy budget is counted under it)",
        earlier_id or default or "images",
    )
    if earlier_id not in (None, name):
        text = (
            "{option.dataset_id} {name}: charges on the images in {folder} are already counted "
            "under {before!r}. Keep that name, so that one odometer counts all of them. If the "
            "images are of other people now, move them to another folder"
        )
        error = ConfigError(text, option="dataset_id", name=name, folder=folder, before=earlier_id)
        raise errors.public(error)
    return name


def look_for_persons(
    survey: Survey, options: InitOptions, owner: Owner, state: Path
) -> tuple[Survey, Literal["group", "image"] | None]:
    """Find each image's person by the owner's rule, and ask for a rule if there is none.

    Returns the new survey and the unit of privacy. The unit is None if there is neither a rule nor
    the owner's confirmation that every image shows a different person.
    Raises the errors of `confirm_companions` and `ask_for_groups`.
    """
    confirm_companions(survey, owner)
    confirmed = options.one_image_each
    if survey.groups is None and not confirmed:
        while (new_options := ask_for_groups(survey, options, owner)) is not None:
            try:
                _, survey = survey_and_ask(new_options, owner, state)
                break
            except (ConfigError, DataError) as mistake:
                # Due to the answer: without it, the survey succeeded
                owner.see(mistake.spelled(owner.spelling))
        confirmed = owner.ask is not None and new_options is None
    if survey.groups is None and survey.volumes:
        _, survey = survey_and_ask(replace(options, groups=Groups(volume=True)), owner, state)
    if survey.groups is not None:
        return survey, GROUP
    if confirmed:
        return survey, IMAGE
    return survey, None


def ask_for_groups(survey: Survey, options: InitOptions, owner: Owner) -> InitOptions | None:
    """Ask whether a person can appear in several images and, if so, how to find an image's person.

    Returns the options with the answer, or None if the owner answers “no”. If a pattern finds ids
    that repeat in the file names, the default answers are “yes” and this pattern.

    Raises ConfigError if ids seem to repeat and there is no one to answer.
    """
    default: bool | None = False
    pattern = None
    if repeats := survey.repeats:
        pattern = repeats.groups
        default = bool(pattern) or None
        if owner.ask is None:
            raise ConfigError(
                "{why}. Use {option.groups} {way} to protect people, or {option.one_image_each} to "
                "confirm that no person appears twice",
                option="groups",
                why=repeats.why,
                way=f"'{pattern}'" if pattern else "with a pattern, a column or a CSV file",
            )
        owner.see(repeats.why)
        if repeats.persons:
            owner.see(f"         {repeats.persons} persons, found by the pattern {pattern}")
        for name, person in repeats.examples:
            owner.see(f"         according to this pattern, {name} shows person {person}")
    noun = "image"
    if survey.volumes:
        noun = "volume"
    if not owner.answer(f"Can the same person appear in more than one {noun}?", default, None):
        return None
    return ask_option("groups", pattern, options, owner)


def choose_size_hint(options: InitOptions, survey: Survey, owner: Owner) -> int:
    """Choose the number of images or persons outside the hold-out.

    The default answer is rounded, because the number is published.
    """
    units = "sensitive images" if survey.persons is None else "persons"
    if survey.held_out is None and options.size_hint is None:
        owner.see(
            f"{Data().holdout_fraction:.0%} of the {units} are set aside to test the release: "
            "count only the rest."
        )
    question = f"About how many {units} are there? (published with the release)"
    size_hint: int = owner.option(options, "size_hint", question, rounded_count(survey))
    return size_hint


def rounded_count(survey: Survey) -> int:
    """Return the rounded number of images or persons outside the hold-out."""
    from sfumato.planning.proposal import rounded_size

    share = 1 - Data().holdout_fraction if survey.held_out is None else 1
    return rounded_size(round((survey.persons or survey.images) * share))


def survey_lines(survey: Survey) -> Iterator[str]:
    """Yield a small tree that shows how the folder was understood. Its counts are private."""
    by = ""
    if "label_column" in survey.data:
        by = f", by column {survey.data['label_column']}"
    yield f"local    {survey.images} images in {len(survey.classes)} classes{by}"
    for name, count in zip(survey.classes, survey.counts, strict=True):
        yield f"         ├─ {name}: {count}{', too few to learn from' if count < 10 else ''}"
    if survey.groups is not None:
        yield f"         ├─ {survey.persons} persons, by {survey.groups.words}"
    if survey.localizers:
        yield f"         ├─ DICOM localizers (overview images) left out: {survey.localizers}"
    if survey.facts.burned_in:
        yield (
            "         ├─ warning: DICOM files with text, such as a name, burned into the pixels "
            f"(according to their headers): {survey.facts.burned_in}"
        )
    for person, count in survey.largest:
        yield f"         ├─ person {person} is among the persons with the most images ({count})"
    way = "test/,"
    hold_out = survey.held_out
    if hold_out is None:
        way = "chosen by a secret key, about"
        hold_out = round(Data().holdout_fraction * survey.images)
    warning = ""
    if hold_out < 10 * len(survey.classes):
        warning = ", too few to judge the release"
    yield f"         └─ hold-out: {way} {hold_out} images{warning}"


def summary(project: Proposed) -> Iterator[str]:
    """Describe the images, the proposal and its reasons, and which facts become public."""
    classes = project.survey.classes
    params = project.chosen.params
    colours = "colour" if project.survey.facts.colour else "grey"
    labels = "labels, any number per image" if params.data.labels == SEVERAL else "classes"
    yield f"images   {colours}, {len(classes)} {labels}"
    hold_out = f"{params.data.holdout_fraction:.0%} of the images, chosen by a secret key"
    yield f"hold-out {hold_out if project.survey.held_out is None else 'test/'}"
    training_parts = [part.name for part in split_of(Path(str(params.data.path)))[0]]
    if added_parts := [name for name in training_parts if {*words_in(name)} & {*VALIDATION}]:
        yield (
            f"         {', '.join(added_parts)}/ is added to the training images, because no "
            "separate validation images are needed"
        )
    yield f"protects {protection_text(project)}"
    yield f"recipe   {params.recipe}: {project.chosen.row}"
    if params.synthesize.choose:
        yield (
            "         public images are added if they do no harm: a classifier trained with them "
            "must agree with the teacher about as often as a classifier trained without them"
        )
    more = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
    occurring = (
        ", the fact that all of these labels occur" if "classes" in project.survey.data else ""
    )
    names = f"its class names ({', '.join(classes[:5])}{more}){occurring}, the shape of its images"
    yield (
        f"public   with the release, these facts become public: the existence of the dataset, "
        f"{names}, and privacy.size_hint={params.privacy.size}"
    )
    if project.counted:
        units = "persons" if params.privacy.unit == GROUP else "images"
        option = project.spelling("size_hint")
        yield (
            f"         size_hint is the number of {units}, rounded to one significant digit. To "
            f"publish another number, use {option}"
        )


def warnings(project: Proposed, state: Path) -> Iterator[str]:
    """Yield warnings about the settings, the minutes and earlier charges on the dataset."""
    from sfumato.planning.make import final_settings_lines
    from sfumato.planning.resolve import warnings_of
    from sfumato.privacy.odometer import Odometer

    params = project.chosen.params
    for warning in warnings_of(params, project.plan.budget["delta"], len(project.survey.classes)):
        yield f"warning: {warning}"
    yield from final_settings_lines(params)
    if params.privacy.unit == GROUP:
        yield (
            "the minutes assume one image per person: if persons have more images, queries take "
            "longer"
        )
    if Odometer(state, params.data.name).opened():
        yield (
            f"warning: dataset {params.data.name!r} already has charges on this machine, which "
            "still count"
        )


def size_rows(project: Proposed) -> Iterator[list[str]]:
    """Yield one row of text per size, the largest size first.

    The columns are the pixels, the expected minutes of the run, the minutes that a run with the
    longest fits needs, and the expected usefulness.
    """
    from sfumato.planning.forecast import forecast

    for proposal in sorted(
        [project.chosen, *project.others],
        key=lambda proposal: both_sides(proposal.params.data.size or 0),
        reverse=True,
    ):
        size = proposal.params.data.size or 0
        privacy = proposal.params.privacy
        mark = "proposed " if proposal is project.chosen else ""
        pixels = f"{size}" if isinstance(size, int) else by(size)
        minutes = f"{'' if proposal.enough else 'at least '}{proposal.seconds / 60:.0f}"
        useful = "unknown"
        if proposal.kind:
            useful = forecast(proposal.kind, privacy.size, privacy.epsilon, proposal.size_factor)
        yield [mark + pixels, minutes, f"{math.ceil(proposal.full_minutes)}", useful]


def protection_text(project: Proposed) -> str:
    params = project.chosen.params
    if params.data.groups:
        return f"each person with all their images; ids are found by {params.data.groups.words}"
    if params.privacy.unit == IMAGE:
        return "each image (you confirmed that no two images show the same person)"
    groups_option, one_image_option = map(project.spelling, ("groups", "one_image_each"))
    return (
        "each image, but not a person with several images (to protect persons, use "
        f"{groups_option}; if no person has several images, use {one_image_option})"
    )
