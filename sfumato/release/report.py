"""Write the report as one self-contained page.

The public edition may be shared. The owner's edition also contains numbers from real images, so it
may not be shared.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from sfumato.data.images import per_class
from sfumato.errors import UNREADABLE, BudgetError, DataError, explained
from sfumato.privacy.accountant import round_up
from sfumato.privacy.check import check_ledger
from sfumato.privacy.events import (
    PROTECTED,
    UNITS,
    ZERO_OUT_ONE,
    Mechanism,
    common_adjacency,
    event_of,
)
from sfumato.privacy.ledger import by_id, compose, read_ledger, spent_on_one
from sfumato.privacy.profile import (
    Profile,
    bound_text,
    membership_advantage,
    percent_up,
    privacy_profile,
    true_positive_rate,
)
from sfumato.release.card import WORDS, neighbours, template
from sfumato.release.exports import PUBLIC_SOURCE
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.stages import QUERIES
from sfumato.storage.arrays import read_array
from sfumato.storage.artifacts import PRIVACY, Artifact, read_artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json
from sfumato.storage.records import Records

Facts = dict[str, Any]  # values that fill templates and forms, by name


class Picture(NamedTuple):
    title: str
    caption: str
    uri: str


class Table(NamedTuple):
    """A table of numbers from real images, formatted as text.

    Each row has one cell per column. The first cell names the row.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Local(NamedTuple):
    """Content that only the owner's edition shows."""

    verdict: str = ""  # the verdict in words
    metrics: tuple[Table, ...] = ()  # numbers from real images
    warnings: tuple[str, ...] = ()
    plots: tuple[Picture, ...] = ()
    pictures: tuple[Picture, ...] = ()  # images that the models learned from
    # `sfumato.planning.forecast.curve`: returns the data for the plot of the expected usefulness
    curve: Callable[[str, float], Mapping] | None = None


def report_page(release: Path, ledger: Path, local: Local | None = None) -> str:
    """Render the report as HTML: the owner's edition if `local` is given, else the public edition.

    Raises the errors of `checked_release`.

    Guarantee: the public edition depends only on the files of `release` and `ledger`, which are
    already released.
    """
    artifact, content, epsilon = checked_release(release, ledger)
    release_facts = what_was_released(artifact)
    # `check_ledger` does not read all fields of a record, so some faults are only found here
    causes = (*UNREADABLE, OverflowError, TemplateError)
    page = template("report.html", autoescape=True, grouped=grouped, bound=bound_text)
    with explained(
        BudgetError,
        lambda error: (
            f"{ledger} contains a record that cannot be shown ({error!r}): run `stage ledger "
            "write`, or restore the ledger from git"
        ),
        causes=causes,
    ):
        cost = what_it_cost(content, epsilon)
        return page.render(
            local=local,
            ledger=content,
            release=release_facts,
            cost=cost,
            attacker=what_it_means(content),
            proof=what_to_check(artifact, content, ledger),
            trust=who_is_trusted(bool(cost["owners"])),
            not_covered=not_covered(cost["grouped"]),
            words=WORDS["about"],
        )


def who_is_trusted(several_owners: bool) -> list[str]:
    """Return two texts: how far the owners are trusted, and how far the recipients are.

    several_owners: whether the release was made from the measurements of several owners.
    """
    return [WORDS["trusted_owners"][several_owners], WORDS["trusted_recipients"]]


def not_covered(by_person: bool) -> list[str]:
    """Return one text for each risk that the guarantee does not cover.

    by_person: whether the guarantee protects all images of a person together.
    """
    return [WORDS["people"][by_person], *WORDS["not_covered"]]


def checked_release(release: Path, ledger: Path) -> tuple[Artifact, dict, float]:
    """Check a release and its ledger. Return both, and ε recomputed from the ledger's records.

    Raises BudgetError if the ledger is invalid or lacks a charge of the release, and DataError if
    the release is invalid.
    """
    artifact = read_artifact(release, "synthesize")
    content = read_ledger(ledger)
    epsilon, problems = check_ledger(content)
    unmatched_keys = [
        key for key, record in artifact.records.items() if by_id(content).get(key) != record
    ]
    problems += [
        f"its record of charge {key[:8]} is missing, or differs from the record in {release}"
        for key in unmatched_keys
    ]
    if problems:
        remedy = "Run `stage ledger write`, or restore the ledger from git"
        raise BudgetError(f"{ledger} is not valid: {'; '.join(problems)}. {remedy}")
    return artifact, content, epsilon


