"""A state directory for each test of data, in which archives are unpacked."""

from collections.abc import MutableMapping

import pytest


@pytest.fixture(autouse=True)
def own_state(
    tmp_path_factory: pytest.TempPathFactory, environment: MutableMapping[str, str]
) -> None:
    environment["SFUMATO_STATE"] = str(tmp_path_factory.mktemp("state"))
