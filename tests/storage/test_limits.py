"""Limit the resources that a file may use while it is read."""

import pytest

from sfumato.errors import DataError
from sfumato.storage.limits import BoundedReader, check_picture


def test_a_read_takes_no_more_than_the_file_has(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    with BoundedReader(tmp_path / "file", 100) as file:
        assert file.read(4) == b"cont"
        assert file.read(2**60) == b"ent"
        file.seek(0)
        assert file.read() == b"content"
    with (
        BoundedReader(tmp_path / "file", 3) as file,
        pytest.raises(ValueError, match="has 7 bytes"),
    ):
        file.read()


@pytest.mark.parametrize(
    "form", [(1, 65_536), (65_536, 1), (9_460, 9_460, 3), (8_000, 8_000, 1, 5)]
)
def test_a_picture_that_is_long_or_large_is_refused(form):
    with pytest.raises(DataError, match=f"x has {form[0]}×{form[1]} pixels"):
        check_picture("x", *form)


@pytest.mark.parametrize(
    "form", [(1, 65_535), (9_450, 9_450, 3), (5_000, 4_000, 1, 2), (11_585, 11_585, 1, 2)]
)
def test_a_picture_up_to_the_limits_is_accepted(form):
    assert check_picture("x", *form) <= 2**28
