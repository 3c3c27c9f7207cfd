"""Damage the files of a small finished project in many ways, and run a command that reads each.

    python benchmarks/malformed.py --count 500 --seed 0

Each case changes one file: parameters, a recipe, a plan, a card, the ledger, DVC's lock, a journal,
an artifact or images. It changes the file in one way: cut short, bits flipped, emptied, a value of
another type, a key removed, repeated or added, deep nesting, huge numbers or bytes that are not
text. In some cases the file is removed, or replaced by a pipe, a folder, a link or a sparse file of
a terabyte. In some of the other cases, the file's recorded hash is updated. A command of the
program then runs in its own process, with bounded memory and time. It must exit with 0, 2, 3 or 4,
print no traceback, leave no incomplete file, and accept nothing wrong: no changed ledger, no
artifact with changed bytes, no journal that lost a charge.

Then each file that `bombs.py` builds is read in its own process, after PyTorch and all decoders
were imported. From then on, the process may use 2 GB more memory. (The limit is RLIMIT_DATA, which
counts private memory. RLIMIT_AS would count the whole address space, which is 3 GB after the
import.) The program must refuse each file within 20 seconds by one of its own errors. A MemoryError
must not be the cause of this error. The program may write at most LARGEST_PICTURE bytes plus a
megabyte, and it must leave no file in the state directory or among the temporary files.
"""

from __future__ import annotations

import argparse
import atexit
import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from bombs import BOMBS

from sfumato.errors import SfumatoError
from sfumato.storage.limits import LARGEST_PICTURE

ROOT = Path(__file__).resolve().parent.parent
# limits of one command; memory means address space, of which PyTorch needs a lot
SECONDS, MEMORY = 60, 24 * 2**30
BOMB_SECONDS, BOMB_MEMORY = 20, 2 * 2**30  # memory in addition to the imported program's
ALLOWED = {0, 2, 3, 4}
SMALL = {
    "recipe": "dp-feta",
    "profile": "digits",
    "run": ["count", "central", "pretrain", "synthesize"],
    "count": {"noise": "rest"},
    "privacy": {"epsilon": 10.0, "lifetime_epsilon": "unlimited"},
    "model": {"width": 8, "multipliers": [1, 1]},
    "pretrain": {"steps": 4, "batch": 8, "phases": [{"sources": {"central": 1}}]},
    "synthesize": {"count": 20, "steps": 2, "sources": {"pretrain": 1}},
}


@dataclass(frozen=True)
class Target:
    """A file to damage, and the command that reads it.

    guarded: whether any change of its bytes must be refused.
    """

    file: str
    command: tuple[str, ...]
    guarded: bool = False


CHECK = ("ledger", "check", "--artifacts")
PLAN, SYNTHESIZE = ("plan",), ("synthesize", "--out", "other")
PREPARE = ("prepare", "sensitive", "--card", "other.json")
TARGETS = [
    Target("params.yaml", PLAN),
    Target("params.yaml", ("recipe", "show")),
    Target("pipelines/dp-feta.yaml", PLAN),
    Target("pipelines/profiles/digits.yaml", ("recipe", "list")),
    Target("data/sensitive/card.json", PLAN),
    Target("data/sensitive/card.json", ("doctor",)),
    Target("ledger.json", ("ledger", "check"), guarded=True),
    Target("ledger.json", ("ledger", "show")),
    Target("ledger.json", PLAN),
    Target("ledger.json", ("report", "--out", "other.html")),
    Target("dvc.lock", CHECK),
    Target("artifacts/plan/budget.json", ("ledger", "write", "--out", "other.json")),
    Target("artifacts/plan/permission.json", ("ledger", "history")),
    Target("artifacts/plan/permission.json", ("central", "--out", "other")),
    Target("artifacts/plan/lineage.json", ("central", "--out", "other")),
    Target("artifacts/plan/lineage.json", PLAN),
    Target("artifacts/plan/synthesize.yaml", SYNTHESIZE),
    Target("artifacts/plan/count.yaml", ("count", "--out", "other")),
    Target("artifacts/count/privacy.json", CHECK),
    Target("artifacts/count/privacy.json", PLAN),
    Target("artifacts/count/counts.json", SYNTHESIZE, guarded=True),
    Target("artifacts/pretrain/weights.safetensors", SYNTHESIZE, guarded=True),
    Target("artifacts/pretrain/config.json", SYNTHESIZE, guarded=True),
    Target("artifacts/synthesize/images.npy", ("report", "--out", "other.html"), guarded=True),
    Target("artifacts/synthesize/card.json", ("report", "--out", "other.html"), guarded=True),
    Target("state/odometer/digits.jsonl", ("ledger", "history")),
    Target("state/keys/digits.journal", ("ledger", "history")),
    Target("state/odometer/digits.jsonl", PLAN),
    Target("state/data/digits/card.json", ("central", "--out", "other")),
    Target("state/data/digits/sensitive/images.npy", ("central", "--out", "other")),
    Target("set.npz", PREPARE),
    Target("folder/a/0.png", PREPARE),
    Target("raw/mnist/train-images-idx3-ubyte.gz", PREPARE),
    Target("raw/mnist/train-labels-idx1-ubyte.gz", PREPARE),
]
MNIST = {"source": "mnist", "path": "raw/mnist", "dataset_id": "own"}
SOURCES = {
    "set.npz": {"source": "npz", "path": "set.npz", "dataset_id": "own"},
    "folder/a/0.png": {"source": "imagefolder", "path": "folder", "dataset_id": "own"},
    "raw/mnist/train-images-idx3-ubyte.gz": MNIST,
    "raw/mnist/train-labels-idx1-ubyte.gz": MNIST,
}

