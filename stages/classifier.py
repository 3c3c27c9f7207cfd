"""`stage classifier`: train a classifier on the public set only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import FREE, Stage

if TYPE_CHECKING:
    from sfumato.planning.work import Work
    from sfumato.settings.training import Classifier
    from stages.runner import StageRun


def classifier(run: StageRun, settings: Classifier) -> None:
    from sfumato.data.cards import CARD, read_public_card
    from sfumato.features.public_network import arguments_of
    from sfumato.storage.files import write_json
    from sfumato.storage.weights import save_network
    from sfumato.training.public_classifier import train_public_classifier
    from stages.screen import progress, say

    images = run.public
    with progress("classifier") as report:
        model, accuracy = train_public_classifier(images, settings, run.plan.seed, report)
    say(
        f"classifier: {100 * accuracy:.1f} % accuracy on the public images kept for validation, "
        f"which have {len(images.classes)} classes"
    )
    with run.writing() as directory:
        save_network(model, arguments_of(model), directory)
        content = {
            "public_validation_accuracy": round(accuracy, 4),
            "classes": images.classes,
            "source": read_public_card(run.path("public") / CARD).source,
        }
        write_json(directory / "card.json", content)


def network_work(workload: Work, block: int) -> int:
    from functools import partial

    from sfumato.features.public_network import build_network
    from sfumato.planning.work import PUBLIC_CLASSES

    settings = workload.params.classifier
    return workload.operations(
        partial(build_network, settings.network, workload.shape, PUBLIC_CLASSES, settings.width),
        workload.shape,
    )


def work(workload: Work) -> float:
    settings = workload.params.classifier
    return workload.TRAINING * settings.steps * settings.batch * workload.network("classifier")


STAGE = Stage(
    "classifier",
    FREE,
    "Train a classifier on the public set.",
    "sfumato.settings.training:Classifier",
    classifier,
    inputs=("public",),
    seeded=True,
    several_labels=True,
    network_work=network_work,
    work=work,
)
