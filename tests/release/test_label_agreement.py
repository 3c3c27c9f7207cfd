"""The labels of a release are the teacher's only if they fit its images."""

import numpy as np
import pytest
import torch
from small_release import write_teacher

from sfumato.data.images import ImageSet
from sfumato.features.teacher_network import load_teacher_network
from sfumato.release.card import REQUESTED_LABELS
from sfumato.release.label_agreement import agreement_beyond_chance, labels_fit
from sfumato.release.loading import KINDS_FILE
from sfumato.release.release import requested_agreement
from sfumato.settings.release import Synthesize


@pytest.fixture(scope="module")
def teacher(digits, tmp_path_factory):
    return load_teacher_network(write_teacher(tmp_path_factory.mktemp("teacher"), digits))


@pytest.fixture(scope="module")
def real(digits):
    some = digits.take(np.arange(600, 1400))
    return torch.from_numpy(some.images).permute(0, 3, 1, 2), torch.from_numpy(some.labels)


def noise(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (number, 1, 8, 8), generator=random, dtype=torch.uint8)
    return images, torch.arange(number) % 10


def test_agreement_is_0_by_chance_and_near_1_for_digits(teacher, real):
    # For 800 noise images, which agree by chance, the standard deviation of kappa is 0.012
    assert abs(agreement_beyond_chance(teacher, *noise(800))) < 0.05
    assert agreement_beyond_chance(teacher, *real) > 0.7
    images, labels = real
    assert agreement_beyond_chance(teacher, images[labels == 3], labels[labels == 3]) == 1


def test_unequal_classes_agree_more_often_by_chance(tmp_path):
    """Random labels agree for 0.9² + 0.1² of the images if 90 % of the images have one class."""
    requested = np.repeat([0, 1], [900, 100])
    given = np.random.default_rng(0).permutation(requested)
    np.save(tmp_path / KINDS_FILE, np.array(["plain"] * 1000 + ["distorted"] * 10))
    np.save(tmp_path / REQUESTED_LABELS, requested)
    images = np.zeros((1010, 1, 1, 1), np.uint8)
    released = ImageSet(images, np.append(given, np.ones(10, np.int64)), ("a", "b"))
    agreed, by_chance = requested_agreement(released, tmp_path)
    assert by_chance == pytest.approx(0.82) and agreed == pytest.approx(0.82, abs=0.03)


def test_half_fitting_labels_have_half_the_agreement(teacher, real):
    images, labels = real
    whole = agreement_beyond_chance(teacher, images, labels)
    mixed = labels.clone()
    mixed[::2] = mixed[::2][torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    assert 0.35 * whole < agreement_beyond_chance(teacher, images, mixed) < 0.65 * whole


@pytest.mark.parametrize("herding", [1, 3])
def test_images_that_the_teacher_cannot_read_keep_their_classes(teacher, real, herding):
    settings = Synthesize(
        sources={"refine": 3, "select": 1},
        relabel=True,
        distorted=0.5,
        mixed=0.25,
        herding=herding,
        least_agreement=0.1,
    )
    compared = []

    def drawn(images, labels):
        def draw(settings, seed, progress):
            compared.append((settings.count, {*settings.sources}, seed))
            return images, labels, np.repeat("refine", len(images))

        return draw

    assert labels_fit(drawn(*real), settings, teacher, 5)
    assert not labels_fit(drawn(*noise(800)), settings, teacher, 5)
    assert compared == 2 * [(1000, {"refine"}, 7)], "some drawn images, without public ones"
    for unchecked in ({"least_agreement": 0.0}, {"sources": {"select": 1.0}}):
        changed = settings.model_copy(update=unchecked)
        assert labels_fit(drawn(*noise(800)), changed, teacher, 5)
    assert len(compared) == 2
