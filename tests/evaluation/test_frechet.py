import numpy as np
import pytest
import scipy.linalg

from sfumato.evaluation.metrics import distances
from sfumato.evaluation.metrics.distances import frechet_distance

RNG = np.random.default_rng(0)


def skewed(rows, columns, rank, seed):
    """Correlated features of a given rank, off centre."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns)) + rng.normal(size=columns)


def by_eigenvalues(a, b):
    """The distance from the eigenvalues of A B, which are those of A^½ B A^½."""
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    roots = np.sqrt(np.maximum(scipy.linalg.eigvals(cov_a @ cov_b).real, 0)).sum()
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * roots


@pytest.mark.parametrize("rank_a, rank_b", [(16, 16), (5, 16), (5, 3)])
@pytest.mark.parametrize("rows", [400, 17, 9])
def test_it_agrees_with_an_independent_formula(rows, rank_a, rank_b):
    a, b = skewed(rows, 16, rank_a, 1), skewed(300, 16, rank_b, 2)
    assert frechet_distance(a, b) == pytest.approx(by_eigenvalues(a, b), rel=1e-3)


@pytest.fixture
def pytorch_fid(monkeypatch):
    """pytorch-fid's own distance; a shim takes the argument that it passes to sqrtm where scipy no longer does."""
    fid_score = pytest.importorskip("pytorch_fid.fid_score")

    def sqrtm(matrix, disp=True):
        root = scipy.linalg.sqrtm(matrix)
        return root if disp else (root, np.nan)

    class Linalg:
        pass

    Linalg.sqrtm = staticmethod(sqrtm)
    monkeypatch.setattr(fid_score, "linalg", Linalg)

    def distance(a, b):
        return fid_score.calculate_frechet_distance(
            *(part for x in (a, b) for part in (x.mean(axis=0), np.cov(x, rowvar=False)))
        )

    return distance


@pytest.mark.parametrize("rank", [16, 6, 1])
@pytest.mark.parametrize("rows", [400, 12])
@pytest.mark.filterwarnings("ignore:.*singular")
def test_it_agrees_with_pytorch_fid(pytorch_fid, rank, rows):
    a, b = skewed(rows, 16, rank, 3), skewed(300, 16, 16, 4)
    assert frechet_distance(a, b) == pytest.approx(pytorch_fid(a, b), rel=1e-3)
    assert frechet_distance(a.astype(np.float32), b.astype(np.float32)) == pytest.approx(pytorch_fid(a, b), rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*singular")
def test_it_agrees_with_pytorch_fid_where_features_are_constant(pytorch_fid):
    a, b = skewed(200, 16, 16, 3), skewed(300, 16, 16, 4)
    a[:, :5], b[:, 3:8] = 0, 2
    assert frechet_distance(a, b) == pytest.approx(pytorch_fid(a, b), rel=1e-3)


def test_blocks_of_rows_change_nothing(monkeypatch):
    a, b = skewed(400, 16, 9, 3), skewed(300, 16, 16, 4)
    whole = frechet_distance(a, b)
    for rows in (1, 7, 300):
        monkeypatch.setattr(distances, "ROWS", rows)
        assert frechet_distance(a, b) == pytest.approx(whole, rel=1e-9)


def test_it_is_symmetric_zero_for_equals_and_the_shift_for_shifted():
    a, b = skewed(100, 8, 8, 5), skewed(80, 8, 8, 6)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a))
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a + 3) == pytest.approx(9 * 8)
    assert frechet_distance(a, (a - a.mean(0)) * 2 + a.mean(0)) == pytest.approx(
        np.trace(np.cov(a, rowvar=False))
    )  # (2 − 1)² tr A


def test_constant_features_have_a_distance():
    assert frechet_distance(np.zeros((5, 3)), np.ones((4, 3))) == pytest.approx(3)


@pytest.mark.parametrize("bad", [np.full((5, 3), np.nan), np.zeros((1, 3)), np.zeros((5, 4)), np.zeros(5)])
def test_features_that_cannot_be_compared_are_refused(bad):
    with pytest.raises(ValueError, match="expected finite"):
        frechet_distance(bad, RNG.normal(size=(5, 3)))
