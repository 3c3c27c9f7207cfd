"""`stage mark check` on pictures as others send them back."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.release.pattern import add_pattern, pattern_key

KEY = pattern_key("clinic", 0)


@pytest.fixture
def pictures(desk, digits) -> np.ndarray:
    """Return twenty pictures of 64×64 pixels, and write the card of their release."""
    Path("card.json").write_text(json.dumps({"shape": [1, 64, 64], "pattern": KEY}))
    return np.stack(
        [
            np.asarray(Image.fromarray(image).resize((64, 64)))
            for image in digits.images[:20, ..., 0]
        ]
    )


def save(pictures: np.ndarray, folder: str, **options) -> None:
    Path(folder).mkdir()
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(f"{folder}/{i}.jpg", **{"quality": 90} | options)


def marked(pictures: np.ndarray) -> np.ndarray:
    return add_pattern(pictures[..., None], KEY)[..., 0]


def test_the_pattern_is_found_in_a_set_and_in_one_picture(desk, pictures):
    save(marked(pictures), "marked")
    save(pictures, "plain")
    text = desk.run(
        "mark check marked --card card.json", "pattern: found. 20 of 20 pictures could be compared"
    )
    assert "signed metadata (20 of 20 pictures): none" in text
    desk.run("mark check marked/3.jpg --card card.json", "1 of 1")
    desk.run("mark check plain --card card.json", "pattern: not found", code=1)


def test_the_pattern_is_found_at_quality_85(desk, pictures):
    save(marked(pictures), "marked", quality=85)
    desk.run("mark check marked --card card.json", "pattern: found")


def test_a_picture_of_another_size_is_compared_at_the_release_s(desk, pictures):
    save(np.repeat(np.repeat(marked(pictures), 2, axis=1), 2, axis=2), "larger")
    desk.run(
        "mark check larger --card card.json", "pattern: found. 20 of 20 pictures could be compared"
    )


def test_cut_pictures_and_wrong_cards_are_refused_in_a_sentence(desk, pictures):
    save(pictures[:, :32], "cut")
    desk.run("mark check cut --card card.json", "The release has images of 64×64 pixels", code=4)
    desk.run("mark check cut --card none.json", "not the card of a release", "--card", code=4)
    Path("card.json").write_text(json.dumps({"shape": [1, 64, 64]}))
    desk.run("mark check cut --card card.json", "pattern: the pictures of this release", code=1)