# --- damage ---------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        10**30,
        2**62,
        1e308,
        -0.0,
        "",
        "x" * 100_000,
        [],
        {},
        [[]],
        {"a": {"b": []}},
    ),
    *(
        "../../../etc/passwd",
        "/etc/passwd",
        "\x00",
        "\x1b[2J",
        "\u202e",
        "<script>alert(1)</script>",
        "=1+1",
        "1e5",
    ),
    *(float("nan"), float("inf"), "9" * 5000, 99999999999999),
]


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 8, 200])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def noise(content: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice([1, 7, len(content)]))


def longer(content: bytes, chance: random.Random) -> bytes:
    return content + chance.choice([b"\0", b"}", b"\n- a", content, b"\xff\xfe", b"\xed\xa0\x80"])


def nested(content: bytes, chance: random.Random) -> bytes:
    deep = chance.choice([60, 1000, 200_000])
    return chance.choice(
        [b"[" * deep, b'{"a":' * deep, b"[" * deep + b"]" * deep, b"- " * deep, b"a: [" * 50 + b"x"]
    )


def bomb(content: bytes, chance: random.Random) -> bytes:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]"
        for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    ]
    return "\n".join(lines).encode()


def spots(content: Any, path: tuple = ()) -> list[tuple]:
    """List the path of every value in nested lists and mappings."""
    inner = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    return [spot for key, value in inner for spot in [(*path, key), *spots(value, (*path, key))]]


def odd_value(content: Any, chance: random.Random) -> Any:
    places = spots(content)
    if not places:
        return chance.choice(ODD)
    *path, last = chance.choice(places)
    within = content
    for key in path:
        within = within[key]
    match chance.choice(["replace"] * 5 + ["remove", "add"]):
        case "replace":
            within[last] = chance.choice(ODD)
        case "remove":
            del within[last]
        case "add" if isinstance(within, dict):
            within["odd"] = chance.choice(ODD)
        case _:
            within.append(chance.choice(ODD))
    return content


def of_another_kind(content: bytes, chance: random.Random) -> bytes:
    """Replace, remove or add one value of a JSON or YAML file. Flip bits of any other file."""
    try:
        return json.dumps(odd_value(json.loads(content), chance)).encode()
    except ValueError:
        pass
    try:
        return yaml.dump(odd_value(yaml.safe_load(content), chance)).encode(
            "utf-8", "surrogatepass"
        )
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError):
        return flip(content, chance)


