"""The endless release: what recipients draw from its networks, and what they are refused."""

import itertools
import json
import re
import resource
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from small_release import RECORD, save_stream
from torch.utils.data import DataLoader

import sfumato
from sfumato.data.images import as_bytes
from sfumato.errors import ConfigError, DataError
from sfumato.features.teacher_network import (
    Labelling,
    best_temperature,
    load_teacher_network,
    probabilities_of,
)
from sfumato.release.pattern import pattern_key, pattern_score
from sfumato.release.stream import surest_rows, view
from sfumato.settings.release import Synthesize
from sfumato.storage.digest import digest_of_file

DRAWN = {"relabel": True, "mixed": 0.25, "shares": "each"}


@pytest.fixture(scope="module")
def release(digits, tmp_path_factory):
    return save_stream(tmp_path_factory.mktemp("stream"), digits, **DRAWN)


def some(stream, number=3):
    return [*itertools.islice(stream, number)]


def test_it_draws_without_repeating_and_labels_softly(release):
    batches = some(sfumato.stream(release, batch=32), 4)
    for images, labels, _ in batches:
        assert images.shape == (32, 1, 8, 8) and images.dtype == torch.float32
        assert images.min() >= 0 and images.max() <= 1
        assert labels.shape == (32, 10) and torch.allclose(labels.sum(dim=1), torch.ones(32))
        assert (labels.max(dim=1).values < 0.999).any()
    rows = torch.cat([images for images, _, _ in batches]).flatten(1)
    assert len(rows.unique(dim=0)) == 128


def test_any_number_of_threads_gives_the_seeds_batches(release):
    threads = torch.get_num_threads()
    drawn = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            drawn.append(some(sfumato.stream(release, batch=32, seed=5)))
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*drawn, strict=True):
        assert torch.equal(one.images, two.images) and torch.equal(one.labels, two.labels)
    other = some(sfumato.stream(release, batch=32, seed=6))
    assert not torch.equal(drawn[0][0].images, other[0].images)


def test_workers_draw_the_same_batches_in_the_same_order(release):
    stream = sfumato.stream(release, batch=16)
    alone = some(stream, 5)
    for workers in (1, 2):
        shared = some(DataLoader(stream, batch_size=None, num_workers=workers), 5)
        assert all(torch.equal(a.images, b.images) for a, b in zip(alone, shared, strict=True))


def test_a_new_loop_repeats_and_the_docstring_states_it(release):
    stream = sfumato.stream(release, batch=16)
    (first,) = some(stream, 1)
    (again,) = some(stream, 1)
    assert torch.equal(first.images, again.images)
    assert "each new loop, begins with the first" in sfumato.stream.__doc__


def test_no_global_generator_moves(release):
    before = torch.random.get_rng_state()
    some(sfumato.stream(release, batch=16))
    assert torch.equal(before, torch.random.get_rng_state())


def test_memory_stays_flat_over_many_draws(release):
    stream = iter(sfumato.stream(release, batch=256))
    for number, _ in enumerate(stream):
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KB
        if number == 20:
            before = used
        if number == 300:
            break
    assert used - before < 10_000, "280 batches have 21 MB"


def test_every_batch_states_that_it_is_generated_and_its_licence(digits, tmp_path):
    folder = save_stream(tmp_path, digits, about={"licence": "cc-by-4.0"}, **DRAWN)
    (_, _, about), *_ = some(sfumato.stream(folder, batch=4))
    assert about["Iptc4xmpExt:DigitalSourceType"].endswith("/trainedAlgorithmicMedia")
    assert about["description"].startswith("AI-generated image") and about["licence"] == "cc-by-4.0"
    text = (folder / "README.md").read_text()
    assert "costs no further privacy" in text and "`networks/`" in text


def test_labels_are_the_teachers_of_the_images_as_drawn(release):
    stream = sfumato.stream(release, batch=40, augment=False)
    teacher = load_teacher_network(release / "networks" / "teacher")
    ((images, labels, _),) = some(stream, 1)
    assert torch.allclose(
        labels, stream.labelling.soft(probabilities_of(teacher, images), "plain").float()
    )
    ((_, varied, _),) = some(sfumato.stream(release, batch=40), 1)
    assert torch.equal(varied[:30], labels[:30]), "shifts, blur and light change no label"
    assert not torch.allclose(varied[30:], labels[30:]), "blends are labelled as they look"


