"""The last page in the terminal after a run: what was released, what it cost, where it is and what may be shared."""

from __future__ import annotations

from pathlib import Path

from sfumato.privacy.check import check_ledger
from sfumato.privacy.ledger import by_id, read_ledger
from sfumato.privacy.profile import bound_text
from sfumato.release.report import what_was_released
from sfumato.storage.artifacts import read_artifact

RULE = "─" * 72


def summary_lines(release: Path, ledger: Path, report: Path, verdict: str) -> list[str]:
    """The page, line by line. report: folder of the public report; verdict: on the release, or where to find it.

    Raises BudgetError where the ledger cannot be read, DataError where the release cannot.
    """
    artifact, content = read_artifact(release, "synthesize"), read_ledger(ledger)
    spent, _ = check_ledger(content)
    shown = what_was_released(artifact)
    units = sorted({record["unit"] for record in by_id(content).values()})
    rows = {
        "released": f"{shown['images']} {shown['kind']}, {shown['colour']}, {shown['shape']}, "
        f"{shown['class_count']} classes",
        "look at": f"{release / 'grid.png'}, {report / 'index.html'}",
        "cost": f"ε = {bound_text(spent)} of {content['target']:g} at δ = {bound_text(content['delta'], 3)}",
        "protects": f"{', '.join(units) or 'nothing: no charge'}, of dataset {content['odometer']['dataset_id']}",
        "verdict": verdict,
        "share": f"{release}/, {report}/, {ledger}",
        "keep": "metrics.json, evaluation/ and the state directory are local: numbers and pixels of real images",
        "in git": f"git add params.yaml dvc.lock {ledger} (DVC's own hint leaves {ledger} out)",
    }
    return [RULE, *(f"{name:<9} {text}" for name, text in rows.items()), RULE]
