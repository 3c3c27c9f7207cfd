import pytest
import torch

from sfumato.errors import DataError
from sfumato.queries.count import public_counts, public_several, read_counts, save_counts
from sfumato.storage.artifacts import Artifact


def test_denominators_never_fall_below_the_noise():
    counts = public_counts(torch.tensor([100.0, 3.0, -20.0]), noise_multiplier=10.0)
    assert counts.per_class.tolist() == [100, 10, 10]
    assert public_counts(torch.tensor([0.2, 5.0]), noise_multiplier=0.1).per_class.tolist() == [
        1,
        5,
    ]


def test_priors_are_a_distribution_whatever_the_noise():
    random = torch.Generator().manual_seed(0)
    for scale in (1.0, 50.0, 1e4):
        for _ in range(50):
            priors = public_counts(20 + scale * torch.randn(5, generator=random), scale).priors
            assert (priors >= 0).all() and abs(priors.sum().item() - 1) < 1e-12
    assert public_counts(torch.tensor([-3.0, -1.0]), 2.0).priors.tolist() == [0.5, 0.5]


def test_the_total_is_the_sum_of_noisy_counts_and_positive():
    assert public_counts(torch.tensor([100.0, 3.0, -20.0]), 10.0).total == 83
    assert public_counts(torch.tensor([-5.0, -5.0]), 10.0).total == 10


def test_counts_of_another_number_of_classes_are_refused(tmp_path):
    noisy = torch.tensor([100.0, 3.0])
    save_counts(public_counts(noisy, 10.0), noisy, tmp_path)
    artifact = Artifact(tmp_path, "count")
    assert read_counts(artifact, 100, 2).per_class.tolist() == [100, 10]
    with pytest.raises(DataError, match="expected 3 classes"):
        read_counts(artifact, 100, 3)


def test_counts_of_several_labels_are_read_as_written(tmp_path):
    noisy = torch.tensor([60.0, 40.0, 100.0, 0.5, 20.0, 10.0]).double()
    counts = public_several(noisy, 1e-3)
    save_counts(counts, noisy, tmp_path)
    again = read_counts(Artifact(tmp_path, "count"), 100, len(counts.per_class))
    assert again.total == counts.total
    for read, written in zip(again[1:], counts[1:], strict=True):
        assert torch.allclose(read, written, rtol=1e-6)
