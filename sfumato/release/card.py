"""The dataset card of a release: the `README.md` that dataset hubs show. Its first lines say what the images cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, UNITS, ZERO_OUT_ONE, common_adjacency, event_from_json
from sfumato.privacy.profile import bound_text
from sfumato.privacy.resolved import StagePlan
from sfumato.release.exports import METADATA, NPZ, PARQUET, PNG
from sfumato.release.marks import PUBLIC_SOURCE
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.release import Synthesize

KINDS = {
    "augmented": "slightly moved, brightened or blurred",
    "distorted": "warped, textured and under another light, to train a classifier on and not to look at",
    "mixed": "blends of two images, to train a classifier on and not to look at",
}
ABOUT = {
    "owner": "Published by",
    "owner_type": "Kind of publisher",
    "contact": "Contact",
    "purpose": "Purpose",
    "region": "Region",
    "sector": "Sector",
    "licence": "Licence",
    "url": "Published at",
}
SNIPPET = """import sfumato  # needs NumPy alone

release = sfumato.load_release("path/of/this/folder")  # checks every file against privacy.json
release.images, release.labels, release.classes        # uint8 (N, H, W, C), int64 (N,), names
release.to_torch()                                     # a torch Dataset
{also}"""
LOADED = {  # by export, how others load it; of several, the first
    "parquet": """
import datasets

datasets.load_dataset("path/of/this/folder")["train"]  # or the name of this repository on the Hub
""",
    "png": """
import torchvision

