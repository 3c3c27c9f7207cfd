"""Whatever rows a query returns, no row adds more to a sum than the bound."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfumato.privacy.rows import Rows, bounded_sum, one_hot

AWKWARD = [
    0.0,
    1.0,
    -3.0,
    1e-30,
    1e30,
    1e-187,
    5e-324,
    1e300,
    1.7e308,
    float("nan"),
    float("inf"),
    -float("inf"),
]
numbers = st.one_of(st.sampled_from(AWKWARD), st.floats(-1e3, 1e3))


def matrix(rows: int, width: int):
    return st.lists(
        st.lists(numbers, min_size=width, max_size=width), min_size=rows, max_size=rows
    ).map(lambda values: torch.tensor(values, dtype=torch.float64).reshape(rows, width))


def test_a_norm_that_underflows_or_overflows_hides_no_row():
    def outer(left: float, right: float, max_norm: float) -> float:
        return bounded_sum(
            Rows(*torch.tensor([[[left]], [[right]]], dtype=torch.float64)), max_norm
        ).item()

    for small in (7.8529e-187, 5e-324, 1e-100, 1e-99):
        for large in (1e300, 1.7e308, 1e100, 1e99):
            assert 0 <= outer(large, small, 1e-6) <= 1e-6 and 0 <= outer(small, large, 1e-6) <= 1e-6
    assert outer(1e99, 1e-99, 2.0) == pytest.approx(1) and outer(
        1e99, 1e-99, 1e-6
    ) == pytest.approx(1e-6)


@given(
    st.data(), st.integers(1, 5), st.booleans(), st.sampled_from([1e-6, 0.3, 1.0, 2.0**0.5, 28.0])
)
def test_one_image_moves_any_sum_by_at_most_the_bound(data, count, outer, max_norm):
    left = data.draw(matrix(count, 3))
    right = data.draw(matrix(count, 2)) if outer else None
    whole = bounded_sum(Rows(left, right), max_norm)
    assert whole.isfinite().all() and whole.shape == ((3, 2) if outer else (3,))
    for i in range(count):
        kept = torch.arange(count) != i
        rest = bounded_sum(Rows(left[kept], right[kept] if outer else None), max_norm)
        assert torch.linalg.vector_norm(whole - rest) <= max_norm * (1 + 1e-9 * count)
    none = bounded_sum(Rows(left[:0].float(), right[:0].float() if outer else None), max_norm)
    assert torch.equal(none, torch.zeros_like(whole)) and none.dtype == torch.float64


def test_a_row_alone_is_within_the_bound_to_the_last_bit():
    random = torch.Generator().manual_seed(0)
    for _ in range(2000):
        row = torch.randn(1, 7, generator=random, dtype=torch.float64) * 10 ** float(
            torch.randn(1, generator=random)
        )
        other = torch.randn(1, 5, generator=random, dtype=torch.float64)
        for max_norm in (0.1, 1.0, 2.0**0.5):
            assert torch.linalg.vector_norm(bounded_sum(Rows(row), max_norm)) <= max_norm
            assert torch.linalg.vector_norm(bounded_sum(Rows(row, other), max_norm)) <= max_norm


def test_whole_rows_within_the_bound_stay_whole():
    labels = torch.tensor([0, 2, 2, 9, -1])
    assert bounded_sum(Rows(one_hot(labels, 3)), 1.0).tolist() == [1.0, 0.0, 2.0]
    for votes in range(1, 50):
        ballots = torch.zeros(4, 60, dtype=torch.float64)
        ballots[:, :votes] = 1
        assert bounded_sum(Rows(one_hot(labels[:4], 3), ballots), votes**0.5)[2, :votes].eq(2).all()
