"""Guarantees with public text-to-image models: what one image changes, what a latent depends on,
and who may draw it.
"""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from cases import Case, seeded_draws
from cases import saliency as released
from dpsgd_runs import check_clip, check_rows
from test_groups import opened

from sfumato.data import store
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import (
    LATENTS,
    LatentSet,
    have_latents,
    latents_directory,
    latents_key,
    load_latents,
    load_prepared,
    read_card,
    write_latents,
)
from sfumato.dpsgd.gradients import Microbatch, clipped_gradient_sum, draw
from sfumato.dpsgd.trainable import choose_trainable
from sfumato.errors import DataError
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import NoiseSource
from sfumato.settings.data import Data
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import TimestepMixture

KINDS = ("unet-epsilon", "unet-v", "transformer")
CLASSES = ("zero", "one", "two")
UNIFORM = TimestepMixture(weights=(1,), bounds=(0, 1000))
# B images. The clip C is far below the norms of the gradients, so every row is clipped
B, C = 3, 1e-5


@cache
def network(models, kind: str, trainable: str = "attention-lora"):
    """Load a model, and perturb its trained weights. Returns the model and these weights.

    Tests must not change them.
    """
    from sfumato.text_to_image.network import load_latent

    model = load_latent(models / f"{kind}-reference")
    choose_trainable(model, Finetune(trainable=trainable), None, 0)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in parameters.values():
            value.add_(
                (0.3 if trainable.endswith("lora") else 0.02)
                * torch.randn(value.shape, generator=generator)
            )
    return model, parameters


