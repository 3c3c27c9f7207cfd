"""`stage doctor`: what was found on this machine."""

from __future__ import annotations

from stages.common import CARD, CardPath, state_dir


def doctor(card: CardPath = CARD) -> None:
    """What is here: device, threads, libraries, data, state, DVC."""
    import importlib.util
    import json
    import os
    from importlib.metadata import version

    import torch
    from rich.console import Console
    from rich.table import Table

    from sfumato.sources import DEBIAN_FASHION_MNIST

    table = Table("what", "found", show_header=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    table.add_row("device", device)
    for name in ("torch", "torchvision", "opacus", "dp-accounting", "dvc", "pytorch-fid"):
        table.add_row(name, version(name) if importlib.util.find_spec(name.replace("-", "_")) else "not installed")
    state = state_dir()
    table.add_row("state directory", f"{state} ({'exists' if state.exists() else 'not there yet'})")
    prepared = sorted(p.parent.name for p in state.glob("data/*/card.json"))
    table.add_row("prepared datasets", ", ".join(prepared) or "none: `stage prepare sensitive`")
    table.add_row("data card", json.loads(card.read_text(encoding="utf-8"))["dataset_id"] if card.is_file() else f"no {card}")
    table.add_row("fashion-mnist", "system package" if DEBIAN_FASHION_MNIST.is_dir() else "not installed: data/raw or a download")
    table.add_row("DVC repository", "yes" if os.path.isdir(".dvc") else "no")
    Console().print(table)
