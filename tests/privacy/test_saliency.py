"""Test the saliency query: its sensitivity on a network with attention, that it opens only one
charge, and how noise changes the norms.
"""

import csv
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import PUBLIC, Case, Recorder, drawn_images, saliency_gradients
from cases import saliency as released
from dpsgd_runs import CLIP, check_clip
from small_network import perturbed
from torch import Tensor

from sfumato.diffusion.unet import UNet, build_unet, load_model
from sfumato.dpsgd import run as dpsgd
from sfumato.dpsgd.gradients import draw
from sfumato.dpsgd.run import step
from sfumato.dpsgd.trainable import candidates, choose_trainable
from sfumato.errors import BudgetError, ConfigError, DataError, SfumatoError
from sfumato.privacy.events import Mechanism
from sfumato.privacy.resolved import QueryPlan
from sfumato.queries.saliency import query_saliency, rank_candidates
from sfumato.release.synthesizer import load_synthesizer
from sfumato.settings.dpsgd import SALIENT, Finetune, Saliency
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model
from sfumato.storage.artifacts import write_empty, writing
from stages import runner

B, N = 4, PUBLIC  # images, public size
ARGUMENTS = {
    "resolution": 8,
    "channels": 1,
    "classes": 10,
    "width": 8,
    "multipliers": (1, 2),
    "attention": (0, 1),
}


def network(seed: int = 0, **more) -> UNet:
    torch.manual_seed(seed)
    return perturbed(build_unet(**{**ARGUMENTS, **more}))


MODEL = network(channels=3, classes=4)


def training(kind: str) -> Finetune:
    steps = {
        "steps": 4,
        "batch": 14,
        "draws": 1,
        "microbatch_size": 8,
        "checkpoint_every": 1,
        "max_grad_norm": 0.1,
    }
    return Finetune(trainable=kind, **steps)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_one_image_moves_the_candidates_sum_by_the_clip(chunk):
    asked = {"microbatch_size": chunk, "max_norm": CLIP}
    case = Case(stage="saliency", query=partial(released, model=MODEL, **asked), bound=CLIP)
    images, labels = drawn_images(B, classes=4, shape=(3, 8, 8))
    (whole,) = case.totals(images, labels)
    assert len(whole) == sum(MODEL.get_parameter(name).numel() for name in candidates(MODEL))
    moved = case.moves(images, labels, range(B))
    # The moves are near the bound; otherwise, the test would be void
    assert min(moved) > 0.95 * CLIP and max(moved) <= CLIP * (1 + 1e-5)


def query(charge, size: int = 4) -> dict[str, Tensor]:
    return query_saliency(charge, saliency_gradients(MODEL, microbatch_size=size))


def test_memory_does_not_grow_with_the_set():
    class Watched(Recorder):
        def agree(self, *given):
            pass

        def batches(self, size, draws=None):
            assert size == 32
            return super().batches(size, draws)

    charge = Watched(*drawn_images(90, classes=4, shape=(3, 8, 8)))
    query(charge, size=8)
    assert all(value.requires_grad for value in MODEL.parameters())
    assert charge.asked[0][0].grad_fn is None  # no autograd graph, which would keep every batch


def test_the_vectors_are_one_release_over_the_public_size():
    charge = Recorder(*drawn_images(B, classes=4, shape=(3, 8, 8)))
    vectors = query(charge)
    ((total, _, _),) = charge.asked
    assert list(vectors) == candidates(MODEL)
    torch.testing.assert_close(torch.cat(list(vectors.values())), total / N)
    assert [len(vector) for vector in vectors.values()] == [
        MODEL.get_parameter(name).numel() for name in vectors
    ]


def test_the_draws_of_the_query_are_secret():
    answers = []
    for _ in range(2):
        torch.manual_seed(0)  # a public seed must not fix the draws
        vectors = query(Recorder(*drawn_images(B, classes=4, shape=(3, 8, 8))))
        answers.append(torch.cat(list(vectors.values())))
    assert not torch.equal(*answers)


