"""Gaussian and uniform noise from a cryptographic generator, keyed by the system's entropy."""

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from randomgen import AESCounter

from sfumato.privacy.events import SECRET, SEEDED

PIECE = 2**18  # Maximum number of noise values drawn at once from one source
GRID_BITS = 20  # A release is rounded to about a millionth of its noise
# Position of the Mersenne twister's words in the state of torch's CPU generator: 624 words of 32
# bits, each stored in 64 bits.
TWISTER = slice(24, 24 + 8 * 624)


class NoiseSource:
    """A stream of randomness that cannot be replayed.

    It runs AES in counter mode, with 128 bits of `os.urandom` as the key. A forked process gets a
    new stream. A source cannot be saved, copied or pickled.

    seed: only for tests. It makes the stream repeatable. Records then contain the label SEEDED
    instead of SECRET, and every check refuses them.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self.label = SECRET if seed is None else SEEDED
        self._process: int | None = None

    @property
    def generator(self) -> np.random.Generator:
        """Generator of this process. A fork gets a new one, so it never repeats earlier noise."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            key = int.from_bytes(os.urandom(16), "little") if self._seed is None else self._seed
            self._generator = np.random.Generator(AESCounter(key=key))
        return self._generator

    def gaussian(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        """Draw a tensor of N(0, std²) noise, float64, on the CPU.

        Without a seed, a tensor with more than PIECE entries is drawn in several threads, in pieces
        of at most PIECE entries. Each piece comes from a new source.
        """
        if self._seed is None and (count := math.prod(shape)) > PIECE:
            sizes = [min(PIECE, count - start) for start in range(0, count, PIECE)]
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                parts = threads.map(lambda size: NoiseSource().gaussian((size,), std), sizes)
            return torch.cat([*parts]).view(shape)
        return torch.from_numpy(np.asarray(self.generator.standard_normal(shape) * std))

    def __reduce__(self):  # also called by `copy`
        raise TypeError(
            "a noise source cannot be saved, copied or sent: its stream must never be used twice"
        )


def rounded(noisy: torch.Tensor, grid: float) -> torch.Tensor:
    """Round each entry to the nearest multiple of `grid`, a power of two."""
    return noisy.div(grid).round_().mul_(grid)  # copies once


def public_grid(std: float) -> float:
    """Return the step of the grid for releases with noise of this standard deviation.

    A release is rounded to a multiple of this step, which is a public power of two, about
    2^GRID_BITS times finer than the noise. In double precision, the last bits of "sum + noise"
    depend on the sum, so they could distinguish an empty sum from any other. A release contains
    none of these bits, because neighbouring points of the grid are thousands of floats apart.

    Source: Mironov 2012.
    """
    return 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)


def secret_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """Create a torch generator that cannot be replayed, for secret draws other than the noise.

    A CPU generator uses only 32 bits of a seed, so an attacker could try all seeds. Therefore the
    624 words of its state are filled with random bits from the operating system. Generators of
    other devices use 64 bits of a seed.
    """
    generator = torch.Generator(device)
    if generator.device.type != "cpu":
        return generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
    words = np.frombuffer(os.urandom(4 * 624), dtype=np.uint32)
    state = generator.manual_seed(0).get_state()
    state[TWISTER] = torch.from_numpy(words.astype(np.uint64).view(np.uint8))
    twin = np.random.MT19937()
    twin.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    sample = torch.rand(4, generator=torch.Generator().set_state(state))
    if sample.tolist() != [int(word) % 2**24 / 2**24 for word in twin.random_raw(4)]:
        raise RuntimeError(
            "this version of torch stores the state of its generators in an unknown layout: "
            "install a version that constraints.txt allows"
        )
    return generator.set_state(state)
