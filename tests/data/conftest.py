"""Unpack archives of all tests of data into a state directory that no other test uses."""

from collections.abc import MutableMapping

import pytest


@pytest.fixture(autouse=True)
def own_state(
    tmp_path_factory: pytest.TempPathFactory, environment: MutableMapping[str, str]
) -> None:
    environment["SFUMATO_STATE"] = str(tmp_path_factory.mktemp("state"))
