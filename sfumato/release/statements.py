"""Machine-readable statements beside the public report, from the release and the ledger alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sfumato
from sfumato.privacy.accountant import round_up
from sfumato.release.croissant import croissant
from sfumato.release.registry import ASKED, registry_entry
from sfumato.release.report import (
    NOT_COVERED,
    PEOPLE,
    TRUST,
    checked,
    day_of,
    mechanisms,
    what_it_cost,
    what_was_released,
)
from sfumato.settings.recipes import as_yaml
from sfumato.storage.artifacts import PRIVACY, Artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json

CROISSANT, REGISTRY = "croissant.json", "deployment.yaml"


def write_statements(release: Path, ledger: Path, directory: Path) -> list[str]:
    """Write the Croissant record and the registry's entry into `directory`. Returns what the owner has not said yet.

    Raises what `sfumato.release.report.checked` raises. Without a charge there is nothing to state.
    Guarantee: what is written is a function of the files of `release` and `ledger`, both already released.
    """
    artifact, content, spent = checked(release, ledger)
    if not content["records"]:
        return []
    facts = facts_of(artifact, content, spent)
    folder = f"../{release.name}"  # as the pipeline lays them out
    text = json.dumps(croissant(facts, folder), indent=1, ensure_ascii=False) + "\n"
    (directory / CROISSANT).write_text(text, encoding="utf-8")
    if missing := [f"release.{key}" for key in ASKED if key not in facts["about"]]:
        return missing
    entry = registry_entry(facts).model_dump(exclude_none=True)
    (directory / REGISTRY).write_text(as_yaml(entry), encoding="utf-8")
    return []


def facts_of(artifact: Artifact, ledger: Mapping, spent: float) -> dict[str, Any]:
    """What both statements say, in one place."""
    card = read_json(artifact.path / "card.json")
    shown, cost = what_was_released(artifact), what_it_cost(ledger, spent)
    listed = read_json(artifact.path / PRIVACY)["files"]
    charges = [
        {
            "stage": record["stage"],
            "released": record["released"],
            "sensitivity": record["sensitivity"],
            "mechanism": "; ".join(
                f"Gaussian, noise multiplier {sigma}, sample rate {rate}, releases {uses}"
                for sigma, rate, uses in mechanisms(record["event"])
            ),
        }
        for record in ledger["records"]
    ]
    odometer = cost["odometer"]
    among = "" if odometer["complete"] else "at least "
    others = ", ".join(f"{value} ({name})" for name, value in cost["accountants"])
    public = ["the fact that the set exists", "its class names and the shape of its images", "all settings"]
    return {
        "dataset": cost["dataset"],
        "class_count": shown["class_count"],
        "classes": card["classes"],
        "public_images": shown["only_public"],
        "kind": shown["kind"],
        "description": f"{shown['images']} labelled {shown['kind']}, {shown['colour']}, {shown['shape']} pixels, "
        f"in {shown['class_count']} classes.",
        "about": shown["about"],
        "files": {**listed, PRIVACY: digest_of_file(artifact.path / PRIVACY)},
        "day": max(day_of(record) for record in ledger["records"]),
        "size_hint": ledger["size_hint"],
        "epsilon": round_up(spent, 4),
        "delta": ledger["delta"],
        "unit": cost["unit"],
        "neighbours": cost["neighbours"],
        "charges": charges,
        "guarantee": f"(ε, δ)-differentially private with ε = {cost['epsilon']} and δ = {cost['delta']} for "
        f"{cost['unit']}.",
        "accounting": f"All charges ({cost['charges']}) are composed together; ε by method: {others}.",
        "all_time": f"When the ledger was written, the charges opened on the dataset were "
        f"{among}{odometer['charges']} in all, ε = {odometer['epsilon']} together. Further releases add to it.",
        "trust": " ".join(TRUST),
        "gaps": [f"The guarantee does not cover {gap}." for gap in (PEOPLE[cost["grouped"]], *NOT_COVERED)],
        "public": [*public, *(["the number of images, by the owner's declaration"] if cost["declared"] else [])],
        "measured": f"Made from noisy measurements: {', '.join(row['stage'] for row in cost['stages'])}.",
        "labels": "Labels were given by a classifier that was trained under the same guarantee."
        if card.get("labels") == "teacher" or shown["public_images"]
        else "Labels are those that the models were asked for.",
        "version": sfumato.__version__,
        "digest": ledger["digest"],
    }
