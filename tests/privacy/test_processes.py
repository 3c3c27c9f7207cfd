"""One charge over several processes: the same release as with one, the noise once, nothing lost where one dies."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import read_card
from sfumato.privacy.odometer import Odometer
from sfumato.settings.data import Data

SCRIPT = Path(__file__).with_name("many_processes.py")


def run(folder: Path, processes: int, *words: str) -> tuple[int, str, dict[int, dict]]:
    """Exit code, output, and what each process found."""
    out = folder / f"out-{processes}-{'-'.join(words)}"
    out.mkdir()
    arguments = [str(SCRIPT), str(folder / "state"), str(folder / "card.json"), str(out), *words]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), *arguments], capture_output=True, text=True, timeout=300
    )
    found = {int(path.stem[5:]): torch.load(path) for path in out.glob("rank-*.pt")}
    return done.returncode, done.stdout + done.stderr, found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same digits and hold-out, in a state directory each."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / "state" / "keys").mkdir(parents=True, mode=0o700)
        (folder / "state" / "keys" / "digits").write_bytes(bytes(range(32)))
        prepare_sensitive(Data(), folder / "state", folder / "card.json", folder / "raw")
        return folder

    return make


@pytest.fixture(scope="module")
def one(folders):
    code, text, found = run(folders("one"), 1)
    assert code == 0, text
    return found[0]


@pytest.fixture(scope="module")
def several(folders):
    folder = folders("several")
    code, text, found = run(folder, 3)
    assert code == 0 and len(found) == 3, text
    return found, Odometer(folder / "state", read_card(folder / "card.json").dataset_id)


def test_queries_release_what_one_process_releases(one, several):
    found, _ = several
    for name in ("count", "frequency"):
        assert torch.allclose(found[0][name], one[name], atol=1e-5), name
        assert all(torch.equal(found[0][name], other[name]) for other in found.values()), "all know what was released"


def test_the_weights_after_dp_sgd_are_those_of_one_process(one, several):
    found, _ = several
    for name in (name for name in one if name.startswith("weights.")):
        assert torch.allclose(found[0][name], one[name], atol=1e-5), name
        assert all(torch.equal(found[0][name], other[name]) for other in found.values())


def test_noise_is_added_once(several):
    """False-alarm rate 1e-6: the variance of 20 000 Gaussians is within 5 standard errors; noise of two is at 100."""
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
    assert [record["stage"] for record in odometer.opened()] == ["count", "frequency", "noise", "draws", "finetune"]


def test_a_lost_process_ends_all_and_another_number_of_them_goes_on_with_the_same_charge(folders):
    folder = folders("killed")
    code, text, found = run(folder, 2, "2")
    odometer = Odometer(folder / "state", read_card(folder / "card.json").dataset_id)
    assert code != 0 and not found, text
    assert (len(odometer.opened()) == 1 and not odometer.runs()) or odometer.opened()[0]["stage"] == "finetune"
    code, text, found = run(folder, 3, "-1")
    assert code == 0 and "no further charge" in text, text
    assert len(odometer.opened()) == 1 and len(found) == 3
    steps = [row["step"] for row in json.loads((folder / "out-3--1" / "rank-0.json").read_text())]
    assert steps == [1, 2, 3, 4, 5]
