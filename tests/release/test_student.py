"""The released student, which learns only from the stream, for its recipients."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_release import RECORD, release_plan, save_stream

import sfumato
from sfumato.errors import DataError
from sfumato.release.student import load_student_network, save_student, train_student
from sfumato.release.teacher import write_card
from sfumato.settings.training import Student
from sfumato.storage.artifacts import write_empty, writing
from sfumato.storage.records import Records


@pytest.fixture(scope="module")
def release(digits, tmp_path_factory):
    return save_stream(
        tmp_path_factory.mktemp("release"), digits, relabel=True, mixed=0.25, shares="each"
    )


@pytest.fixture(scope="module")
def folder(digits, release):
    network = train_student(release, Student(steps=150, width=8), 0)
    plan = SimpleNamespace(**vars(release_plan(digits, {"licence": "cc-by-4.0"})))
    with writing(release.with_name("student"), "student", records=[RECORD]) as directory:
        save_student(network, directory)
        write_card(directory, plan, Records.of([RECORD]), "student.md")
    return release.with_name("student")


def test_it_names_real_images_that_it_has_never_seen(folder, digits):
    student = sfumato.load_student(folder)
    found = student.probabilities(digits.images[600:1200])
    assert found.shape == (600, 10) and np.allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found.argmax(axis=1) == digits.labels[600:1200]).mean() > 0.7
    assert student.predict(digits.images[700]) in digits.classes
    with pytest.raises(DataError, match=r"the classifier expects uint8 \(N, 8, 8, 1\)"):
        student.probabilities(digits.images[:4] / 255)


def test_one_seed_gives_one_network_and_moves_no_generator(release):
    before = torch.random.get_rng_state()
    first, again, other = (
        train_student(release, Student(steps=3, width=4), seed) for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    for one, two, three in zip(
        first.parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(one, two) and (one.numel() < 10 or not torch.equal(one, three))


def test_its_cards_state_cost_licence_and_where_it_comes_from(folder):
    student = sfumato.load_student(folder)
    text = (folder / "README.md").read_text()
    assert 0 < student.card["epsilon"] < 2 and student.ledger == Records.of([RECORD])
    assert "it adds no privacy cost" in text and "cc-by-4.0" in text and "load_student" in text


def test_a_swapped_one_a_teacher_and_an_empty_one_are_refused(folder, release, tmp_path):
    with pytest.raises(DataError, match="was written by `teacher`"):
        sfumato.load_student(release / "networks" / "teacher")
    write_empty(tmp_path / "off", "student")
    with pytest.raises(DataError, match="contains no student"):
        sfumato.load_student(tmp_path / "off")
    weights = folder / "weights.safetensors"
    kept = weights.read_bytes()
    save_student(
        load_student_network(folder).apply(
            lambda part: [p.data.zero_() for p in part.parameters()]
        ),
        folder,
    )
    with pytest.raises(DataError, match=r"weights\.safetensors no longer has the bytes"):
        sfumato.load_student(folder)
    weights.write_bytes(kept)
