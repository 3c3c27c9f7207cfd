"""Machine-readable statements beside the public report, from the release and the ledger only.

Their texts are in `statements.yaml`, parsed before facts enter: the owner's words cannot change the structure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

import yaml

from sfumato.privacy.accountant import round_up
from sfumato.privacy.events import Mechanism
from sfumato.release.card import LABEL_TABLE, WORDS
from sfumato.release.exports import PARQUET
from sfumato.release.report import checked, day_of, not_covered, what_it_cost, what_was_released
from sfumato.settings.recipes import as_yaml
from sfumato.storage.artifacts import PRIVACY, Artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json

CROISSANT, REGISTRY = "croissant.json", "deployment.yaml"
FORMS = Path(__file__).with_suffix(".yaml")
OTHER = "application/octet-stream"  # the format of any other file
ASKED = ("owner", "owner_type", "purpose", "region")  # what the registry requires and a ledger does not hold


def write_statements(release: Path, ledger: Path, directory: Path) -> list[str]:
    """Write the Croissant record and the registry's entry into `directory`. Returns what the owner has not given yet.

    Without a charge nothing is written.
    Raises what `sfumato.release.report.checked` raises.
    Guarantee: what is written is a function of the files of `release` and `ledger`, both already released.
    """
    artifact, content, spent = checked(release, ledger)
    if not content["records"]:
        return []
    facts, forms = facts_of(artifact, content, spent), yaml.safe_load(FORMS.read_text(encoding="utf-8"))
    files = read_json(artifact.path / PRIVACY)["files"] | {PRIVACY: digest_of_file(artifact.path / PRIVACY)}
    base = facts.get("url", f"../{release.name}").rstrip("/")  # as the pipeline lays them out
    distribution = [
        {"name": name, "sha256": sha256, "base": base, "format": forms["formats"].get(PurePath(name).suffix, OTHER)}
        for name, sha256 in sorted(files.items())
        if not name.startswith("png/")
    ]
    record = filled(forms["croissant"], facts | {"distribution": [filled(forms["file"], one) for one in distribution]})
    if PARQUET in files and LABEL_TABLE not in files:  # its one column of labels
        record["recordSet"].append(filled(forms["table"], {"parquet": PARQUET}))
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (directory / CROISSANT).write_text(text, encoding="utf-8")
    if missing := [f"release.{key}" for key in ASKED if key not in facts]:
        return missing
    (directory / REGISTRY).write_text(as_yaml(filled(forms["registry"], facts)), encoding="utf-8")
    return []


def filled(form: Any, facts: Mapping[str, Any]) -> Any:
    """A form with its facts: {name} within a text, the fact itself for a text "=name"; a missing one drops its key."""
    if isinstance(form, dict):
        parts = {key: filled(value, facts) for key, value in form.items()}
        return {key: value for key, value in parts.items() if value is not None}
    if isinstance(form, list):
        return [filled(value, facts) for value in form]
    if not isinstance(form, str):
        return form
    return facts.get(form[1:]) if form.startswith("=") else form.format_map(facts)


def facts_of(artifact: Artifact, ledger: Mapping, spent: float) -> dict[str, Any]:
    """What both statements hold, by the names that the forms use. The owner's words are among them, if given."""
    card = read_json(artifact.path / "card.json")
    shown, cost = what_was_released(artifact), what_it_cost(ledger, spent)
    about, odometer, only_public = shown["about"], cost["odometer"], shown["only_public"]
    day = max(day_of(record) for record in ledger["records"])
    publisher = about.get("owner", "Its owner")
    email = {"email": about["contact"]} if "@" in about.get("contact", "") else {}
    declared = ["the number of images, by the owner's declaration"] if cost["declared"] else []
    public = ["the fact that the set exists", "its class names and the shape of its images", "all settings", *declared]
    others = ", ".join(f"{value} ({name})" for name, value in cost["accountants"])
    gaps = (f"The guarantee does not cover {gap}." for gap in not_covered(cost["grouped"]))
    by_teacher = card.get("labels") == "teacher" or only_public
    return about | {
        "dataset": cost["dataset"],
        "description": f"{shown['images']} labelled {shown['kind']}, {shown['colour']}, {shown['shape']} pixels, "
        f"{shown['in_classes']}.",
        "kind": shown["kind"],
        "in_classes": shown["in_classes"],
        "day": day,
        "year": day[:4],
        "short_digest": ledger["digest"][:16],
        "version": version("sfumato"),
        "publisher": publisher,
        "creator": {"@type": "sc:Organization", "name": publisher, **email} if "owner" in about else None,
        "slug": re.sub(r"[^a-z0-9]+", "-", f"{publisher} {cost['dataset']} {day[:4]}".lower()).strip("-"),
        "licence_or_other": about.get("licence", "other"),
        "use_cases": [about["purpose"]] if "purpose" in about else None,
        "product": "Dataset" if only_public else "Synthetic data",
        "collection": "Software Collection" if only_public else "Synthetic data generation",
        "keywords": ["differential privacy", *([] if only_public else ["synthetic data"])],
        "class_names": [{"classes/label": i, "classes/name": name} for i, name in enumerate(card["classes"])],
        "limitations": ["Made to train classifiers; images and labels were not checked by hand.", *gaps],
        "labels": "Labels were given by a classifier that was trained under the same guarantee."
        if by_teacher
        else "Labels are those that the models were asked for.",
        "measured": f"Made from noisy measurements: {', '.join(row['stage'] for row in cost['stages'])}.",
        "epsilon": round_up(spent, 4),
        "delta": ledger["delta"],
        "unit": cost["unit"],
        "size_hint": ledger["size_hint"],
        "neighbours": cost["neighbours"],
        "guarantee": f"(ε, δ)-differentially private with ε = {cost['epsilon']} and δ = {cost['delta']} for "
        f"{cost['unit']}{' of any one owner, whose people are others by declaration' if cost['owners'] else ''}.",
        "accounting": f"All charges ({cost['charges']}) are composed together; ε by method: {others}.",
        "all_time": "What was ever opened on each set is in its owner's journal. Further releases add to it."
        if cost["owners"]
        else f"When the ledger was written, the charges opened on the dataset were "
        f"{'' if odometer['complete'] else 'at least '}{odometer['charges']} in all, ε = {odometer['epsilon']} "
        "together. Further releases add to it.",
        "trust": " ".join(WORDS["trust"]),
        "public": "; ".join(public) + ".",
        "mechanisms": "\n".join(map(mechanism_line, ledger["records"])),
    }


def mechanism_line(record: Mapping) -> str:
    """A record as one line of a list."""
    one = Mechanism.from_json(record["event"])
    noise = f"noise multiplier {one.noise_multiplier:g}, sample rate {one.sample_rate:.4g}, releases {one.uses}"
    return f"- {record['stage']}: {record['released']}. Gaussian, {noise}; sensitivity {record['sensitivity']}."
