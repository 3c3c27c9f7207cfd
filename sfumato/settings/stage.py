"""Declaration of a stage of the pipeline, and the paths that stages share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from sfumato.errors import nearest

if TYPE_CHECKING:
    from sfumato.settings.fields import Settings
    from sfumato.storage.artifacts import Artifact

ARTIFACTS = Path("artifacts")
PLAN = ARTIFACTS / "plan"
CARD_PATH = Path("data/sensitive/card.json")  # the public card of the sensitive set
PUBLIC = Path("data/public")  # the public image set, called "public" among the inputs of a stage
LEDGER = Path("ledger.json")
LOCK = Path("dvc.lock")
RECIPES = Path("pipelines")
# The survey and the proposal of `stage init`, which are local
PROPOSAL = "evaluation/proposal.json"


class Kind(StrEnum):
    """Kind of a stage, by the data that it may read.

    A query measures sensitive images, and spends budget. A free stage reads only public or released
    data. A local stage reads real images outside the guarantee, so its results are not part of a
    release.
    """

    QUERY = "query"
    FREE = "free"
    LOCAL = "local"


def unknown_name(key: str, name: str, names: Iterable[str]) -> str:
    return f"{name!r} in {key} does not exist: {nearest(name, names)}"


def one_label_only(subject: str) -> str:
    return (
        f"{subject} requires one label per image, but data.labels is `several`. Change or remove "
        f"{subject}, choose one of the recipes dp-merf, dp-mepf and feta-pro-f, or prepare the "
        "images with data.labels: one"
    )


def nothing(*_: object) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class Stage:
    """Declaration of a stage of the pipeline.

    The stage's module, `stages/<name>.py`, ends with this declaration, `STAGE`.

    Args:
        settings_in: Class of its settings as `module:class`, imported on first use.
        run: Function of the stage. Takes a `StageRun`, or a `QueryRun` for a query, and the
            settings.
        revision: Number to raise by hand when a change of code makes the same settings give
            different results. Plans and records contain it. If it is raised, the stage runs again.
            A query then spends again, and so do the queries that read its artifact. A free stage
            never spends. `tests/test_golden.py` pins the results of each revision.
        inputs: Stages whose artifacts it reads, and "public" for the public set.
        optional: Inputs whose stage need not be in `run`.
        seeded: True if it draws public randomness from `seed`.
        network: True if it depends on the section `model`, the settings of the diffusion model.
        shows_epsilon: True if it prints ε while it runs, and so depends on δ.
        owned: True if it reads the section `release`.
        shared: True for a free stage whose work is shared by many processes. The work of a query is
            shared unless `one_process` is True.
        one_process: True for a query that refuses to run in more than one process.
        several_labels: True if it accepts images with several labels each.
        adds_up: True if the noisy sums of several owners may be added. The sums must not depend on
            any owner's earlier releases.
        beside: Files that it reads in addition to its plan and the artifacts in `inputs`.
        gives: Content of its artifact that `synthesize` can use: "generator" if it can draw images,
            "images" if it contains images; empty for any other content.
        network_work: Function that returns the number of operations of the stage's network for one
            image. It takes a `Work` and the side of a block of pixels. If the side is above 1, some
            networks read or draw one pixel per block.
        work: Function that takes a `Work` and returns the number of operations of the stage.
            Without it, a query is assumed to read each drawn image once, and the time of a free
            stage is unknown until it has run.
        problems: Function that takes a `Setup` (see `sfumato.planning.checks`) and returns one
            sentence for each mistake in the settings of the stage.
        remarks: Function that takes a `Plan` and returns sentences for the owner. They are shown
            before a query spends.
        inherited: Function that takes the project's folder, `Params` and the state directory, and
            returns earlier releases from which the public inputs of the stage were made.
    """

    name: str
    kind: Kind
    summary: str
    settings_in: str
    run: Callable[..., None]
    _: KW_ONLY
    revision: int = 1
    inputs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ("count",)
    seeded: bool = False
    network: bool = False
    shows_epsilon: bool = False
    owned: bool = False
    shared: bool = False
    one_process: bool = False
    several_labels: bool = False
    adds_up: bool = False
    beside: tuple[Path, ...] = ()
    gives: str = ""
    network_work: Callable[..., int] | None = None
    work: Callable[..., float | None] | None = None
    problems: Callable[..., Iterable[str]] = nothing
    remarks: Callable[..., Iterable[str]] = nothing
    inherited: Callable[..., Sequence[Artifact]] = nothing

    @property
    def settings(self) -> type[Settings]:
        return resolve_name(self.settings_in)

    @property
    def upstream(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if name != "public")

    @property
    def spread(self) -> bool:
        """Return whether a launcher may divide the stage's work among many processes."""
        return self.shared or (self.kind is QUERY and not self.one_process)

    @property
    def public_only(self) -> bool:
        """Return whether the stage's result depends only on the public set.

        If so, one result can be used for several sensitive sets.
        """
        return self.inputs == ("public",)


QUERY, FREE, LOCAL = Kind
