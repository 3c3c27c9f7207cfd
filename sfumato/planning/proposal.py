"""Propose parameters that suit a folder of images, an ε and a number of minutes.

The rules are in the table `proposals.yaml`. They use public values only: the shape, classes and
rounded number of the images, ε, and the minutes that `planning/estimate.py` expects.
"""

import math
import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from sfumato.data.cards import Card
from sfumato.errors import ConfigError
from sfumato.planning.forecast import kind_of, size_factor
from sfumato.settings.data import SEVERAL, Data, Groups
from sfumato.settings.fields import Size, both_sides, by, size_of
from sfumato.settings.noise import noise_at
from sfumato.settings.params import Params
from sfumato.settings.queries import TEACHER_CONSTANTS, Teacher
from sfumato.settings.recipes import Layer, overlaid, params_of, read_overlay
from sfumato.settings.stage import RECIPES
from sfumato.storage.documents import read_yaml

PROPOSALS: dict[str, Any] = dict(read_yaml(Path(__file__).with_name("proposals.yaml")))
JUDGING = 0.25  # The evaluation may take this share of the minutes. The rest is for the release

Seconds = Callable[[Params], Mapping[str, float]]  # expected seconds of each stage


class When(TypedDict):
    """Properties of the images to which a row of the table applies."""

    side: tuple[int, int]  # bounds of the longer side, in pixels
    channels: list[int]
    several: NotRequired[bool]  # whether images have several labels
    # Whether the owner has public images. With "beside", the row applies in both cases
    public: NotRequired[bool | str]


class Row(TypedDict):
    """A row of the table."""

    name: str
    when: When
    params: Layer
    # First and last value of each parameter. A key is, for example, pretrain.steps
    grows: dict[str, tuple[float, float]]
    lighter: NotRequired[list[Layer]]  # changes that save time, in the order in which they apply
    tuned_at: NotRequired[float]  # number of images with which the constants were tuned
    on_request: NotRequired[bool]  # whether the row is used only for a size that the owner set


@dataclass(frozen=True, kw_only=True)
class ProposalRequest:
    """The public facts about the images, and the owner's requests."""

    dataset_id: str
    path: str
    side: Size  # size of the stored images, in pixels: side of a square, or (rows, columns)
    channels: int
    longer: int = 0  # longer side of the original images, in pixels; 0 if unknown
    size_hint: int  # rounded number of sensitive images, or of persons
    epsilon: float
    minutes: float
    unit: str | None = None  # privacy.unit
    # Further keys of the section `data`, such as range
    data: Mapping[str, object] = field(default_factory=dict)
    fit: str = "crop"
    groups: Groups | None = None  # rule for finding persons' ids
    public: str | None = None  # folder of public images
    public_images: int = 0  # number of public images
    evaluate: bool = True  # whether to evaluate the release on real images
    # Whether classes may be mirror images of each other, such as left and right hands
    sided: bool = False


@dataclass(frozen=True)
class Proposal:
    """Parameters for a set of images."""

    content: Layer  # the content of `params.yaml`
    params: Params  # `content`, completed by the recipe and the defaults
    row: str  # name of the row of the table that was used
    fit_length: float  # position between the first (0) and the last (1) numbers of `grows`
    seconds: float  # expected seconds of a run
    judging: float  # how many of these seconds the evaluation takes
    enough: bool  # whether a run ends within the requested minutes
    full_minutes: float = math.inf  # minutes of a run with the last numbers of `grows`
    size_factor: float = 1.0  # result of `forecast.size_factor`

    @property
    def kind(self) -> str | None:
        """Kind of public runs that the forecast is based on; None if images have several labels."""
        return kind_of(self.params, self.params.data.channels)


def proposed_card(params: Params, classes: tuple[str, ...], official: bool) -> Card:
    """Return the card that images will have once they are prepared.

    official: True if the folder contains a hold-out, False if a secret key will select it.
    """
    data = params.data
    return Card(
        dataset_id=data.name,
        source=data.source,
        shape=(data.channels or 1, *both_sides(data.size or 0)),
        classes=classes,
        split="official" if official else "keyed",
        version="proposed",
        unit=params.privacy.protected,
        labels=data.labels,
    )


