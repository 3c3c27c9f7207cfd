"""A project from Python: what `stage init` writes and `dvc repro` runs, as one object."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import LAST_ERROR, ConfigError, DataError, SfumatoError, error_from
from sfumato.planning.running import release_left
from sfumato.settings.options import InitOptions
from sfumato.settings.stage import ARTIFACTS, CARD_PATH, LEDGER
from sfumato.storage.documents import read_json
from sfumato.storage.in_use import in_use
from sfumato.storage.state_directory import state_dir

if TYPE_CHECKING:
    import pandas

    from sfumato.privacy.check import Verified
    from sfumato.release.loading import Release

NOISE = ("Running stage", "Updating lock", "To track", "\tgit add", "To enable", "\tdvc config", "Use `dvc push`")
# Becomes a program, and leaves a watcher in its process group, which ends with all of it unless a line comes to stdin.
WATCHER = """exec 3<&0
{ read -r line || { kill -INT 0; sleep 2; kill -KILL 0; }; } <&3 >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null"""


class Project:
    """A folder with `params.yaml` and `dvc.yaml`: the same stages, ledger and odometer as on the command line.

    Threads may work with several projects at once. Raises ConfigError without a project, which `create` makes.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder = Path(folder).expanduser().resolve()
        missing = [name for name in ("params.yaml", "dvc.yaml") if not (self.folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{self.folder} is not a project: {missing[0]} is missing. Create a project with Project.create"
            )

    def __repr__(self) -> str:
        card = self.folder / ARTIFACTS / "synthesize" / "card.json"
        released = "nothing released yet"
        if card.is_file():
            made = read_json(card)
            released = f"{made['images']} images released, ε = {made['epsilon']:.4f}"
        return f"<Project {self.folder}: {released}>"

    @classmethod
    def create(cls, folder: str | Path, *, images: str | Path, epsilon: float, **options: Any) -> Project:
        """Look at a folder of images and write a project that fits them, ε and the minutes; spends nothing.

        Prints what was chosen, and what becomes public.

        Args:
            folder: Folder of the project.
            images: Folder of images elsewhere, with one folder per class.
            epsilon: Privacy budget of the whole project.
            options: Further options of `stage init`, with underscores, as text or as values:
                one_image_each=True, minutes=60, size=(96, 128), range=(0, 4095),
                classes=("lung, left", "lung, right").

        Raises:
            ConfigError: An option is not valid, or does not fit the images. Its `option` is the
                name of the parameter.
            DataError: The images cannot be used.
        """
        from sfumato.data.sources.packed import unpacking
        from sfumato.planning.create import Owner, propose_project, summary, warnings

        stated = InitOptions(images=Path(images), out=Path(folder), epsilon=epsilon, **options)
        state = state_dir()
        with in_use(state), unpacking():
            made = propose_project(stated, Owner(), state)
            for line in (*summary(made), *warnings(made, state)):
                print(line)
            made.write(print, force=stated.force)
        return cls(folder)

    def plan(self) -> pandas.DataFrame:
        """What each stage would cost, in ε and minutes; spends nothing. Images that are not prepared are.

        Returns a row for each stage that runs: noise_multiplier, sample_rate, releases, epsilon (of this query only)
        and share of the budget, empty for a stage that is free; minutes. `attrs` holds epsilon, delta and target.
        """
        import pandas

        from sfumato.planning.folder import prepare_images, resolve_project

        if not (self.folder / CARD_PATH).is_file():
            prepare_images(self.folder, state_dir())
        resolved = resolve_project(self.folder, state_dir(), Path("params.yaml"), dry_run=True)
        resolved.check_lifetime(resolved.spending()[0])
        seconds: Any = resolved.seconds()
        budget = resolved.budget
        names = [name for name in seconds if resolved.params.runs(name)]
        table = pandas.DataFrame.from_dict(budget["stages"], orient="index").rename(columns={"uses": "releases"})
        columns = ["noise_multiplier", "sample_rate", "releases", "epsilon", "share"]
        table = table.reindex(index=names, columns=columns).rename_axis("stage")
        table["minutes"] = pandas.Series(seconds, dtype=float) / 60
        table.attrs = {key: budget[key] for key in ("epsilon", "delta", "target")}
        return table

    def check(self, epsilon: float | None = None, *, delta: float | None = None, unit: str | None = None) -> Verified:
        """Verify the ledger and the files of the release, from the records and without data.

        epsilon: the largest allowed, beside the ledger's own target; delta: to compute at; unit: "image" or "group", if
        it must be protected. Raises BudgetError, whose `problems` are the reasons, unless all holds.
        """
        from sfumato.privacy.check import verify

        ledger = self.folder / LEDGER
        verified = partial(verify, artifacts=True, all_opinions=True, state=state_dir())
        return verified(ledger, limit=epsilon, delta=delta, unit=unit)

    def run(self, *, progress: bool = True) -> Release:
        """Run what changed since the last run, and return the release. Every charge is journalled as ever.

        progress: print a line for each stage. Raises the error of the stage that failed, in its own words.
        """
        repro(self.folder, shown=progress)
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
            raise DataError(f"{metrics} does not exist: call run() in a project whose `run` contains evaluate")
        return dict(read_json(metrics)["verdict"])

    def report(self) -> Path:
        """The page that says what was released, what it cost and what an attacker can learn at most."""
        page = self.folder / ARTIFACTS / "report" / "index.html"
        if not page.is_file():
            raise DataError(f"{page} does not exist: call run() first")
        return page


def repro(folder: Path, *targets: str, shown: bool) -> None:
    """Run `dvc repro` of this very environment, its `stage` first on the path. shown: print its lines.

    If this process is killed or interrupted, all that DVC started gets Ctrl-C, and a kill 2 seconds later. What an
    earlier run left in DVC's lock is removed first. Raises the error of the stage that failed.
    """
    release_left(folder)
    with tempfile.TemporaryDirectory() as place:
        said = Path(place) / "error.json"
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        watcher = ["sh", "-c", WATCHER, "sh"] if os.name == "posix" else []
        with subprocess.Popen(
            # -P: nothing in the user's folder takes the place of a package
            [*watcher, sys.executable, "-P", "-m", "dvc", "repro", *targets],
            cwd=folder,
            env={**os.environ, "PATH": path, LAST_ERROR: str(said)},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as running:
            last = deque[str](maxlen=5)
            command = ""  # DVC's line of a command, shown before the first line of a stage that says something
            for line in running.stdout or ():
                last.append(line)
                shown &= not line.startswith("error: ")  # it is raised below
                if line.startswith("> "):
                    command = line
                elif shown and line.strip() and not line.startswith(NOISE):
                    print(command + line, end="", flush=True)
                    command = ""
            running.communicate("\n")  # the watcher leaves
        if running.returncode and said.is_file():
            raise error_from(read_json(said))
        if running.returncode:
            raise SfumatoError(f"`dvc repro` failed in {folder}: {''.join(last).strip()}")
