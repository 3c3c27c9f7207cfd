"""The Dockerfile, read as text because nothing can build it here.

The image is small, runs without root, contains nothing private, and keeps its state outside.
"""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE = (ROOT / "Dockerfile").read_text()
STEPS = [
    line.split(None, 1)
    for line in FILE.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]
FINAL = STEPS[max(i for i, (word, _) in enumerate(STEPS) if word == "FROM") :]
ALLOWED = [
    line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
]


def said(word: str, steps=FINAL) -> list[str]:
    return [rest for name, rest in steps if name == word]


def test_both_stages_start_from_a_supported_slim_python():
    wanted = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())[1]
    assert {base.split()[0] for base in said("FROM", STEPS)} == {f"python:{wanted}-slim"}
    assert not said("ADD", STEPS)


def test_what_runs_is_not_root_and_its_state_is_a_volume():
    (user,), (state,) = said("USER"), said("VOLUME")
    assert [name for name, _ in FINAL][-4:] == ["USER", "VOLUME", "WORKDIR", "CMD"]
    assert user == "${UID}" and said("ARG") == ["UID=1000"], (
        "a number, so that Kubernetes can check that it is not root"
    )
    (name,) = re.findall(r"useradd --uid \$\{UID\} --create-home (\w+)", said("RUN")[0])
    assert (
        f"SFUMATO_STATE={state} " in said("ENV")[0]
        and f"DVC_SITE_CACHE_DIR={state}/" in said("ENV")[0]
    )
    assert re.search(
        rf"install -d -o {name} -g {name} -m 0700 {state} {said('WORKDIR')[0]}", said("RUN")[0]
    )


def test_a_stop_reaches_every_process_like_ctrl_c():
    """DVC ignores SIGINT while a stage runs, and the stage ends itself.

    Without `-g`, no stage would get the signal. `-s` also reaps processes in Apptainer, where tini
    is not the first process.
    """
    entry = ['["tini", "-s", "-g", "--"]']
    assert said("ENTRYPOINT") == entry and said("STOPSIGNAL") == ["SIGINT"]
    assert re.search(r"apt-get install [^&]*\btini\b", said("RUN")[0])


def test_pytorch_is_the_cpu_build_by_default():
    (run,), (argument,) = (said(word, STEPS[: -len(FINAL)]) for word in ("RUN", "ARG"))
    assert argument == "TORCH=cpu" and 'https://download.pytorch.org/whl/${TORCH}"' in run
    assert run.index("download.pytorch.org") < run.index("-c constraints.txt"), (
        "first, or pip takes CUDA's"
    )
    pinned = re.findall(r"(?m)^torch(?:vision)?==.*", (ROOT / "constraints.txt").read_text())
    assert len(pinned) == 2 and "grep -E '^torch(vision)?=='" in run


def test_no_layer_keeps_caches():
    for _, run in (step for step in STEPS if step[0] == "RUN"):
        assert run.count("pip install") == run.count("--no-cache-dir")
        assert (
            ("apt-get" in run)
            == ("rm -rf /var/lib/apt/lists/*" in run)
            == ("--no-install-recommends" in run)
        )


@pytest.mark.parametrize(
    "path",
    [
        ".git",
        ".sfumato",
        "artifacts",
        "data",
        "evaluation",
        "metrics.json",
        "params.yaml",
        ".venv",
        "tests",
    ],
)
def test_nothing_private_and_nothing_superfluous_goes_into_it(path):
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert not any(fnmatch(path, pattern) for pattern in ALLOWED)


def test_what_it_is_built_from_is_there():
    assert all((ROOT / name).exists() for name in ALLOWED)
    assert {
        "constraints.txt",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "pipelines",
        "sfumato",
        "stages",
    } <= {*ALLOWED}


def test_the_readmes_command_mounts_pictures_read_only():
    command = re.search(r"docker run [^`]*", (ROOT / "README.md").read_text())[0]
    assert f":{said('VOLUME')[0]} " in command and f":{said('WORKDIR')[0]} " in command
    assert "--network none" in command and re.search(r"-v \S+:/data/clinic:ro ", command)
