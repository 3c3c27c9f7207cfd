import json

import pytest

from sfumato.config import Data
from sfumato.errors import DataError
from sfumato.prepare import prepare_sensitive
from sfumato.prepared import load_prepared, read_card


@pytest.fixture
def prepared(tmp_path):
    prepare_sensitive(Data(), tmp_path / "state", tmp_path / "card.json", tmp_path)
    return tmp_path


def test_images_are_found_by_their_card(prepared):
    card = read_card(prepared / "card.json")
    assert load_prepared(prepared / "state", card, "sensitive").shape == card.shape == (1, 8, 8)


def test_images_of_another_card_are_refused(prepared):
    content = json.loads((prepared / "card.json").read_text())
    (prepared / "card.json").write_text(json.dumps(content | {"fingerprint": "0" * 64}))
    with pytest.raises(DataError, match="other images"):
        load_prepared(prepared / "state", read_card(prepared / "card.json"), "sensitive")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"dataset_id": "x"}'])
def test_what_is_no_card_is_named(tmp_path, text):
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(DataError, match=r"card\.json"):
        read_card(tmp_path / "card.json")
    with pytest.raises(DataError, match="prepare sensitive"):
        read_card(tmp_path / "none.json")
