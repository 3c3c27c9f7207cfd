"""The dataset card of a release: the `README.md` that dataset hubs show."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template
from markdown_it import MarkdownIt

from sfumato.privacy.accountant import checked_delta
from sfumato.privacy.events import PROTECTED, UNITS, common_adjacency
from sfumato.privacy.ledger import spent_on_one
from sfumato.privacy.profile import bound_text
from sfumato.privacy.resolved import StagePlan
from sfumato.release.card_check import Cost, ReleaseCard
from sfumato.release.exports import PUBLIC_SOURCE
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.fields import Settings
from sfumato.settings.release import Synthesize
from sfumato.storage.files import ATTRIBUTES, UNTOUCHED
from sfumato.storage.records import Records

WORDS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
)
PREPARED = {
    "upright": "by EXIF",
    "transparent": "over black",
    "fit": "crop",
    "range": None,
    "filter": "lanczos",
}
# File with the classes requested from the models, for a release with the teacher's labels
REQUESTED_LABELS = "asked.npy"
UNCHANGED = {
    "plain": "as a model drew it",
    "public": "a public image, privately selected and labelled",
}
# For images with several labels: a table with one row per image and one column per label
LABEL_TABLE = "labels.csv"


def neighbours(unit: str, adjacency: str) -> str:
    """Describe how two neighbouring sets differ. unit: protected unit, as named in records."""
    return f"{PROTECTED[unit]}, {WORDS['neighbours'][adjacency]}"


def dataset_card(
    plan: StagePlan[Synthesize],
    card: ReleaseCard,
    per_class: Sequence[int],
    records: Records,
    public_source: str | None = None,
) -> str:
    """Return the card as Markdown with YAML front matter. The same release gives the same bytes.

    card: the content of `card.json`; per_class: (classes,), number of images of each label;
    public_source: where the public images come from, such as "glyphs".
    """
    model_counts = dict(card["sources"])
    public_count = model_counts.pop(PUBLIC_SOURCE, 0)
    kinds = card["kinds"]
    claims = {record.get("claim", "") for record in records.values()}
    numbers = enumerate(zip(plan.classes, per_class, strict=True))
    sizes = {1e3: "n<1K", 1e4: "1K<n<10K", 1e5: "10K<n<100K", 1e6: "100K<n<1M", 1e7: "1M<n<10M"}
    return template("card.md", autoescape=False, plain=plain).render(
        **privacy_facts(plan, records, card),
        plan=plan,
        count=card["images"],
        per_class=per_class,
        size=next((name for bound, name in sizes.items() if card["images"] < bound), "n>10M"),
        chosen=public_count,
        drawn=model_counts,
        mixture=card.get("mixture"),
        stream=card.get("stream"),
        coarse="auxiliary" in model_counts
        and any(record["stage"] == "covariance" for record in records.values()),
        changed=[
            (WORDS["kinds"][name], number)
            for name, number in kinds.items()
            if name in WORDS["kinds"]
        ],
        kinds=kinds,
        claim=claims.pop() if len(claims) == 1 else "",
        owners=sorted(records.owners),
        # Bound for a person who is in the sets of all owners
        together=bound_text(cost_of(plan, Records(records))["epsilon"]),
        classes=[(str(label), name, str(number)) for label, (name, number) in numbers],
        about=[
            (word, plan.about[key]) for key, word in WORDS["about"].items() if key in plan.about
        ],
        prepared=card["prepared"],
        licence=WORDS["licences"].get(public_source, ""),
    )


def privacy_facts(
    plan: StagePlan[Settings], records: Mapping[str, dict], cost: Cost
) -> dict[str, object]:
    """Collect what a README states about the charges behind a release.

    cost: result of `cost_of`, or the content of `card.json`, which contains the same keys.
    """
    unit = next((record["unit"] for record in records.values()), UNITS[IMAGE])
    return {
        "dataset": plan.dataset_id,
        "epsilon": bound_text(cost["epsilon"]),
        "delta": bound_text(cost["delta"], 3),
        "accounting": WORDS["accountants"][plan.accountant],
        "neighbours": neighbours(unit, cost["adjacency"]),
        "grouped": unit == UNITS[GROUP],
        "charges": sorted((record["stage"], record["released"]) for record in records.values()),
        "table": table,
    }


def template(name: str | Path, *, autoescape: bool, **filters: Callable[..., str]) -> Template:
    """Load a template by its name in this folder, or by its path.

    filters: further Jinja filters, by name.
    """
    environment = Environment(
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment.from_string((Path(__file__).parent / name).read_text(encoding="utf-8"))


def page(text: str, title: str) -> str:
    """Render Markdown as an HTML page that needs no other file and no network.

    HTML tags in the Markdown are shown as text.
    """
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return template("page.html", autoescape=True).render(body=body, title=title)


def cost_of(plan: StagePlan[Settings], records: Records) -> Cost:
    """Compute the cost of all charges behind a release for one unit, by the plan's accountant.

    Epsilon is computed at the plan's delta. If the plan has no delta, the default is used. Returns
    epsilon, delta, the adjacency of the records, and the protected units.
    """
    adjacency = common_adjacency(records.values())
    delta = checked_delta(plan.delta, plan.size_hint)
    epsilon = spent_on_one(records, delta, plan.accountant, adjacency)
    return {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "units": records.units}


def data_dictionary(card: ReleaseCard, several: bool) -> dict[str, tuple[str, str, str]]:
    """Describe a table of labels: meaning, type and values of each column, by the column's name.

    several: whether images have several labels.
    """
    classes = card["classes"]
    meanings = {
        "file_name": ("name of the picture", "string", f"000001.png to {card['images']:06d}.png")
    }
    if several:
        flag = ("whether the picture has this label", "integer", "0 no; 1 yes")
        meanings |= {f"label {name}": flag for name in classes}
    else:
        meanings["label"] = ("number of the class", "integer", f"0 to {len(classes) - 1}")
        meanings["class"] = ("name of the class", "string", "; ".join(classes))
    kinds = "; ".join(
        f"{kind}: {(UNCHANGED | WORDS['kinds'])[kind]}" for kind in card.get("kinds", ("plain",))
    )
    return meanings | {"kind": ("how the picture was made", "string", kinds)}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [
        f"| {' | '.join(plain(cell) if not cell.startswith('`') else cell for cell in row)} |"
        for row in rows
    ]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, on one line."""
    return "".join(f"\\{c}" if c in "\\`*_|<>[]#" else c for c in " ".join(text.split()))


def write_readme(directory: Path, text: str) -> None:
    """Write `README.md`, and the file that makes git keep the bytes of all files."""
    (directory / "README.md").write_text(text, encoding="utf-8")
    (directory / ATTRIBUTES).write_text(UNTOUCHED, encoding="utf-8")
