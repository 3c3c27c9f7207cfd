import json

import numpy as np
import pytest

from sfumato.data.prepare import prepare_public, prepare_sensitive
from sfumato.data.store import PublicCard, load_prepared, load_public, read_card, read_public_card
from sfumato.errors import DataError
from sfumato.settings.data import Data, Public


@pytest.fixture
def prepared(tmp_path):
    prepare_sensitive(Data(), tmp_path / "state", tmp_path / "card.json", tmp_path)
    return tmp_path


def test_images_are_found_by_their_card(prepared):
    card = read_card(prepared / "card.json")
    assert load_prepared(prepared / "state", card, "sensitive").shape == card.shape == (1, 8, 8)


def test_images_of_another_card_are_refused(prepared):
    content = json.loads((prepared / "card.json").read_text())
    (prepared / "card.json").write_text(json.dumps(content | {"version": "another"}))
    with pytest.raises(DataError, match="other images"):
        load_prepared(prepared / "state", read_card(prepared / "card.json"), "sensitive")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"dataset_id": "x"}'])
def test_what_is_no_card_is_named(tmp_path, text):
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(DataError, match=r"card\.json"):
        read_card(tmp_path / "card.json")
    with pytest.raises(DataError, match="prepare sensitive"):
        read_card(tmp_path / "none.json")


# ---- public sets


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    out = tmp_path_factory.mktemp("public") / "public"
    prepare_public(Public(source="photos", per_class=3), (3, 8, 9), out, out, seed=0)
    return out


def test_a_public_set_is_what_its_card_says(public):
    card = read_public_card(public / "card.json")
    images = load_public(public, (3, 8, 9))
    assert card == PublicCard(enabled=True, source="photos", shape=(3, 8, 9), classes=("china", "flower"), images=6)
    assert images.shape == card.shape and len(images) == card.images and images.classes == card.classes
    assert isinstance(images.images, np.memmap) and not images.images.flags.writeable


def test_a_public_set_of_another_shape_is_refused(public):
    with pytest.raises(DataError, match="stage prepare public"):
        load_public(public, (1, 8, 8))


def test_a_public_set_that_is_switched_off_has_a_card_and_no_images(tmp_path):
    prepare_public(None, (1, 8, 8), tmp_path / "public", tmp_path, seed=0)
    assert read_public_card(tmp_path / "public" / "card.json") == PublicCard(enabled=False)
    with pytest.raises(DataError, match="into run"):
        load_public(tmp_path / "public", (1, 8, 8))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"enabled": true}', '{"shape": 3, "classes": []}'])
def test_what_is_no_public_card_is_named(tmp_path, text):
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(DataError, match=r"card\.json"):
        read_public_card(tmp_path / "card.json")
    with pytest.raises(DataError, match="run `stage prepare public`"):
        load_public(tmp_path / "none", (1, 8, 8))
