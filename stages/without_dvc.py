"""`stage run` without DVC: go through the stages of `dvc.yaml` in order, and run each stage whose
entry in `dvc.lock` is out of date.

`dvc.lock` has DVC's own format, so DVC can take over after `dvc commit` has filled its cache.
Without DVC, there is no cache. A missing output is computed again, and a query's release is
restored from the state directory.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from filelock import Timeout

from sfumato.errors import ConfigError, SfumatoError, explained, nearest
from sfumato.settings.recipes import as_yaml
from sfumato.settings.stage import ARTIFACTS, LOCK
from sfumato.storage.digest import md5_of_file, md5_of_folder, tracked_files
from sfumato.storage.documents import read_yaml
from sfumato.storage.files import delete, replace_file
from sfumato.storage.locks import file_lock, holding
from stages.dvc_lock import damage, lock_in_words
from stages.screen import tell

UNDERSTOOD = {"cmd", "params", "deps", "outs", "metrics", "always_changed", "desc", "meta"}
PARAMS = "params.yaml"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage of `dvc.yaml`. persist: outputs that stay in place when the stage runs again."""

    name: str
    cmd: str | list[str]
    params: Sequence[str]
    deps: Sequence[str]
    outs: Sequence[str]
    persist: Sequence[str]
    always_changed: bool

    @property
    def commands(self) -> list[str]:
        if isinstance(self.cmd, str):
            return [self.cmd]
        return self.cmd


def run_in_order(folder: Path, targets: Sequence[str]) -> None:
    """Run each stage that has changed.

    With `targets`, only the targets and the stages whose outputs they need are considered. Exits
    with the code of a command that fails.
    """
    from sfumato.planning.project import check_and_renew, forking, own_path

    check_and_renew(folder)
    steps = selected_steps(read_steps(folder / "dvc.yaml"), targets)
    (folder / ARTIFACTS).mkdir(exist_ok=True)
    running = file_lock(folder / ARTIFACTS / "running.lock", blocking=False)
    busy = f"another `stage run` is running in {folder}: wait until it ends"
    with (
        explained(ConfigError, busy, causes=(Timeout,)),
        holding(running),
        forking({**os.environ, "PATH": own_path()}) as environment,
    ):
        lock = read_dvc_lock(folder)
        for step in steps:
            run_if_changed(folder, step, lock, environment)


def read_steps(file: Path) -> dict[str, Step]:
    """Read the stages of `dvc.yaml`, by name.

    Raises ConfigError if a stage uses more features of DVC than `stage init` writes.
    """
    with explained(
        ConfigError, lambda error: f"{file} cannot be read ({error}): restore it from git"
    ):
        stages = dict(read_yaml(file)["stages"])
        steps = {
            name: step_of(name, stage)
            for name, stage in stages.items()
            if UNDERSTOOD.issuperset(stage)
        }
    if strange := [
        name for name in stages if name not in steps or "${" in json.dumps(stages[name])
    ]:
        unknown = ", ".join(sorted({*stages[strange[0]]} - UNDERSTOOD)) or "${…}"
        raise ConfigError(
            f"{file}: the stage {strange[0]!r} uses {unknown}, which only DVC understands: "
            "install DVC (`pip install dvc`), and run without --no-dvc"
        )
    return steps


def step_of(name: str, stage: Mapping[str, Any]) -> Step:
    outs: dict[str, dict[str, object]] = {}
    for entry in (*stage.get("outs", ()), *stage.get("metrics", ())):
        outs |= entry if isinstance(entry, dict) else {entry: {}}
    return Step(
        name=name,
        cmd=stage["cmd"],
        params=sorted(stage.get("params", ())),
        deps=sorted(stage.get("deps", ())),
        outs=sorted(outs),
        persist=[path for path, options in outs.items() if options.get("persist")],
        always_changed=bool(stage.get("always_changed")),
    )


