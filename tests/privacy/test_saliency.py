"""The saliency query: its sensitivity on a network with attention, its one charge, what noise does to its norms."""

import csv
import json
import math

import pytest
import torch
from small_network import perturbed
from torch import Tensor

from sfumato.diffusion.unet import UNet, load_model
from sfumato.dpsgd import run as dpsgd
from sfumato.dpsgd.gradients import draw, per_image_gradients
from sfumato.dpsgd.run import State, step
from sfumato.dpsgd.trainable import candidates, choose_trainable, flat
from sfumato.errors import BudgetError, ConfigError, DataError, SfumatoError
from sfumato.privacy.events import Mechanism
from sfumato.privacy.resolved import QueryPlan
from sfumato.queries import saliency
from sfumato.queries.saliency import query_saliency, rank_candidates
from sfumato.release.synthesizer import load_synthesizer
from sfumato.settings.dpsgd import SALIENT, Finetune, Lora, Saliency
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model
from sfumato.storage.artifacts import write_empty, writing
from stages import runner

B, C, N = 6, 1e-4, 50.0  # images, clip (far below the norms: every row is clipped), public size
ARGUMENTS = {"resolution": 8, "channels": 1, "classes": 10, "width": 8, "multipliers": (1, 2), "attention": (0, 1)}


def network(seed: int = 0, **more) -> UNet:
    torch.manual_seed(seed)
    return perturbed(UNet(**{**ARGUMENTS, **more}))


MODEL = network(channels=3, classes=4)


class Recorder:
    """A charge over a few images that keeps what is released; it knows which images the last batch held."""

    def __init__(self, images: Tensor, labels: Tensor, index: Tensor, noise: float = 0.0) -> None:
        self.images, self.labels, self.index, self.noise = images, labels, index, noise
        self.released: list[tuple[Tensor, float]] = []
        self.current, self.largest = index[:0], 0

    def batches(self, size: int, draws: int = 1):
        for part in self.index.split(size) if len(self.index) else ():
            self.current, self.largest = part, max(self.largest, len(part))
            yield self.images[part], self.labels[part]

    def release(self, total: Tensor, max_norm: float, integer: bool = False) -> Tensor:
        self.released.append((total.clone(), max_norm))
        return total + self.noise


@pytest.fixture
def total(monkeypatch):
    """The sum over the images of `index` before the noise, each image with draws of its own whoever else is there."""

    def total(settings: Saliency, index: Tensor, spoil=None, candidate="qkv") -> Tensor:
        generator = torch.Generator().manual_seed(0)
        images, labels = torch.rand(B, 3, 8, 8, generator=generator), torch.randint(4, (B,), generator=generator)
        drawn = draw(MODEL, images, settings.draws, settings.noise_levels, generator, label_dropout=0.2)
        if spoil:
            spoil(images, labels)
        charge = Recorder(images, labels, index)
        monkeypatch.setattr(saliency, "draw", lambda *rest, **more: drawn.rows(charge.current))
        query_saliency(charge, MODEL, candidates(MODEL, candidate), settings, N)
        ((released, max_norm),) = charge.released  # once
        assert max_norm == settings.max_norm
        return released

    return total


@pytest.mark.parametrize(("draws", "chunk"), [(1, 1), (4, 4), (1, 8), (4, 1), (1, 4)])
def test_one_image_moves_the_sum_of_all_candidates_by_at_most_the_clip(total, draws, chunk):
    settings = Saliency(max_norm=C, draws=draws, microbatch_size=chunk)
    everything = torch.arange(B)
    whole = total(settings, everything)
    assert whole.shape == (sum(MODEL.get_parameter(name).numel() for name in flat(candidates(MODEL))),)
    for i in range(B):
        moved = float(torch.linalg.vector_norm(whole - total(settings, everything[everything != i])))
        assert 0.95 * C < moved <= C * (1 + 1e-5)  # (near the bound, or the test would say nothing)


@pytest.mark.parametrize("candidate", ["qkvo", "matrices", "layers"])
def test_the_bound_is_that_of_all_candidates_together_whatever_they_are(total, candidate):
    settings = Saliency(max_norm=C, microbatch_size=4)
    everything = torch.arange(B)
    whole = total(settings, everything, candidate=candidate)
    assert len(whole) == sum(MODEL.get_parameter(name).numel() for name in flat(candidates(MODEL, candidate)))
    for i in range(2):
        moved = float(
            torch.linalg.vector_norm(whole - total(settings, everything[everything != i], candidate=candidate))
        )
        assert 0.95 * C < moved <= C * (1 + 1e-5)


