"""Program that `test_dealt_out.py` runs in one process or several, with a folder of digits."""

import json
from pathlib import Path
from unittest import mock

import numpy as np

from sfumato.data.images import ImageSet
from sfumato.data.store import read_card
from sfumato.evaluation import scores
from sfumato.privacy.authorize import open_local
from sfumato.runtime import distributed
from sfumato.settings.evaluate import Evaluate

SETTINGS = Evaluate(classifiers=("lr", "mlp"), seeds=(0, 1, 2), steps=5, fidelity=())


def main(folder: Path) -> None:
    distributed.join()
    card = read_card(folder / "card.json")
    train, holdout = open_local(folder / "state", card, "evaluate", everywhere=True)
    trained = []
    inner = scores.evaluate_classifier

    def noted(name, *rest):
        trained.append([name, rest[-1]])
        return inner(name, *rest)

    half = ImageSet(np.array(train.images[::2]), np.array(train.labels[::2]), train.classes)
    with mock.patch.object(scores, "evaluate_classifier", noted):
        found = scores.evaluate_release({"release": half}, train, holdout, SETTINGS)
    content = {"found": found, "trained": trained}
    (folder / f"rank-{distributed.rank()}-of-{distributed.world_size()}.json").write_text(
        json.dumps(content)
    )
    distributed.leave_group()
