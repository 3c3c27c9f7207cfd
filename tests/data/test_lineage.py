import pytest

from sfumato.data.lineage import lineage
from sfumato.errors import DataError


def test_what_is_remembered_of_a_release_is_held_to_its_form(tmp_path):
    (tmp_path / "state/released").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.png").write_bytes(b"x")
    for wrong in ("[]", "{", '{"records": [], "hashes": []}', '{"records": {}, "hashes": 5}'):
        (tmp_path / "state/released/a.json").write_text(wrong)
        with pytest.raises(DataError, match="what was released is not known"):
            lineage(tmp_path / "model", "model", True, tmp_path / "state")
