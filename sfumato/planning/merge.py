"""Combine the noisy sums of several owners into one project, whose remaining stages are free."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sfumato.errors import ConfigError
from sfumato.planning.make import write_texts
from sfumato.planning.project_files import (
    IGNORED,
    dvc_content,
    workflow_place,
    workflow_text,
    write_project,
)
from sfumato.privacy.events import PROTECTED
from sfumato.privacy.ledger import BudgetFile, read_budget
from sfumato.privacy.resolved import PlanFile, read_stage_plan
from sfumato.queries.count import read_counts
from sfumato.queries.merging import (
    check_owner,
    merge_counts,
    merge_means,
    merged_budget,
    same_settings,
)
from sfumato.runtime.progress import Say
from sfumato.settings.data import IMAGE
from sfumato.settings.recipes import as_yaml
from sfumato.settings.stage import ARTIFACTS, FREE, LEDGER, PLAN, PUBLIC
from sfumato.settings.stages import NAMES, QUERIES, STAGES
from sfumato.storage.artifacts import (
    Artifact,
    check_out,
    merge_records,
    read_artifact,
    refuse_links,
    write_empty,
    writing,
)
from sfumato.storage.documents import MERGE_HEADER, dataset_name, read_yaml
from sfumato.storage.files import ATTRIBUTES, UNTOUCHED, copy_directory, json_text
from sfumato.storage.records import Records


def merge_projects(
    folders: Sequence[Path], out: Path, say: Say, *, different_people: bool
) -> tuple[Sequence[str], Sequence[str]]:
    """Add up the noisy counts and means of several owners, and write the project `out` with the
    sums.

    The owners must have the same settings. Each owner's ε stays the same if no person appears in
    the images of two owners.

    different_people: True if the owners confirm that there is no such person. Returns (merged
    queries, dataset ids). Raises ConfigError or DataError if merging fails.
    """
    check_folders(folders, out)
    plans = [
        {name: read_yaml(file) for name in STAGES if (file := plan_file(folder, name)).exists()}
        for folder in folders
    ]
    first = plans[0]
    queries = same_settings(folders, plans)
    releases_of = {
        name: [read_artifact(folder / ARTIFACTS / name, name) for folder in folders]
        for name in queries
    }
    budgets = [read_budget(folder / PLAN / "budget.json") for folder in folders]
    # One tuple per owner, with the releases of all queries
    releases = zip(*releases_of.values(), strict=True)
    owners = [check_owner(*each) for each in zip(folders, plans, budgets, releases, strict=True)]
    dataset_ids = sorted(name for names in owners for name in names)
    # From here on, the records of the releases declare that no person is in two datasets.
    releases_of = {
        name: [
            replace(release, records=Records(release.records, dataset_ids)) for release in releases
        ]
        for name, releases in releases_of.items()
    }
    records = merge_records([*itertools.chain(*releases_of.values())])
    check_owners(records, different_people)
    shared = [name for name, plan in first.items() if STAGES[name].public_only and plan["enabled"]]

    size_hint = sum(plan["count"]["size_hint"] for plan in plans)
    budget = merged_budget(budgets, size_hint, records)
    for name in (*QUERIES, *shared):
        check_out(out / ARTIFACTS / name, name)
    write_plans(first, "-and-".join(dataset_ids)[:64], size_hint, budget, out / PLAN)
    write_releases(releases_of, out)
    # All owners share the public images, and the results of free stages that read only these images
    for path in (*(ARTIFACTS / name for name in shared), PUBLIC):
        if (folders[0] / path).is_dir():
            read_artifact(folders[0] / path, path.name)
            copy_directory(folders[0] / path, out / path)
    free = [name for name in first if STAGES[name].kind is FREE and name not in shared]
    unit = first["count"].get("unit", IMAGE)
    place = workflow_place(out)
    workflow = workflow_text(budget["target"], budget["delta"], unit, place.directory)
    write_pipeline(out, free, say, {place.path: workflow})
    return queries, dataset_ids


def plan_file(folder: Path, name: str) -> Path:
    return folder / PLAN / f"{name}.yaml"


def check_folders(folders: Sequence[Path], out: Path) -> None:
    """Raise ConfigError if there are fewer than two projects, or if a project contains links, no
    plans or unreadable plans.

    Also raises ConfigError if `out` is already a project, or lies in one of the projects to merge.
    """
    if len(folders) < 2:
        raise ConfigError(
            f"expected two or more projects to merge, got {len(folders)}: name the folder of each "
            "project"
        )
    out_folder = out.resolve()
    if {out_folder, *out_folder.parents} & {folder.resolve() for folder in folders}:
        raise ConfigError(
            "{option.out} {out} is one of the projects to merge, or a folder in one of them: name "
            "another folder",
            option="out",
            out=out,
        )
    if (out / "params.yaml").exists():
        raise ConfigError(
            "{option.out} {out} is already a project, with a params.yaml: name another folder",
            option="out",
            out=out,
        )
    for folder in folders:
        if not (folder / PLAN).is_dir():
            raise ConfigError(
                f"{folder} contains no {PLAN}: name the project folder of an owner, or a folder "
                "with a copy of the project's artifacts/"
            )
        refuse_links(folder / ARTIFACTS)
        refuse_links(folder / PUBLIC.parts[0], folder / PUBLIC)
    for folder, name in itertools.product(folders, STAGES):
        # Where the package of a stage is not installed, the stage has no plan
        if name in NAMES or plan_file(folder, name).exists():
            read_stage_plan(plan_file(folder, name), name)


def check_owners(records: Records, different_people: bool) -> None:
    """Raise ConfigError if two owners have the same dataset id or different units of privacy, or if
    `different_people` is False.

    records: charges of all owners;
    different_people: True if the owners confirm that no person appears in the images of two owners.
    If there were such a person, the costs for this person would add up.
    """
    if len({*records.owners}) < len(records.owners):
        raise ConfigError(
            "at least two projects have the same dataset id (ids of all projects: "
            f"{', '.join(records.owners)}): each owner needs a different id"
        )
    if not different_people:
        raise ConfigError(
            "if a person has images in two of the datasets {owners}, the costs for this person add "
            "up: confirm with {option.different_people} that no such person exists, or make "
            "separate releases",
            option="different_people",
            owners=", ".join(records.owners),
        )
    if len(records.units) > 1:
        raise ConfigError(
            f"some owners protect {', others '.join(PROTECTED[unit] for unit in records.units)}: "
            "set the same privacy.unit in all projects"
        )


def write_releases(releases_of: Mapping[str, Sequence[Artifact]], out: Path) -> None:
    """Write the sums of the owners' releases, and empty artifacts for queries without a release.

    releases_of: mapping from each query to the releases of all owners.
    """
    plan = read_stage_plan(out / PLAN / "auxiliary.yaml", "auxiliary")
    counts = releases_of["count"]
    sizes = [read_counts(count, plan.size_hint, len(plan.classes)).total for count in counts]
    with writing(out / ARTIFACTS / "count", "count", counts) as directory:
        total = merge_counts(counts, directory, plan.several).total
    for name, releases in releases_of.items():
        if name != "count":
            with writing(out / ARTIFACTS / name, name, releases) as directory:
                merge_means(name, releases, sizes, total, directory, plan)
    for name in QUERIES:
        if name not in releases_of:
            write_empty(out / ARTIFACTS / name, name)


def write_plans(
    plans: Mapping[str, PlanFile], dataset_id: str, size_hint: int, budget: BudgetFile, folder: Path
) -> None:
    """Write the plan of the merged project. It is the first owner's plan, but with a dataset id, a
    `size_hint` and a budget for all owners together.

    No query can run with this plan.
    """
    texts = {"budget.json": json_text(budget)}
    for name, plan in plans.items():
        content = {key: value for key, value in plan.items() if key != "about"}
        if plan.get("dataset_id"):
            content |= {"dataset_id": dataset_name(dataset_id), "size_hint": size_hint}
        if STAGES[name].owned:
            content |= {"delta": budget["delta"], "accountant": budget["accountant"]}
        texts[f"{name}.yaml"] = as_yaml(content)
    write_texts(folder, texts)


def write_pipeline(out: Path, free: Sequence[str], say: Say, workflow: Mapping[str, str]) -> None:
    """Write `dvc.yaml` and the files beside it.

    `dvc.yaml` contains no queries, because the owners have already run them.

    workflow: content of the CI workflow that checks the ledger, by its path.
    """
    stages = {
        name: entry
        for name, entry in dvc_content()["stages"].items()
        if name in (*free, "ledger", "report")
    }
    outputs = {f"{ARTIFACTS}/{name}" for name in stages} | {str(LEDGER)}
    for entry in stages.values():
        deps = entry["deps"]
        assert isinstance(deps, list)
        entry["deps"] = [path for path in deps if path in outputs or (out / path).exists()]
    text = f"{MERGE_HEADER}. These free stages use the noisy sums of all owners.\n"
    files = {
        "dvc.yaml": text + as_yaml({"stages": stages}, blocks=True),
        ".gitignore": IGNORED,
        ATTRIBUTES: UNTOUCHED,
    }
    write_project(out, {**files, **workflow}, say)
