import pytest
import torch

from sfumato.evaluation.classifiers import DEEP, FEATURES, NAMES, build_classifier

SHALLOW = [name for name in NAMES if name not in DEEP]  # the others: test_deep_classifiers


@pytest.mark.parametrize("name", SHALLOW)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 5, 9), (1, 1, 1), (3, 3, 3)])
def test_every_shape_gives_logits_and_gradients(name, shape):
    model = build_classifier(name, shape, classes=7)
    logits = model(torch.rand(2, *shape))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    widths = {"lr": shape[0] * shape[1] * shape[2], "student": model.head.in_features}
    assert model.features(torch.rand(2, *shape)).shape == (2, widths.get(name, FEATURES))


@pytest.mark.parametrize("name", SHALLOW)
def test_the_prediction_of_an_image_does_not_depend_on_its_batch(name):
    model = build_classifier(name, (1, 8, 8), classes=3).eval()
    images = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(model(images)[:1], model(images[:1]))


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="lr, mlp, cnn, student, wrn, resnet, resnext"):
        build_classifier("vit", (1, 8, 8), 10)