def sizes_of(side: int, longer: int, proportion: float) -> tuple[Size, ...]:
    """Return the sizes to which images may be resized, the largest first.

    The longer side of each size is one of `sides` in the table. The shorter side is a multiple of 4
    pixels, and at least 8. Sizes larger than the images are left out. If no size remains, the
    smallest of `sides` is used.

    side, longer: medians of the images' shorter and longer sides, in pixels; proportion: rows
    divided by columns.
    """
    # Shorter side divided by longer side, rounded to quarters
    quarter = max(1, round(4 * min(proportion, 1 / proportion))) / 4
    limit = min(side / quarter, longer)
    sides = [each for each in PROPOSALS["sides"] if each <= limit] or [min(PROPOSALS["sides"])]
    sizes = []
    for each in sorted(sides, reverse=True):
        shorter = max(8, 4 * round(each * quarter / 4))
        sizes.append(size_of(sorted((shorter, each), reverse=proportion > 1)))
    return tuple(sizes)


def are_sided(classes: Sequence[str]) -> bool:
    """Return whether classes may be mirror images of one another, judging by their names."""
    words = {word for name in classes for word in re.split(r"[\W_]+", name.lower())}
    return not words.isdisjoint(PROPOSALS["sided"])


def rounded_size(count: int) -> int:
    """Round a count to one significant digit, so that it may be published. Return at least 3."""
    return max(3, int(float(f"{count:.0e}")))


def propose(request: ProposalRequest, seconds: Seconds) -> Proposal:
    """Propose parameters for images of the size `request.side`.

    seconds: function that estimates the seconds of each stage on this machine. Raises ConfigError
    if no row of the table fits.
    """
    row = row_for(request)
    budget = 60 * request.minutes * PROPOSALS["reserve"]
    longest = proposal(replace(request, minutes=math.inf), row, [row["params"]], 1.0, seconds)
    full_minutes = (
        min(longest.seconds, (longest.seconds - longest.judging) / (1 - JUDGING))
        / 60
        / PROPOSALS["reserve"]
    )
    overlays = [row["params"]]
    for lighter in [{}, *row.get("lighter", [])]:
        overlays.append(lighter)
        proposal_at = partial(proposal, request, row, overlays, seconds=seconds)
        if proposal_at(0.0).seconds <= budget:
            break
    # 0: the first value of each setting in the row's `grows`; 1: the last value
    parts = [step / 128 for step in range(129)]
    return replace(
        proposal_at(parts[bisect(parts[1:], budget, key=lambda part: proposal_at(part).seconds)]),
        full_minutes=full_minutes,
    )


def proposals(request: ProposalRequest, sides: Sequence[Size], seconds: Seconds) -> list[Proposal]:
    """Make a proposal for each size that has a row in the table.

    A row with `on_request` is used only if there is a single size.

    The first proposal is the chosen one; the others follow, the largest size first. Among the sizes
    that can be run within the minutes, the chosen size is the largest one that is at least 90 % as
    useful as the most useful one. If no size can be run within the minutes, the smallest size is
    chosen. Raises ConfigError if the table has no row for any size.
    """
    ordered = sorted(sides, key=both_sides, reverse=True)
    by_size = []
    for side in ordered:
        with suppress(ConfigError):
            sized_request = replace(request, side=side)
            if len(sides) == 1 or not row_for(sized_request).get("on_request"):
                by_size.append(propose(sized_request, seconds))
    if not by_size:
        row_for(replace(request, side=ordered[0]))  # raises
    longer = [max(both_sides(p.params.data.size or 0)) for p in by_size]
    largest = max(longer[0], request.longer)
    product = request.epsilon * request.size_hint
    by_size = [
        replace(p, size_factor=size_factor(p.fit_length, side, largest, product))
        for p, side in zip(by_size, longer, strict=True)
    ]
    best = max((p.size_factor for p in by_size if p.enough), default=0.0)
    eligible = (p for p in by_size if p.enough and p.size_factor >= 0.9 * best)
    chosen = next(eligible, by_size[-1])
    return [chosen, *(p for p in by_size if p is not chosen)]


