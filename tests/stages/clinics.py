"""Clinics with the same settings, each with a project and a state directory of its own."""

import os
from contextlib import chdir
from pathlib import Path
from unittest import mock

import numpy as np
import yaml
from typer.testing import CliRunner

from sfumato.data.images import ImageSet
from stages.cli import app

SMALL = {
    "recipe": "dp-merf",
    "count": {"noise": "5%"},
    "frequency": {"size": 200},
    "auxiliary": {"steps": 3, "batch": 20, "width": 8, "images": 40},
    "synthesize": {"count": 40},
}


def begin_clinics(home: Path, digits: ImageSet, **privacy: dict[str, object]) -> Path:
    """Create a project below `home` for each name. Returns `home`.

    privacy: section `privacy` of each project, by name.

    Each clinic releases counts and an embedding of its own 500 digits.
    """
    for i, (name, own_privacy) in enumerate(privacy.items()):
        (home / name).mkdir()
        own = digits.take(np.arange(500 * i, 500 * (i + 1)))
        np.savez(
            home / f"{name}.npz",
            images=own.images,
            labels=own.labels,
            classes=np.array(own.classes),
        )
        data = {"source": "npz", "path": str(home / f"{name}.npz"), "dataset_id": name}
        params = SMALL | {"data": data, "privacy": {"size_hint": 300} | own_privacy}
        (home / name / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
        with (
            chdir(home / name),
            mock.patch.dict(os.environ, SFUMATO_STATE=str(home / f"state-{name}")),
        ):
            for command in ("prepare sensitive", "plan", "count", "frequency"):
                done = CliRunner().invoke(app, command.split(), catch_exceptions=False)
                assert done.exit_code == 0, done.output
    return home