def one_line(content: bytes, chance: random.Random) -> bytes:
    """Remove, repeat, swap or edit a line, or remove it and all lines after it."""
    lines = content.splitlines(keepends=True)
    i, j = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.choice(["out", "twice", "swap", "edit", "cut"]):
        case "out":
            del lines[i]
        case "twice":
            lines.insert(j, lines[i])
        case "swap":
            lines[i], lines[j] = lines[j], lines[i]
        case "edit":
            lines[i] = of_another_kind(lines[i], chance) + b"\n"
        case _:
            lines[i:] = []
    return b"".join(lines)


def npy_of(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": kind, "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def false_claims(content: bytes, chance: random.Random) -> bytes:
    """Make a header claim a shape, number of axes or type that its content does not have."""
    shape = chance.choice(
        [(2**36, 28, 28), (-1, 8, 8), (2**62,) * 4, (), (0, 8, 8, 1), (10**18, 8, 8, 1)]
    )
    if content.startswith(b"\x93NUMPY"):
        return npy_of(shape, chance.choice(["|u1", "<f8", "|O", "<U9"])) + content[128:]
    if content.startswith(b"PK"):
        file, members = io.BytesIO(), zipfile.ZipFile(io.BytesIO(content))
        with zipfile.ZipFile(
            file, "w", chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_BZIP2])
        ) as archive:
            for name in members.namelist():
                odd = name == chance.choice(members.namelist())
                archive.writestr(name, npy_of(shape) if odd else members.read(name))
        return file.getvalue()
    if content.startswith(b"\x1f\x8b"):
        axes = chance.choice(
            [(-1, 28, 28), (2**31 - 1,) * 3, (0, 0, 0), (1, 28, 28), (2**20, 2**10, 2)]
        )
        return gzip.compress(
            b"\0\0\x08\x03" + struct.pack(">3i", *axes) + bytes(chance.choice([0, 784, 2**24]))
        )
    return struct.pack("<Q", chance.choice([0, 2**63, 2**32, 100])) + content[8:]


def encrypted(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := content.find(mark, start + 1)) >= 0:
            changed[start + flags] |= 1
    return bytes(changed)


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    *(cut, flip, flip, noise, longer, nested, bomb, one_line, false_claims, encrypted),
    *[of_another_kind] * 8,
    lambda content, chance: b"",
]


def replace_kind(path: Path, chance: random.Random) -> str:
    """Remove the file, or replace it by a pipe, a folder, a sparse file or a link, at random.

    Returns a word for the change.
    """
    kind = chance.choice(["pipe", "folder", "link", "nothing", "hole"])
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "hole":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == "link":
        path.symlink_to(chance.choice(["/dev/zero", "/etc/passwd", "/nowhere", path.name]))
    return kind


# --- one case -------------------------------------------------------------------------------------