def row_for(request: ProposalRequest) -> Row:
    rows: list[Row] = PROPOSALS["rows"]
    for row in rows:
        when = row["when"]
        low, high = when["side"]
        fits = request.channels in when["channels"] and low <= max(both_sides(request.side)) <= high
        fits &= when.get("several", False) == (request.data.get("labels") == SEVERAL)
        if fits and when.get("public") in (None, "beside", request.public is not None):
            return row
    colour = "colour" if request.channels == 3 else "grey"
    kind = f"{colour} images of {by(request.side)}"
    if request.public:
        kind += " with public images"
    raise ConfigError(
        f"there is no proposal for {kind}: choose a recipe from `stage recipe list`, and write "
        "params.yaml yourself"
    )


def proposal(
    request: ProposalRequest, row: Row, overlays: Sequence[Layer], part: float, seconds: Seconds
) -> Proposal:
    """Make a proposal from one row of the table.

    overlays: changes to the settings, in the order in which they apply;
    part: number from 0 to 1 that selects the value of each setting in the row's `grows`. 0 selects
    the setting's first value, 1 its last. The scale in between is logarithmic.
    """
    content = reduce(overlaid, overlays, settings_of(request))
    beside = request.public is not None and row["when"].get("public") == "beside"
    _, recipe = read_overlay(RECIPES, content["recipe"])
    runs: list[str] = (recipe | content)["run"]
    if beside:
        runs = [*runs, "select"]
        content = overlaid(content, PROPOSALS["beside"])
    if not request.evaluate:
        runs = [name for name in runs if name != "evaluate"]
    if beside or not request.evaluate:
        content["run"] = runs
    content = adapt_to_size(content, request, row, runs)
    for key, (first, last) in row["grows"].items():  # geometric interpolation, to two digits
        *sections, name = key.split(".")
        change: Layer = {name: int(float(f"{first * (last / first) ** part:.1e}"))}
        for section in reversed(sections):
            change = {section: change}
        content = overlaid(content, change)
    content = with_images_of_the_release(content, request, runs, beside)
    params = params_of(content, Path("params.yaml"))
    stage_seconds = seconds(params)
    allowed = JUDGING * 60 * request.minutes * PROPOSALS["reserve"]
    if stage_seconds.get("evaluate", 0.0) > allowed:
        steps = max(1, int((params.evaluate.steps or 0) * allowed / stage_seconds["evaluate"]))
        content = overlaid(content, {"evaluate": {"steps": steps}})
        params = params_of(content, Path("params.yaml"))
        stage_seconds = seconds(params)
    total = sum(stage_seconds.values())
    enough = total <= 60 * request.minutes
    return Proposal(
        content, params, row["name"], part, total, stage_seconds.get("evaluate", 0.0), enough
    )


def settings_of(request: ProposalRequest) -> Layer:
    """Return the settings that depend only on the images and the owner's answers."""
    data: Layer = {
        "dataset_id": request.dataset_id,
        "source": "imagefolder",
        "path": request.path,
        "size": request.side,
        "channels": request.channels,
        **request.data,
    }
    if request.fit != Data().fit:
        data["fit"] = request.fit
    if request.groups is not None:
        data["groups"] = request.groups.model_dump(exclude_defaults=True)
    privacy: Layer = {
        "epsilon": request.epsilon,
        "size_hint": request.size_hint,
        "accountant": "exact",
    }
    if request.unit is not None:
        privacy["unit"] = request.unit
    content: Layer = {"recipe": None, "profile": None, "seed": 0, "data": data, "privacy": privacy}
    if request.public is not None:
        content["public"] = {
            "source": "imagefolder",
            "path": request.public,
            "declared_public": True,
        }
    return content


