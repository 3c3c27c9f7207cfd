"""Check that the tests catch typical mistakes. Each mutant puts one mistake into a copy of this
tree.

    make mutants                                     all of them, on one thread
    python tests/mutants/run.py --seconds 60         a random sample: none starts after 60 s
    python tests/mutants/run.py --only NAME --show   one, with the output of its tests

The mutants are the entries of the YAML files in this folder. An entry names a file, a fragment that
occurs once in this file, its replacement, and tests. At least one of the tests must fail. One
process imports the libraries, and forks for each mutant.
"""

from __future__ import annotations

import argparse
import compileall
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SLOW_IMPORTS = (
    *(
        "torch",
        "torchvision",
        "numpy",
        "scipy.stats",
        "sklearn.datasets",
        "pandas",
        "matplotlib.pyplot",
        "PIL.Image",
    ),
    *(
        "pydantic",
        "yaml",
        "typer",
        "rich.table",
        "filelock",
        "randomgen",
        "safetensors.torch",
        "opacus",
        "hypothesis",
    ),
    *("dp_accounting.rdp", "dp_accounting.pld"),
)
LIMIT = 180  # seconds for the tests of one mutant; a mutant whose tests take longer is BROKEN
LIMIT_OF_ALL = 3600  # seconds for all tests once, without any mutant
KILLED = "killed"
SURVIVED = "survived"
BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake, and the tests that must find it.

    mistake: kind of the mistake;
    tests: at least one of these tests must fail, unless `harmless` is set;
    harmless: the reason why no test can fail; empty if a test must fail.
    """

    name: str
    mistake: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    harmless: str = ""

    def apply(self, tree: Path) -> str:
        """Change the file in `tree`. Returns its text before the change.

        Raises ValueError unless the fragment occurs exactly once.
        """
        path = tree / self.file
        before = path.read_text(encoding="utf-8")
        if before.count(self.find) != 1:
            raise ValueError(
                f"{self.name}: its fragment occurs {before.count(self.find)} times in {self.file}"
            )
        path.write_text(before.replace(self.find, self.replace), encoding="utf-8")
        return before


@dataclass(frozen=True, kw_only=True)
class Outcome:
    mutant: Mutant
    result: str
    seconds: float
    output: str

    @property
    def failed(self) -> str:
        """Return the line of the output that names the failed test, or "" if none failed."""
        lines = [
            line for line in self.output.splitlines() if line.startswith(("FAILED ", "ERROR "))
        ]
        return lines[0] if lines else ""


def load_mutants() -> list[Mutant]:
    found = []
    for file in sorted(HERE.glob("*.yaml")):
        for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
            words = {key: str(value) for key, value in entry.items() if key != "tests"}
            found.append(Mutant(**words, tests=tuple(entry["tests"])))
    return found


def copy_tree(target: Path) -> None:
    """Copy the files of this repository that git tracks or would add, and compile them."""
    listed = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split(
        "\0"
    ):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    compileall.compile_dir(target, quiet=2)


def run_tests(tree: Path, tests: Sequence[str], limit: float = LIMIT) -> tuple[int, str]:
    """Run tests in a fork in which `tree` is the project.

    Returns pytest's exit code and its output. The exit code is −1 if the tests took more than
    `limit` seconds.
    """
    log = tree.parent / "output"
    scratch = tree.parent / "scratch"
    child = os.fork()
    if child == 0:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1), os.dup2(descriptor, 2)
        os.chdir(tree)
        sys.path[:] = [
            str(tree),
            *(path for path in sys.path if Path(path).resolve() not in (ROOT, HERE)),
        ]
        sys.dont_write_bytecode = True
        os.environ |= {
            "PYTHONPATH": str(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SFUMATO_STATE": str(scratch / "state"),
        }
        words = [
            "-x",
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            f"--basetemp={scratch}",
            f"--rootdir={tree}",
        ]
        code = pytest.main([*words, *tests])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(int(code))
    until = time.monotonic() + limit
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.05)
    if done[0] == 0:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -1, f"no end after {limit:g} s"
    return os.waitstatus_to_exitcode(done[1]), log.read_text(encoding="utf-8", errors="replace")


def try_mutant(tree: Path, mutant: Mutant) -> Outcome:
    started = time.monotonic()
    path = tree / mutant.file
    try:
        before = mutant.apply(tree)
    except ValueError as error:
        return Outcome(mutant=mutant, result=BROKEN, seconds=0.0, output=str(error))
    # Remove the compiled code of this file. Python compares file times in whole seconds, so it
    # might not notice the change.
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()
    try:
        code, output = run_tests(tree, mutant.tests)
    finally:
        path.write_text(before, encoding="utf-8")
    result = {0: SURVIVED, 1: KILLED}.get(code, BROKEN)
    return Outcome(mutant=mutant, result=result, seconds=time.monotonic() - started, output=output)


def outcomes(mutants: Sequence[Mutant], seconds: float) -> Iterator[Outcome]:
    """Try one mutant after another. None is started later than `seconds` after the preparation."""
    for name in SLOW_IMPORTS:
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        started = time.monotonic()
        for mutant in mutants:
            if time.monotonic() - started > seconds:
                return
            yield try_mutant(tree, mutant)


def check_tests(mutants: Sequence[Mutant]) -> None:
    """Raise ValueError if tests of the mutants fail without any mutant: such tests would seem to
    catch every mutant.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(tree := Path(folder) / "tree")
        code, output = run_tests(
            tree, sorted({test for mutant in mutants for test in mutant.tests}), LIMIT_OF_ALL
        )
        if code:
            raise ValueError(f"the tests fail without any mutant:\n{output[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Put known mistakes into the code, and see whether the tests fail."
    )
    parser.add_argument("--only", nargs="*", help="names of mutants, or the beginnings of names")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after so many, in a random order"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the order; without it another one each time"
    )
    parser.add_argument(
        "--check", action="store_true", help="first run their tests without any: they must pass"
    )
    parser.add_argument("--show", action="store_true", help="show the output of the tests")
    given = parser.parse_args()
    mutants = [m for m in load_mutants() if not given.only or m.name.startswith(tuple(given.only))]
    if given.seconds < float("inf"):
        seed = given.seed if given.seed is not None else random.randrange(10**6)
        print(f"a random sample (--seed {seed})")
        random.Random(seed).shuffle(mutants)
    if given.check:
        check_tests(mutants)
    started = time.monotonic()
    wrong = []
    tried = 0
    counted = dict.fromkeys((KILLED, SURVIVED, BROKEN), 0)
    for outcome in outcomes(mutants, given.seconds):
        tried += 1
        counted[outcome.result] += 1
        expected = SURVIVED if outcome.mutant.harmless else KILLED
        mark = "" if outcome.result == expected else f"  EXPECTED {expected}"
        wrong += [outcome] if mark else []
        by = outcome.failed.removeprefix("FAILED ") or outcome.mutant.harmless
        print(
            f"{outcome.result:8} {outcome.seconds:5.1f} s  {outcome.mutant.name}{mark}  {by}"[:200],
            flush=True,
        )
        if given.show or mark:
            print(outcome.output[-6000:])
    print(
        f"{tried} of {len(mutants)} mutants tried: {counted[KILLED]} killed, {counted[SURVIVED]} "
        f"survived, {counted[BROKEN]} broken, in {time.monotonic() - started:.0f} s; {len(wrong)} "
        f"not as expected{': ' if wrong else ''}{', '.join(o.mutant.name for o in wrong)}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
