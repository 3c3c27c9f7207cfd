"""EfficientNet-lite0: our own architecture, with weights for ImageNet from a package."""

import pytest
import torch

from sfumato.errors import ConfigError, DataError
from sfumato.features import FEATURES, PACKAGE, efficientnet_lite
from sfumato.features.efficientnet_lite import efficientnet_lite0, imagenet_network
from sfumato.features.own_network import OwnFeatures
from sfumato.queries.feature_means import encoding_alone


def test_it_gives_what_the_published_network_gives():
    """Compare five of the 1 000 logits of a ramp with the output of
    github.com/ml-illustrated/EfficientNet-Lite-PyTorch 0.1.0.
    """
    network = efficientnet_lite0().eval()
    network.load_state_dict(efficientnet_lite.imagenet_weights(imagenet_network().path))
    ramp = torch.linspace(-1, 1, 224)
    with torch.no_grad():
        logits = network((ramp[:, None] * ramp).expand(1, 3, -1, -1))
    torch.testing.assert_close(logits[0, LOGITS_AT], LOGITS, rtol=1e-4, atol=1e-4)


LOGITS_AT = [0, 1, 500, 998, 999]
LOGITS = torch.tensor([-0.86611, -0.14532, -0.71815, 0.50608, 0.24029])


def test_images_of_any_size_have_1280_features_and_a_gradient():
    features = FEATURES["imagenet"]((1, 20, 20))
    grey = torch.rand(2, 1, 20, 20, requires_grad=True)
    rows = features(grey)
    assert rows.shape == (2, 1280) and torch.equal(rows, features(grey.expand(-1, 3, -1, -1)))
    rows.sum().backward()
    assert grey.grad.abs().sum() > 0


def test_its_middle_layers_have_384_averaged_features():
    images = torch.rand(2, 1, 40, 30)
    network = efficientnet_lite0().eval()
    network.load_state_dict(efficientnet_lite.imagenet_weights(imagenet_network().path))
    with torch.no_grad():
        shown = torch.nn.functional.interpolate(
            images.expand(-1, 3, -1, -1), (128, 128), mode="bilinear"
        )
        hidden = network.features[:5]((shown - 127 / 255) / (128 / 255))
        means = [hidden.mean((2, 3))]
        for block in network.features[5:7]:
            hidden = block(hidden)
            means.append(hidden.mean((2, 3)))
        expected = torch.cat([torch.nn.functional.normalize(each) for each in means], dim=1)
        rows = FEATURES["imagenet-middle"]((1, 40, 30))(images)
    assert rows.shape == (2, 80 + 112 + 192)
    torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("name", ["imagenet", "imagenet-middle"])
def test_without_an_image_other_rows_are_equal_to_the_last_bit(name):
    encode = encoding_alone(FEATURES[name]((1, 24, 24)), (1, 24, 24), torch.device("cpu"))
    images = torch.rand(3, 1, 24, 24)
    assert torch.equal(encode(images)[[0, 2]], encode(images[[0, 2]]))


def test_another_file_in_place_of_its_weights_is_refused(tmp_path, monkeypatch):
    (tmp_path / PACKAGE / "models").mkdir(parents=True)
    (tmp_path / PACKAGE / "__init__.py").touch()
    (tmp_path / PACKAGE / efficientnet_lite.PICKLE).write_bytes(b"other")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="has sha256 d9298a10.*expected 57934424"):
        OwnFeatures(imagenet_network())


def test_without_its_extra_the_error_names_it(uninstall):
    uninstall(PACKAGE)
    with pytest.raises(ConfigError, match=r"pip install 'sfumato\[imagenet\]'"):
        imagenet_network()
