import numpy as np

from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.sampling import poisson_draw


def test_every_image_enters_independently_at_the_rate():
    generator, size, rate, draws = NoiseSource().generator, 50, 0.2, 20_000
    seen, pairs, lengths = np.zeros(size), 0, []
    for _ in range(draws):
        chosen = poisson_draw(generator, size, rate)
        seen[chosen] += 1
        pairs += np.isin([3, 17], chosen).all()
        lengths.append(len(chosen))
    # six standard errors of a binomial each: false alarm below 1e-6 over all assertions
    assert np.all(np.abs(seen / draws - rate) < 6 * np.sqrt(rate * (1 - rate) / draws))
    assert abs(pairs / draws - rate**2) < 6 * np.sqrt(rate**2 / draws)
    variance = size * rate * (1 - rate)
    assert abs(np.var(lengths) / variance - 1) < 6 * np.sqrt(
        2.2 / draws
    )  # a shuffled fixed-size batch would have variance 0


def test_indices_are_distinct_ascending_and_in_range():
    chosen = poisson_draw(NoiseSource().generator, 1000, 0.3)
    assert np.all(np.diff(chosen) > 0) and chosen.min() >= 0 and chosen.max() < 1000


def test_extreme_rates_and_empty_sets():
    generator = NoiseSource().generator
    assert len(poisson_draw(generator, 10, 1.0)) == 10
    assert len(poisson_draw(generator, 0, 0.5)) == 0
    assert any(len(poisson_draw(generator, 5, 0.01)) == 0 for _ in range(50))