def with_images_of_the_release(
    content: Layer, request: ProposalRequest, runs: Sequence[str], beside: bool
) -> Layer:
    """Set the numbers of released and selected images, the formats of their files, and the mark of
    origin in these files.

    If classes may be mirror images of each other, `teacher.flip` is switched off.

    beside: whether public images are released in addition to drawn ones.
    """
    # Only a new project may set `mark: files`. In an existing project, this would change the
    # release
    synthesize: Layer = {"mark": "files"}
    changes: Layer = {"synthesize": synthesize}
    count = content["synthesize"]["count"]
    if beside:
        images = max(2, int(request.public_images * PROPOSALS["beside_part"]))
        changes["select"] = {"images": images}
    elif "select" in runs:
        count = min(count, max(2, int(request.public_images * PROPOSALS["public_part"])))
        synthesize["count"] = count
        changes["select"] = {"images": count}
    if request.sided and "teacher" in runs:
        changes["teacher"] = {"flip": False}
    if count <= PROPOSALS["folders"]:
        synthesize["export"] = ["png"]
    return overlaid(content, changes)


def adapt_to_size(content: Layer, request: ProposalRequest, row: Row, runs: Sequence[str]) -> Layer:
    """Adapt the shares of the budget and the teacher's constants to ε and the number of images or
    persons. If there are few colour images, also apply the changes `few_colour` of the table.
    """
    product = request.epsilon * request.size_hint
    if row.get("tuned_at"):
        rule = PROPOSALS["few_colour"]
        if request.channels == 3 and request.size_hint <= rule["most"]:
            content = overlaid(content, rule["params"])
        effective = product / row["tuned_at"]
        rules = at_effective_epsilon(content["recipe"], effective)
        content = overlaid(
            content, {name: section for name, section in rules.items() if name in runs}
        )
        teacher = content["teacher"]
        max_dimension = teacher.get("dimension", TEACHER_CONSTANTS["auxiliary"]["dimension"][0])
        teacher_changes = {
            "ridge": teacher.get("ridge", float(f"{small_sample('ridge', effective):.2g}")),
            "dimension": min(max_dimension, int(small_sample("dimension", product))),
        }
        content = overlaid(content, {"teacher": teacher_changes})
    share = max(float(content["count"]["noise"].rstrip("%")), small_sample("count", product))
    return overlaid(content, {"count": {"noise": f"{share:.2g}%"}})


def small_sample(name: str, product: float) -> float:
    """Compute a value by a rule of the table `few` in `proposals.yaml`.

    name: name of the rule;
    product: number of images or persons, times ε. For the rule "ridge", the product is also divided
    by `tuned_at` of the chosen row of the table `rows`.
    """
    rule = PROPOSALS["few"][name]
    low, high = rule["within"]
    return float(min(max(rule["value"] * (product / rule["at"]) ** rule["power"], low), high))


def at_effective_epsilon(recipe: str, epsilon: float) -> Layer:
    """Return the settings of a recipe that depend on ε: the noise of queries, and the teacher's
    learning rate, clip and number of steps.

    epsilon: privacy.epsilon times the number of images or persons, divided by the number of images
    with which the recipe was tuned. If it is less than 1, the teacher's learning rate is lowered.
    """
    _, content = read_overlay(RECIPES, recipe)
    sections: Layer = {}
    for name, section in content.items():
        if isinstance(section, dict) and isinstance(noise := section.get("noise"), dict):
            sections[name] = {"noise": noise_at(epsilon, noise)}
    if "teacher" not in content:
        return sections
    rules = Teacher.constants(str(content["teacher"].get("fitted_on", "public")), epsilon)
    rules["learning_rate"] *= min(epsilon, 1.0) ** 0.6  # fitted to brain MRI at ε = 1 and 10
    rounded_constants = {
        key: float(f"{value:.3g}")
        for key, value in rules.items()
        if key in ("learning_rate", "max_norm")
    }
    return {**sections, "teacher": {**rounded_constants, "steps": rules["steps"]}}
