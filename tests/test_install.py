"""Installation takes PyTorch's CPU builds if there is no NVIDIA card.

It takes them from the public index if PyTorch's own index does not answer.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPU = (ROOT / "cpu.txt").read_text()
BUILDS = re.findall(r"(?m)^(torch\w*)==([0-9.]+);", CPU)
FILES = ("Makefile", "cpu.txt", "constraints.txt", "pyproject.toml")
UNREACHABLE = "http://127.0.0.1:9"  # the discard port, which nothing serves


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def index(tmp_path):
    """Serve an index that has a page for torch. Yields its address."""
    (tmp_path / "index" / "torch").mkdir(parents=True)
    handler = partial(Quiet, directory=tmp_path / "index")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def make_install(folder: Path, index: str, *, card: bool = False) -> tuple[list[str], str]:
    """Run `make install` with an installer that only prints its arguments.

    Returns its lines and standard error.
    """
    project = folder / "project"
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").touch()
    for name in FILES:
        shutil.copy(ROOT / name, project)
    programs = folder / "programs"
    programs.mkdir()
    for name in ("sh", "sed", "uname", "touch", "env", "make", "awk", "df", "echo"):
        (programs / name).symlink_to(shutil.which(name))
    # not the first python3 of PATH, which may be a script of pyenv that needs other programs
    (programs / "python3").symlink_to(sys.executable)
    if card:
        (programs / "nvidia-smi").symlink_to(shutil.which("true"))
    words = ["make", "--silent", "install", "INSTALLER=echo installed", f"TORCH_INDEX={index}"]
    environment = os.environ | {"PATH": str(programs)}
    done = subprocess.run(
        words, cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("installed")], done.stderr


def test_cpu_builds_have_the_versions_that_the_tests_use():
    constraints = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert dict(BUILDS) == {name: constraints[name] for name in ("torch", "torchvision")}
    assert CPU.splitlines()[-1] == "."


def add_wheel(folder: Path, version: str) -> None:
    """Add an empty wheel of torch to the index in `folder`."""
    (folder / "torch").mkdir(parents=True)
    place = folder / "torch" / f"torch-{version}-py3-none-any.whl"
    about = f"torch-{version}.dist-info"
    with zipfile.ZipFile(place, "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    page = f'<a href="{quote(place.name)}">{place.name}</a>'
    (folder / "torch" / "index.html").write_text(page)


@pytest.mark.parametrize(("answers", "build"), [(True, "+cpu"), (False, "")])
def test_pip_takes_the_cpu_build_if_its_index_answers(tmp_path, index, answers, build):
    """The installation once ended with "No matching distribution" if the index was blocked."""
    name, version = BUILDS[0]
    add_wheel(tmp_path / "index" / "public", version)
    add_wheel(tmp_path / "index" / "cpu", f"{version}+cpu")
    more = f"{index}/cpu" if answers else UNREACHABLE
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps"]
    words += ["--no-cache-dir", "--retries", "0", "--index-url", f"{index}/public"]
    words += ["--extra-index-url", more, f"{name}=={version}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert f"Would install {name}-{version}{build}\n" in done.stdout, done.stderr


def test_uv_takes_the_cpu_builds_from_the_same_index():
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    (index,) = uv["index"]
    assert index["explicit"] and f"--extra-index-url {index['url']}\n" in CPU
    assert {source["index"] for name, _ in BUILDS for source in uv["sources"][name]} == {
        index["name"]
    }


def test_the_package_itself_names_no_index():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [words for words in project["dependencies"] if "+" in words or "@" in words]


def test_make_takes_cpu_builds_where_their_index_answers(tmp_path, index):
    lines, _ = make_install(tmp_path, index)
    wanted = [f"{name}=={version}" for name, version in BUILDS]
    assert lines[0].split()[1:] == ["--no-deps", "--index-url", index, *wanted]
    assert lines[1].endswith("-c constraints.txt -e .")


def test_make_takes_the_public_index_where_the_other_is_silent(tmp_path):
    lines, errors = make_install(tmp_path, UNREACHABLE)
    assert len(lines) == 1 and "index-url" not in lines[0]
    assert errors.count("cannot be reached") == 1


def test_make_keeps_cuda_for_an_nvidia_card(tmp_path, index):
    lines, errors = make_install(tmp_path, index, card=True)
    assert len(lines) == 1 and "index-url" not in lines[0] and not errors


def test_make_lets_python_keep_compiled_modules(tmp_path):
    """Containers often forbid Python to keep compiled modules.

    A start of Python that has to compile PyTorch takes three times as long.
    """
    (tmp_path / "Makefile").write_text(
        f"include {ROOT / 'Makefile'}\nprobe:\n"
        f"\t@{sys.executable} -c 'import sys; print(sys.dont_write_bytecode)'\n"
    )
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    words = ["make", "--silent", "probe"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
