"""`stage classifier`: train a classifier on the public set only."""

from sfumato.data.cards import CARD, read_public_card
from sfumato.data.store import load_public
from sfumato.features.public_network import arguments_of
from sfumato.settings.training import Classifier
from sfumato.storage.files import write_json
from sfumato.storage.weights import save_network
from sfumato.training.public_classifier import train_public_classifier
from stages.runner import StageRun
from stages.screen import progress, say


def classifier(run: StageRun, settings: Classifier) -> None:
    public = run.path("public")
    images = load_public(public, run.plan.shape)
    with progress("classifier") as report:
        model, accuracy = train_public_classifier(images, settings, run.plan.seed, report)
    named = f"{100 * accuracy:.1f} % accuracy on the public images kept for validation"
    say(f"classifier: {named}, in {len(images.classes)} classes")
    with run.writing() as directory:
        save_network(model, arguments_of(model), directory)
        content = {
            "public_validation_accuracy": round(accuracy, 4),
            "classes": images.classes,
            "source": read_public_card(public / CARD).source,
        }
        write_json(directory / "card.json", content)
