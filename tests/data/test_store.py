from dataclasses import replace

import numpy as np
import pytest

from sfumato.data.cards import PublicCard, read_card, read_public_card
from sfumato.data.prepare import prepare_public, prepare_sensitive
from sfumato.data.store import load_prepared, load_public
from sfumato.errors import DataError
from sfumato.settings.data import Data, Public


def test_images_of_another_card_are_refused(tmp_path):
    prepare_sensitive(Data(), tmp_path / "state", tmp_path / "card.json", tmp_path)
    card = replace(read_card(tmp_path / "card.json"), version="another")
    with pytest.raises(DataError, match="does not contain the images"):
        load_prepared(tmp_path / "state", card, "sensitive")


def test_a_public_set_must_match_its_card_and_shape(tmp_path):
    public = tmp_path / "public"
    prepare_public(Public(source="photos", per_class=3), (3, 8, 9), public, tmp_path, seed=0)
    card = read_public_card(public / "card.json")
    images = load_public(public, (3, 8, 9))
    assert card == PublicCard(
        enabled=True, source="photos", shape=(3, 8, 9), classes=("china", "flower"), images=6
    )
    assert (
        images.shape == card.shape and len(images) == card.images and images.classes == card.classes
    )
    assert isinstance(images.images, np.memmap) and not images.images.flags.writeable
    with pytest.raises(DataError, match="stage prepare public"):
        load_public(public, (1, 8, 8))


@pytest.mark.parametrize("read", [read_card, read_public_card])
@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"dataset_id": "x"}', '{"enabled": true}', '{"shape": 3, "classes": []}'],
)
def test_what_is_no_card_is_named(tmp_path, read, text):
    with pytest.raises(
        DataError, match=r"card\.json is missing: run `stage prepare (sensitive|public)` first"
    ):
        read(tmp_path / "card.json")
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(DataError, match=r"card\.json is not"):
        read(tmp_path / "card.json")