def what_was_released(artifact: Artifact) -> Facts:
    """Collect facts about a release for the report, such as the number of images and the grid."""
    with explained(
        DataError,
        lambda error: (
            f"the release {artifact.path} cannot be shown ({error!r}): run `stage synthesize` again"
        ),
    ):
        card = read_json(artifact.path / "card.json")
        labels = read_array(artifact.path / "labels.npy")
        class_counts = zip(
            card["classes"], per_class(labels, len(card["classes"])).tolist(), strict=True
        )
        classes = [(label, name, grouped(n)) for label, (name, n) in enumerate(class_counts)]
        channels, height, width = card["shape"]
        public = PUBLIC_SOURCE in card["sources"]
        only_public = {*card["sources"]} == {PUBLIC_SOURCE}
        kinds = {
            "synthetic images": not only_public,
            "public images, privately selected and labelled": public,
        }
        number = grouped(len(card["classes"]))
        return {
            "images": grouped(card["images"]),
            "shape": f"{height} × {width}",
            "colour": "grey" if channels == 1 else "colour",
            "classes": classes[:100],
            "class_count": number,
            "several": labels.ndim == 2,
            "in_classes": (
                f"in {number} classes"
                if labels.ndim == 1
                else f"with none, one or several of {number} labels each"
            ),
            "sources": [
                (name, grouped(number)) for name, number in sorted(card["sources"].items())
            ],
            "public_images": public,
            "only_public": only_public,
            "kind": " and ".join(kind for kind, present in kinds.items() if present),
            "about": {
                key: str(text)
                for key, text in card.get("about", {}).items()
                if key in WORDS["about"]
            },
            "kinds": [(name, grouped(number)) for name, number in card["kinds"].items()],
            "grid": picture(artifact.path / "grid.png", "", "Up to ten images of each class"),
        }


def what_it_cost(ledger: Mapping, epsilon: float) -> Facts:
    """Collect what the report states about the privacy cost.

    epsilon: ε of the release, from `checked_release`.
    """
    ledger_records = Records.of_ledger(ledger)
    records = ledger_records.values()
    delta = ledger["delta"]

    def cost_of(part: Records) -> str:
        adjacency = common_adjacency(part.values())
        return bound_text(spent_on_one(part, delta, ledger["accountant"], adjacency))

    composed = compose(ledger_records, delta, ledger["accountant"])
    spending = {name: stage for name in QUERIES if (stage := composed["stages"][name])["records"]}
    first: dict = next(iter(records), {})
    unit = first.get("unit", UNITS[IMAGE])
    claims = {record.get("claim") for record in records}
    return {
        "dataset": ", ".join(sorted({record["dataset_id"] for record in records})),
        "unit": PROTECTED[unit],
        "grouped": unit == UNITS[GROUP],
        "weight": first.get("group_weight"),
        "claim": first.get("claim") if len(claims) == 1 else None,
        "declared": ledger["adjacency"] == ZERO_OUT_ONE,
        "neighbours": neighbours(unit, ledger["adjacency"]),
        "epsilon": bound_text(epsilon),
        "delta": scientific(delta),
        "one_in": grouped(math.floor(1 / delta)),
        "anyone": percent_up(delta * ledger["size_hint"]),
        # The factor is left out if ε is large, because it then means little to a reader
        "factor": bound_text(math.exp(epsilon), 3) if epsilon <= math.log(10) else "",
        "accountant": WORDS["accountants"][ledger["accountant"]],
        "accountants": [
            (name, bound_text(value)) for name, value in sorted(composed["epsilon"].items())
        ],
        "stages": cost_rows(spending, ledger_records),
        "public_images": any(record["stage"] == "histogram" for record in records),
        "owners": [
            (owner, cost_of(part))
            for owner, part in ledger_records.of_one_person().items()
            if ledger_records.owners
        ],
        # Bound for a person who is in the sets of all owners
        "together": cost_of(Records(ledger_records)),
    }


def cost_rows(spending: Mapping[str, Mapping], records: Records) -> list[Facts]:
    """Return a row for each stage: its charges, and its segment of the stacked bar of costs.

    spending: composed cost of each stage; records: the records of all stages.
    """
    rows = []
    start = 0.0
    for stage, entry in spending.items():
        charges = []
        for record in map(records.__getitem__, entry["records"]):
            mechanism = Mechanism.from_json(record["event"])
            sums = {
                "sigma": f"{mechanism.noise_multiplier:g}",
                "rate": f"{mechanism.sample_rate:.4g}",
                "uses": grouped(mechanism.uses),
            }
            charges.append({"released": record["released"], **sums})
        share = 100 * entry["share"]
        tint = 1 + sum(other["share"] > entry["share"] for other in spending.values())
        segment = {"start": f"{start:.2f}", "width": f"{share:.2f}", "tint": min(tint, 6)}
        cost = {"epsilon": bound_text(entry["epsilon"]), "share": f"{share:.1f}"}
        rows.append({"stage": stage, "charges": charges, **cost, **segment})
        start += share
    return rows


