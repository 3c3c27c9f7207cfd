"""Gaussians and uniforms from the operating system's entropy through a cryptographic bit generator."""

from __future__ import annotations

import os

import numpy as np
import torch
from randomgen import AESCounter

from sfumato.privacy.events import SECRET, SEEDED


class NoiseSource:
    """A stream of randomness that nobody can replay.

    AES in counter mode, keyed by 128 bits of `os.urandom`; made anew in a forked process; never saved, copied or pickled.
    With `seed` (tests only) the stream repeats, and `label` says so in every record, so that every ledger check fails.
    Attacks on the floating-point form of the noise are out of scope.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self.label = SECRET if seed is None else SEEDED
        self._process = -1
        self._generator = self._fresh()

    def _fresh(self) -> np.random.Generator:
        self._process = os.getpid()
        key = int.from_bytes(os.urandom(16), "little") if self._seed is None else self._seed
        return np.random.Generator(AESCounter(key=key))

    @property
    def generator(self) -> np.random.Generator:
        """The generator of this very process: a fork must not repeat its parent's noise."""
        if os.getpid() != self._process:
            self._generator = self._fresh()
        return self._generator

    def gaussian_like(self, total: torch.Tensor, std: float) -> torch.Tensor:
        """N(0, std²) of the shape of `total`: drawn in float64, scaled, then cast to its type."""
        drawn = self.generator.standard_normal(tuple(total.shape))
        return torch.from_numpy(np.asarray(drawn * std)).to(device=total.device, dtype=total.dtype)

    def __reduce__(self):
        raise TypeError("a noise source cannot be saved, copied or sent: its stream must never be used twice")

    def __deepcopy__(self, memo):
        return self.__reduce__()

    __copy__ = __reduce__