def poison(value: float):
    def spoil(images: Tensor, labels: Tensor) -> None:
        images[2, 0, 3, 3] = value

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_non_finite_image_counts_for_nothing(total, value):
    settings = Saliency(max_norm=C, draws=2, microbatch_size=4)
    everything = torch.arange(B)
    whole = total(settings, everything, poison(value))
    assert whole.isfinite().all()
    assert torch.linalg.vector_norm(whole - total(settings, everything[everything != 2])) <= 1e-4 * C


@pytest.mark.parametrize("label", [-1, 4, 10**6])
def test_a_label_out_of_range_moves_the_sum_by_at_most_the_clip(total, label):
    settings = Saliency(max_norm=C, microbatch_size=4)

    def spoil(images: Tensor, labels: Tensor) -> None:
        labels[2] = label

    everything = torch.arange(B)
    moved = torch.linalg.vector_norm(total(settings, everything, spoil) - total(settings, everything[everything != 2]))
    assert moved <= C * (1 + 1e-5)


def test_an_empty_set_is_a_release_of_zeros(total):
    assert not total(Saliency(), torch.arange(0)).any()


def test_memory_does_not_grow_with_the_set():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(90, 3, 8, 8, generator=generator), torch.randint(4, (90,), generator=generator)
    charge = Recorder(images, labels, torch.arange(90))
    query_saliency(charge, MODEL, candidates(MODEL), Saliency(microbatch_size=8), N)
    assert charge.largest == 32
    assert all(value.requires_grad for value in MODEL.parameters())
    assert charge.released[0][0].grad_fn is None  # no graph that would hold every batch


def test_the_vectors_are_the_one_release_cut_up_over_the_public_size(total):
    images, labels = torch.rand(B, 3, 8, 8), torch.randint(4, (B,))
    for candidate in ("qkv", "layers"):
        groups = candidates(MODEL, candidate)
        charge = Recorder(images, labels, torch.arange(B), noise=0.25)
        vectors = query_saliency(charge, MODEL, groups, Saliency(microbatch_size=4), N)
        ((released, _),) = charge.released
        assert list(vectors) == list(groups)
        torch.testing.assert_close(torch.cat(list(vectors.values())), (released + 0.25) / N)
        assert [len(vector) for vector in vectors.values()] == [
            sum(MODEL.get_parameter(name).numel() for name in names) for names in groups.values()
        ]


def test_the_draws_of_the_query_are_secret():
    images, labels = torch.rand(B, 3, 8, 8), torch.randint(4, (B,))
    answers = []
    for _ in range(2):
        torch.manual_seed(0)  # nothing public fixes them
        vectors = query_saliency(
            Recorder(images, labels, torch.arange(B)), MODEL, candidates(MODEL), Saliency(microbatch_size=4), N
        )
        answers.append(torch.cat(list(vectors.values())))
    assert not torch.equal(*answers)


def test_the_whole_query_is_one_gaussian_and_its_noise_has_the_size_it_claims(owner):
    # A fresh network ends in zeros, so no gradient reaches attention: what is released is the noise alone.
    # 2 688 entries; the standard deviation within 7 %, five standard errors: false alarm below 1e-6. The same for the
    # sum of the debiased squares.
    torch.manual_seed(0)
    model = UNet(**ARGUMENTS)
    mechanism = Mechanism(noise_multiplier=3.0)
    charge = owner.open(mechanism, stage="saliency", max_norm=0.5)
    vectors = query_saliency(charge, model, candidates(model), Saliency(max_norm=0.5), 1000.0)
    noise = torch.cat(list(vectors.values()))
    std = 3.0 * 0.5 / 1000
    assert float(noise.std()) == pytest.approx(std, rel=0.07)
    rows = rank_candidates(vectors, std)
    assert abs(sum(row.debiased for row in rows)) < 5 * math.sqrt(2 * len(noise)) * std**2
    with pytest.raises(BudgetError, match="new charge"):
        query_saliency(charge, model, candidates(model), Saliency(), 1000.0)
    (record,) = owner.odometer.opened()
    assert Mechanism.from_json(record["event"]) == mechanism


def test_the_debiased_squared_norm_is_unbiased():
    # Gaussian noise on known vectors, 2000 trials, fixed seed; five standard errors of the mean: under another seed, a
    # false alarm below 1e-6.
    std, trials = 0.3, 2000
    generator = torch.Generator().manual_seed(0)
    truth = {
        "small": torch.randn(12, generator=generator).double(),
        "large": 0.05 * torch.randn(900, generator=generator).double(),
    }
    found: dict[str, list[float]] = {name: [] for name in truth}
    raw: dict[str, list[float]] = {name: [] for name in truth}
    for _ in range(trials):
        noisy = {
            name: vector + std * torch.randn(len(vector), generator=generator, dtype=torch.float64)
            for name, vector in truth.items()
        }
        for row in rank_candidates(noisy, std):
            found[row.name].append(row.debiased)
            raw[row.name].append(row.raw_norm**2)
    for name, vector in truth.items():
        square = float(vector.square().sum())
        error = math.sqrt((2 * len(vector) * std**4 + 4 * std**2 * square) / trials)
        assert sum(found[name]) / trials == pytest.approx(square, abs=5 * error)
        assert sum(raw[name]) / trials > square + 20 * error  # the raw one is not


