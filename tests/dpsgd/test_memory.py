"""The estimate of memory against what PyTorch's allocator saw, and the chunk that follows from it."""

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from peak_memory import peak_memory
from sfumato.dpsgd.memory import SALIENCY_COPIES, choose_microbatch, estimate
from tiny_diffusers import KINDS, save_references

from sfumato.dpsgd.gradients import clipped_gradient_sum, draw
from sfumato.dpsgd.trainable import candidates, choose_trainable
from sfumato.settings.dpsgd import Finetune, Lora, Saliency
from sfumato.settings.noise_levels import TimestepMixture
from sfumato.settings.training import Model
from sfumato.text_to_image.network import load_latent, outline

CLASSES = ("zero", "one", "two")
UNIFORM = TimestepMixture(weights=(1,), bounds=(0, 1000))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_references(tmp_path_factory.mktemp("models"), CLASSES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("trainable", "chunk", "draws"), [("attention-lora", 8, 1), ("all", 4, 2), ("salient-lora", 2, 4)]
)
def test_the_memory_estimate_is_within_a_quarter_of_what_was_measured(models, kind, trainable, chunk, draws):
    settings = Finetune(trainable=trainable, draws=draws, microbatch_size=chunk, lora=Lora(rank=2))
    told = estimate(outline(Model(directory=str(models / kind)), len(CLASSES)), settings)
    model = load_latent(models / f"{kind}-reference")
    choose_trainable(model, settings, list(candidates(model).values()), 0)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert told.trained == sum(value.numel() for value in parameters.values())
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        latents, labels = torch.zeros(chunk, 4, 8, 8), torch.zeros(chunk, dtype=torch.int64)
        drawn = draw(model, latents, draws, UNIFORM, generator)
        clipped_gradient_sum(model, parameters, latents, labels, drawn, 1.0, chunk)

    assert told.activations + told.gradients == pytest.approx(peak_memory(step), rel=0.25)
    assert told.weights == sum(
        value.numel() * value.element_size() for value in [*model.parameters(), *model.buffers()]
    )


def test_the_chunk_is_what_fits(models):
    settings, model = Saliency(), Model(directory=str(models / "transformer"))
    one = estimate(outline(model, 3), settings, microbatch_size=1).peak
    assert estimate(outline(model, 3), settings, budget=one // 2).chunk == 1
    few, many = (estimate(outline(model, 3), settings, budget=times * one) for times in (6, 100))
    assert 1 < few.chunk < many.chunk == 32 and few.peak <= 6 * one
    assert all(value.device.type == "meta" for value in outline(model, 3).parameters())


def test_a_loaded_network_is_given_what_was_foretold_of_its_outline(models):
    settings, reference = Saliency(), Model(directory=str(models / "transformer"))
    model = load_latent(models / "transformer-reference")
    named = dict(model.named_parameters())
    pool = {name: named[name] for names in candidates(model, settings.candidates).values() for name in names}
    for batch, expected in ((1000.0, 32), (20.0, 8)):
        found = choose_microbatch(model, pool, settings.draws, batch=batch, copies=SALIENCY_COPIES)
        assert (
            found == (estimate(outline(reference, 3), settings, batch).microbatch_size, settings.draws) == (expected, 1)
        )
    assert choose_microbatch(model, pool, 1, batch=1000.0, copies=SALIENCY_COPIES, microbatch_size=3) == (3, 1)
