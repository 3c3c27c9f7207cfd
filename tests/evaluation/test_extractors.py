import hashlib

import numpy as np
import pytest
import torch

from sfumato.errors import DataError
from sfumato.evaluation import downstream, extractors
from sfumato.evaluation.extractors import (
    Extractor,
    build_extractor,
    embedded_extractor,
    inception_extractor,
)
from sfumato.evaluation.metrics.neighbours import nearest_rows
from sfumato.settings.evaluate import Evaluate

RNG = np.random.default_rng(0)
GREY, COLOUR = (
    RNG.integers(0, 256, size=(5, 12, 12, channels), dtype=np.uint8) for channels in (1, 3)
)


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory):
    """Write random weights for pytorch-fid's network, in the format of its published file."""
    from pytorch_fid import inception

    torch.manual_seed(0)
    kept = []
    build = inception._inception_v3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            inception, "_inception_v3", lambda *a, **k: kept.append(build(*a, **k)) or kept[0]
        )
        patch.setattr(inception, "load_state_dict_from_url", lambda *_, **__: kept[0].state_dict())
        inception.fid_inception_v3()
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.save(kept[0].state_dict(), path)
    return path


@pytest.fixture
def published(inception_file, monkeypatch):
    """Return `inception_file`. Its hash is now expected instead of the published one."""
    monkeypatch.setattr(
        extractors, "INCEPTION_SHA256", hashlib.sha256(inception_file.read_bytes()).hexdigest()
    )
    return inception_file


def test_inception_gives_what_pytorch_fid_gives(published, monkeypatch):
    from pytorch_fid import inception

    before = inception.load_state_dict_from_url
    extractor = inception_extractor(published)
    assert inception.load_state_dict_from_url is before
    found = extractor(COLOUR)
    state = torch.load(published, weights_only=True)
    monkeypatch.setattr(inception, "load_state_dict_from_url", lambda *_, **__: state)
    theirs = (
        inception.InceptionV3([3])
        .eval()(torch.from_numpy(COLOUR).permute(0, 3, 1, 2).float() / 255)[0]
        .flatten(1)
    )
    assert found.shape == (5, 2048) and found.dtype == np.float32
    assert np.allclose(found, theirs.numpy(), rtol=1e-3, atol=1e-4)
    assert (
        np.array_equal(extractor.head, state["fc.weight"].numpy()) and len(extractor.head) == 1008
    )
    assert np.allclose(extractor(GREY[:2]), extractor(np.repeat(GREY[:2], 3, axis=3)), atol=1e-5)


def test_only_the_published_weights_are_taken(tmp_path, inception_file):
    with pytest.raises(DataError, match="does not exist"):
        inception_extractor(tmp_path / "none.pth")
    sha256 = hashlib.sha256(inception_file.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"{sha256}, expected 6726825d"):
        inception_extractor(inception_file)


def test_a_file_with_the_same_first_digits_is_not_unpickled(tmp_path, monkeypatch):
    """The first digits of a hash are easily matched by trial. Checking only them would let an
    attacker exploit the unpickler.
    """
    other = tmp_path / "other.pth"
    other.write_bytes(b"no weights: who unpickles it finds that out in another way")
    begins = hashlib.sha256(other.read_bytes()).hexdigest()[:8]
    monkeypatch.setattr(extractors, "INCEPTION_SHA256", begins + extractors.INCEPTION_SHA256[8:])
    with pytest.raises(DataError, match="is not the file of the Inception weights"):
        inception_extractor(other)
    assert len(extractors.INCEPTION_SHA256) == 64


@pytest.fixture(scope="module")
def embedded(digits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downstream, "MIN_STEPS", 60)
        patch.setattr(extractors, "EPOCHS", 1)
        *same, other = (
            embedded_extractor(digits.take(np.arange(count)), "digits") for count in (600, 600, 300)
        )
        return same, other


def test_the_embedded_space_is_deterministic_and_named(embedded, digits):
    (first, again), other = embedded
    assert first.name == "cnn-digits-128" and first.head is None
    assert first.digest == again.digest != other.digest
    found = first(digits.images[:600])
    assert np.array_equal(found, again(digits.images[:600]))
    assert np.sqrt(np.mean(found**2)) == pytest.approx(1, rel=1e-3)


def test_the_embedded_space_puts_images_of_a_class_together(embedded, digits):
    """Nearest neighbours among unseen digits share the label far more often than by chance
    (0.1).
    """
    features = embedded[0][0](digits.images[600:1400])
    labels = digits.labels[600:1400]
    index, _ = nearest_rows(features[:200], features[200:])
    assert (labels[200:][index] == labels[:200]).mean() > 0.8


def test_features_that_are_not_finite_are_refused():
    broken = Extractor(name="broken", digest="", embed=lambda images: images.flatten(1) / 0.0)
    with pytest.raises(DataError, match="non-finite features"):
        broken(COLOUR)


def test_the_configured_extractor_draws_only_if_needed(published, short_judging):
    said = []
    assert build_extractor(Evaluate(fidelity=()), (1, 12, 12), said.append) is None
    config = Evaluate(extractor="inception", weights=str(published))
    assert build_extractor(config, (1, 12, 12), said.append).head.shape[1] == 2048
    assert (
        build_extractor(Evaluate(extractor="pixels"), (3, 12, 40), said.append).name
        == "pixels-12x16"
    )
    assert said == []
    for images, source in ((GREY, "glyphs"), (COLOUR, "procedural")):
        found = build_extractor(Evaluate(), (images.shape[3], 12, 12), said.append)
        assert found.name == f"cnn-{source}-128" and found(images).shape == (5, 128)
        assert (
            said.pop() == f"training of a feature network on computer-generated images ({source})"
        )


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 40), (1, 64, 50)])
def test_a_copy_is_nearest_and_a_shade_moves_features_alike(shape):
    extractor = build_extractor(Evaluate(extractor="pixels"), shape, print)
    images = np.random.default_rng(0).integers(0, 200, (6, *shape[1:], shape[0]), dtype=np.uint8)
    features = extractor(images)
    assert (
        features.shape == (6, shape[0] * min(shape[1], 16) * min(shape[2], 16))
        and len(np.unique(features, axis=0)) == 6
    )
    assert np.array_equal(extractor(images[3:4])[0], features[3])
    assert np.allclose(extractor(images + np.uint8(51)), features + 0.2, atol=1e-6)


def test_an_extractor_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="embedded"):
        Evaluate(extractor="torchvision")
