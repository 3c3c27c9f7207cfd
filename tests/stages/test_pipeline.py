"""`dvc repro` as the data owner meets it: what re-runs, what re-spends, what is refused, what a kill leaves.

One small real run, then edits of it.
The tests of this module share one repository and run in the order of the file, each from what the last one left.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SIZE = 317  # of the source: a number to search git for
# The key of the hold-out. With it the numbers searched for are always the same, and none of them is public by chance,
# as the 62 classes of glyphs are.
KEY = bytes(range(32))
SMALL = {
    "recipe": "full",
    "profile": "digits",
    "data": {"dataset_id": "small", "source": "npz", "path": "source.npz"},
    "privacy": {"epsilon": 10.0, "size_hint": 300, "lifetime_epsilon": "unlimited"},
    "model": {"width": 16, "multipliers": [1, 1]},
    "public": {"per_class": 4},
    "frequency": {"size": 200},
    "classifier": {"steps": 15, "width": 8},
    "select": {"count": 20},
    "auxiliary": {"steps": 20, "images": 200},
    "pretrain": {"steps": 20, "batch": 16},
    "run": [
        "count",
        "central",
        "frequency",
        "auxiliary",
        "classifier",
        "histogram",
        "select",
        "pretrain",
        "saliency",
        "finetune",
        "synthesize",
        "evaluate",
    ],
    "finetune": {"steps": 40, "batch": 60, "draws": 1, "trainable": "salient-lora"},
    "synthesize": {"count": 120, "steps": 3},
    "evaluate": {"classifiers": ["lr"], "seeds": [0], "epochs": 1, "stages": [], "bound": False, "fidelity": []},
}


class Repository:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = os.environ | {
            "SFUMATO_STATE": str(path / "state"),
            "PYTHONPATH": str(path),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "SFUMATO_CHECKPOINT_EVERY": "1",
        }
        self.edits: dict = {}

    def run(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(words, cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=1500)
        return done.returncode, done.stdout + done.stderr

    def repro(self, *words: str) -> str:
        code, text = self.run("dvc", "repro", *words)
        assert code == 0, text
        return text

    def edit(self, **content) -> None:
        from sfumato.recipes import overlaid

        self.edits = overlaid(self.edits, content)
        (self.path / "params.yaml").write_text(yaml.safe_dump(overlaid(SMALL, self.edits), sort_keys=False))

    def opened(self) -> list[str]:
        """The stages of all charges ever opened, in order."""
        lines = (self.path / "state" / "odometer" / "small.jsonl").read_text().splitlines()
        return [entry["record"]["stage"] for entry in map(json.loads, lines) if entry["kind"] == "open"]

    def journal(self) -> list[dict]:
        path = self.path / "state" / "odometer" / "small.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def write_source(self, size: int) -> None:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
        np.savez(
            self.path / "source.npz",
            images=images[:size],
            labels=bunch.target[:size],
            classes=np.array([str(i) for i in range(10)]),
        )


def ran(text: str) -> set[str]:
    return {line.split("'")[1] for line in text.splitlines() if line.startswith("Running stage")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Repository:
    path = tmp_path_factory.mktemp("repository")
    for name in ("sfumato", "stages", "pipelines"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, path / name)
    repository = Repository(path)
    for words in (["git", "init", "-q"], ["dvc", "init", "-q"], ["dvc", "config", "core.analytics", "false"]):
        assert repository.run(*words)[0] == 0
    (path / ".git/info/exclude").write_text("/state/\n")
    repository.edit()
    repository.write_source(SIZE)
    key = path / "state" / "keys" / "small"
    key.parent.mkdir(parents=True)
    key.write_bytes(KEY)
    return repository


QUERIES = ["central", "count", "finetune", "frequency", "histogram", "saliency"]


PREPARED = {"prepare-sensitive", "prepare-public", "plan"}  # which params.yaml re-runs, to the same end
AFTER = {"synthesize", "ledger", "report", "evaluate"}


def test_a_first_run_ends_in_a_release_with_a_ledger_that_holds(repository):
    assert (
        ran(repository.repro())
        >= {"prepare-sensitive", "plan", *QUERIES, "prepare-public", "auxiliary", "classifier", "select", "pretrain"}
        | AFTER
    )
    images = np.load(repository.path / "artifacts/synthesize/images.npy")
    labels = np.load(repository.path / "artifacts/synthesize/labels.npy")
    assert (
        images.shape == (120, 8, 8, 1)
        and images.dtype == np.uint8
        and labels.shape == (120,)
        and set(labels) <= set(range(10))
    )
    assert sorted(repository.opened()) == QUERIES
    code, text = repository.run("stage", "ledger", "check", "--epsilon", "10", "--artifacts")
    assert code == 0, text
    ledger = json.loads((repository.path / "ledger.json").read_text())
    assert 9 < ledger["epsilon"]["rdp"] <= 10 and len(ledger["records"]) == len(QUERIES)
    assert (repository.path / "artifacts/report/index.html").stat().st_size > 10_000 and (
        repository.path / "evaluation/report.html"
    ).exists()


def test_a_ledger_over_the_limit_exits_3(repository):
    code, text = repository.run("stage", "ledger", "check", "--epsilon", "5")
    assert code == 3 and "exceeds --epsilon 5" in text and "Traceback" not in text


def test_a_changed_file_of_an_artifact_is_found(repository):
    file = repository.path / "artifacts/synthesize/labels.npy"
    whole = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(whole[:-1] + b"\x07")
    code, text = repository.run("stage", "ledger", "check", "--artifacts")
    file.write_bytes(whole)
    assert code == 3 and "labels.npy" in text


def test_a_release_whose_cost_was_cut_away_is_found(repository):
    folder = repository.path / "artifacts/synthesize"
    file = folder / "privacy.json"
    whole = file.read_text()
    content = json.loads(whole)
    file.chmod(0o644)
    for edit, words in (
        ({"records": {}}, "lacks records of"),
        ({"stage": "auxiliary"}, "was written by `auxiliary`"),
        ({"records": dict(list(content["records"].items())[:-1])}, "lacks records of"),
    ):
        file.write_text(json.dumps(content | edit))
        code, text = repository.run("stage", "ledger", "check", "--artifacts")
        assert code == 3 and words in text and "Traceback" not in text, text
    file.write_text(whole)
    folder.rename(folder.with_name("aside"))
    code, text = repository.run("stage", "ledger", "check", "--artifacts")
    folder.with_name("aside").rename(folder)
    assert code == 3 and "artifacts/synthesize is not an artifact" in text, text
    assert repository.run("stage", "ledger", "check", "--artifacts")[0] == 0


def test_git_holds_no_size_no_counts_and_no_hash_of_sensitive_bytes(repository):
    import hashlib

    state = repository.path / "state" / "data" / "small"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=repository.path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    tracked = [
        name for name in tracked if not name.startswith(("state/", "source.npz", ".git/", "sfumato/", "stages/"))
    ]
    assert {"dvc.lock", "ledger.json"} <= set(tracked)
    assert not any(name.startswith(("metrics.json", "evaluation", "artifacts")) for name in tracked)
    written = {
        name: (repository.path / name).read_text()
        for name in tracked
        if name not in ("params.yaml",) and not name.startswith("pipelines/")
    }
    numbers, hashes = [SIZE], []
    for part in ("sensitive", "holdout"):
        labels = np.load(state / part / "labels.npy")
        numbers.append(len(labels))
        hashes += [str(np.bincount(labels, minlength=10).tolist())]
        for file in (state / part).glob("*.npy"):
            hashes += [hashlib.new(kind, file.read_bytes()).hexdigest() for kind in ("md5", "sha256", "sha1")]
    # DVC notes the size of every file. A file made from public parameters alone may by chance have as many bytes as
    # there are images.
    public = ("params.yaml", "pipelines", "sfumato", "stages", "data/", "artifacts/plan")
    lock = written["dvc.lock"]
    for entry in re.findall(r"- path: (?:\S+)\n(?: {6}\S.*\n)+", lock):
        if entry.split()[2].startswith(public):
            lock = lock.replace(entry, re.sub(r"size: \d+", "size: of a public file", entry))
    assert lock.count("size: of a public file") > 20
    written["dvc.lock"] = lock
    for name, text in written.items():
        assert not [number for number in numbers if re.search(rf"(?<![\w.]){number}(?![\w.])", text)], name
        assert not [secret for secret in hashes if secret in text], name
    lock = yaml.safe_load((repository.path / "dvc.lock").read_text())["stages"]
    assert "outs" not in lock["evaluate"]  # a hash of numbers from the hold-out would change with one of its pixels
    named = [entry["path"] for stage in lock.values() for entry in [*stage.get("deps", []), *stage.get("outs", [])]]
    assert not any("state" in name or name.endswith((".npz", "metrics.json")) for name in named)


def test_a_saved_experiment_holds_no_numbers_from_real_images(repository):
    """DVC commits every metric and plot that dvc.yaml names with a saved experiment, also those that git ignores."""
    files = ("dvc.yaml", "dvc.lock", "ledger.json", "params.yaml", ".gitignore", ".dvcignore")
    code, text = repository.run("git", "add", *files)
    assert code == 0, text
    owner = ("-c", "user.name=owner", "-c", "user.email=owner@localhost")
    code, text = repository.run("git", *owner, "commit", "-qm", "a first release")
    assert code == 0, text
    code, text = repository.run("dvc", "exp", "save", "--name", "kept")
    assert code == 0, text
    _, refs = repository.run("git", "for-each-ref", "--format=%(refname)", "refs/exps")
    saved = next(ref for ref in refs.split() if ref.endswith("/kept"))
    named = repository.run("git", "ls-tree", "-r", "--name-only", saved)[1].split()
    assert {"dvc.lock", "ledger.json"} <= set(named)
    assert (repository.path / "metrics.json").exists() and not [
        name for name in named if name.startswith(("metrics.json", "evaluation", "dvc_plots"))
    ]
    assert repository.run("dvc", "exp", "remove", "kept")[0] == 0


def test_a_second_run_runs_nothing(repository):
    assert ran(repository.repro()) == set()


def test_changing_the_release_spends_nothing(repository):
    repository.edit(synthesize={"count": 110})
    assert ran(repository.repro()) <= {*PREPARED, *AFTER}
    assert sorted(repository.opened()) == QUERIES


def test_a_docstring_runs_no_query(repository):
    file = repository.path / "sfumato/queries/count.py"
    file.write_text(file.read_text().replace('"""', '"""Edited. ', 1) + "\n# a comment\n")
    assert ran(repository.repro()) <= {"plan"}
    assert sorted(repository.opened()) == QUERIES


def test_an_upgrade_of_the_code_runs_no_query_and_no_stage_before_one(repository):
    whole = {}
    for name in ("sfumato/queries/count.py", "sfumato/warmup/curriculum.py", "sfumato/privacy/noise.py"):
        file = repository.path / name
        whole[file] = file.read_text()
        file.write_text(whole[file] + "\nANOTHER = 1\n")
    code, text = repository.run("stage", "plan", "--dry-run")
    assert code == 0 and text.count("kept; the code has changed since") == len(QUERIES), text
    assert "next: nothing to spend: `dvc repro`" in text.splitlines()[-1]
    assert ran(repository.repro()) <= {"plan", *AFTER}  # what comes after the last query takes the new code
    assert sorted(repository.opened()) == QUERIES
    for file, content in whole.items():
        file.write_text(content)


UPSTREAM, DOWNSTREAM = {"count", "central", "frequency", "histogram"}, ["finetune", "saliency"]  # of the warm-up


def test_what_the_warm_up_is_made_of_spends_downstream_only_and_the_plan_says_so_first(repository):
    before = len(repository.opened())
    for stage, edit in (
        ("select", {"count": 10}),
        ("auxiliary", {"steps": 22}),
        ("pretrain", {"amp": {"radius": 0.01}}),
    ):
        repository.edit(**{stage: edit})
        code, text = repository.run("stage", "plan", "--dry-run")
        assert (
            code == 0
            and all(f"{query}: would re-spend" in text for query in DOWNSTREAM)
            and f"depends on {stage}" in text
        )
        assert all(f"{query}: already released" in text for query in UPSTREAM)
    assert not UPSTREAM & ran(repository.repro())
    assert sorted(repository.opened()[before:]) == DOWNSTREAM


def test_a_forced_run_is_refused_with_the_reason(repository):
    before = repository.opened()
    code, text = repository.run("dvc", "repro", "-f")
    assert code != 0 and "already released" in text and "spend_again" in text and "Traceback" not in text
    assert repository.opened() == before
    assert repository.run("dvc", "checkout", "--force")[0] == 0
    assert ran(repository.repro()) <= PREPARED


def test_an_image_more_runs_every_query(repository):
    """Once the owner says that the images are others: nothing that is public tells it, so nothing spends unasked."""
    repository.write_source(SIZE + 1)
    before = len(repository.opened())
    card = (repository.path / "data/sensitive/card.json").read_text()
    assert repository.run("stage", "prepare", "sensitive")[0] == 0
    assert (repository.path / "data/sensitive/card.json").read_text() == card
    repository.edit(data={"version": "2"})
    repository.repro()
    assert sorted(repository.opened()[before:]) == QUERIES


def wait_for(repository: Repository, uses: int, process: subprocess.Popen) -> None:
    """Until a charge opened since has so many durable uses (0: until it is opened)."""
    for _ in range(1200):
        last = [entry for entry in repository.journal() if entry["kind"] in ("open", "progress")][-1]
        if (last["kind"] == "open" and uses == 0) or (last["kind"] == "progress" and last["uses"] >= uses):
            return
        assert process.poll() is None, "finetune ended before it could be killed"
        time.sleep(0.05)
    raise AssertionError("finetune made no progress")


def test_a_killed_run_resumes_and_is_paid_for_once(repository):
    repository.edit(
        finetune={"learning_rate": 1e-4, "ratio": 0.5}
    )  # new work, on other matrices of the same saliency release
    before = len(repository.opened())
    assert repository.run("stage", "plan")[0] == 0
    for uses in (0, 5, 17):
        entries = len(repository.journal())
        process = subprocess.Popen(
            ["stage", "finetune"],
            cwd=repository.path,
            env=repository.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while uses == 0 and len(repository.journal()) == entries and process.poll() is None:
            time.sleep(0.05)
        wait_for(repository, uses, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = repository.path / "state" / "runs" / repository.journal()[-1]["id"]
    shutil.copytree(run, repository.path / "aside")
    text = repository.repro()
    assert "resuming run" in text and "finetune" in ran(text)
    assert repository.opened()[before:] == ["finetune"]
    log = (repository.path / "artifacts/finetune/log.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in log[1:]] == list(range(1, 41))
    assert not list(run.glob("checkpoint-*"))


def test_a_checkpoint_kept_aside_cannot_be_resumed_for_free(repository):
    run = repository.path / "state" / "runs" / repository.journal()[-2]["id"]
    closed = [entry["id"] for entry in repository.journal() if entry["kind"] == "close"][-1]
    run = repository.path / "state" / "runs" / closed
    shutil.copytree(repository.path / "aside", run, dirs_exist_ok=True)
    code, text = repository.run("stage", "finetune")
    assert code == 3 and "already released" in text
    before = len(repository.opened())
    repository.edit(privacy={"spend_again": ["finetune"]})
    assert repository.run("stage", "plan")[0] == 0
    code, text = repository.run("stage", "finetune")
    assert code == 0 and "resuming" not in text, text
    assert repository.opened()[before:] == ["finetune"]


def test_a_trimmed_ledger_is_found(repository):
    from sfumato.digest import digest_of

    repository.edit(privacy={"spend_again": []})
    path = repository.path / "ledger.json"
    ledger = json.loads(path.read_text())
    whole = path.read_text()
    del ledger["digest"]
    ledger["records"] = [record for record in ledger["records"] if record["stage"] != "frequency"]
    path.write_text(json.dumps({**ledger, "digest": digest_of(ledger)}))
    code, text = repository.run("stage", "ledger", "check")
    path.write_text(whole)
    assert code == 3 and "frequency ran" in text and "md5" in text
