import pytest
import torch
from torch import nn

from sfumato.evaluation.classifiers import CLASSIFIERS, DEEP, build_classifier, plain_resnet, resnext, wide_resnet


def parameters(body, width, classes) -> int:
    return sum(value.numel() for value in body.parameters()) + (width + 1) * classes


# Published: WRN-40-4 8.9 M (Zagoruyko and Komodakis Table 4), ResNet-110 1.7 M (He et al. Table 6),
# ResNeXt-29 8×64d 34.4 M (Xie et al. Table 7).
@pytest.mark.parametrize(
    ("network", "millions"),
    [(wide_resnet(3, 40, 4), 8.95), (plain_resnet(3, 110), 1.73), (resnext(3, 29, 8, 64), 34.43)],
)
def test_the_networks_of_the_papers_have_their_published_size(network, millions):
    assert parameters(*network, classes=10) / 1e6 == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize("name", DEEP)
def test_a_network_is_as_deep_as_its_name_says(name):
    """Depth counts the convolutions in a row and the head.

    1×1 shortcuts do not count, except in WRN, which counts 4 of stem, shortcuts and head (6n + 4).
    """
    model, expected = build_classifier(name, (1, 8, 8), 10), {"wrn": 16, "resnet": 20, "resnext": 20}
    beside = {id(m) for part in model.modules() for m in (getattr(part, "shortcut", None) or nn.Identity()).modules()}
    depth = 1 + sum(isinstance(m, nn.Conv2d) and id(m) not in beside for m in model.modules())
    assert depth + (2 if name == "wrn" else 0) == expected[name]
    assert str(expected[name]) in CLASSIFIERS[name].network


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 5, 9), (1, 1, 1)])
def test_every_shape_gives_logits_and_gradients(name, shape):
    model = build_classifier(name, shape, classes=7)
    logits = model(torch.rand(2, *shape))
    logits.sum().backward()
    assert logits.shape == (2, 7) and all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", DEEP)
def test_the_prediction_of_an_image_does_not_depend_on_its_batch(name):
    model = build_classifier(name, (1, 16, 16), classes=3).eval()
    images = torch.rand(4, 1, 16, 16)
    torch.testing.assert_close(model(images)[:1], model(images[:1]))
