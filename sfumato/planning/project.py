"""Use a project from Python: create, plan, run and check it with one object."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfumato.errors import LAST_ERROR, UNREADABLE, ConfigError, DataError, SfumatoError, error_from
from sfumato.planning.project_files import check_dvc, make_index, renew
from sfumato.planning.running import remove_unused_lock
from sfumato.settings.options import InitOptions
from sfumato.settings.recipes import load_params
from sfumato.settings.stage import ARTIFACTS, CARD_PATH, LEDGER, PLAN, RECIPES
from sfumato.settings.stages import STAGES
from sfumato.storage.documents import read_json, read_yaml
from sfumato.storage.in_use import in_use
from sfumato.storage.state_directory import DVC_INDEX, state_dir

if TYPE_CHECKING:
    import pandas

    from sfumato.evaluation.verdict import Verdict
    from sfumato.privacy.check import Verified
    from sfumato.release.loading import Release

DVC_HINTS = (  # DVC's output lines are not shown if they begin with one of these texts
    "Running stage",
    "Updating lock",
    "To track",
    "\tgit add",
    "To enable",
    "\tdvc config",
    "Use `dvc push`",
)
# Shell script that starts a program and a watcher in one process group. If the Python process that
# started the script dies, the watcher's stdin closes before a line arrives. The watcher then ends
# the whole group.
WATCHER = """exec 3<&0
{ read -r line || { kill -INT 0; sleep 2; kill -KILL 0; }; } <&3 >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null"""


class Project:
    """A folder with `dvc.yaml` and `params.yaml`. Projects that `stage merge` wrote have no
    `params.yaml`. The methods use the same stages, ledger and odometer as the command line.

    Threads may work with several projects at once.

    Args:
        folder: Folder of the project.

    Raises:
        ConfigError: The folder is not a project. Use `create` to make one.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder = Path(folder).expanduser().resolve()
        if not (self.folder / "dvc.yaml").is_file():
            raise ConfigError(
                f"{self.folder} is not a project, because dvc.yaml is missing. Use the project's "
                "folder, or create a project with `stage init` or Project.create"
            )

    def __repr__(self) -> str:
        file = self.folder / ARTIFACTS / "synthesize" / "card.json"
        status = "nothing released yet"
        if file.is_file():
            card = read_json(file)
            status = f"{card['images']} images released, ε = {card['epsilon']:.4f}"
        return f"<Project {self.folder}: {status}>"

    @classmethod
    def create(
        cls, folder: str | Path, *, images: str | Path, epsilon: float, **options: Any
    ) -> Project:
        """Survey a folder of images, choose parameters for them, and write a project.

        Prints the chosen parameters, and which facts become public. Spends nothing.

        Args:
            folder: Folder of the project.
            images: Folder of images, outside the project folder, for example with one folder per
                class.
            epsilon: Privacy budget of the whole project.
            options: Further options of `stage init`. Write underscores instead of hyphens. Each
                value is text, as on the command line, or a Python value: one_image_each=True,
                minutes=60, size=(96, 128), range=(0, 4095), classes=("lung, left", "lung, right").

        Raises:
            ConfigError: An option is not valid, or does not fit the images. The error's `option` is
                the option's name.
            DataError: The images cannot be used.
        """
        from sfumato.data.sources.packed import unpacking
        from sfumato.planning.create import Owner, propose_project, summary, warnings

        init_options = InitOptions(
            images=Path(images), out=Path(folder), epsilon=epsilon, **options
        )
        state = state_dir()
        with in_use(state), unpacking():
            project = propose_project(init_options, Owner(), state)
            for line in (*summary(project), *warnings(project, state)):
                print(line)
            project.write(print, force=init_options.force)
        return cls(folder)

    def plan(self) -> pandas.DataFrame:
        """Compute what each stage would cost, in ε and minutes. Spends nothing.

        If the images are not prepared yet, this method prepares them first.

        Returns:
            One row per stage in `run`, with the columns noise_multiplier, sample_rate, releases,
            epsilon (of this query only), share (of the budget) and minutes. For a free stage, all
            columns except minutes are empty. The table's `attrs` contain the epsilon and delta of
            the whole plan, and the target for epsilon.
        """
        import pandas

        from sfumato.planning.folder import prepare_images, resolve_project

        if not (self.folder / CARD_PATH).is_file():
            prepare_images(self.folder, state_dir())
        resolved = resolve_project(self.folder, state_dir(), Path("params.yaml"), dry_run=True)
        resolved.check_lifetime(resolved.spending()[0])
        seconds = resolved.seconds()
        budget = resolved.budget
        names = [name for name in seconds if resolved.params.runs(name)]
        table = pandas.DataFrame.from_dict(budget["stages"], orient="index").rename(
            columns={"uses": "releases"}
        )
        columns = ["noise_multiplier", "sample_rate", "releases", "epsilon", "share"]
        table = table.reindex(index=names, columns=columns).rename_axis("stage")
        table["minutes"] = pandas.Series({**seconds}, dtype=float) / 60
        table.attrs = {key: budget[key] for key in ("epsilon", "delta", "target")}
        return table

    def check(
        self, epsilon: float | None = None, *, delta: float | None = None, unit: str | None = None
    ) -> Verified:
        """Verify the ledger and the files of all artifacts. Needs no images.

        Args:
            epsilon: Largest ε to accept. The target in the ledger is checked in any case.
            delta: δ at which ε is computed. The default is the ledger's δ.
            unit: "image" or "group", to require this unit of privacy. By default, both are
                accepted.

        Returns:
            The verified ledger, with its ε.

        Raises:
            BudgetError: The ledger or a file is not valid. The error's `problems` list all reasons.
            ConfigError: An argument is not valid, or Opacus is not installed.
        """
        from sfumato.privacy.check import Bound, verify

        bound = Bound(limit=epsilon, delta=delta, unit=unit)
        return verify(
            self.folder / LEDGER, bound, artifacts=True, all_opinions=True, state=state_dir()
        )

    def run(self, *, progress: bool = True) -> Release:
        """Run all stages that have changed since the last run, and return the release.

        Args:
            progress: Print a line for each stage.

        Raises:
            ConfigError: The settings are not valid, or DVC cannot run in the folder.
            SfumatoError: A stage failed. The error has the class and the message of the error that
                the stage raised.
        """
        repro(self.folder, shown=progress)
        return self.release

    @property
    def release(self) -> Release:
        """Return the release of the last run.

        Raises:
            DataError: There is no release, or one of its files was changed.
        """
        from sfumato.release.loading import load_release

        return load_release(self.folder / ARTIFACTS / "synthesize")

    @property
    def verdict(self) -> Verdict:
        """Return the result of the last evaluation: level, sentence and accuracies.

        The result is local: do not share it.

        Raises:
            DataError: This release was not evaluated.
        """
        from sfumato.evaluation.identity import measured_another

        metrics = self.folder / "metrics.json"
        if not metrics.is_file():
            raise DataError(
                f"{metrics} does not exist: add evaluate to `run` in params.yaml if it is missing, "
                "and call run()"
            )
        content = read_json(metrics)
        if measured_another(content, self.folder / ARTIFACTS / "synthesize"):
            raise DataError(
                f"{metrics} is about another release: run `stage evaluate` in {self.folder}"
            )
        return cast("Verdict", content["verdict"])

    def report(self) -> Path:
        """Return the path of the page that describes the release: what it contains, what it cost,
        and how much an attacker can learn.

        Raises:
            DataError: There is no page yet.
        """
        page = self.folder / ARTIFACTS / "report" / "index.html"
        if not page.is_file():
            raise DataError(f"{page} does not exist: call run() first")
        return page


