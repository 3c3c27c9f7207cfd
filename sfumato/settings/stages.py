"""The table of all stages of the pipeline: their kinds, inputs and outputs.

The `stage` program, the plan, the ledger, `dvc.yaml` and the docs are made from this table. The function of a stage is
`<name>` in `stages/<name>.py`, and its parameters are the section `<name>` of `sfumato.settings.params.Params`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sfumato.settings.fields import Settings

ARTIFACTS = Path("artifacts")
PLAN = ARTIFACTS / "plan"
CARD_PATH = Path("data/sensitive/card.json")  # the public card of the sensitive set
PUBLIC = Path("data/public")  # the public image set, called "public" among the inputs of a stage
LEDGER = Path("ledger.json")
LOCK = Path("dvc.lock")
RECIPES = Path("pipelines")
PROPOSAL = "evaluation/proposal.json"  # the survey and the proposal of `stage init`, which are local


class Kind(StrEnum):
    """Data that a stage may read. A query spends; a free stage reads only public or released data.

    A local stage reads real images outside the guarantee, so its results are not part of a release.
    """

    QUERY = "query"
    FREE = "free"
    LOCAL = "local"


@dataclass(frozen=True)
class Stage:
    """A stage that the plan resolves.

    revision: number to raise by hand whenever the same settings would give different results. Plans and records contain
    it. A raised revision reruns the stage. A query then spends again, as do the queries that read it. A free stage
    never spends. `tests/test_golden.py` pins the results of each revision.
    """

    name: str
    kind: Kind
    summary: str
    _: KW_ONLY
    revision: int = 1
    inputs: tuple[str, ...] = ()  # stages whose artifacts it reads, and "public" for the public set
    optional: tuple[str, ...] = ("count",)  # inputs that may be off
    seeded: bool = False  # draws public randomness from `seed`
    network: bool = False  # depends on the parameters of the network
    shows_epsilon: bool = False  # prints ε while it runs, so depends on δ
    owned: bool = False  # reads the section `release`
    shared: bool = False  # a free stage whose work many processes share; queries do so unless `one_process`
    one_process: bool = False  # a query that refuses to run in more than one process
    beside: tuple[Path, ...] = ()  # further input files
    gives: str = ""  # content that `synthesize` may draw from: a "generator", or "images" to choose from

    @property
    def settings(self) -> type[Settings]:
        from sfumato.settings.params import Params

        return Params.model_fields[self.name].annotation  # type: ignore[return-value]

    @property
    def upstream(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if name != "public")

    @property
    def spread(self) -> bool:
        """True if its work is distributed over the processes of a launch."""
        return self.shared or (self.kind is Kind.QUERY and not self.one_process)

    @property
    def public_only(self) -> bool:
        """True if its result depends only on the public set, so that it can be shared between sensitive sets."""
        return self.inputs == ("public",)


QUERY, FREE, LOCAL = Kind
# fmt: off
# Methods of papers, for comparison. Only these rows use `sfumato/baselines`; their settings are in `baselines`.
BASELINES = (
    Stage("evolve", QUERY,
          "Release noisy votes for the candidates of a public renderer, round by round, and the last generation.",
          inputs=("count",), seeded=True, one_process=True, gives="images"),
    Stage("adversarial", QUERY,
          "Train a discriminator on the sensitive images by DP-SGD, and a generator against it.",
          inputs=("count",), seeded=True, shows_epsilon=True, one_process=True, gives="generator"),
)
WARMING = tuple(stage.name for stage in BASELINES if stage.gives == "images")  # sources of `pretrain`, too
TABLE = (
    Stage("count", QUERY, "Release noisy class counts of the sensitive images."),
    Stage("central", QUERY, "Release noisy central images: the mean or mode of a random draw per class.",
          inputs=("count",)),
    Stage("frequency", QUERY, "Release the noisy mean of random Fourier features of all images, by class.",
          inputs=("count",), seeded=True),
    Stage("classifier", FREE, "Train a classifier on the public set.",
          inputs=("public",), seeded=True),
    Stage("moments", QUERY,
          "Release the noisy means of a public network's features of all images, and of their squares, by class.",
          inputs=("classifier", "count")),
    Stage("covariance", QUERY,
          "Release the noisy means and covariances of the low frequencies of all images, by class.",
          inputs=("count",)),
    Stage("auxiliary", FREE, "Fit a generator to a release of all images, and draw images from it.",
          inputs=("frequency", "moments", "covariance", "public", "count"), seeded=True, revision=2, gives="generator"),
    *BASELINES,
    Stage("histogram", QUERY, "Release noisy votes of the sensitive images for the public classes.",
          inputs=("classifier",)),
    Stage("teacher", QUERY, "Release a linear classifier on public features, by noisy gradient steps.",
          inputs=("classifier", "auxiliary", "public", "count"), seeded=True),
    Stage("embedding", QUERY,
          "Release the noisy mean, by class, of random Fourier features of networks trained on earlier releases.",
          inputs=("auxiliary", "teacher", "count"), seeded=True),
    Stage("refine", FREE,
          "Fit the generator further, to the embeddings and the teacher's labels, and draw images from it.",
          inputs=("auxiliary", "frequency", "embedding", "teacher", "count"), optional=("count", "embedding"),
          seeded=True, revision=2, gives="generator"),
    Stage("select", FREE,
          "Keep the public classes with the most votes, or the images that the teacher labels with most confidence.",
          inputs=("histogram", "teacher", "public"), optional=("histogram",)),
    Stage("pretrain", FREE,
          "Train the diffusion model on central, auxiliary and public images, in the order of its curriculum.",
          inputs=("central", "frequency", "auxiliary", "refine", *WARMING, "select", "public", "count"), seeded=True,
          network=True, shared=True, revision=2),
    Stage("saliency", QUERY,
          "Release noisy gradient norms of the weight matrices, of which `finetune` trains the most salient.",
          inputs=("pretrain", "count"), network=True),
    Stage("finetune", QUERY, "Train the synthesizer, or the chosen part of it, on the sensitive images by DP-SGD.",
          inputs=("pretrain", "saliency", "count"), seeded=True, network=True, shows_epsilon=True),
    Stage("synthesize", FREE, "Draw the synthetic set, which may be shared.",
          inputs=("finetune", "pretrain", "refine", "auxiliary", *(stage.name for stage in BASELINES), "select",
          "public", "frequency", "teacher", "count"), seeded=True, owned=True, shared=True, revision=3),
    Stage("student", FREE, "Train a network on what the release's networks draw; it may be shared too.",
          inputs=("synthesize",), seeded=True, owned=True),
    Stage("evaluate", LOCAL,
          "Train classifiers on synthetic images, test them on the real hold-out, compare features.",
          inputs=("synthesize", "student", "teacher"), optional=("student", "teacher"), beside=(LEDGER,)),
)
# fmt: on
STAGES: dict[str, Stage] = {stage.name: stage for stage in TABLE}
QUERIES = tuple(name for name, stage in STAGES.items() if stage.kind is QUERY)


def dvc_stages() -> dict[str, tuple[list[str], list[str], list[str]]]:
    """Return the commands, dependencies and outputs of every stage of the repository, by DVC's names.

    Guarantee: no dependency or output contains sensitive, hold-out or latent bytes, or numbers measured on them. DVC
    writes the hashes of dependencies and outputs into git.
    """
    params = Path("params.yaml")
    cards = [PUBLIC / "card.json", PUBLIC / "privacy.json"]
    charged = [ARTIFACTS / name for name in (*QUERIES, "synthesize")]
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
    stages["ledger"] = (["stage ledger write"], [PLAN / "budget.json", CARD_PATH, *charged], [LEDGER])
    stages["report"] = (["stage report"], [ARTIFACTS / "synthesize", LEDGER], [ARTIFACTS / "report"])
    return {name: (lines, [*map(str, reads)], [*map(str, writes)]) for name, (lines, reads, writes) in stages.items()}
