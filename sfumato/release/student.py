"""The student: a classifier trained on images that the networks of a release draw.

Training costs no privacy.

import sfumato
student = sfumato.load_student("artifacts/student")
student.predict("x.png"), student.probabilities(images)
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.features.public_network import arguments_of, build_network
from sfumato.features.teacher_network import ImageClassifier
from sfumato.release.stream import stream
from sfumato.release.teacher import ReleasedClassifier, load_released
from sfumato.runtime.compute import device
from sfumato.runtime.progress import Progress, no_progress
from sfumato.settings.training import Student
from sfumato.storage.weights import load_network, save_network
from sfumato.training.supervised import Schedule, train_supervised


class StudentNetwork(ImageClassifier):
    """Classifier from (B, C, H, W) float32 in [0, 1] to (B, classes) logits.

    several: whether images have several labels. If so, the sigmoid of each logit is a probability;
    arguments: arguments of `build_network`.
    """

    def __init__(self, several: bool, **arguments: Any) -> None:
        super().__init__()
        self.several = several
        self.network = build_network(**arguments)
        self.shape = self.network.shape
        self.classes = self.network.classes

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)


def train_student(
    release: Path, settings: Student, seed: int, progress: Progress = no_progress
) -> StudentNetwork:
    """Train a network on the images and labels that a release's stream draws.

    seed: fixes the drawn images and the initial weights. PyTorch's global random state does not
    change.

    Guarantee: the network is a function of the release and of public settings.
    """
    dataset = stream(release, settings.batch, seed)
    schedule = Schedule(
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        weight_decay=0.02,
        decay_vectors=False,
        soft=not dataset.several,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = StudentNetwork(
            dataset.several,
            network="residual",
            shape=dataset.shape,
            classes=len(dataset.classes),
            width=settings.width,
        )
        batches = ((images, labels) for images, labels, _ in dataset)
        train_supervised(network.to(device()), batches, schedule, progress)
    return network


def save_student(network: StudentNetwork, directory: Path) -> None:
    save_network(network, {"several": network.several, **arguments_of(network.network)}, directory)


def load_student_network(directory: Path) -> StudentNetwork:
    """Load the network that `save_student` wrote, in eval mode.

    Raises DataError if files are missing or damaged.
    """
    return load_network(directory, StudentNetwork, "student").eval()


def load_student(path: str | Path) -> ReleasedClassifier:
    """Load the student from a folder that `stage student` wrote.

    Args:
        path: Path of that folder.

    Raises:
        DataError: The folder contains no student, or its files were changed.
    """
    return load_released(Path(path).expanduser(), "student", load_student_network)