def test_the_least_sure_fifth_of_each_class_is_left_out():
    sure = torch.tensor([0.9, 0.6, 0.8, 0.7, 0.99, 0.55, 0.65, 0.75, 0.85, 0.95])
    labels = torch.stack([sure, 1 - sure], dim=1)
    labels[1::2] = labels[1::2].flip(1)
    assert surest_rows(labels, 8).tolist() == [0, 1, 2, 3, 4, 7, 8, 9]


def test_mirror_images_are_drawn_only_if_the_teacher_allows(digits, tmp_path):
    left = torch.zeros(200, 1, 8, 8)
    left[..., :4] = 1
    for mirrored in (False, True):
        seen = view(left, mirrored, torch.Generator().manual_seed(0))
        assert bool((seen[..., 0].mean((1, 2)) < 0.1).any()) is mirrored
        folder = save_stream(tmp_path / str(mirrored), digits, flip=mirrored, **DRAWN)
        assert sfumato.stream(folder).mirrored is mirrored
        assert ("mirror images" in (folder / "README.md").read_text()) is mirrored


def test_latent_numbers_spread_more_the_longer_it_draws(release, monkeypatch):
    stream = sfumato.stream(release, batch=16, augment=False)
    spreads = []
    real = stream.parts
    monkeypatch.setattr(
        stream,
        "parts",
        lambda *given, spread: spreads.append(spread) or real(*given, spread=spread),
    )
    for number in (0, 3000, 10**6):
        stream.draw(number)
    assert spreads == [1.0, pytest.approx(1.12), 1.25]


def test_without_a_teacher_labels_are_the_classes_requested(digits, tmp_path):
    folder = save_stream(tmp_path, digits, relabel=False)
    ((images, labels, _),) = some(sfumato.stream(folder, batch=20), 1)
    assert len(images) == 20 and set(labels.flatten().tolist()) == {0.0, 1.0}
    assert not (folder / "networks" / "teacher").exists()


def test_the_pattern_of_the_release_is_in_drawn_images_too(digits, tmp_path):
    scores = []
    for mark in ("files", "pixels"):
        folder = save_stream(tmp_path / mark, digits, mark=mark, **DRAWN)
        images = torch.cat([batch.images for batch in some(sfumato.stream(folder, batch=200))])
        pixels = as_bytes(images).permute(0, 2, 3, 1).numpy()
        scores.append(pattern_score(pixels, pattern_key("clinic-2026", 0)))
    assert scores[0] < 1 < 1.5 < scores[1], "so few pixels cannot have more"


def test_the_temperature_is_what_fits_the_classes_requested():
    wanted = torch.arange(4).repeat(50)
    unsure = torch.full((200, 4), 0.2).scatter(1, wanted[:, None], 0.4)
    assert best_temperature(unsure, wanted) == 0.3, "always right, so it may be surer"
    guessed = torch.full((200, 4), 0.2).scatter(
        1, torch.randint(4, (200, 1), generator=torch.manual_seed(0)), 0.4
    )
    assert best_temperature(guessed, wanted) == 1.0
    labels = Labelling({"plain": torch.zeros(4)}, 0.5).soft(unsure, "blend")
    assert torch.allclose(labels[0], torch.tensor([16.0, 4, 4, 4]).double() / 28)


def test_the_lines_of_the_readme_train_a_network(release, monkeypatch, digits, capsys):
    text = (release / "README.md").read_text().split("### Draw more images")[1]
    lines = re.search(r"```python\n(.*?)```", text, re.S)[1]
    assert len(lines.splitlines()) == 10 and lines.count("1500") == 2
    monkeypatch.chdir(release)
    Image.fromarray(digits.images[0, :, :, 0]).save("x.png")
    found = {}
    exec(lines.replace("1500", "60"), found)
    (release / "x.png").unlink()
    assert capsys.readouterr().out.startswith("tensor([[")
    images, labels = digits.batch(np.arange(600, 1000))
    assert (found["network"](images).argmax(dim=1) == labels).float().mean() > 0.6


