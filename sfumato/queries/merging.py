"""One release of several owners' noisy sums: counts, and class means of features. Free: it reads releases only."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import ConfigError, DataError, explained
from sfumato.features import FeatureMeans
from sfumato.privacy.accountant import round_up
from sfumato.privacy.events import Mechanism, common_adjacency
from sfumato.privacy.ledger import spent_on_one
from sfumato.privacy.resolved import StagePlan
from sfumato.queries.count import PublicCounts, public_counts, public_several, save_counts
from sfumato.queries.feature_means import KINDS, load_means
from sfumato.settings.stages import QUERIES, STAGES, Kind
from sfumato.storage.artifacts import PRIVACY, Artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.weights import save_tensors

MERGED = ("count", "frequency", "moments", "covariance")  # all other queries rest on what one owner released before
# what may differ between the plans of two owners
THEIRS = {"dataset_id", "size_hint", "mechanism", "delta", "about", "again"}


def same_settings(folders: Sequence[Path], plans: Sequence[Mapping[str, dict[str, Any]]]) -> list[str]:
    """The queries that ran. Raises ConfigError if the releases do not add up, or their public settings differ."""
    queries = [name for name in QUERIES if any(plan[name]["enabled"] for plan in plans)]
    if name := next((name for name in queries if name not in MERGED), None):
        way = f"take a recipe of {', '.join(MERGED)} only, such as dp-merf, dp-mepf or dp-kernel"
        why = "its steps, draws or features rest on what one owner released before"
        raise ConfigError(f"releases of {name} do not add up: {why}: {way}")
    if "count" not in queries:
        raise ConfigError("count is not in `run`: without noisy counts the means of two owners have no weights")
    for folder, plan in zip(folders[1:], plans[1:], strict=True):
        for name in (name for name, stage in STAGES.items() if stage.kind is not Kind.LOCAL):
            own, other = ({k: v for k, v in one[name].items() if k not in THEIRS} for one in (plans[0], plan))
            for key in sorted(own.keys() | other.keys()):
                if own.get(key) != other.get(key):
                    both = f"{folder} and {folders[0]} differ in {name}.{key}: {other.get(key)} and {own.get(key)}"
                    what = "all settings but data.dataset_id, privacy.size_hint and ε"
                    raise ConfigError(f"{both}. Owners agree on {what} before they spend")
    return queries


def merged_budget(
    budgets: Sequence[Mapping[str, Any]], size_hint: int, records: Sequence[dict], apart: Sequence[str]
) -> dict[str, Any]:
    """The budget of the merged release: at the smallest δ of the owners, their largest ε, or what it is at that δ."""
    (recipe, accountant), *others = {(budget["recipe"], budget["accountant"]) for budget in budgets}
    if others:
        raise ConfigError("the owners differ in recipe or privacy.accountant: they agree on both before they spend")
    delta = min(budget["delta"] for budget in budgets)
    if delta > 1 / size_hint:
        raise ConfigError(
            f"δ = {delta:g} is above 1/{size_hint}, of all owners' units: each must plan with a smaller δ"
        )
    spent = spent_on_one(records, delta, accountant, common_adjacency(records), apart)
    target = max(*(budget["target"] for budget in budgets), round_up(spent))
    return {"recipe": recipe, "accountant": accountant, "delta": delta, "size_hint": size_hint, "target": target}


def merge_counts(counts: Sequence[Artifact], directory: Path, several: bool = False) -> PublicCounts:
    """The sums of the noisy counts of all owners, with what `public_counts` makes of them; written as `count` does.

    several: an image has any number of labels.
    In distribution it is one owner's release over all images, whose noise has the variance of all noises together.
    """
    noisy = torch.zeros(1, dtype=torch.float64)
    for count in counts:
        with explained(DataError, lambda e: f"{count.path} holds no counts ({e!r}): run `stage count` again"):  # noqa: B023
            noisy = noisy + torch.tensor(read_json(count.path / "counts.json")["noisy"], dtype=torch.float64)
    charges = [r["event"] for count in counts for r in count.records.values() if r["stage"] == "count"]
    sigmas = [Mechanism.from_json(event).noise_multiplier for event in charges]
    merged = (public_several if several else public_counts)(noisy, math.hypot(*sigmas))
    save_counts(merged, noisy, directory)
    return merged


def merge_means(
    stage: str, releases: Sequence[Artifact], sizes: Sequence[float], size: float, directory: Path, plan: StagePlan
) -> FeatureMeans:
    """The means of all owners' noisy sums over `size`, written as the query does.

    sizes: N̄ of each owner, over which their own means are; size: N̄ of all.
    Raises ConfigError if the features of two owners are not the same, to the last byte.
    """
    tensor = f"{KINDS[stage].tensor}.safetensors"
    about = [read_json(release.path / "features.json") for release in releases]
    varying = {tensor, "features.json", PRIVACY}  # the other files rebuild the features
    maps = [{f.name: digest_of_file(f) for f in one.path.iterdir() if f.name not in varying} for one in releases]
    for i, release in enumerate(releases):
        if maps[i] != maps[0] or {**about[i], "deviation": 0} != {**about[0], "deviation": 0}:
            fix = "take the same settings, seed and public network (one owner sends artifacts/classifier to the others)"
            raise ConfigError(f"{release.path} and {releases[0].path} are means of different features: {fix}")
    means = [load_means(stage, release.path, plan=plan) for release in releases]
    table = sum((m.table.double() * n for m, n in zip(means, sizes, strict=True)), torch.zeros(1)) / size
    deviations = [m.deviation * n for m, n in zip(means, sizes, strict=True) if m.deviation is not None]
    deviation = math.hypot(*deviations) / size if len(deviations) == len(means) else None
    for name in maps[0]:
        shutil.copyfile(releases[0].path / name, directory / name)
    save_tensors({KINDS[stage].tensor: table.float().contiguous()}, directory / tensor)
    write_json(directory / "features.json", {**about[0], "deviation": deviation})
    return FeatureMeans(table.float(), means[0].features, deviation)