def test_the_whole_query_is_one_gaussian_of_its_noise(owner):
    # The last layer of a new network is zero, so no gradient reaches attention, and the release is
    # only noise. For its 2 688 entries, 7 % of the standard deviation are five standard errors,
    # with a false-alarm rate below 1e-6. The sum of the debiased squares has the same tolerance.
    torch.manual_seed(0)
    model = build_unet(**ARGUMENTS)
    mechanism = Mechanism(noise_multiplier=3.0)
    charge = owner.open(mechanism, stage="saliency", max_norm=0.5)
    gradients = saliency_gradients(model, max_norm=0.5)
    vectors = query_saliency(charge, gradients)
    noise = torch.cat(list(vectors.values()))
    std = 3.0 * 0.5 / N
    assert float(noise.std()) == pytest.approx(std, rel=0.07)
    rows = rank_candidates(vectors, std).itertuples()
    assert abs(sum(row.debiased for row in rows)) < 5 * math.sqrt(2 * len(noise)) * std**2
    with pytest.raises(BudgetError, match="new charge"):
        query_saliency(charge, gradients)
    (record,) = owner.odometer.opened()
    assert Mechanism.from_json(record["event"]) == mechanism


def test_the_debiased_squared_norm_is_unbiased():
    # Gaussian noise on known vectors, 500 trials, fixed seed. The tolerance of the mean is five
    # standard errors. Under another seed, the false-alarm rate is below 1e-6.
    std = 0.3
    trials = 500
    generator = torch.Generator().manual_seed(0)
    truth = {
        "small": 0.3 * torch.randn(12, generator=generator).double(),
        "large": 0.05 * torch.randn(900, generator=generator).double(),
    }
    found, raw = ({name: [] for name in truth} for _ in range(2))
    for _ in range(trials):
        noise = {
            n: std * torch.randn(len(v), generator=generator, dtype=torch.float64)
            for n, v in truth.items()
        }
        for row in rank_candidates(
            {name: truth[name] + noise[name] for name in truth}, std
        ).itertuples():
            found[row.name].append(row.debiased)
            raw[row.name].append(row.raw_norm**2)
    for name, vector in truth.items():
        square = float(vector.square().sum())
        error = math.sqrt((2 * len(vector) * std**4 + 4 * std**2 * square) / trials)
        assert sum(found[name]) / trials == pytest.approx(square, abs=5 * error)
        assert sum(raw[name]) / trials > square + 20 * error  # the raw square is biased


def test_the_debiased_rank_ignores_noise_of_large_matrices():
    generator = torch.Generator().manual_seed(0)
    noisy = {
        "large, no signal": torch.randn(10_000, generator=generator),
        "small, signal": torch.randn(16, generator=generator) + 30,
    }
    # The small matrix has the larger raw norm: 120, against 101 for the large one
    assert [row.raw_rank for row in rank_candidates(noisy, 1.0).itertuples()] == [2, 1]
    noisy["large, no signal"] = torch.randn(40_000, generator=generator)
    rows = list(rank_candidates(noisy, 1.0).itertuples())
    assert [row.raw_rank for row in rows] == [1, 2]
    assert [row.rank for row in rows] == [2, 1]


@pytest.mark.parametrize("kind", ["attention-lora", "salient-lora"])
def test_one_image_moves_the_adapter_gradients_by_the_clip(kind):
    model = network(channels=3, classes=4)
    choose_trainable(model, training(kind), candidates(model)[::4], 0)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    images, labels = drawn_images(B, classes=4, shape=(3, 8, 8))
    drawn = draw(model, images, 4, Saliency().noise_levels, torch.Generator().manual_seed(0))
    check_clip(model, parameters, (images, labels, drawn), CLIP, 3)


@pytest.fixture
def desk(owner, here, monkeypatch):
    """Write a project with a pretrained network.

    Returns a function that runs `saliency` or `finetune` with given settings and mechanism.
    """
    artifacts = here / "artifacts"
    home = here / "data" / "sensitive"
    (artifacts / "plan").mkdir(parents=True)
    home.mkdir(parents=True)
    (home / "card.json").write_bytes((here / "card.json").read_bytes())
    permission = {"delta": 1e-5, "lifetime_epsilon": "unlimited"}
    (artifacts / "plan" / "permission.json").write_text(json.dumps(permission))
    with writing(artifacts / "pretrain", "pretrain") as directory:
        network().save(directory)
    write_empty(artifacts / "count", "count")
    card = owner.card
    known = {"size_hint": 1400, "seed": 3, "model": Model(), "delta": 1e-5, "enabled": True}
    known |= {"dataset_id": card.dataset_id, "shape": card.shape, "classes": card.classes}

    def run(stage: str, settings, mechanism: Mechanism) -> None:
        plan = QueryPlan(
            stage=stage, settings=settings, digest=str(settings), mechanism=mechanism, **known
        )
        monkeypatch.setattr(runner, "load_plan", lambda *rest: plan)
        lineage = {stage: {"plan": str(settings)}}
        (artifacts / "plan" / "lineage.json").write_text(json.dumps(lineage))
        runner.run_stage(STAGES[stage])

    run.artifacts = artifacts
    return run


