import pytest

from sfumato.storage.digest import canonical, digest_of, digest_of_file


def test_canonical_form_ignores_order_and_refuses_nan():
    assert digest_of({"a": 1, "b": [1.5]}) == digest_of({"b": [1.5], "a": 1})
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


def test_a_file_is_known_by_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert digest_of_file(tmp_path / "a") == digest_of_file(tmp_path / "b")
