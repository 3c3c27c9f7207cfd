"""The mixture to release is chosen by comparing students, classifiers that are trained on it.

The choice reads no real image, so it spends no ε.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from small_plan import card, params
from test_golden import PUBLIC, case, computed, digits

from sfumato.data.images import ImageSet
from sfumato.errors import ConfigError
from sfumato.evaluation import mixture
from sfumato.evaluation.mixture import WITH, WITHOUT, agreement, chosen_mixture, judges
from sfumato.features.teacher_network import TeacherNetwork
from sfumato.planning.resolve import make_plan
from sfumato.release.variation import PLAIN, Varied, beside_public

MIXED = {
    "sources": {"auxiliary": 1.0, "select": 1.0},
    "labels": "uniform",
    "choose": True,
    "relabel": True,
}


def shaded(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of noise, (N, 1, 8, 8) uint8, and their classes: 0 is dark, 1 is bright."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    return (
        torch.rand(count, 1, 8, 8, generator=random) * 100 + 155 * labels[:, None, None, None]
    ).byte(), labels


class Dark(TeacherNetwork):
    """A teacher that assigns every image to class 0, but is less certain of bright ones."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        light = images.mean(dim=(1, 2, 3))
        return torch.stack([9 - 4 * light, torch.zeros_like(light)], dim=1)


seen_dark = Dark(2, feature="pixels", shape=(1, 8, 8), dimension=4)


def of(images: torch.Tensor, labels: torch.Tensor) -> Varied:
    return Varied(images, labels, np.full(len(labels), PLAIN))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(mixture, "STEPS", 25)
    monkeypatch.setattr("sfumato.evaluation.mixture.JUDGES", 40)


def pixels(images: torch.Tensor) -> np.ndarray:
    return images.permute(0, 2, 3, 1).numpy()


def test_a_student_agrees_only_with_right_labels(quick):
    images, labels = shaded(60, 1)
    learned, right = shaded(100, 2)
    for own, low, high in ((right, 0.95, 1.0), (1 - right, 0.0, 0.05)):
        assert (
            low
            <= agreement(of(learned, own), {"drawn": (pixels(images), labels.numpy())}, 2, 0)[
                "drawn"
            ]
            <= high
        )


def test_a_student_that_always_names_the_larger_class_has_a_half(quick):
    images, labels = shaded(100, 1)
    rows = np.argsort(labels.numpy(), kind="stable")[40:]  # 10 of one class, 50 of the other
    judged = {"drawn": (pixels(images)[rows], labels.numpy()[rows])}
    assert agreement(of(images, torch.ones(100, dtype=torch.int64)), judged, 2, 0)["drawn"] == 0.5


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        ((0.95, 0.8), WITH),
        ((0.935, 0.8), WITH),
        ((0.92, 0.99), WITHOUT),
        ((0.97, 0.55), WITHOUT),
        ((0.5, 0.5), WITHOUT),
    ],
)
def test_public_images_stay_if_they_help_and_cost_nothing(beside, name):
    found = {
        WITHOUT: {"drawn": 0.95, "public": 0.6},
        WITH: dict(zip(("drawn", "public"), beside, strict=True)),
    }
    assert chosen_mixture(found) == name


def test_the_teacher_labels_public_judges_in_equal_shares():
    """This teacher prefers class 0 for every image. To make the shares equal, the half of the
    images for which it is least certain gets label 1.
    """
    images, labels = shaded(mixture.JUDGES + 80, 1)
    public = ImageSet(pixels(images), labels.numpy(), ("dark", "bright"))
    found = judges(seen_dark, public.take(np.arange(20)), public, 0)
    assert len(found["public"][1]) == mixture.JUDGES and len(found["drawn"][1]) == 20
    assert np.mean(found["public"][1]) == pytest.approx(0.5, abs=0.01)
    bright = found["public"][0].mean(axis=(1, 2, 3))
    assert bright[found["public"][1] == 1].min() > bright[found["public"][1] == 0].max()


def test_public_images_keep_their_labels_among_drawn_ones():
    images, labels = shaded(40, 1)
    drawn = Varied(images, labels, np.repeat(["plain", "distorted"], [10, 30]), labels[:10])
    public = torch.full((6, 1, 8, 8), 7, dtype=torch.uint8)
    found = beside_public(drawn, public, torch.ones(6, dtype=torch.int64), 1, 0)
    first = found.kinds[:16]
    assert sorted(first) == ["plain"] * 10 + ["public"] * 6 and list(first) != sorted(first)
    assert (found.images[:16][torch.from_numpy(first == "public")] == 7).all()
    assert (found.labels[:16][torch.from_numpy(first == "public")] == 1).all()
    assert torch.equal(found.images[16:], images[10:]) and len(found.requested_labels) == 16
    half = beside_public(drawn, public, torch.ones(6, dtype=torch.int64), 2, 0)
    assert (
        dict(Counter(half.kinds)) == {"plain": 5, "public": 6, "distorted": 15}
        and len(half.requested_labels) == 11
    )


@pytest.mark.parametrize("name", [WITH, WITHOUT])
def test_the_release_is_the_mixture_that_was_chosen(quick, monkeypatch, name):
    monkeypatch.setattr("sfumato.evaluation.mixture.chosen_mixture", lambda agreements: name)
    found = computed(case("synthesize", **MIXED, count=60))
    public = PUBLIC // 2  # number of selected images
    assert len(found["images.npy"]) == (2 * public if name == WITH else 60)
    shown = {image.tobytes() for image in found["images.npy"].numpy()}
    joined = {image.tobytes() for image in digits(4, 8, False)[0][:PUBLIC][1::2, ..., None]}
    assert (joined <= shown) == (name == WITH)


@pytest.mark.parametrize("sources", [{"select": 1}, {"auxiliary": 1}])
def test_a_choice_needs_public_images_and_drawn_ones(sources):
    made = params(recipe="teacher-mixed", synthesize={"sources": sources, "choose": True})
    with pytest.raises(
        ConfigError, match="requires select and another stage in synthesize.sources"
    ):
        make_plan(made, card())
