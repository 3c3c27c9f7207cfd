"""The baselines on a simulated GPU, as `tests/test_on_a_gpu.py` runs the other parts."""

import pytest
import torch
from pretended_gpu import pretended_gpu
from test_on_a_gpu import (
    CLASSES,
    CUDA,
    DRAWN,
    EVEN,
    SETTLED,
    SHAPE,
    TRIED,
    charge,
    images,
    latents,
    small_generator,
)

from sfumato.baselines.dp_gan import AdversarialState, Discriminator
from sfumato.baselines.private_evolution import RendererGenerator, distance_features, query_votes
from sfumato.baselines.settings import Adversarial, Evolve
from sfumato.dpsgd.run import State

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def test_votes_wait_for_the_card_only_where_expected():
    with pretended_gpu() as card:
        generator = RendererGenerator("glyphs", SHAPE)
        settings = Evolve(population=40, images=40)
        embedding = distance_features(settings, SHAPE, generator, 0).to(CUDA)
        rows = latents(embedding, embedding)
        places = torch.rand(40, rows.latents.shape[1])
        query_votes(charge(rows), places, torch.arange(40) % CLASSES, CLASSES)
    assert card.waiting == {TRIED}


def test_dp_gan_waits_for_the_card_only_where_expected():
    shape = (1, 28, 28)
    settings = Adversarial(steps=2, max_grad_norm=1.0)
    with pretended_gpu() as card:
        judge = Discriminator(28, 1, CLASSES, 8).to(CUDA)
        state = State(judge, settings, 40.0, autocast=True)
        run = AdversarialState(state, small_generator(shape), settings, EVEN, 0)
        drawn = charge(images(shape=shape))
        run.step(drawn)
        run.load(run.tensors())
        run.step(drawn)
        run.result()
    own = {f"baselines/dp_gan.py AdversarialState.{name}" for name in ("generate_batch", "tensors")}
    updates = {"dpsgd/run.py State.tensors", "dpsgd/run.py update"}
    assert card.waiting == {DRAWN} | SETTLED | own | updates
