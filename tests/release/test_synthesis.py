import pytest
import torch

from sfumato.data.images import room
from sfumato.diffusion.unet import build_unet
from sfumato.errors import DataError
from sfumato.generators.network import Generator
from sfumato.generators.one_step import save_generator
from sfumato.release.synthesis import draw_mixture, sorted_examples
from sfumato.settings.release import Synthesize

SHAPE = {"resolution": 8, "channels": 1, "classes": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name in ("finetune", "auxiliary"):
        (path / name).mkdir()
    arguments = SHAPE | {"width": 8, "multipliers": [1, 1]}
    build_unet(**arguments).save(path / "finetune")
    save_generator(Generator(**SHAPE, latent=4, width=8), path / "auxiliary")
    return {name: path / name for name in ("finetune", "pretrain", "auxiliary")}


MIXTURE = Synthesize(count=31, sources={"finetune": 1, "auxiliary": 2}, steps=2)


def test_a_mixture_has_each_sources_part_and_the_asked_number(models):
    images, labels, drawn_by = draw_mixture(models, MIXTURE, None, seed=0)
    assert sorted(drawn_by) == ["auxiliary"] * 21 + ["finetune"] * 10
    assert images.shape == (31, 1, 8, 8) and labels.shape == (31,) and images.dtype == torch.uint8


def test_the_public_seed_fixes_the_release_on_disk(models, tmp_path):
    drawn = ((1, None), (1, tmp_path), (2, None))
    first, again, other = (
        draw_mixture(models, MIXTURE, None, seed, folder=place)[0] for seed, place in drawn
    )
    assert (
        torch.equal(first, again)
        and not torch.equal(first, other)
        and list(tmp_path.iterdir()) == []
    )


def test_labels_follow_the_priors(models):
    priors = torch.tensor([0.5, 0.5, 0.0]).double()
    _, labels, _ = draw_mixture(
        models, Synthesize(count=40, sources={"auxiliary": 1}), priors, seed=0
    )
    assert abs(labels.bincount(minlength=3) - torch.tensor([20, 20, 0])).max() <= 1


def test_examples_are_sorted_by_class_with_blanks():
    images = torch.tensor([0, 51, 102, 153], dtype=torch.uint8).view(4, 1, 1, 1)
    grid = (
        sorted_examples(images, torch.tensor([1, 0, 1, 1]), classes=2, number=2).flatten().tolist()
    )
    assert grid == pytest.approx([0.2, 1.0, 0.0, 0.4])


def test_reserved_room_leaves_no_file_and_refuses_misfits(tmp_path):
    images = room(5, (1, 4, 4), tmp_path / "new")
    images[:] = 7
    assert images.shape == (5, 1, 4, 4) and images.dtype == torch.uint8 and images.sum() == 7 * 80
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(OSError):
        room(10**9, (3, 10**3, 10**3), tmp_path)


def test_a_model_that_draws_what_is_not_finite_is_named(models, monkeypatch):
    broken = iter([torch.full((4, 1, 8, 8), float("nan"))]), torch.zeros(4, dtype=torch.int64)
    monkeypatch.setattr("sfumato.release.synthesis.drawing", lambda *given: broken)
    with pytest.raises(DataError, match="the model of `auxiliary` drew non-finite pixels"):
        draw_mixture(models, Synthesize(count=4, sources={"auxiliary": 1}), None, 0)