def test_noise_alone_lifts_a_large_matrix_and_the_debiased_rank_does_not_fall_for_it():
    generator = torch.Generator().manual_seed(0)
    noisy = {
        "large, no signal": torch.randn(10_000, generator=generator),
        "small, signal": torch.randn(16, generator=generator) + 30,
    }
    assert [row.raw_rank for row in rank_candidates(noisy, 1.0)] == [2, 1]  # 120 against 101: only just
    noisy["large, no signal"] = torch.randn(40_000, generator=generator)
    rows = rank_candidates(noisy, 1.0)
    assert [row.raw_rank for row in rows] == [1, 2]
    assert [row.rank for row in rows] == [2, 1]


def test_candidates_are_ranked_by_their_norms():
    released = {f"m{i}": torch.full((4,), float((7 * i) % 10)) for i in range(10)}
    rows = rank_candidates(released, 0.01)
    assert [row.name for row in rows] == list(released)
    by_value = sorted(released, key=lambda name: -float(released[name][0]))
    assert [by_value[row.rank - 1] for row in rows] == [by_value[row.raw_rank - 1] for row in rows] == list(released)


def test_adapters_cost_what_full_training_costs(owner):
    mechanism = Mechanism(noise_multiplier=2.0, sample_rate=0.02, uses=2)
    events = []
    for kind in ("all", "attention-lora"):
        model = network()
        settings = Finetune(trainable=kind, lora=Lora(rank=2), draws=1, microbatch_size=8, max_grad_norm=1.0)
        choose_trainable(model, settings, None, 0)
        charge = owner.open(mechanism, plan=kind, stage="finetune")
        run = State(model, settings, public_batch=30.0, autocast=False)
        while charge.used < charge.uses:
            step(run, charge)
        charge.close()
        events.append(charge.record["event"])
    assert events[0] == events[1]


@pytest.mark.parametrize("kind", ["attention-lora", "salient-lora"])
def test_one_image_moves_the_sum_of_adapter_gradients_by_at_most_the_clip(kind):
    model = network(channels=3, classes=4)
    choose_trainable(
        model,
        Finetune(trainable=kind, lora=Lora(rank=2)),
        [names for names in list(candidates(model).values())[::4]],
        0,
    )
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(B, 3, 8, 8, generator=generator), torch.randint(4, (B,), generator=generator)
    drawn = draw(model, images, 4, Saliency().noise_levels, generator)
    rows = per_image_gradients(model, parameters, images, labels, drawn)
    assert torch.cat([part.flatten(1) for part in rows.values()], dim=1).norm(dim=1).min() > 2 * C
    whole = saliency.clipped_gradient_sum(model, parameters, images, labels, drawn, C, 4)
    for i in range(B):
        rest = torch.arange(B) != i
        without = saliency.clipped_gradient_sum(model, parameters, images[rest], labels[rest], drawn.rows(rest), C, 4)
        assert 0.95 * C < float(torch.linalg.vector_norm(whole - without)) <= C * (1 + 1e-5)


