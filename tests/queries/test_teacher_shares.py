"""Labels by the teacher at the shares that were asked."""

import pytest
import torch

from sfumato.queries.teacher import at_shares, share_offsets


def drawn(shares, sharpness, bias, seed=0):
    """Probabilities of a teacher that leans towards some classes, and the true labels: (N, M), (N,)."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares))
    logits = torch.randn(len(labels), len(shares), generator=random)
    logits[torch.arange(len(labels)), labels] += 2
    return (sharpness * (logits + torch.tensor(bias))).softmax(dim=1), labels


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 20.0])
@pytest.mark.parametrize(
    ("shares", "bias"), [([900, 100], [2.0, 0.0]), ([500, 300, 200], [0.0, 3.0, 0.0]), ([400] * 3, [0.0, 0.0, 0.0])]
)
def test_each_class_is_said_as_often_as_it_was_asked_and_more_often_rightly(shares, bias, sharpness):
    probabilities, labels = drawn(shares, sharpness, bias)
    adjusted = at_shares(probabilities, share_offsets(probabilities, labels.bincount()))
    said = adjusted.argmax(dim=1)
    assert (said.bincount(minlength=len(shares)) - torch.tensor(shares)).abs().max() <= 2
    assert torch.allclose(adjusted.sum(dim=1), torch.ones(len(labels), dtype=torch.float64))

    def recall(found):
        return torch.stack([(found[labels == m] == m).double().mean() for m in range(len(shares))]).mean()

    assert recall(said) >= recall(probabilities.argmax(dim=1)) - 0.01


def test_a_class_that_nobody_asked_for_is_not_said_though_the_teacher_is_sure_of_it():
    probabilities = torch.tensor([[0.9, 0.1]]).repeat(500, 1) + 0.05 * torch.rand(500, 1)
    said = at_shares(probabilities, share_offsets(probabilities, torch.tensor([0, 500]))).argmax(dim=1)
    assert (said == 1).all()
