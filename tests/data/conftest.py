"""What all tests of data share: archives are unpacked into a state directory that no other test knows."""

import pytest


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path_factory.mktemp("state")))
