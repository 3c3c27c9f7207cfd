"""The table of stages, collected from their modules, in the order in which they run.

The `stage` program, the parameters, the plan, the ledger, `dvc.yaml` and the docs are made from
this table.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from sfumato.errors import ConfigError, explained
from sfumato.settings.stage import (
    ARTIFACTS,
    CARD_PATH,
    FREE,
    LEDGER,
    LOCAL,
    PLAN,
    PUBLIC,
    QUERY,
    RECIPES,
    Stage,
)

# Methods of papers, for comparison: their modules, recipes and `sfumato/baselines` may be deleted
# together
BASELINES: tuple[str, ...] = ("evolve", "adversarial")
NAMES = (
    *("count", "central", "frequency", "classifier", "moments", "covariance", "auxiliary"),
    *BASELINES,
    *("histogram", "teacher", "embedding", "refine", "select", "pretrain", "saliency", "finetune"),
    *("synthesize", "student", "evaluate"),
)
# Group of entry points of other packages. Each entry point is a module that declares a STAGE
OTHER_PACKAGES = "sfumato.stages"


def declared_stages() -> Iterator[Stage]:
    """Yield the stages of this package, then the stages of other packages."""
    for name in NAMES:
        yield import_module(f"stages.{name}").STAGE
    names = [*NAMES]
    for point in entry_points(group=OTHER_PACKAGES):
        stage = load_entry(point, names)
        names.append(stage.name)
        yield stage


def load_entry(point: EntryPoint, names: Collection[str]) -> Stage:
    """Load the stage of another package. Raises ConfigError if this fails, or if its name is one of
    `names`.
    """
    package = getattr(point.dist, "name", point.value)
    failed = f"the package {package} declares a stage in {point.value}, which cannot be loaded"
    with explained(
        ConfigError,
        lambda error: f"{failed} ({error!r}): fix the package, or uninstall it",
        causes=(Exception,),
    ):
        stage: Stage = point.load().STAGE
        if stage.name in names:
            raise ValueError(f"{stage.name} is already the name of a stage")
        return stage


def collect_stages() -> dict[str, Stage]:
    """Return the stages by name. A stage that is not installed is removed from all `inputs`."""
    stages = {stage.name: stage for stage in declared_stages()}
    names = {*stages, "public"}
    return {
        name: replace(stage, inputs=tuple(other for other in stage.inputs if other in names))
        for name, stage in stages.items()
    }


STAGES = collect_stages()
QUERIES = tuple(name for name, stage in STAGES.items() if stage.kind is QUERY)


def dvc_stages() -> dict[str, tuple[list[str], list[str], list[str]]]:
    """Return the commands, dependencies and outputs of every stage in `dvc.yaml`, by the stage's
    name in that file.

    Guarantee: no dependency or output contains sensitive images, hold-out images, their latents, or
    numbers measured on them. DVC writes the hashes of dependencies and outputs into git.
    """
    params = Path("params.yaml")
    cards = [PUBLIC / "card.json", PUBLIC / "privacy.json"]
    charged_artifacts = [ARTIFACTS / name for name in (*QUERIES, "synthesize")]
    stages = {
        "prepare-sensitive": (["stage prepare sensitive"], [RECIPES], [CARD_PATH]),
        "prepare-public": (["stage prepare public"], [params, RECIPES, CARD_PATH], [PUBLIC]),
        "plan": (["stage plan"], [params, RECIPES, CARD_PATH, *cards], [PLAN]),
    }
    for name, stage in STAGES.items():
        reads = [PLAN / f"{name}.yaml", *stage.beside]
        reads += [PUBLIC if other == "public" else ARTIFACTS / other for other in stage.inputs]
        if stage.kind is not FREE:
            reads.append(CARD_PATH)
        if stage.kind is LOCAL:
            stages[name] = ([f"stage {name}", "stage report --audience owner"], reads, [])
        else:
            stages[name] = ([f"stage {name}"], reads, [ARTIFACTS / name])
    stages["ledger"] = (
        ["stage ledger write"],
        [PLAN / "budget.json", CARD_PATH, *charged_artifacts],
        [LEDGER],
    )
    stages["report"] = (
        ["stage report"],
        [ARTIFACTS / "synthesize", LEDGER],
        [ARTIFACTS / "report"],
    )
    return {
        name: (lines, [*map(str, reads)], [*map(str, writes)])
        for name, (lines, reads, writes) in stages.items()
    }