def mend(path: Path) -> None:
    """Update the damaged file's hash in its privacy.json, as an informed attacker would."""
    about = path.parent / "privacy.json"
    content = json.loads(about.read_text())
    content["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    about.write_text(json.dumps(content))


def run(words: tuple[str, ...]) -> tuple[int, str]:
    """Run a command in a forked process. Returns its exit code and the end of its output.

    The code is 124 if the command ran too long and was killed.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        atexit._clear()  # the parent's exit handlers must not run here
        code, out = 1, io.StringIO()
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            sys.argv = ["stage", *words]
            from stages.cli import main

            with redirect_stdout(out), redirect_stderr(out):
                try:
                    main()
                    code = 0
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else int(end.code is not None)
                except BaseException:
                    traceback.print_exc()
                atexit._run_exitfuncs()  # such as the removal of unpacked files
        finally:
            os.write(write, out.getvalue()[-8000:].encode("utf-8", "backslashreplace"))
            os._exit(code)
    os.close(write)
    until = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124, ""
        time.sleep(0.005)
    with os.fdopen(read, "rb") as file:
        return os.waitstatus_to_exitcode(status), file.read().decode()


def accepts_something_wrong(target: Target, text: str, epsilon: float) -> str | None:
    """Return why the command must not succeed after this damage, or None if it may."""
    if target.guarded:
        return "changed bytes were accepted"
    history = target.command == ("ledger", "history") and target.file.startswith("state")
    if history and "incomplete" not in text and total_of(text) < epsilon - 1e-3:
        return "a journal that lost a charge was accepted"
    return None


def total_of(history: str) -> float:
    return float(history.rsplit("ε = ", 1)[1].split(" ")[0]) if "ε = " in history else 0.0


def make_project(folder: Path) -> float:
    """Create a small finished project in `folder`, and make it the working directory.

    Returns the ε of its journal.
    """
    shutil.copytree(ROOT / "pipelines", folder / "pipelines")
    os.chdir(folder)
    os.environ["SFUMATO_STATE"] = str(folder / "state")
    Path("params.yaml").write_text(yaml.safe_dump(SMALL))
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 8, 8), dtype=np.uint8), np.arange(12) % 2
    np.savez("set.npz", images=images, labels=labels, classes=np.array(["a", "b"]))
    from PIL import Image

    for i, image in enumerate(images):
        (folder / "folder" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "folder" / "ab"[i % 2] / f"{i}.png")
    (folder / "raw/mnist").mkdir(parents=True)
    for split in ("train", "t10k"):
        for kind, values in (("images-idx3", images), ("labels-idx1", labels.astype(np.uint8))):
            header = (
                b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape)
            )
            (folder / f"raw/mnist/{split}-{kind}-ubyte.gz").write_bytes(
                gzip.compress(header + values.tobytes())
            )
    from sfumato.settings.stages import STAGES

    steps = [
        ("prepare", "sensitive"),
        ("prepare", "public"),
        ("plan",),
        *((name,) for name in STAGES),
    ]
    for words in [*(step for step in steps if step != ("evaluate",)), ("ledger", "write")]:
        code, text = run(words)
        if code:
            raise RuntimeError(f"stage {' '.join(words)} ended with {code}:\n{text}")
    written = hashlib.md5(Path("ledger.json").read_bytes()).hexdigest()
    outs = [{"path": "ledger.json", "hash": "md5", "md5": written}]
    Path("dvc.lock").write_text(
        yaml.safe_dump({"schema": "2.0", "stages": {"ledger": {"cmd": "x", "outs": outs}}})
    )
    for words in (("ledger", "check", "--artifacts"), ("ledger", "history")):
        code, text = run(words)
        if code:
            raise RuntimeError(f"the undamaged project fails `stage {' '.join(words)}`:\n{text}")
    return total_of(text)


def try_one(whole: Path, epsilon: float, chance: random.Random) -> tuple[str, list[str]]:
    """Try one case in a fresh copy of the project. Returns its description, and what went wrong."""
    here = Path.cwd()
    for entry in here.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    shutil.copytree(whole, here, dirs_exist_ok=True)
    target = chance.choice(TARGETS)
    path = here / target.file
    if target.file in SOURCES:
        Path("params.yaml").write_text(
            yaml.safe_dump({"recipe": "dpdm", "data": SOURCES[target.file]})
        )
    before, damage = path.read_bytes(), chance.choice(DAMAGES)
    mended = False
    if chance.random() < 0.08:
        name = replace_kind(path, chance)
    else:
        name = getattr(damage, "__name__", "empty").replace("<lambda>", "empty")
        path.write_bytes(damage(before, chance))
        if (
            mended := target.guarded
            and target.file.startswith("artifacts/")
            and chance.random() < 0.5
        ):
            mend(path)
    same = path.is_file() and path.stat().st_size < 2**30 and path.read_bytes() == before
    code, text = run(target.command)
    wrong = []
    if code not in ALLOWED:
        wrong.append(f"exit code {code}")
    if "Traceback" in text or "Error:" in text.replace("Usage Error:", ""):
        wrong.append("a traceback")
    if code and not text.strip():
        wrong.append("the command failed without a message")
    if (
        code == 0
        and not same
        and not mended
        and (why := accepts_something_wrong(target, text, epsilon))
    ):
        wrong.append(why)
    if left := [str(p.relative_to(here)) for p in here.rglob("*.tmp")]:
        wrong.append(f"left behind: {left[0]}")
    if code and any((here / name).exists() for name in ("other", "other.json", "other.html")):
        wrong.append("the command failed, but left an output")
    told = (
        f"{target.file} ({name}{', hash updated' if mended else ''}): stage "
        f"{' '.join(target.command)} -> {code}"
    )
    return told, [f"{why}\n{text[-1500:]}" for why in wrong]


# --- bombs ----------------------------------------------------------------------------------------


def own(file: str, entry: str) -> int:
    """Read a number from /proc/self/FILE: kilobytes of memory in `status`, bytes in `io`."""
    return int(
        next(
            line for line in Path("/proc/self", file).read_text().splitlines() if entry in line
        ).split()[1]
    )


def explode(name: str, folder: Path) -> list[str]:
    """Build the bomb `name` in an empty folder, and read it in a forked process.

    Returns what went wrong.
    """
    for part in ("set", "tmp"):
        (folder / part).mkdir()
    reader = BOMBS[name](folder / "set")
    channel, write = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(channel)
        atexit._clear()  # the parent's exit handlers must not run here
        wrong = ["the process exited"]
        try:
            os.environ["SFUMATO_STATE"] = str(folder / "state")
            tempfile.tempdir = str(folder / "tmp")
            wrong = read_bounded(reader)
            atexit._run_exitfuncs()
        finally:
            os.write(write, json.dumps(wrong).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(channel, "rb") as file:
        wrong = json.loads(file.read() or '["the process was killed"]')
    os.waitpid(child, 0)
    if (seconds := time.monotonic() - begun) > BOMB_SECONDS:
        wrong.append(f"it took {seconds:.0f} s")
    stayed = [
        path for part in ("state", "tmp") for path in (folder / part).rglob("*") if path.is_file()
    ]
    return wrong + [f"left behind: {path.relative_to(folder)}" for path in stayed[:1]]


def read_bounded(reader: Callable[[], object]) -> list[str]:
    """Call `reader` with bounded memory and time. Returns what went wrong."""
    memory = 1024 * own("status", "VmData") + BOMB_MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    signal.alarm(3 * BOMB_SECONDS)
    before = own("io", "wchar")
    wrong = ["accepted"]
    try:
        reader()
    except BaseException as error:
        wrong = (
            []
            if isinstance(error, SfumatoError) and str(error)
            else [f"{type(error).__name__}: {error}"[:500]]
        )
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                wrong.append(f"caused by a MemoryError: {error}"[:500])
            cause = cause.__cause__ or cause.__context__
    written = own("io", "wchar") - before
    if written > LARGEST_PICTURE + 2**20:
        wrong.append(f"{written:,} bytes written")
    return wrong


def explode_all(names: list[str]) -> int:
    """Try the named bombs, and print what went wrong. Returns the number of failures."""
    import imagecodecs
    import tifffile  # noqa: F401

    import sfumato.data.survey
    import sfumato.release.loading  # noqa: F401

    imagecodecs.png_check(b"")  # loads the codec before the forks
    failures = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="bomb-") as folder:
            wrong = explode(name, Path(folder))
        failures += bool(wrong)
        for why in wrong:
            print(f"{name}: {why}", flush=True)
    print(
        f"{len(names)} bombs, {BOMB_MEMORY / 2**30:.0f} GB of memory for each: "
        f"{len(names) - failures} refused, {failures} failures"
    )
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="Number of a single case to run.")
    arguments = parser.parse_args()
    import torch

    import sfumato.release.release
    import sfumato.training.curriculum  # noqa: F401  (imported once, before the forks)

    torch.set_num_threads(1)
    codes: Counter[str] = Counter()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="malformed-") as name:
        whole, here, begun = Path(name) / "whole", Path(name) / "here", time.perf_counter()
        here.mkdir()
        # created in the folder of the cases, because the state contains absolute paths
        epsilon = make_project(here)
        shutil.copytree(here, whole)
        for number in range(arguments.count) if arguments.only is None else [arguments.only]:
            told, wrong = try_one(whole, epsilon, random.Random(f"{arguments.seed} {number}"))
            codes[told.rsplit(" ", 1)[1]] += 1
            failures += bool(wrong)
            for why in wrong:
                print(f"case {number}: {told}: {why}", flush=True)
        seconds = time.perf_counter() - begun
        os.chdir(ROOT)
    spread = ", ".join(f"{number} × exit {code}" for code, number in sorted(codes.items()))
    print(
        f"{codes.total()} malformed inputs, seed {arguments.seed}: {spread}; {failures} failures "
        f"({seconds:.0f} s)"
    )
    if arguments.only is None:
        failures += explode_all([*BOMBS])
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
