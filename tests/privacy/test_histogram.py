"""Adding or removing one image changes only its own votes.

The network is trained, and in some tests rounding decides the class.
"""

import copy
import math

import pytest
import torch
from cases import Recorder
from torch import Tensor

from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.public_network import ResNet
from sfumato.privacy.rows import bounded_sum
from sfumato.queries.histogram import query_histogram, vote_rows
from sfumato.settings.training import Classifier
from sfumato.training.public_classifier import train_public_classifier

CLASSES = 10


@pytest.fixture(scope="module")
def trained(digits) -> ResNet:
    return train_public_classifier(digits, Classifier(width=8, steps=100), seed=0)[0]


@pytest.fixture(scope="module")
def undecided(trained) -> ResNet:
    """Return a network with eight copies of each class, which differ by rounding errors.

    The last bits of a sum decide which copy has the largest logit.
    """
    model = copy.deepcopy(trained)
    model.classes = 8 * CLASSES
    head = torch.nn.Linear(model.head.in_features, model.classes)
    apart = 1 + 6e-8 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.weight.copy_(trained.head.weight.repeat(8, 1) * apart)
        head.bias.copy_(trained.head.bias.repeat(8))
    model.head = head
    return model.eval()


@pytest.fixture(scope="module")
def sample(digits) -> tuple[Tensor, Tensor]:
    return digits.batch(range(90))


def total(
    model: ResNet, images: Tensor, labels: Tensor, votes: int = 1, classes=None, size=None
) -> Tensor:
    charge = Recorder(images, labels, size=size)
    query_histogram(charge, model, votes, classes)
    ((released, max_norm, integer),) = charge.asked
    assert max_norm == math.sqrt(votes) and integer
    return released


@pytest.mark.parametrize("network", ["trained", "undecided"])
@pytest.mark.parametrize("votes", [1, 5])
@pytest.mark.parametrize("classes", [None, CLASSES])
def test_one_image_moves_the_votes_by_exactly_the_bound(network, votes, classes, sample, request):
    """The bound is reached, but never exceeded: only the image's own votes change.

    In chunks of 89, the last of the 90 images has its own chunk, unless an earlier image is left
    out.
    """
    model = request.getfixturevalue(network)
    images, labels = sample
    whole = total(model, images, labels, votes, classes, size=89)
    for left_out in (0, 1, 40, 89):
        keep = torch.arange(90) != left_out
        move = whole - total(model, images[keep], labels[keep], votes, classes, size=89)
        assert set(move.unique().tolist()) == {0.0, 1.0} and move.sum() == votes
        assert torch.linalg.vector_norm(move) == math.sqrt(votes)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_logits_depend_on_their_image_to_the_last_bit(layout, undecided, sample):
    images = sample[0]
    alone = torch.cat([rows_alone(undecided, image[None]) for image in images])
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows_alone(undecided, images.to(memory_format=layout)), alone)
    assert torch.equal(rows_alone(undecided, images[shuffled]), alone[shuffled])
    assert torch.equal(rows_alone(undecided, images[::2].expand(-1, 1, 8, 8)), alone[::2])
    misaligned = torch.empty(images.numel() + 1)[1:].view(images.shape).copy_(images)
    assert torch.equal(rows_alone(undecided, misaligned), alone)


def test_logits_in_batches_depend_on_their_image_only(undecided, sample):
    if place_matters(undecided, (1, 8, 8), torch.device("cpu")):
        pytest.skip("here the place in a batch matters, and images come one by one")
    images = sample[0]
    alone = torch.cat([rows_alone(undecided, image[None], place_matters=False) for image in images])
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    for order in (shuffled, shuffled[:50], torch.arange(0, len(images), 3)):
        assert torch.equal(rows_alone(undecided, images[order], place_matters=False), alone[order])


def test_logits_do_not_depend_on_the_number_of_threads(undecided, sample):
    before = torch.get_num_threads()
    try:
        answers = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            answers.append(rows_alone(undecided, sample[0]))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*answers)


def test_the_logits_equal_the_networks(trained, sample):
    with torch.no_grad():
        torch.testing.assert_close(
            rows_alone(trained, sample[0]), trained(sample[0]), rtol=1e-4, atol=1e-4
        )


def test_a_network_in_training_mode_is_refused(trained, sample):
    with pytest.raises(ValueError, match="training mode"):
        total(copy.deepcopy(trained).train(), *sample)


def test_votes_are_the_likeliest_classes_ties_go_to_the_first():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, -1.0, 5.0], [-4.0, -3.0, -2.0, -9.0]])
    labels = torch.tensor([1, 0, 1])
    assert bounded_sum(vote_rows(logits, labels, 2), math.sqrt(2)).tolist() == [
        [1.0, 3.0, 1.0, 1.0]
    ]
    by_class = [[1.0, 1.0, 0.0, 0.0], [0.0, 2.0, 1.0, 1.0]]
    assert bounded_sum(vote_rows(logits, labels, 2, 2), math.sqrt(2)).tolist() == by_class


def test_a_logit_that_is_not_finite_votes_nowhere():
    logits = torch.tensor(
        [[0.0, math.inf, 1.0], [math.nan, 0.0, 1.0], [0.0, -math.inf, 1.0], [1.0, 0.0, 0.0]]
    )
    assert bounded_sum(vote_rows(logits, torch.zeros(4, dtype=torch.int64), 1), 1.0).tolist() == [
        [1.0, 0.0, 0.0]
    ]


def test_more_votes_than_classes_are_refused_before_a_draw(trained, owner):
    charge = owner.open()
    with pytest.raises(ValueError, match="votes=11"):
        query_histogram(charge, trained, 11)
    assert charge.used == 0
    query_histogram(charge, trained, 1)
    assert charge.used == 1
