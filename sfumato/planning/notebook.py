"""A project from Python: what `stage init` writes and `dvc repro` runs, as one object."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import BudgetError, ConfigError, DataError, SfumatoError
from sfumato.settings.stages import ARTIFACTS, CARD, PLAN, PUBLIC, RECIPES
from sfumato.storage.documents import read_json

if TYPE_CHECKING:
    import pandas

    from sfumato.release.loading import Release

REPORT = f"{ARTIFACTS}/report/index.html"
ERRORS: dict[int, type[SfumatoError]] = {kind.exit_code: kind for kind in (ConfigError, BudgetError, DataError)}
COLUMNS = ["noise_multiplier", "sample_rate", "releases", "epsilon", "share"]
NOISE = ("Running stage", "Updating lock", "To track", "\tgit add", "To enable", "\tdvc config", "Use `dvc push`")
# Becomes a program, and leaves a watcher in its process group, which ends with all of it unless a line comes to stdin.
WATCHED = """exec 3<&0
{ read -r line || { kill -INT 0; sleep 2; kill -KILL 0; }; } <&3 >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null"""


class Project:
    """A folder with `params.yaml` and `dvc.yaml`: the same stages, ledger and odometer as on the command line.

    Raises ConfigError if the folder holds no project: `Project.create` makes one.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder = Path(folder).expanduser().resolve()
        missing = [name for name in ("params.yaml", "dvc.yaml") if not (self.folder / name).is_file()]
        if missing:
            raise ConfigError(f"{self.folder} is not a project: {missing[0]} is missing. Project.create makes one")

    def __repr__(self) -> str:
        card = self.folder / ARTIFACTS / "synthesize" / "card.json"
        made = read_json(card) if card.is_file() else None
        released = f"{made['images']} images released, ε = {made['epsilon']:.4f}" if made else "nothing released yet"
        return f"<Project {self.folder}: {released}>"

    @classmethod
    def create(cls, folder: str | Path, *, images: str | Path, epsilon: float, **options: Any) -> Project:
        """Look at a folder of images and write a project that fits them, ε and the minutes; spends nothing.

        folder: of the project; images: one folder a class, elsewhere; epsilon: of the whole project; options: those of
        `stage init`, with underscores: minutes, groups, one_image_each=True, size_hint, dataset_id, range=(0, 4095),
        public, force=True, …. Raises ConfigError or DataError, as `stage init` does.
        """
        words = ["-m", "stages.cli", "init", str(images), "--yes"]
        for name, value in {"out": folder, "epsilon": epsilon, **options}.items():
            if value is not None and value is not False:
                text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
                words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={text}"))
        try:
            run_program(words, Path.cwd(), shown=True)
        except SfumatoError as error:  # its options are parameters here
            text = re.sub(r"(?<!`)--([a-z][a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
            raise type(error)(text) from None
        return cls(folder)

    def plan(self) -> pandas.DataFrame:
        """What each stage would cost, in ε and minutes; spends nothing.

        Returns a row for each stage that runs: noise_multiplier, sample_rate, releases, epsilon (of this query only)
        and share of the budget, empty for a stage that is free; minutes. `attrs` holds epsilon, delta and target.
        """
        import pandas

        from sfumato.data.store import read_card, read_public_card
        from sfumato.planning.estimate import expected_seconds
        from sfumato.settings.recipes import load_params
        from sfumato.storage.state_directory import state_dir

        run_program(["-m", "dvc", "repro", "plan"], self.folder, shown=False)
        with chdir(self.folder):
            params, card = load_params(Path("params.yaml"), Path(RECIPES)), read_card(Path(CARD))
            public = Path(PUBLIC) / "card.json"
            images = read_public_card(public).images if public.is_file() else 0
            seconds: Any = expected_seconds(params, card.shape, len(card.classes), state_dir(), images)
            budget: Any = read_json(Path(PLAN) / "budget.json")
        names = [name for name in seconds if name in params.run]
        table = pandas.DataFrame.from_dict(budget["stages"], orient="index").rename(columns={"uses": "releases"})
        table = table.reindex(index=names, columns=COLUMNS).rename_axis("stage")
        table["minutes"] = pandas.Series(seconds, dtype=float) / 60
        table.attrs = {key: budget[key] for key in ("epsilon", "delta", "target")}
        return table

    def run(self, *, progress: bool = True) -> Release:
        """Run what changed since the last run, and return the release. Every charge is journalled as ever.

        progress: print a line for each stage. Raises the error of the stage that failed, in its own words.
        """
        run_program(["-m", "dvc", "repro"], self.folder, shown=progress)
        return self.release

    @property
    def release(self) -> Release:
        """The release of the last run. Raises DataError if there is none, or if a file of it was changed."""
        from sfumato.release.loading import load_release

        return load_release(self.folder / ARTIFACTS / "synthesize")

    @property
    def verdict(self) -> dict[str, Any]:
        """What the last evaluation says of the release: level, sentence, accuracies. Local. DataError without one."""
        metrics = self.folder / "metrics.json"
        if not metrics.is_file():
            raise DataError(f"{metrics} does not exist: call run(), in a project that evaluates")
        return dict(read_json(metrics)["verdict"])

    def report(self) -> Path:
        """The page that says what was released, what it cost and what an attacker can learn at most."""
        if not (self.folder / REPORT).is_file():
            raise DataError(f"{self.folder / REPORT} does not exist: call run() first")
        return self.folder / REPORT


def run_program(words: list[str], folder: Path, *, shown: bool) -> None:
    """Run a program of this very environment in a folder, its `stage` first on the path. shown: print its lines.

    If this process is killed or interrupted, all that the program started gets Ctrl-C, and a kill 2 seconds later.
    Raises the error of the stage that failed, in its own words.
    """
    place = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    with subprocess.Popen(
        # -P: nothing in the user's folder takes the place of a package
        [*(["sh", "-c", WATCHED, "sh"] if os.name == "posix" else []), sys.executable, "-P", *words],
        cwd=folder,
        env=os.environ | place,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as running:
        lines = []
        for line in running.stdout or ():
            lines.append(line)
            shown &= not line.startswith(("error: ", "Usage: "))  # it is raised below
            if shown and line.strip() and not line.startswith(NOISE):
                print(line, end="", flush=True)
        running.communicate("\n")  # the watcher leaves
    if running.returncode:
        text = "".join(lines)
        boxed = " ".join(line.strip(" │\n") for line in lines if line.startswith("│"))  # about an option
        last = boxed or "".join(lines[-5:]).strip()
        _, found, said = f"\n{text}".rpartition("\nerror: ")
        codes = re.findall(r"exited with (\d+)", text) or [running.returncode]
        raise ERRORS.get(int(codes[-1]), SfumatoError)(said.partition("\nERROR: ")[0].strip() if found else last)
