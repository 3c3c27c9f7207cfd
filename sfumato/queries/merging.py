"""One release of several owners' noisy sums: counts, and class means of features. Free: it reads releases only."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sfumato.errors import ConfigError, DataError, explained
from sfumato.features import FeatureMeans
from sfumato.privacy.events import event_from_json, mechanisms
from sfumato.privacy.resolved import StagePlan
from sfumato.queries.count import PublicCounts, public_counts, save_counts
from sfumato.queries.feature_means import KINDS, load_means
from sfumato.storage.artifacts import PRIVACY, Artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.weights import save_tensors

# why the releases of other queries do not add up
EACH_STEP = "each of its steps depends on the noisy ones before, so two owners' sums do not add up to one of all images"
REFUSED = {
    "adversarial": EACH_STEP,
    "central": "its sums are over draws of one owner each, by their own denominators",
    "embedding": "its features were learned on one owner's release, so those of two owners differ",
    "evolve": EACH_STEP,
    "finetune": EACH_STEP,
    "histogram": "only the selection that follows it reads it, and that of one owner serves all",
    "saliency": "it is of one owner's network",
    "teacher": EACH_STEP,
}
MERGED = ("count", *(stage for stage in KINDS if stage not in REFUSED))


def noise_of_counts(count: Artifact) -> float:
    """The standard deviation of the noise in each count: of a merged one, of all its charges together."""
    records = [record for record in count.records.values() if record["stage"] == "count"]
    parts = [mechanisms(event_from_json(record["event"])) for record in records]
    return math.sqrt(sum(sigma**2 for part in parts for sigma, *_ in part))


def merge_counts(counts: Sequence[Artifact], directory: Path) -> PublicCounts:
    """The sums of the noisy counts of all owners, with what `public_counts` makes of them; written as `count` does.

    In distribution it is one owner's release over all images, whose noise has the variance of all noises together.
    """
    noisy = torch.stack([noisy_counts(count) for count in counts]).sum(dim=0)
    merged = public_counts(noisy, math.hypot(*map(noise_of_counts, counts)))
    save_counts(merged, noisy, directory)
    return merged


def noisy_counts(count: Artifact) -> Tensor:
    with explained(DataError, lambda error: f"{count.path} holds no counts ({error!r}): run `stage count` again"):
        return torch.tensor(read_json(count.path / "counts.json")["noisy"], dtype=torch.float64)


def merge_means(
    stage: str, releases: Sequence[Artifact], sizes: Sequence[float], size: float, directory: Path, plan: StagePlan
) -> FeatureMeans:
    """The means of all owners' noisy sums over `size`, written as the query does.

    sizes: N̄ of each owner, over which their own means are; size: N̄ of all.
    Raises: ConfigError if the features of two owners are not the same, to the last byte.
    """
    tensor = f"{KINDS[stage].tensor}.safetensors"
    about = [read_json(release.path / "features.json") for release in releases]
    maps = [features_files(release.path, tensor) for release in releases]
    for i, release in enumerate(releases):
        if maps[i] != maps[0] or {**about[i], "deviation": 0} != {**about[0], "deviation": 0}:
            raise ConfigError(
                f"{release.path} and {releases[0].path} are means of different features: take the same settings, seed "
                "and public network (one owner sends artifacts/classifier to the others)"
            )
    means = [load_means(stage, release.path, plan=plan) for release in releases]
    table = sum((m.table.double() * n for m, n in zip(means, sizes, strict=True)), torch.zeros(1)) / size
    deviations = [m.deviation * n for m, n in zip(means, sizes, strict=True) if m.deviation is not None]
    deviation = math.hypot(*deviations) / size if len(deviations) == len(means) else None
    for name in maps[0]:
        shutil.copyfile(releases[0].path / name, directory / name)
    save_tensors({KINDS[stage].tensor: table.float().contiguous()}, directory / tensor)
    write_json(directory / "features.json", {**about[0], "deviation": deviation})
    return FeatureMeans(table.float(), means[0].features, deviation)


def features_files(path: Path, tensor: str) -> dict[str, str]:
    """The files that rebuild the features of a release, with their sha256."""
    varying = {tensor, "features.json", PRIVACY}
    return {file.name: digest_of_file(file) for file in sorted(path.iterdir()) if file.name not in varying}
