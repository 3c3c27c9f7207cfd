import pytest
import torch

from sfumato.errors import DataError
from sfumato.storage.artifacts import read_artifact, writing
from sfumato.storage.weights import load_network, load_tensors, save_tensors


def test_non_finite_weights_are_refused_with_a_valid_hash(tmp_path):
    with writing(tmp_path / "pretrain", "pretrain") as folder:
        save_tensors(
            {"weight": torch.tensor([[1.0, float("nan")]])}, folder / "weights.safetensors"
        )
        (folder / "config.json").write_text('{"in_features": 2, "out_features": 1, "bias": false}')
    assert read_artifact(tmp_path / "pretrain", "pretrain").enabled
    with pytest.raises(DataError, match="non-finite"):
        load_network(tmp_path / "pretrain", torch.nn.Linear, "pretrain")
    (tmp_path / "cut").write_bytes(b"\x08")
    with pytest.raises(ValueError, match="eader"):
        load_tensors(tmp_path / "cut")


def test_a_damaged_network_names_a_remedy_for_recipients(tmp_path):
    """A recipient cannot run the stage that made the network."""
    save_tensors({"other": torch.zeros(1)}, tmp_path / "weights.safetensors")
    (tmp_path / "config.json").write_text('{"in_features": 2, "out_features": 1}')
    with pytest.raises(DataError, match="fetch it again from its publisher.* run `stage teacher`"):
        load_network(tmp_path, torch.nn.Linear, "teacher")