@pytest.fixture
def desk(owner, tmp_path, monkeypatch):
    """A repository with a warmed-up network, and the two stages on plans made here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_STATE", str(owner.state))
    artifacts = tmp_path / "artifacts"
    (artifacts / "plan").mkdir(parents=True)
    permission = {"delta": 1e-5, "lifetime_epsilon": "unlimited"}
    (artifacts / "plan" / "permission.json").write_text(json.dumps(permission))
    with writing(artifacts / "pretrain", "pretrain") as directory:
        network().save(directory)
    write_empty(artifacts / "count", "count")
    public = {
        "dataset_id": owner.card.dataset_id,
        "shape": owner.card.shape,
        "classes": owner.card.classes,
        "size_hint": 1400,
        "seed": 3,
    }

    def run(stage: str, settings, mechanism: Mechanism) -> None:
        plan = QueryPlan(
            stage=stage,
            enabled=True,
            settings=settings,
            digest=str(settings),
            mechanism=mechanism,
            model=Model(),
            delta=1e-5,
            **public,
        )
        monkeypatch.setattr(runner, "load_plan", lambda *rest: plan)
        lineage = {stage: {"plan": str(settings)}}
        (artifacts / "plan" / "lineage.json").write_text(json.dumps(lineage))
        runner.run_stage(STAGES[stage], card=tmp_path / "card.json")

    run.artifacts = artifacts
    return run


ONCE, STEPS = Mechanism(noise_multiplier=0.5), Mechanism(noise_multiplier=1.0, sample_rate=0.01, uses=4)


def training(kind: str) -> Finetune:
    return Finetune(
        trainable=kind,
        steps=4,
        batch=14,
        draws=1,
        microbatch_size=8,
        lora=Lora(rank=2),
        checkpoint_every=1,
        max_grad_norm=0.1,
    )


def test_the_release_chooses_what_is_trained(desk, owner, monkeypatch):
    desk("saliency", Saliency(microbatch_size=32), ONCE)
    directory = desk.artifacts / "saliency"
    choice = json.loads((directory / "saliency.json").read_text())
    order = [name for (name,) in choice["ranked"]["debiased"]]
    selected = sorted(
        order[:5], key=flat(candidates(network())).index
    )  # 30 % of 15, as the default says, in the order of the model
    table = list(csv.DictReader((directory / "saliency.csv").read_text().splitlines()))
    assert sorted(path.name for path in directory.iterdir()) == ["privacy.json", "saliency.csv", "saliency.json"]
    assert list(table[0]) == ["matrix", "size", "raw_norm", "debiased", "rank", "raw_rank"]
    assert [f"{row['matrix']}.weight" for row in table] == flat(candidates(network()))
    assert [f"{row['matrix']}.weight" for row in sorted(table, key=lambda row: int(row["rank"]))] == order
    assert choice["noise_std"] == 0.5 / 1400 and choice["candidates"] == "qkv"
    for row in table:
        assert float(row["debiased"]) == pytest.approx(
            float(row["raw_norm"]) ** 2 - int(row["size"]) * choice["noise_std"] ** 2, rel=1e-3, abs=1e-9
        )

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
    assert len(stepped) == 5  # two steps, the kill, and the two that were left
    opened = owner.odometer.opened()
    assert [record["stage"] for record in opened] == ["saliency", "finetune"]  # resumed: no further charge
    finetune, pretrain = desk.artifacts / "finetune", desk.artifacts / "pretrain"
    assert sorted(path.name for path in finetune.iterdir()) == [
        "adapter.json",
        "adapter.safetensors",
        "log.csv",
        "privacy.json",
        "trainable.json",
    ]
    assert json.loads((finetune / "adapter.json").read_text())["matrices"] == selected
    said = json.loads((finetune / "trainable.json").read_text())
    assert said["set"] == "salient-lora"
    assert said["trained"] == [name.replace(".weight", part) for name in selected for part in (".A", ".B")]
    shapes = [network().get_parameter(name).shape for name in selected]
    assert said["parameters"] == sum(2 * sum(shape) for shape in shapes)
    assert len((finetune / "log.csv").read_text().splitlines()) == 5
    assert set(json.loads((finetune / "privacy.json").read_text())["records"]) == {
        record["id"] for record in opened
    }  # both are paid for
    base, result = load_model(pretrain), load_synthesizer(finetune, pretrain)
    assert {
        name for name, value in base.named_parameters() if not torch.equal(value, result.get_parameter(name))
    } == set(selected)

    desk("finetune", training("salient"), STEPS)  # in full: weights, and no adapter left beside them
    assert {path.name for path in finetune.iterdir()} == {
        "config.json",
        "weights.safetensors",
        "log.csv",
        "privacy.json",
        "trainable.json",
    }
    result = load_synthesizer(finetune, pretrain)
    assert {
        name for name, value in base.named_parameters() if not torch.equal(value, result.get_parameter(name))
    } == set(selected)

    desk("finetune", training("noisy"), STEPS)  # its base is not that of pretrain: weights of its own
    result = load_synthesizer(finetune, desk.artifacts / "nowhere")
    assert {
        name for name, value in base.named_parameters() if not torch.equal(value, result.get_parameter(name))
    } == set(order)


def test_a_lost_selection_is_never_written(desk, monkeypatch):
    def idle(state, charge):
        list(charge.batches(9))
        charge.release(torch.zeros(state.size), state.config.max_grad_norm)
        return {"step": charge.used, "learning_rate": 1.0, "noised_gradient_norm": 0.0}

    monkeypatch.setattr(dpsgd, "step", idle)
    with pytest.raises(SfumatoError, match="was to be trained and did not change"):
        desk("finetune", training("attention-lora"), STEPS)
    assert not (desk.artifacts / "finetune").exists()


@pytest.mark.parametrize("kind", SALIENT)
def test_a_salient_set_without_saliency_is_refused_before_it_spends(desk, owner, kind):
    with pytest.raises(DataError, match="stage saliency"):
        desk("finetune", training(kind), STEPS)
    write_empty(desk.artifacts / "saliency", "saliency")
    with pytest.raises(ConfigError, match="add saliency to run"):
        desk("finetune", training(kind), STEPS)
    assert owner.odometer.opened() == []
