"""The dataset card of a release: the `README.md` that dataset hubs show. Its first lines say what the images cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE, event_from_json
from sfumato.privacy.meaning import bound_text
from sfumato.release.exports import METADATA, NPZ, PARQUET, PNG

SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))
NEIGHBOURS = {
    ADD_OR_REMOVE_ONE: "one (image, label) added or removed",
    ZERO_OUT_ONE: "one (image, label) replaced by a blank; the number of images is public by declaration",
}


def dataset_card(
    *,
    dataset_id: str,
    shape: tuple[int, int, int],
    classes: Sequence[str],
    per_class: Sequence[int],
    sources: Mapping[str, int],
    size_hint: int,
    records: Mapping[str, dict],
    export: Sequence[str] = (),
) -> str:
    """The card as Markdown with YAML front matter, byte-deterministic.

    shape: (C, H, W); per_class: (M,) number of released images of each label; sources: stage -> images it drew;
    records: every charge behind the release, by id. It states Rényi's epsilon at the default delta of `size_hint`.
    """
    count, (channels, height, width) = sum(per_class), shape
    delta = default_delta(size_hint)
    adjacencies = {record["adjacency"] for record in records.values()}
    adjacency = ZERO_OUT_ONE if adjacencies == {ZERO_OUT_ONE} else ADD_OR_REMOVE_ONE
    spent = epsilon([event_from_json(record["event"]) for record in records.values()], delta, "rdp", adjacency)
    front: dict[str, object] = {
        "license": "other",
        "pretty_name": f"{dataset_id}, synthetic and differentially private",
        "task_categories": ["image-classification"],
        "size_categories": [next((name for bound, name in SIZES if count < bound), "n>10M")],
        "tags": ["synthetic", "differential-privacy"],
    }
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
    drawn = ", ".join(f"{number} by `{name}`" for name, number in sorted(sources.items()))
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=120).rstrip(),
            "---",
            "",
            f"# {plain(dataset_id)}, synthetic",
            "",
            f"{count} labelled synthetic {'grey' if channels == 1 else 'colour'} images of {height}×{width} pixels in "
            f"{len(classes)} classes."
            " All were drawn by generative models that know the sensitive images through noisy releases only"
            f" ({drawn}).",
            "",
            "![Ten images of each class](grid.png)",
            "",
            "## Privacy",
            "",
            f"The set is (ε, δ)-differentially private with **ε = {bound_text(spent)}** at "
            f"**δ = {bound_text(delta, 3)}** (Rényi accounting; {len(records)}"
            f" charge{'s' * (len(records) != 1)}).",
            f"Neighbouring sets differ in {NEIGHBOURS[adjacency]}. `privacy.json` lists the mechanisms, so anyone can "
            "recompute ε from it at any δ; the project's `ledger.json` composes them with everything else that was "
            "released.",
            "",
            "Not covered: hold-out images, choices made by looking at numbers from real images, the fact that the "
            "sensitive set exists, its class names and image shape, several images of one person.",
            "",
            *table(
                ("mechanism of", "released"),
                sorted((record["stage"], record["released"]) for record in records.values()),
            ),
            "",
            "## Files",
            "",
            *table(("file", "what"), [(f"`{name}`", what) for name, what in files.items()]),
            "",
            "## Classes",
            "",
            *table(
                ("label", "class", "images"),
                [(str(i), name, str(n)) for i, (name, n) in enumerate(zip(classes, per_class, strict=True))],
            ),
            "",
            "## Use",
            "",
            "The labels are those that the models were asked to draw; nobody checked them by hand. Accuracy on these "
            "images says little about accuracy on real ones. The licence is for whoever publishes the set to name.",
            "",
        ]
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return lines + [
        f"| {' | '.join(plain(cell) if not cell.startswith('`') else cell for cell in row)} |" for row in rows
    ]


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return "".join(f"\\{c}" if c in "\\`*_|<>[]#" else c for c in " ".join(text.split()))
