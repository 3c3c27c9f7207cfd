"""One charge over several processes releases the same as in one process.

It adds the noise once, and loses nothing if a process dies.
"""

import math
from pathlib import Path

import pytest
import torch
from joined_processes import run_joined
from many_processes import main
from torch.multiprocessing.spawn import ProcessException

from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import read_card
from sfumato.privacy.odometer import Odometer
from sfumato.settings.data import Data


def run(folder: Path, processes: int, kill: int | None = None) -> dict[int, dict]:
    """Run the program in several processes. Returns the results of each, by its rank."""
    out = folder / f"out-{processes}"
    out.mkdir()
    run_joined(processes, main, folder / "state", folder / "card.json", out, kill)
    return {int(path.stem[5:]): torch.load(path) for path in out.glob("rank-*.pt")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that prepares the digits in a new folder, always with the same hold-out."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / "state" / "keys").mkdir(parents=True, mode=0o700)
        (folder / "state" / "keys" / "digits").write_bytes(bytes(range(32)))
        prepare_sensitive(Data(), folder / "state", folder / "card.json", folder / "raw")
        return folder

    return make


@pytest.fixture(scope="module")
def one(folders):
    return run(folders("one"), 1)[0]


@pytest.fixture(scope="module")
def several(folders):
    folder = folders("several")
    found = run(folder, 3)
    assert len(found) == 3
    return found, Odometer(folder / "state", read_card(folder / "card.json").dataset_id)


def test_all_processes_end_dp_sgd_with_equal_weights(one, several):
    found, _ = several
    for name in ("count", "frequency", *(name for name in one if name.startswith("weights."))):
        assert torch.allclose(found[0][name], one[name], atol=1e-5), name
        assert all(torch.equal(found[0][name], other[name]) for other in found.values()), name


def test_noise_is_added_once(several):
    """The variance of 20 000 Gaussians is within 5 standard errors: false-alarm rate 1e-6.

    If two processes added noise, the variance would be off by 100 standard errors.
    """
    found, _ = several
    noise = found[0]["noise"]
    assert abs(noise.var().item() / 4 - 1) < 5 * math.sqrt(2 / noise.numel())


def test_each_image_of_a_draw_is_seen_by_one_process(one, several):
    found, _ = several
    seen = torch.cat([other["mine"] for other in found.values()])
    assert len(seen) == len(one["mine"]) and all(len(other["mine"]) for other in found.values())
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, one["mine"].tolist()))


def test_one_charge_each_is_journalled(several):
    _, odometer = several
    assert [record["stage"] for record in odometer.opened()] == [
        "count",
        "frequency",
        "noise",
        "draws",
        "finetune",
    ]


def test_a_run_resumes_under_its_charge_with_fewer_processes(folders):
    folder = folders("killed")
    with pytest.raises(ProcessException):
        run(folder, 2, kill=2)
    assert not list(folder.glob("out-2/*"))
    odometer = Odometer(folder / "state", read_card(folder / "card.json").dataset_id)
    assert [record["stage"] for record in odometer.opened()] == ["finetune"]
    found = run(folder, 3, kill=-1)
    assert len(odometer.opened()) == 1 and len(found) == 3
    assert any("no further cost" in line for line in found[0]["said"])
    assert [row["step"] for row in found[0]["log"]] == [1, 2, 3, 4, 5]
