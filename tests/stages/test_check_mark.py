"""`stage release check-mark` on pictures as others send them back."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.release.pattern import add_pattern, pattern_key

KEY = pattern_key("clinic", 0)


@pytest.fixture
def pictures(desk, digits) -> np.ndarray:
    """Twenty of 64 pixels, and the card of their release."""
    Path("card.json").write_text(json.dumps({"shape": [1, 64, 64], "pattern": KEY}))
    return np.stack([np.asarray(Image.fromarray(image).resize((64, 64))) for image in digits.images[:20, ..., 0]])


def save(pictures: np.ndarray, folder: str) -> None:
    Path(folder).mkdir()
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(f"{folder}/{i}.jpg", quality=90)


def test_marked_pictures_are_found_together_and_one_by_one_and_others_are_not(desk, pictures):
    save(add_pattern(pictures[..., None], KEY)[..., 0], "marked")
    save(pictures, "plain")
    desk.run(
        "release check-mark marked --card card.json", "20 of 20 pictures compared: together they carry the pattern"
    )
    desk.run("release check-mark marked/3.jpg --card card.json", "1 of 1")
    desk.run("release check-mark plain --card card.json", "do not carry the pattern", code=1)


def test_pictures_of_another_size_and_cards_without_a_key_are_refused_in_a_sentence(desk, pictures):
    save(pictures[:, :32], "cut")
    desk.run("release check-mark cut --card card.json", "contains no picture of 64×64 pixels", code=4)
    desk.run("release check-mark cut --card none.json", "not the card of a release", "--card", code=4)
    Path("card.json").write_text(json.dumps({"shape": [1, 64, 64]}))
    desk.run("release check-mark cut --card card.json", "synthesize.mark: pixels", code=2)