def selected_steps(steps: Mapping[str, Step], targets: Sequence[str]) -> list[Step]:
    """Return the targets and all stages that they need; without targets, return all stages.

    A stage comes after the stages whose outputs it reads.
    """
    if unknown := [name for name in targets if name not in steps]:
        raise ConfigError(
            f"there is no stage {unknown[0]!r} in dvc.yaml: {nearest(unknown[0], steps)}"
        )
    writers = {
        name: [
            writer.name
            for writer in steps.values()
            if any(Path(dep).is_relative_to(out) for dep in step.deps for out in writer.outs)
        ]
        for name, step in steps.items()
    }
    with explained(
        ConfigError,
        lambda error: (
            f"dvc.yaml: the stages {' → '.join(error.args[1])} form a cycle, in which each "
            "reads an output of the one before: remove one of these inputs"
        ),
        causes=(CycleError,),
    ):
        order = [*TopologicalSorter(writers).static_order()]
    needed = {*(targets or steps)}
    for name in reversed(order):
        if name in needed:
            needed.update(writers[name])
    return [steps[name] for name in order if name in needed]


def run_if_changed(
    folder: Path, step: Step, lock: dict[str, Any], environment: Mapping[str, str]
) -> None:
    """Run a stage if its commands, parameters, inputs or outputs differ from its entry in `lock`,
    the content of `dvc.lock`, or if it is declared `always_changed`. Then write the new entry.
    """
    entry = inputs_of(folder, step)
    if not step.always_changed and lock["stages"].get(step.name) == entry | outputs_of(
        folder, step
    ):
        return
    delete(folder / path for path in {*step.outs} - {*step.persist})
    for command in step.commands:
        tell(f"> {command}")
        code = subprocess.run(
            command, shell=True, cwd=folder, env=environment, check=False
        ).returncode
        if code:
            raise SystemExit(code % 256)
    if missing_outs := [path for path in step.outs if not (folder / path).exists()]:
        raise SfumatoError(
            f"the stage {step.name} ended without writing {missing_outs[0]}: correct the stage's "
            "command in dvc.yaml"
        )
    lock["stages"][step.name] = entry | outputs_of(folder, step)
    replace_file(folder / LOCK, as_yaml(lock, blocks=True).encode())


def read_dvc_lock(folder: Path) -> dict[str, Any]:
    """Read `dvc.lock`. Raises ConfigError, with the remedy, if a kill or an edit damaged it."""
    if not (folder / LOCK).exists():
        return {"schema": "2.0", "stages": {}}
    if damage() is not None:
        raise ConfigError(f"{LOCK} is {lock_in_words()}")
    return dict(read_yaml(folder / LOCK))


def inputs_of(folder: Path, step: Step) -> dict[str, object]:
    """Return the part of a stage's entry in `dvc.lock` that is known before the stage runs."""
    entry: dict[str, object] = {"cmd": step.cmd}
    if step.deps:
        entry["deps"] = [lock_entry(folder, path) for path in step.deps]
    if step.params:
        with explained(ConfigError, lambda error: f"{PARAMS} cannot be read: {error}"):
            values = read_yaml(folder / PARAMS)
            entry["params"] = {
                PARAMS: {name: values[name] for name in step.params if name in values}
            }
    return entry


def outputs_of(folder: Path, step: Step) -> dict[str, object]:
    if not step.outs:
        return {}
    return {"outs": [lock_entry(folder, path) for path in step.outs]}


def lock_entry(folder: Path, path: str) -> dict[str, object]:
    """Describe a file or folder as `dvc.lock` does: path, hash and size."""
    location = folder / path
    entry: dict[str, object] = {"path": path, "hash": "md5"}
    if location.is_file():
        return entry | {"md5": md5_of_file(location), "size": location.stat().st_size}
    files = tracked_files(location)
    size = sum(file.stat().st_size for file in files)
    return entry | {"md5": md5_of_folder(location), "size": size, "nfiles": len(files)}