torchvision.datasets.ImageFolder("path/of/this/folder/png")
""",
}
SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))
NEIGHBOURS = {
    ADD_OR_REMOVE_ONE: "added or removed",
    ZERO_OUT_ONE: "replaced by a blank; their number is public by declaration",
}
PROTECTED = {
    UNITS[IMAGE]: "one (image, label)",
    UNITS[GROUP]: "one group, which is all images of one person with their labels,",
}


def neighbours(unit: str, adjacency: str) -> str:
    """What two neighbouring sets differ in. unit: as records name it."""
    return f"{PROTECTED[unit]} {NEIGHBOURS[adjacency]}"


def dataset_card(
    plan: StagePlan[Synthesize],
    per_class: Sequence[int],
    sources: Mapping[str, int],
    kinds: Mapping[str, int],
    records: Mapping[str, dict],
) -> str:
    """The card as Markdown with YAML front matter, byte-deterministic.

    per_class: (M,) number of released images of each label; sources: stage -> images it drew; kinds: plain, augmented,
    distorted, mixed -> number of images; records: every charge behind the release, by id. It states Rényi's epsilon at
    the default delta of the plan's `size_hint`.
    """
    dataset_id, classes, export = plan.dataset_id, plan.classes, plan.settings.export
    count, (channels, height, width) = sum(per_class), plan.shape
    cost, about = cost_of(plan, records), plan.about
    unit = next((record["unit"] for record in records.values()), UNITS[IMAGE])
    claims = {record.get("claim", "") for record in records.values()}
    claim = f" ({', '.join(claims)})" if len(claims) == 1 and claims != {""} else ""
    people = "" if unit == UNITS[GROUP] else f", several images of one person{claim}"
    chosen, drawn_by_models = sources.get(PUBLIC_SOURCE, 0), {k: n for k, n in sources.items() if k != PUBLIC_SOURCE}
    kind = "synthetic" if not chosen else "synthetic and public" if drawn_by_models else "public, privately chosen"
    front: dict[str, object] = {
        "license": about.get("licence", "other"),
        "pretty_name": f"{dataset_id}, {kind} and differentially private",
        "task_categories": ["image-classification"],
        "size_categories": [next((name for bound, name in SIZES if count < bound), "n>10M")],
        "tags": [*(["synthetic"] if drawn_by_models else []), "differential-privacy"],
    }
    form = next((form for form in LOADED if form in export), "")
    if "parquet" in export:
        front["configs"] = [{"config_name": "default", "data_files": PARQUET}]
    elif PNG in export:
        front["configs"] = [{"config_name": "default", "data_dir": PNG}]
    files = {
        "images.npy": f"uint8 ({count}, {height}, {width}, {channels})",
        "labels.npy": f"int64 ({count},), below {len(classes)}",
        "grid.png": "ten images of each class, to look at",
        "card.json": "shape, classes, which model drew how many",
        "privacy.json": "every privacy mechanism behind the images, and the sha256 of every file here",
    }
    if "npz" in export:
        files[NPZ] = "images, labels and classes in one archive"
    if "parquet" in export:
        files[PARQUET] = "one table: image (PNG bytes) and label, as dataset libraries load it"
    if PNG in export:
        files[f"{PNG}/"] = f"one PNG an image, a folder a class, {METADATA} with file_name, label, class"
    drawn = ", ".join(f"{number} by `{name}`" for name, number in sorted(drawn_by_models.items()))
    origin = (
        f" {'All' if not chosen else count - chosen} were drawn by generative models that know the sensitive images "
        f"through noisy releases only ({drawn})."
        if drawn_by_models
        else ""
    )
    if "auxiliary" in sources and any(record["stage"] == "covariance" for record in records.values()):
        origin += (
            " Those of `auxiliary` follow the sensitive images in their low frequencies alone. What is finer comes "
            "from public images, recoloured, whose licence holds for it too, or from chance."
        )
    if chosen:
        origin += (
            f" {'All' if not drawn_by_models else chosen} are **public images, privately selected and labelled**: "
            "their pixels are the public set's, and so is their licence; the guarantee covers which were chosen and "
            "the label of each, which means that a classifier takes it for that class, not that it shows one."
        )
    if changed := {KINDS[name]: number for name, number in kinds.items() if name in KINDS}:
        origin += f" {kinds['plain']} are as they were drawn" + "".join(f", {n} {what}" for what, n in changed.items())
        origin += ", those not shown in the picture."
    named = (
        "the teacher, a classifier trained under the same guarantee, gave"
        if plan.settings.relabel
        else "the models were asked for"
    )
    header = yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=120).rstrip()
    charges = sorted((record["stage"], record["released"]) for record in records.values())
    numbers = [(str(i), name, str(n)) for i, (name, n) in enumerate(zip(classes, per_class, strict=True))]
    return "\n\n".join(
        [
            f"---\n{header}\n---",
            f"# {plain(dataset_id)}, {kind}",
            f"{count} labelled {'synthetic ' * (not chosen)}{'grey' if channels == 1 else 'colour'} images of "
            f"{height}×{width} pixels in {len(classes)} classes.{origin}",
            "![Ten images of each class](grid.png)",
            "## Privacy",
            f"The set is (ε, δ)-differentially private with **ε = {bound_text(cost.epsilon)}** at "
            f"**δ = {bound_text(cost.delta, 3)}** (Rényi accounting; {len(records)}"
            f" charge{'s' * (len(records) != 1)}).\n"
            f"Neighbouring sets differ in {neighbours(unit, cost.adjacency)}. `privacy.json` lists the "
            "mechanisms, so anyone can recompute ε from it at any δ; the project's `ledger.json` composes them with "
            "everything else that was released.",
            "Not covered: hold-out images, choices made by looking at numbers from real images, the fact that the "
            f"sensitive set exists, its class names and image shape{people}.",
            table(("mechanism of", "released"), charges),
            "## Files",
            table(("file", "what"), [(f"`{name}`", what) for name, what in files.items()]),
            "## Classes",
            table(("label", "class", "images"), numbers),
            *([f"## About\n\n{facts(about)}"] if about else []),
            "## Use",
            f"```python\n{SNIPPET.format(also=LOADED.get(form, ''))}```",
            f"The labels are those that {named}; nobody checked them by hand. Accuracy on these images says little "
            "about accuracy on real ones."
            + ("" if "licence" in about else " The licence is for whoever publishes the set to name.")
            + "\n",
        ]
    )


@dataclass(frozen=True)
class Cost:
    """What a release cost: Rényi's epsilon at delta, for sets that are neighbours by `adjacency` in one of `units`."""

    epsilon: float
    delta: float
    adjacency: str
    units: list[str]


def cost_of(plan: StagePlan[Synthesize], records: Mapping[str, dict]) -> Cost:
    """The cost of all charges behind a release, at the default delta of the plan's `size_hint`."""
    adjacency, delta = common_adjacency(records.values()), default_delta(plan.size_hint)
    spent = epsilon([event_from_json(record["event"]) for record in records.values()], delta, "rdp", adjacency)
    return Cost(spent, delta, adjacency, sorted({record["unit"] for record in records.values()}))


def facts(about: Mapping[str, str]) -> str:
    """What the owner says, one line each."""
    return "\n".join(f"- {word}: {plain(about[key])}" for key, word in ABOUT.items() if key in about)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(plain(cell) if not cell.startswith('`') else cell for cell in row)} |" for row in rows]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return "".join(f"\\{c}" if c in "\\`*_|<>[]#" else c for c in " ".join(text.split()))
