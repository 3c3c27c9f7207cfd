"""Merge several owners' noisy sums into one release: counts, and class means of features.

Merging is free, because it reads releases only.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from sfumato.errors import BudgetError, ConfigError, DataError, explained
from sfumato.features import FeatureMeans
from sfumato.privacy.accountant import ACCOUNTANTS, checked_delta, round_up
from sfumato.privacy.check import TOLERANCE
from sfumato.privacy.events import Mechanism, common_adjacency
from sfumato.privacy.ledger import BudgetFile, spent_on_one
from sfumato.privacy.record import record_problems
from sfumato.privacy.resolved import PlanFile, StagePlan
from sfumato.queries.count import Counts, PublicCounts, public_counts, public_several, save_counts
from sfumato.queries.feature_means import KIND_OF, load_means, save_means
from sfumato.settings.stage import LOCAL
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.artifacts import PRIVACY, Artifact, merge_records
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json, validated
from sfumato.storage.records import Records

MERGED = tuple(name for name in QUERIES if STAGES[name].adds_up)
# Stands for a missing plan: an owner without the package that declares a stage has no plan of it
DISABLED: PlanFile = {"enabled": False}


def same_settings(folders: Sequence[Path], plans: Sequence[Mapping[str, PlanFile]]) -> list[str]:
    """Check that the plans of all owners agree, and return the names of the enabled queries.

    Raises ConfigError if a query cannot be merged, if `count` is not enabled, or if the plans
    differ in a setting on which owners must agree.
    """
    enabled = {name for plan in plans for name in plan if plan[name]["enabled"]}
    queries = [name for name in QUERIES if name in enabled]
    if name := next((name for name in queries if name not in MERGED), None):
        raise ConfigError(
            f"releases of {name} cannot be added up, because the steps, draws or features of this "
            "query depend on earlier releases of one owner: use a recipe such as dp-merf, dp-mepf "
            f"or dp-kernel. All its queries must be among {', '.join(MERGED)}"
        )
    if "count" not in queries:
        raise ConfigError(
            "count is not in `run`, but its noisy counts determine the weights of the owners' "
            "means: use a recipe with count"
        )
    # Fields in which the plans may differ
    varying = {"dataset_id", "size_hint", "mechanism", "delta", "accountant", "about", "again"}
    for folder, plan in zip(folders[1:], plans[1:], strict=True):
        for name in (name for name in STAGES if name in enabled and STAGES[name].kind is not LOCAL):
            first = plans[0].get(name, DISABLED)
            other = plan.get(name, DISABLED)
            for key in sorted((first.keys() | other.keys()) - varying):
                if first.get(key) != other.get(key):
                    raise ConfigError(
                        f"{folder} and {folders[0]} differ in {name}.{key}: {other.get(key)} and "
                        f"{first.get(key)}. Owners must agree on all settings except "
                        "data.dataset_id, privacy.size_hint, privacy.accountant, ε and δ before "
                        "they spend"
                    )
    return queries


def check_owner(
    folder: Path, plans: Mapping[str, PlanFile], budget: BudgetFile, queries: Sequence[Artifact]
) -> tuple[str, ...]:
    """Check one owner's releases, and return the ids of the datasets from which they were made.

    There are several ids if these releases were merged before. Raises DataError, ConfigError or
    BudgetError if the plan and the releases do not match.
    """
    records = merge_records(queries)
    problems = [
        problem for key, record in records.items() for problem in record_problems(key, record)
    ]
    hint = budget["size_hint"]
    with explained(
        ConfigError,
        lambda error: f"{folder} cannot be merged, because its budget.json is not valid: {error}",
        causes=(ConfigError,),
    ):
        delta = checked_delta(budget["delta"], hint)
    for name, plan in plans.items():
        if plan.get("delta", delta) != delta or (
            plan.get("dataset_id") and plan.get("size_hint") != hint
        ):
            problems.append(
                f"size_hint or δ differs between its plan of {name} and its budget.json: run "
                "`stage plan`"
            )
        if not STAGES[name].public_only and plan.get("dataset_id") != plans["count"].get(
            "dataset_id"
        ):
            problems.append(
                f"its plans of the stages `{name}` and `count` are for different datasets: run "
                "`stage plan`"
            )
    declared = queries[0].records.owners
    owners = declared or (plans["count"].get("dataset_id", ""),)
    for query in queries if not problems else ():
        own_records = [
            record for record in query.records.values() if record["stage"] == query.stage
        ]
        planned_event = Mechanism(**plans[query.stage]["mechanism"]).to_json()
        if query.records.owners != declared or len(declared) == 1:
            problem = (
                f"{query.path} and {queries[0].path} come from different merges. They declare "
                "different lists of datasets that share no person: repeat the merge"
            )
            if query.records.owners == declared:
                problem = (
                    f"{query.path} declares that datasets share no person, but names only one of "
                    f"them, {declared[0]}, instead of two or more: repeat the merge"
                )
            problems.append(problem)
        elif not query.enabled or {record["dataset_id"] for record in own_records} != {*owners}:
            problems.append(
                f"{query.path} contains no release of this owner's images: run `stage "
                f"{query.stage}` in the owner's project"
            )
        elif not declared and any(record["event"] != planned_event for record in own_records):
            problems.append(
                f"{query.path} was released with another mechanism than its plan contains: restore "
                "the settings of this release, and run `stage plan`"
            )
    if problems:
        raise DataError(f"{folder} cannot be merged: {problems[0]}")
    adjacency = common_adjacency(records.values())
    spent = spent_on_one(records, delta, budget["accountant"], adjacency)
    if spent > budget["target"] * (1 + TOLERANCE):
        raise BudgetError(
            f"{folder} spent ε = {spent:.4g}, above the target of {budget['target']:g} in its "
            "budget.json: restore the settings of its releases, and run `stage plan`"
        )
    return owners


def merged_budget(budgets: Sequence[BudgetFile], size_hint: int, records: Records) -> BudgetFile:
    """Compute the budget of the merged release, at the smallest δ of all owners.

    size_hint: sum of the size hints of all owners. If the smallest δ is above 1/size_hint, the
    default δ for `size_hint` is used instead.

    The target is the largest target of any owner or, if it is larger, the cost of the merged
    release. The most cautious of the owners' accountants computes this cost.
    """
    recipe, *other_recipes = {budget["recipe"] for budget in budgets}
    if other_recipes:
        raise ConfigError(
            f"the owners have different recipes ({', '.join(sorted([recipe, *other_recipes]))}): "
            "they must agree on one recipe before they spend"
        )
    accountant = min((budget["accountant"] for budget in budgets), key=ACCOUNTANTS.index)
    smallest = min(budget["delta"] for budget in budgets)
    delta = checked_delta(None if smallest > 1 / size_hint else smallest, size_hint)
    spent = spent_on_one(records, delta, accountant, common_adjacency(records.values()))
    target = max(*(budget["target"] for budget in budgets), round_up(spent))
    return {
        "recipe": recipe,
        "accountant": accountant,
        "delta": delta,
        "size_hint": size_hint,
        "target": target,
    }


def merge_counts(
    counts: Sequence[Artifact], directory: Path, several: bool = False
) -> PublicCounts:
    """Add up the noisy counts of all owners, and write them as `count` does.

    The result is distributed like a single release over all images, with a noise variance equal to
    the sum of the owners' noise variances. several: whether images have several labels.
    """
    noisy = torch.zeros(1, dtype=torch.float64)
    for count in counts:
        message = partial(
            "{} has no valid counts ({!r}): run `stage count` again".format, count.path
        )
        with explained(DataError, message):
            owner_counts = validated(Counts, read_json(count.path / "counts.json"))
            if len(owner_counts.noisy) != len(owner_counts.per_class) * (1 + several) + 2 * several:
                raise ValueError(
                    f"counts.json has {len(owner_counts.noisy)} noisy numbers, but "
                    f"{len(owner_counts.per_class)} classes require a different number"
                )
            noisy = noisy + torch.tensor(owner_counts.noisy, dtype=torch.float64)
    charges = [
        r["event"] for count in counts for r in count.records.values() if r["stage"] == "count"
    ]
    sigmas = [Mechanism.from_json(event).noise_multiplier for event in charges]
    merged = (public_several if several else public_counts)(noisy, math.hypot(*sigmas))
    save_counts(merged, noisy, directory)
    return merged


def merge_means(
    stage: str,
    releases: Sequence[Artifact],
    sizes: Sequence[float],
    size: float,
    directory: Path,
    plan: StagePlan,
) -> FeatureMeans:
    """Add up all owners' noisy sums, divide them by `size`, and write the means as the query does.

    sizes: N̄ of each owner, the denominator of its means;
    size: N̄ of all owners together.

    Raises ConfigError if the features of two owners differ in any byte.
    """
    means = [load_means(stage, release.path, plan=plan) for release in releases]
    # `load_means` has checked the form of these files.
    contents = [read_json(release.path / "features.json") for release in releases]
    # These three files may differ. All other files must be equal, because they define the features.
    # features.json is compared below, without its deviation.
    varying = {f"{KIND_OF[stage].tensor}.safetensors", "features.json", PRIVACY}
    maps = [
        {
            f.name: digest_of_file(f)
            for f in release.path.iterdir()
            if f.name not in varying and f.is_file()
        }
        for release in releases
    ]
    for i, release in enumerate(releases):
        if maps[i] != maps[0] or {**contents[i], "deviation": 0} != {**contents[0], "deviation": 0}:
            fix = (
                "use the same settings, seed and public network (one owner sends "
                "artifacts/classifier to the others)"
            )
            raise ConfigError(
                f"{release.path} and {releases[0].path} are means of different features: {fix}"
            )
    table = (
        sum((m.table.double() * n for m, n in zip(means, sizes, strict=True)), torch.zeros(1))
        / size
    )
    deviations = [
        m.deviation * n for m, n in zip(means, sizes, strict=True) if m.deviation is not None
    ]
    deviation = None
    if len(deviations) == len(means):
        deviation = math.hypot(*deviations) / size
    for name in maps[0]:
        shutil.copyfile(releases[0].path / name, directory / name)
    merged = FeatureMeans(table.float(), means[0].features, deviation)
    save_means(stage, merged, contents[0], directory)
    return merged
