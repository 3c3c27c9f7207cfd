"""The local convergence curve of `stage finetune`, where `finetune.convergence` asks for one.

`stages.finetune` imports this by name, late: its code is no part of what fine-tuning releases, so a change of a metric must not re-spend.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stages.common import load_plan, state_dir

if TYPE_CHECKING:
    from sfumato.evaluation.convergence import Convergence
    from sfumato.resolved import StagePlan


def open_curve(plan: StagePlan, card: Path) -> Convergence:
    """Real features in the space that `evaluate` compares in, of the hold-out or of training images as it says. Journalled as local."""
    from sfumato.data.store import read_card
    from sfumato.errors import ConfigError
    from sfumato.evaluation.cache import features_of
    from sfumato.evaluation.convergence import Convergence
    from sfumato.evaluation.scores import some
    from sfumato.privacy.charge import open_local
    from stages.evaluate import feature_space

    if plan.model is not None and plan.model.directory:
        raise ConfigError(
            "finetune.convergence is for our own network, and model.directory names a public model: take one of them out"
        )
    evaluate = load_plan("evaluate", None)
    extractor = feature_space(evaluate)
    if extractor is None:
        raise ConfigError(
            "finetune.convergence needs a feature space, and evaluate.fidelity is empty: set it to null, or take finetune.convergence out"
        )
    train, holdout = open_local(state_dir(), read_card(card), "convergence")
    compared = some(holdout if evaluate.settings.reference == "holdout" else train)
    typer.echo(
        "finetune: convergence is measured on real images: this run is local, and nothing of it can be released",
        err=True,
    )
    return Convergence(extractor, features_of(extractor, compared.images, state_dir() / "cache" / "features"))