@pytest.mark.parametrize(
    "name", ["refine/generator.safetensors", "teacher/weights.safetensors", "refine/config.json"]
)
def test_a_network_that_was_swapped_is_refused(release, tmp_path, name):
    folder = shutil.copytree(release, tmp_path / "copy")
    file = folder / "networks" / name
    file.write_bytes(file.read_bytes().replace(b"8", b"9", 1) + b" ")
    for load in (sfumato.load_release, sfumato.stream):
        with pytest.raises(DataError, match=r"no longer has the bytes that privacy\.json lists"):
            load(folder)


def test_networks_that_are_missing_or_added_are_refused(release, tmp_path):
    folder = shutil.copytree(release, tmp_path / "copy")
    (folder / "networks" / ".DS_Store").write_bytes(b"0")
    (folder / "networks" / "teacher" / ".gitattributes").write_text("added by a hub")
    assert sfumato.stream(folder)
    added = folder / "networks" / "teacher" / "own-network"
    added.write_bytes(b"0")
    with pytest.raises(DataError, match="own-network is not among the files"):
        sfumato.stream(folder)
    added.unlink()
    (folder / "networks" / "refine" / "config.json").unlink()
    with pytest.raises(DataError, match=r"config\.json is missing\): fetch the release again"):
        sfumato.stream(folder)
    assert len(sfumato.load_release(folder)) == 40, "fetching only the images is enough"


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": "0"},
        {"offsets": {"plain": [0.0, "x"]}},
        {"settings": {"sources": {"../x": 1}}},
        {"more": 1},
        {"priors": [1.0]},
    ],
)
def test_a_card_with_a_malformed_entry_is_refused(release, tmp_path, wrong):
    folder = shutil.copytree(release, tmp_path / "copy")
    card = json.loads((folder / "card.json").read_text())
    card["stream"] |= wrong
    (folder / "card.json").write_text(json.dumps(card))
    privacy = json.loads((folder / "privacy.json").read_text())
    privacy["files"]["card.json"] = digest_of_file(folder / "card.json")
    (folder / "privacy.json").write_text(json.dumps(privacy))
    with pytest.raises(DataError, match="has a wrong entry `stream`"):
        sfumato.stream(folder)


def test_a_release_without_networks_names_what_to_do(digits, tmp_path):
    from small_release import write_release

    folder = write_release(tmp_path / "release", digits)
    with pytest.raises(DataError, match=r"use its 40 images .* with synthesize\.stream: true"):
        sfumato.stream(folder)
    with pytest.raises(ConfigError, match="batch=0: expected a whole number, 1 or more"):
        sfumato.stream(folder, batch=0)
    with pytest.raises(ConfigError, match="seed=-1: expected a whole number, 0 or more"):
        sfumato.stream(folder, seed=-1)
    with pytest.raises(ConfigError, match=r"batch=2\.5: expected a whole number"):
        sfumato.stream(folder, batch=2.5)
    with pytest.raises(ConfigError, match="batch='8': expected a whole number"):
        sfumato.stream(folder, batch="8")


@pytest.mark.parametrize(
    ("sources", "public_model", "networks"),
    [
        ({"select": 1}, False, set()),
        ({"finetune": 1}, True, set()),
        ({"finetune": 1, "auxiliary": 1}, False, {"finetune", "auxiliary"}),
        ({"refine": 3, "select": 1}, True, {"refine"}),
    ],
)
def test_only_networks_of_the_recipe_are_shipped(sources, public_model, networks):
    assert {*Synthesize(sources=sources).networks(public_model)} == networks


def test_only_weights_architectures_and_the_teacher_are_shipped(release):
    found = {
        file.relative_to(release / "networks").as_posix()
        for file in (release / "networks").rglob("*.*")
    }
    of_teacher = {"config.json", "weights.safetensors", "card.json", "README.md", "privacy.json"}
    of_teacher.add(".gitattributes")
    assert found == {"refine/config.json", "refine/generator.safetensors"} | {
        f"teacher/{name}" for name in of_teacher
    }
    teacher = sfumato.load_teacher(release / "networks" / "teacher")
    assert teacher.ledger == {RECORD["id"]: RECORD}