def batch(model, draws: int, images: int = B):
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(images, 4, 8, 8, generator=generator)
    labels = torch.tensor([0, 1, 2, -1, 10**6])[-images:]
    return latents, labels, draw(model, latents, draws, UNIFORM, generator, label_dropout=0.2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainable", ["attention-lora", "all"])
def test_per_image_gradients_equal_a_plain_loops(models, kind, trainable):
    model, parameters = network(models, kind, trainable)
    latents, labels, drawn = batch(model, 2, images=5)
    known = torch.tensor([0, 1, 2, 3, 3])  # 3 is out of range, and means no label
    shown = torch.where(drawn.drop, 3, known[:, None])
    check_rows(model, parameters, (latents, labels, drawn), lambda i: shown[i], error=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("trainable", "draws", "chunk", "autocast"),
    [
        *(("attention-lora", draws, chunk, False) for draws, chunk in ((1, 1), (1, 8), (3, 2))),
        *((trainable, 1, 2, True) for trainable in ("attention-lora", "attention", "all")),
    ],
)
def test_one_image_moves_the_gradient_sum_by_the_clip(
    models, kind, trainable, draws, chunk, autocast
):
    model, parameters = network(models, kind, trainable)
    # The relative error of bfloat16 depends on the images. With these five, it stays below 0.2
    drawn = batch(model, draws, images=5 if autocast else B)
    half = check_clip(model, parameters, drawn, C, chunk, autocast)
    if autocast:  # nearly the same sum
        whole = clipped_gradient_sum(model, parameters, *drawn, C, Microbatch(chunk))
        assert 0 < float((whole - half).norm() / whole.norm()) < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_one_image_moves_the_saliency_sum_by_at_most_the_clip(models, kind):
    model, _ = network(models, kind, "all")

    def timesteps(*given, **more):
        drawn = seeded_draws(*given, **more)
        return replace(drawn, levels=(100 * drawn.levels).long().clamp(max=999))

    query = partial(released, draw=timesteps, model=model, max_norm=C, microbatch_size=2)
    moved = Case(stage="saliency", query=query, bound=C).moves(*batch(model, 1)[:2], range(B))
    assert min(moved) > 0.95 * C and max(moved) <= C * (1 + 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_latent_that_is_not_finite_counts_for_nothing(models, kind, value):
    model, parameters = network(models, kind)
    latents, labels, drawn = batch(model, 1)
    latents[0, 0, 3, 3] = value
    whole = clipped_gradient_sum(model, parameters, latents, labels, drawn, C, Microbatch(2))
    rest = torch.arange(B) != 0
    assert whole.isfinite().all()
    if value != 1e30:  # with 1e30, the gradient may stay finite, and is then clipped
        without = clipped_gradient_sum(
            model, parameters, latents[rest], labels[rest], drawn.rows(rest), C, Microbatch(2)
        )
        assert torch.linalg.vector_norm(whole - without) <= 1e-4 * C


# ---- latents


def encode(images):
    """Encode each image by the means of its four quarters, divided by 1000."""
    return torch.nn.functional.avg_pool2d(images, 4).expand(-1, 2, -1, -1) / 1000


@pytest.fixture
def encoded(owner):
    owner.key = latents_key(owner.card, "some encoder")
    write_latents(owner.state, owner.card, owner.key, encode)
    return owner


def test_latents_are_private_and_of_all_images_in_their_order(encoded):
    images = load_prepared(encoded.state, encoded.card, "sensitive")
    latents = load_latents(encoded.state, encoded.card, encoded.key)
    assert len(latents) == len(images) and latents.latents.dtype == np.float16
    index = np.array([5, 0, len(images) - 1])
    torch.testing.assert_close(
        latents.batch(index)[0], encode(images.batch(index)[0]).half().float()
    )
    assert torch.equal(latents.batch(index)[1], images.batch(index)[1])
    assert latents.batch(index[:0])[0].shape == (0, 2, 2, 2)
    home = latents_directory(encoded.state, encoded.card, encoded.key)
    assert home.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in home.iterdir()} == {0o600}


def test_the_charge_draws_the_same_images_and_record(encoded):
    mechanism = Mechanism(noise_multiplier=2.0, sample_rate=0.2, uses=1)
    drawn = []
    records = []
    own = ("id", "plan", "settings", "time")
    for latents in (None, encoded.key):
        charge = encoded.open(
            mechanism, plan=f"plan {latents}", noise=NoiseSource(seed=7), latents=latents
        )
        drawn.append([torch.cat(parts) for parts in zip(*charge.batches(size=100), strict=True)])
        records.append({key: value for key, value in charge.record.items() if key not in own})
    (images, labels), (latents, same) = drawn
    assert torch.equal(labels, same) and records[0] == records[1] and 0 < len(labels) < 1000
    torch.testing.assert_close(latents, encode(images).half().float())


def test_missing_or_foreign_latents_are_refused_early(encoded, tmp_path):
    with pytest.raises(DataError, match="latents.npy is missing"):
        encoded.open(latents="0" * 32)
    home = latents_directory(encoded.state, encoded.card, encoded.key)
    whole = np.load(home / LATENTS)
    np.save(home / LATENTS, whole[:-1])
    with pytest.raises(DataError, match="do not belong to the images"):
        encoded.open(latents=encoded.key)
    assert encoded.odometer.opened() == []


def test_changed_images_or_encoders_have_their_own_latents(encoded, tmp_path):
    other = latents_key(encoded.card, "another encoder")
    assert other != encoded.key and not have_latents(encoded.state, encoded.card, other)
    write_latents(encoded.state, encoded.card, other, encode)
    assert have_latents(encoded.state, encoded.card, other)
    assert not have_latents(encoded.state, encoded.card, encoded.key)  # the old latents are gone
    prepare_sensitive(
        Data(holdout_fraction=0.5), encoded.state, tmp_path / "other.json", tmp_path / "raw"
    )
    changed = read_card(tmp_path / "other.json")
    key = latents_key(changed, "another encoder")
    assert not have_latents(encoded.state, changed, key)  # a preparation removes all latents


def test_latents_are_known_by_images_encoder_and_revision(encoded, monkeypatch):
    """The images are part of the key, so that a withdrawal changes it.

    Encoder and revision are also part of the key. So a query never draws latents that another
    encoder or an older revision has made.
    """
    other = replace(encoded.card, version="another")
    assert (
        len({latents_key(card, name) for card in (encoded.card, other) for name in ("a", "b")}) == 4
    )
    monkeypatch.setattr(store, "ENCODING", 2)
    assert latents_key(encoded.card, "some encoder") != encoded.key


def test_the_charge_hands_out_no_number_that_is_not_finite():
    """A bfloat16 kernel may spread a NaN or an infinity over the rows of other images."""
    latents = np.random.default_rng(0).normal(size=(7, 3, 5, 5)).astype(np.float16)
    broken = latents.copy()
    broken[2, 1, 1], broken[5, 0, 0] = [np.nan, np.inf, -np.inf, 1, np.nan], np.inf
    (drawn, _), *_ = opened(LatentSet(broken, np.zeros(7, dtype=np.int64), ("a",)), 1.0).batches(
        size=7
    )
    assert drawn.isfinite().all() and drawn[2, 1, 1].tolist() == [0, 0, 0, 1, 0]
    others = [0, 1, 3, 4, 6]
    assert torch.equal(drawn[others], torch.from_numpy(latents[others]).float())


def test_an_interrupted_encoding_leaves_nothing(owner, monkeypatch):
    monkeypatch.setattr("sfumato.data.store.inference_batch_size", lambda shape: 64)
    key = latents_key(owner.card, "some encoder")
    calls = []

    def killed(images):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(images)

    with pytest.raises(KeyboardInterrupt):
        write_latents(owner.state, owner.card, key, killed)
    assert not have_latents(owner.state, owner.card, key)
    assert not list((owner.state / "data" / owner.card.dataset_id).glob("*latents-*"))
    seen = []
    write_latents(
        owner.state, owner.card, key, encode, lambda done, whole: seen.append((done, whole))
    )
    assert have_latents(owner.state, owner.card, key)
    # The number of steps does not depend on the number of images, which is private
    assert seen == [(done, 100) for done in range(1, 101)]
    write_latents(owner.state, owner.card, key, killed)  # nothing is encoded again
    assert len(calls) == 3