def what_it_means(ledger: Mapping) -> dict[str, str]:
    """Compute upper bounds on an attacker's success from a ledger (see `attack_bounds`).

    If there are several owners, each bound is the largest over the owners.
    """
    parts = Records.of_ledger(ledger).of_one_person().values()
    return attack_bounds(
        [privacy_profile(map(event_of, part.values()), ledger["adjacency"]) for part in parts]
    )


def attack_bounds(profiles: Sequence[Profile]) -> dict[str, str]:
    """Compute upper bounds on an attacker's success, as percentages rounded up.

    profiles: privacy profiles, δ as a function of ε. Each bound is the largest over the profiles.

    Returns "guess", the share of right guesses about whether one unit was used; "hits", the share
    of used units that are recognised if 1 in 100 unused units is wrongly accused; and "strength", a
    word that rates the protection by "guess".
    """
    advantage = max(map(membership_advantage, profiles))
    hits = max(true_positive_rate(profile, false_positive_rate=0.01) for profile in profiles)
    largest = {"strong": 0.1, "limited": 0.5, "weak": 1.0}  # advantage
    strength = next(name for name, limit in largest.items() if advantage <= limit)
    shares = {"guess": (1 + advantage) / 2, "hits": hits}
    return {name: percent_up(share) for name, share in shares.items()} | {"strength": strength}


def what_to_check(artifact: Artifact, ledger: Mapping, path: Path) -> Facts:
    """Collect facts for checking a release: hashes of its files, software versions, and charges."""
    files = read_json(artifact.path / PRIVACY)["files"]
    top = [(name, sha) for name, sha in sorted(files.items()) if "/" not in name]
    folders = sorted({name.split("/")[0] for name in files if "/" in name})
    records = sorted(
        ledger["records"], key=lambda record: (QUERIES.index(record["stage"]), record["id"])
    )
    versions = {
        (package, str(version))
        for record in records
        for package, version in record["versions"].items()
    }
    return {
        "files": [
            *top,
            (PRIVACY, digest_of_file(artifact.path / PRIVACY)),
            (path.name, digest_of_file(path)),
        ],
        "folders": [
            (folder, grouped(sum(name.startswith(f"{folder}/") for name in files)))
            for folder in folders
        ],
        "versions": sorted(versions),
        "charges": [
            (record["id"], record["stage"], day_of(record), record["plan"]) for record in records
        ],
        "digest": ledger["digest"],
    }


def day_of(record: Mapping) -> str:
    return datetime.fromtimestamp(record["time"], UTC).strftime("%Y-%m-%d")


def summary_lines(
    release: Path, ledger: Path, report: Path, verdict: str, tracked: str
) -> list[str]:
    """Render the summary that is printed at the end of a run, as lines of text.

    report: folder of the public report; tracked: paths for `git add`, separated by spaces.
    """
    artifact = read_artifact(release, "synthesize")
    content = read_ledger(ledger)
    epsilon, _ = check_ledger(content)
    folders = {name: release.with_name(name) for name in ("teacher", "student")}
    text = template("summary.md", autoescape=False).render(
        shown=what_was_released(artifact),
        places={"release": release, "report": report, "ledger": ledger},
        classifiers={
            name: folder for name, folder in folders.items() if (folder / "card.json").is_file()
        },
        cost=(
            f"ε = {bound_text(epsilon)} of {content['target']:g} at δ = "
            f"{bound_text(content['delta'], 3)}"
        ),
        units=sorted({PROTECTED[record["unit"]] for record in content["records"]}),
        dataset=", ".join(content.get("apart") or [content["odometer"]["dataset_id"]]),
        verdict=verdict,
        tracked=tracked,
    )
    return text.splitlines()


def picture(path: Path, title: str, caption: str) -> Picture:
    with explained(
        DataError,
        lambda error: f"{path} cannot be shown ({error}): rerun the stage that writes this file",
    ):
        return Picture(
            title, caption, f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        )


def grouped(value: int) -> str:
    """Format a whole number with a narrow space between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def scientific(value: float) -> str:
    """Format a positive number as a × 10ᵇ, rounded upwards to three significant digits."""
    mantissa, _, exponent = f"{round_up(value, 3):.2e}".partition("e")
    superscript = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{float(mantissa):g} × 10{superscript}"