def own_path() -> str:
    """Return PATH with the folder of this Python environment's programs at its beginning."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def is_off(folder: Path, command: str) -> bool:
    """Return whether a command of `dvc.yaml` runs a stage that the recipe leaves out."""
    name = command.split()[-1]
    with suppress(*UNREADABLE):
        return name in STAGES and not read_yaml(folder / PLAN / f"{name}.yaml")["enabled"]
    return False


@contextmanager
def forking(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield environment variables in which PATH leads to a faster `stage` program.

    This program runs each command in a fork of one process that has already imported the libraries.
    If forking is not possible, as on systems other than Linux, PATH stays unchanged.
    """
    if sys.platform != "linux":
        yield {**environment}
        return
    with tempfile.TemporaryDirectory(prefix="stage-") as folder:
        forked = {**environment, "PATH": os.pathsep.join([f"{folder}/bin", environment["PATH"]])}
        words = [sys.executable, "-P", "-m", "stages.fork_server", folder]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            words, env=forked, start_new_session=True, stdin=pipe, stdout=pipe
        ) as server:
            assert server.stdin is not None and server.stdout is not None
            ready = server.stdout.readline()
            try:
                if not ready:
                    forked["PATH"] = environment["PATH"]
                yield forked
            finally:
                server.stdin.close()  # ends the server
                server.wait()


