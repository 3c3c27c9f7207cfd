"""Load and describe the teacher, a classifier trained with differential privacy, for recipients.

import sfumato
teacher = sfumato.load_teacher("artifacts/teacher")
teacher.predict("x.png"), teacher.probabilities(images)
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sfumato.errors import DataError, explained
from sfumato.features.teacher_network import ImageClassifier, probabilities_of
from sfumato.features.teacher_network import load_teacher_network as load_network
from sfumato.privacy.resolved import StagePlan
from sfumato.release.card import PREPARED, cost_of, plain, privacy_facts, template, write_readme
from sfumato.release.card_check import ClassifierCard, known_cost
from sfumato.release.loading import prepared
from sfumato.settings.fields import Settings
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.records import Records


@dataclass(frozen=True, eq=False)
class ReleasedClassifier:
    """A released classifier, a teacher or a student.

    Args:
        network: Function from (B, C, H, W) float32 in [0, 1] to (B, classes) logits.
        classes: Class names, in the order of the logits.
        card: Content of `card.json`, with ε and δ.
        ledger: Record of every privacy mechanism behind the weights, by id.
    """

    network: ImageClassifier
    classes: tuple[str, ...]
    card: ClassifierCard
    ledger: Records

    def predict(self, picture: str | Path | np.ndarray) -> str | tuple[str, ...]:
        """Classify a picture.

        Args:
            picture: A file, or (H, W, C) uint8 of any size.

        Returns:
            Name of the most probable class. If images have several labels, the names of all labels
            with a probability above 1/2.

        Raises:
            DataError: The file cannot be read, or the array has the wrong type or shape.
        """
        (shares,) = self.probabilities(prepared(self.card, picture)[None])
        if self.network.several:
            return tuple(self.classes[label] for label in np.flatnonzero(shares > 0.5))
        return self.classes[int(shares.argmax())]

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        """Compute class probabilities, (N, classes) float32.

        Args:
            images: (N, H, W, C) uint8, or anything that `np.asarray` converts to it.

        Raises:
            DataError: The images have another type, or another shape than in training.
        """
        with explained(
            DataError,
            lambda error: f"the images cannot be converted to one array of uint8 ({error})",
            causes=(TypeError, ValueError),
        ):
            images = np.asarray(images)
        channels, *sides = self.card["shape"]
        if images.dtype != np.uint8 or images.shape[1:] != (*sides, channels):
            expected = f"uint8 (N, {sides[0]}, {sides[1]}, {channels})"
            raise DataError(
                f"images are {images.dtype} {images.shape}, but the classifier expects {expected}"
            )
        return probabilities_of(
            self.network, torch.tensor(images).permute(0, 3, 1, 2).float() / 255
        ).numpy()


def load_teacher(path: str | Path) -> ReleasedClassifier:
    """Load the teacher from a folder that `stage teacher` wrote.

    Args:
        path: Path of that folder.

    Raises:
        DataError: The folder contains no teacher, or its files were changed.
    """
    return load_released(Path(path).expanduser(), "teacher", load_network)


def load_released(
    folder: Path, stage: str, load: Callable[[Path], ImageClassifier]
) -> ReleasedClassifier:
    """Load the classifier that a stage released.

    load: function that reads the network from the folder.

    Raises DataError if another stage wrote the folder, if its files were changed, or if its card
    contradicts the network or the records.
    """
    artifact = read_artifact(folder, stage, received=True)
    if not artifact.enabled:
        raise DataError(
            f"{folder} contains no {stage}, because the project ran without the stage `{stage}`: "
            f"add {stage} to `run` in params.yaml of that project, and run it again"
        )
    with explained(
        DataError,
        lambda error: (
            f"{folder / 'card.json'} cannot be used ({error!r}): fetch the folder {folder} again"
        ),
    ):
        card: ClassifierCard = read_json(folder / "card.json")
        network = load(folder)
        classes = tuple(card["classes"])
        if (tuple(card["shape"]), len(classes)) != (tuple(network.shape), network.classes):
            raise ValueError("its image shape or number of classes differs from the network's")
        known_cost(card, artifact.records)
        return ReleasedClassifier(network, classes, card, artifact.records)


def write_card(
    directory: Path, plan: StagePlan[Settings], records: Records, form: str = "teacher.md"
) -> None:
    """Write the cards of a classifier: `card.json` for programs, and `README.md` for people.

    records: all charges that the classifier depends on. Their costs are added up, even if owners
    who merged their data sets declared that no person is in two of these sets;
    form: template of `README.md`.
    """
    records = Records(records)
    channels, height, width = plan.shape
    card = {
        "shape": list(plan.shape),
        "classes": list(plan.classes),
        "prepared": PREPARED | plan.prepared,
    }
    cost = cost_of(plan, records)
    write_json(directory / "card.json", {**card, **cost}, ensure_ascii=False)
    text = template(form, autoescape=False, plain=plain).render(
        **privacy_facts(plan, records, cost),
        licence=plan.about.get("licence", ""),
        images=f"{'grey' if channels == 1 else 'colour'} images of {height}×{width} pixels",
        classes=[(str(label), name) for label, name in enumerate(plan.classes)],
    )
    write_readme(directory, text)
