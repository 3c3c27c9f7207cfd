"""Fixtures that many tests share."""

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import settings

from sfumato.data import prepare
from sfumato.data.images import ImageSet
from sfumato.storage.in_use import until_the_end

# Test files that need more than half a minute of processor time. Two workers run them in this
# order.
LONGEST = [
    *("pipeline", "kills", "stages_on_a_gpu", "on_a_gpu", "recipes", "accountant", "plan"),
    *("two_worlds", "notebooks", "several_labels", "init", "latents", "audit"),
]


# No test may fail only because the machine is busy
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Otherwise, dp-accounting would compute the same binomial coefficients again for each noise
# multiplier
rdp_privacy_accountant._log_comb = functools.cache(rdp_privacy_accountant._log_comb)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Switch off the garbage collector while pytest collects the tests.

    It would take a third of that time, because pytest creates a million objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise, a library would report the remaining objects as leaks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no worker waits at the end for another's long file."""
    place = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(autouse=True)
def environment() -> Iterator[MutableMapping[str, str]]:
    """Yield the environment variables, which a test may change.

    They and the current folder are restored after the test.
    """
    folder = Path.cwd()
    with mock.patch.dict(os.environ):
        yield os.environ
    os.chdir(folder)
    # Release the locks that mark datasets as in use. The end of a process would release them too
    until_the_end.close()


@pytest.fixture(autouse=True)
def one_key(environment: MutableMapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all new datasets of this process the same key.

    With a random key, a split of few images may have no hold-out.
    """

    def secret_key(state: Path, dataset_id: str) -> bytes:
        with mock.patch.object(os, "urandom", lambda size: bytes(range(size))):
            return drawn(state, dataset_id)

    drawn = prepare.secret_key
    monkeypatch.setattr(prepare, "secret_key", secret_key)


@pytest.fixture
def here(tmp_path: Path, environment: MutableMapping[str, str]) -> Path:
    """Make an empty folder the current one, with the state directory in it. Returns the folder."""
    os.chdir(tmp_path)
    environment["SFUMATO_STATE"] = str(tmp_path / "state")
    return tmp_path


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces results of `torch.cuda`, as in `cuda(device_count=2)`."""
    import torch

    def answer(**answers: object) -> None:
        for name, value in answers.items():
            monkeypatch.setattr(
                torch.cuda, name, value if callable(value) else lambda *_, value=value: value
            )

    return answer


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that sets whether the processor has bfloat16 arithmetic."""
    import torch

    return lambda there: monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx512_bf16": there}
    )


@pytest.fixture
def clip_as_one_matrix(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that sets whether rows are clipped as one matrix, as on a GPU."""
    return lambda joint: monkeypatch.setattr("sfumato.dpsgd.clip.one_matrix", lambda device: joint)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a file that was just written as one that no longer changes, so that no test waits."""
    monkeypatch.setattr("sfumato.data.prepare.FRESH", 0.0)


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a package count as not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def expect_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Any], Mapping[str, float]]], None]:
    """Return a function that replaces `expected_seconds`, so that this machine is not timed.

    Its argument is a function that computes the seconds of each stage from the parameters.
    """
    expected = "sfumato.planning.estimate.expected_seconds"
    return lambda seconds: monkeypatch.setattr(expected, lambda params, *_: seconds(params))


@pytest.fixture
def short_judging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the training of an evaluation's own networks, for features and for detection."""
    from sfumato.evaluation import detector, downstream, extractors

    monkeypatch.setattr(downstream, "MIN_STEPS", 2)
    monkeypatch.setattr(extractors, "EPOCHS", 1)
    monkeypatch.setattr(extractors, "DRAWN_PER_CLASS", {"glyphs": 4, "procedural": 4})
    monkeypatch.setattr(detector, "STEPS", 2)


@pytest.fixture(scope="session")
def digits() -> ImageSet:
    """scikit-learn's 1797 digits: (1797, 8, 8, 1) uint8."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return ImageSet(images, bunch.target.astype(np.int64), tuple(str(i) for i in range(10)))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one tiny public model per kind, with the classes zero, one and two.

    The kinds are `tiny_diffusers.KINDS`. Tests must not change the models.
    """
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    # Missing if it was deleted together with `sfumato/text_to_image`
    tiny_diffusers = pytest.importorskip("tiny_diffusers")
    return tiny_diffusers.save_references(tmp_path_factory.mktemp("models"), ("zero", "one", "two"))
