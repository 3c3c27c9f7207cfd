import numpy as np
import pytest
import torch
from pydantic import ValidationError

from sfumato.data.images import as_floats
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.teacher_network import TeacherNetwork, probabilities_of
from sfumato.release.variation import BLEND, KINDS, blend_partners, distort, texture, vary
from sfumato.settings.release import Synthesize


@pytest.fixture(scope="module")
def drawn(digits):
    """Return digits in the form in which models draw images, (600, 1, 8, 8) uint8, and their
    labels.
    """
    some = digits.take(np.arange(600))
    return torch.from_numpy(some.images).permute(0, 3, 1, 2), torch.from_numpy(some.labels)


def teacher_on(feature, dimension, drawn, classes=10):
    """Return a teacher that compares features with their class means. It is right for most digits,
    not for all.
    """
    images, labels = drawn
    features = ProjectedFeatures(feature, images.shape[1:], dimension)
    features.fit(images, 0.5, seed=0)
    means = torch.stack([features(as_floats(images[labels == m])).mean(0) for m in range(classes)])
    return TeacherNetwork.of(features, 20 * means.T)


@pytest.fixture(scope="module")
def teacher(drawn):
    return teacher_on("pixels", 40, drawn)


def test_without_a_wish_images_and_labels_stay_as_they_were(drawn):
    varied = vary(drawn[0].clone(), drawn[1], Synthesize(), None, seed=0)
    assert torch.equal(varied.images, drawn[0]) and torch.equal(varied.labels, drawn[1])
    assert (varied.kinds == "plain").all() and varied.requested_labels is None


def test_a_teacher_of_any_features_labels_plain_images_alone(drawn):
    images, labels = drawn
    teacher = teacher_on("deep-scattering", 20, drawn)
    varied = vary(images.clone(), labels, Synthesize(relabel=True), teacher, seed=0)
    assert (varied.kinds == "plain").all() and torch.equal(varied.images, images)
    assert (
        torch.equal(varied.requested_labels, labels)
        and 0.5 < (varied.labels == labels).float().mean() < 1
    )


def test_parts_are_as_requested_with_the_teachers_labels(drawn, teacher):
    images, labels = drawn
    settings = Synthesize(relabel=True, distorted=0.25, mixed=0.25)
    varied = vary(images.clone(), labels, settings, teacher, seed=0)
    assert varied.kinds.tolist() == ["plain"] * 300 + ["distorted"] * 150 + ["blend"] * 150
    assert torch.equal(varied.requested_labels, labels[:300]), (
        "what was asked of the models, not what the teacher sees"
    )
    assert torch.equal(varied.images[:300], images[:300])
    changed = (varied.images != images).flatten(1).any(dim=1)
    assert not changed[:300].any() and changed[300:].float().mean() > 0.9
    assert (
        varied.labels == probabilities_of(teacher, varied.images).argmax(1)
    ).float().mean() > 0.9
    assert (varied.labels[:300].bincount() - labels[:300].bincount()).abs().max() <= 1, (
        "the shares that were asked"
    )
    assert 0.7 < (varied.labels[:300] == labels[:300]).float().mean() < 1


def test_variants_are_fixed_by_the_public_seed(drawn, teacher):
    settings = Synthesize(relabel=True, distorted=0.4, mixed=0.2)
    before = torch.random.get_rng_state()
    first, again, other = (
        vary(drawn[0].clone(), drawn[1], settings, teacher, seed).images for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_distorted_images_differ_and_keep_a_dark_ground(drawn):
    images = as_floats(drawn[0])
    changed = distort(images, torch.Generator().manual_seed(0))
    assert ((changed - images).flatten(1).norm(dim=1) / images.flatten(1).norm(dim=1)).mean() > 0.2
    assert (
        changed.shape == images.shape
        and changed.min() >= 0
        and changed.max() <= 1
        and changed.isfinite().all()
    )
    assert not distort(torch.zeros(4, 3, 16, 16), torch.Generator().manual_seed(0)).any(), (
        "black stays black"
    )
    assert distort(images[:0], torch.Generator()).shape == (0, 1, 8, 8)


def test_textures_are_stripes_and_spots_of_spread_about_one():
    drawn = texture(400, 28, 20, torch.Generator().manual_seed(0))
    stripes = drawn.flatten(1).abs().amax(dim=1) <= 1
    assert 0.35 < stripes.float().mean() < 0.65, "spots of that many cells exceed 1 somewhere"
    assert drawn.shape == (400, 1, 28, 20) and 0.5 < drawn.std() < 1.1 and abs(drawn.mean()) < 0.1


def test_blends_mix_an_image_with_a_confused_class():
    sure = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0.1, 0.9, 0]])
    for seed in range(20):
        weights, partners = blend_partners(sure, 5, torch.Generator().manual_seed(seed))
        assert BLEND[0] <= weights.item() <= BLEND[1] and partners.item() in (0, 1), "of class 0"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"distorted": 0.5, "mixed": 0.5, "relabel": True}, "no plain image"),
        ({"mixed": 0.1}, "relabel: true"),
        ({"distorted": 0.1}, "relabel: true"),
    ],
)
def test_what_makes_no_release_is_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        Synthesize(**wrong)


def test_every_kind_of_images_keeps_the_requested_shares():
    """Infected smears have a dark spot, and distortions add spots. If the offsets come from plain
    images only, most distorted images therefore count as infected.
    """
    random = torch.Generator().manual_seed(0)
    images = 0.75 + 0.05 * torch.randn(1200, 1, 12, 12, generator=random)
    # The classes have equal shares of all images, but not of the 300 plain ones
    labels = torch.tensor([0, 1, 1] * 100 + [1, 0, 0] * 100 + [0, 1] * 300)
    images[labels == 1, :, 4:8, 4:8] -= 0.25
    images = (255 * images.clamp(0, 1)).byte()
    teacher = teacher_on("deep-scattering", 20, (images, labels), classes=2)
    worst = {}
    for shares in ("plain", "each"):
        settings = Synthesize(relabel=True, distorted=0.5, mixed=0.25, shares=shares)
        varied = vary(images.clone(), labels, settings, teacher, seed=0)
        counts = [
            varied.labels[torch.from_numpy(varied.kinds == kind)].bincount(minlength=2)
            for kind in KINDS[:3]
        ]
        worst[shares] = max(float((2 * each / each.sum() - 1).abs().max()) for each in counts)
        assert sorted(varied.labelling.offsets) == (
            ["plain"] if shares == "plain" else sorted(KINDS[:3])
        )
    assert worst["each"] <= 0.05 < 0.2 < worst["plain"]
