import pytest
import torch
from torch import nn

from sfumato.evaluation.classifiers import (
    CLASSIFIERS,
    PENULTIMATE_WIDTH,
    build_classifier,
    plain_resnet,
    resnext,
    wide_resnet,
)

DEPTHS = {"wrn": 16, "resnet": 20, "resnext": 20}


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 5, 9), (1, 1, 1), (3, 3, 3)]
)
def test_every_shape_gives_logits_of_each_image_and_gradients(name, shape):
    model = build_classifier(name, shape, classes=7)
    logits = model(torch.rand(2, *shape))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    widths = {
        "lr": shape[0] * shape[1] * shape[2],
        "mlp": PENULTIMATE_WIDTH,
        "cnn": PENULTIMATE_WIDTH,
    }
    model = model.eval()
    images = torch.rand(5, *shape)
    assert model.features(images).shape == (5, widths.get(name, model.head.in_features))
    torch.testing.assert_close(model(images)[:1], model(images[:1]))


# Published: WRN-40-4 8.9 M (Zagoruyko and Komodakis Table 4), ResNet-110 1.7 M (He et al. Table 6),
# ResNeXt-29 8×64d 34.4 M (Xie et al. Table 7).
@pytest.mark.parametrize(
    ("network", "millions"),
    [(wide_resnet(3, 40, 4), 8.95), (plain_resnet(3, 110), 1.73), (resnext(3, 29, 8, 64), 34.43)],
)
def test_the_networks_of_the_papers_have_their_published_size(network, millions):
    body, width = network
    weights = sum(value.numel() for value in body.parameters()) + (width + 1) * 10
    assert weights / 1e6 == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize(("name", "expected"), DEPTHS.items())
def test_a_network_has_the_stated_depth(name, expected):
    """The depth is the number of convolutions in a row, plus one for the head.

    1×1 shortcuts do not count. By its paper, a WRN with 6n convolutions in its blocks has depth
    6n + 4, which is two more than this count.
    """
    model = build_classifier(name, (1, 8, 8), 10)
    beside = {
        id(m)
        for part in model.modules()
        for m in (getattr(part, "shortcut", None) or nn.Identity()).modules()
    }
    depth = 1 + sum(isinstance(m, nn.Conv2d) and id(m) not in beside for m in model.modules())
    assert depth + (2 if name == "wrn" else 0) == expected