def check_and_renew(folder: Path) -> None:
    """Check the settings of a project, if it has any, and bring its `dvc.yaml` up to date."""
    if (params := folder / "params.yaml").is_file():
        load_params(params, folder / RECIPES)
    renew(folder / "dvc.yaml")


def repro(folder: Path, *targets: str, shown: bool, terminal: bool = False) -> None:
    """Run `dvc repro` with the DVC and the `stage` command of this Python environment.

    shown: print the lines of DVC and its stages, except hints and lines about disabled stages;
    terminal: let DVC and its stages write to the terminal themselves; `shown` then has no effect.

    A lock of DVC is removed first if the programs that took it no longer run. DVC's index is in the
    state directory, unless DVC_SITE_CACHE_DIR is set. If this process is killed or interrupted,
    everything that DVC started is interrupted too, and killed 2 seconds later. Raises ConfigError
    if the settings are not valid or `check_dvc` fails. If a stage fails, raises the error of the
    stage or, with `terminal`, SystemExit with the exit code of this error.
    """
    check_and_renew(folder)
    check_dvc(folder)
    remove_unused_lock(folder)
    index = state_dir() / DVC_INDEX
    make_index(index)
    environment = {"DVC_SITE_CACHE_DIR": str(index), **os.environ, "PATH": own_path()}
    with tempfile.TemporaryDirectory() as scratch:
        error_file = Path(scratch) / "error.json"
        watcher = ["sh", "-c", WATCHER, "sh"] if os.name == "posix" else []
        streams: tuple[int | None, int | None] = (None, None)
        if not terminal:
            streams = (subprocess.PIPE, subprocess.STDOUT)
        with (
            forking({**environment, LAST_ERROR: str(error_file)}) as environment,
            subprocess.Popen(
                # -P: no file in the user's folder can replace a package
                [*watcher, sys.executable, "-P", "-m", "dvc", "repro", *targets],
                cwd=folder,
                env=environment,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=streams[0],
                stderr=streams[1],
                text=True,
                errors="replace",
            ) as running,
        ):
            last = deque[str](maxlen=5)
            for line in running.stdout or ():
                last.append(line)
                shown &= not line.startswith("error: ")  # raised below instead
                off = line.startswith("> ") and is_off(folder, line)
                if shown and line.strip() and not off and not line.startswith(DVC_HINTS):
                    print(line, end="", flush=True)
            running.wait()
            running.communicate("\n")  # ends the watcher
        if running.returncode and terminal:  # the stage or DVC has printed its error
            raise SystemExit(failure(folder, error_file, last).exit_code)
        if running.returncode:
            raise failure(folder, error_file, last)


def failure(folder: Path, error_file: Path, last: Iterable[str]) -> SfumatoError:
    """Return the error of the stage that failed, or else DVC's last lines as an error."""
    if error_file.is_file():
        return error_from(read_json(error_file))
    return SfumatoError(f"`dvc repro` failed in {folder}: {''.join(last).strip()}")