ONCE = Mechanism(noise_multiplier=0.5)
STEPS = Mechanism(noise_multiplier=1.0, sample_rate=0.01, uses=4)


def test_the_release_chooses_what_is_trained(desk, owner, monkeypatch):
    desk("saliency", Saliency(microbatch_size=32), ONCE)
    directory = desk.artifacts / "saliency"
    choice = json.loads((directory / "saliency.json").read_text())
    order = [name for (name,) in choice["ranked"]["debiased"]]
    # By default, 30 % of the 15 matrices are trained. They are listed in the model's order.
    selected = sorted(order[:5], key=candidates(network()).index)
    table = list(csv.DictReader((directory / "saliency.csv").read_text().splitlines()))
    assert sorted(path.name for path in directory.iterdir()) == [
        "privacy.json",
        "saliency.csv",
        "saliency.json",
    ]
    assert list(table[0]) == ["matrix", "size", "raw_norm", "debiased", "rank", "raw_rank"]
    assert [f"{row['matrix']}.weight" for row in table] == candidates(network())
    assert [
        f"{row['matrix']}.weight" for row in sorted(table, key=lambda row: int(row["rank"]))
    ] == order
    assert choice["noise_std"] == 0.5 / 1400 and choice["candidates"] == "qkv"
    for row in table:
        expected = float(row["raw_norm"]) ** 2 - int(row["size"]) * choice["noise_std"] ** 2
        assert float(row["debiased"]) == pytest.approx(expected, rel=1e-3, abs=1e-9)

    stepped = []

    def killed(state, charge):
        stepped.append(None)
        if len(stepped) == 3:
            raise KeyboardInterrupt
        return step(state, charge)

    monkeypatch.setattr(dpsgd, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        desk("finetune", training("salient-lora"), STEPS)
    desk("finetune", training("salient-lora"), STEPS)
    assert len(stepped) == 5  # two steps, the third, which was killed, then the last two
    opened = owner.odometer.opened()
    # Resumed: no further charge
    assert [record["stage"] for record in opened] == ["saliency", "finetune"]
    finetune = desk.artifacts / "finetune"
    pretrain = desk.artifacts / "pretrain"
    base = load_model(pretrain)
    log = {"log.csv", "privacy.json", "trainable.json"}

    def changed(pretrain: Path) -> set[str]:
        result = load_synthesizer(finetune, pretrain)
        return {
            name
            for name, value in base.named_parameters()
            if not torch.equal(value, result.get_parameter(name))
        }

    assert {path.name for path in finetune.iterdir()} == {
        "adapter.json",
        "adapter.safetensors",
    } | log
    assert json.loads((finetune / "adapter.json").read_text())["matrices"] == selected
    said = json.loads((finetune / "trainable.json").read_text())
    assert said["set"] == "salient-lora"
    assert said["trained"] == [
        name.replace(".weight", part) for name in selected for part in (".A", ".B")
    ]
    shapes = [network().get_parameter(name).shape for name in selected]
    assert said["parameters"] == sum(4 * sum(shape) for shape in shapes)
    assert len((finetune / "log.csv").read_text().splitlines()) == 5
    paid = json.loads((finetune / "privacy.json").read_text())["records"]
    assert set(paid) == {record["id"] for record in opened}  # records of both queries
    assert changed(pretrain) == set(selected)

    # Without adapters, all weights are written, and the adapter's files are removed
    desk("finetune", training("salient"), STEPS)
    assert {path.name for path in finetune.iterdir()} == {
        "config.json",
        "weights.safetensors",
    } | log
    assert changed(pretrain) == set(selected)


def test_a_lost_selection_is_never_written(desk, monkeypatch):
    def idle(state, charge):
        list(charge.batches(9))
        charge.release(torch.zeros(state.size), state.config.max_grad_norm)
        return {"step": charge.used, "learning_rate": 1.0, "noised_gradient_norm": 0.0}

    monkeypatch.setattr(dpsgd, "step", idle)
    with pytest.raises(SfumatoError, match="trained parameters did not change"):
        desk("finetune", training("attention-lora"), STEPS)
    assert not (desk.artifacts / "finetune").exists()


@pytest.mark.parametrize("kind", SALIENT)
def test_a_salient_set_without_saliency_is_refused_early(desk, owner, kind):
    with pytest.raises(DataError, match="stage saliency"):
        desk("finetune", training(kind), STEPS)
    write_empty(desk.artifacts / "saliency", "saliency")
    with pytest.raises(ConfigError, match="add saliency to `run`"):
        desk("finetune", training(kind), STEPS)
    assert owner.odometer.opened() == []
