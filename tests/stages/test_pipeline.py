"""`stage run` and `dvc repro` as the data owner meets them: what runs again, what spends again,
what is refused, and what a kill costs.

The tests share one repository, and run in the order of the file. The first makes a small real run.
Each of the others continues from the state that the previous one left.
"""

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import yaml
from small_repository import AFTER, PREPARED, QUERIES, SIZE, Repository, make_repository, ran

from sfumato.settings.stages import STAGES
from sfumato.storage.digest import digest_of


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Repository:
    return make_repository(tmp_path_factory.mktemp("repository"))


def commands(text: str) -> list[str]:
    return [line.removeprefix("> stage ") for line in text.splitlines() if line.startswith("> ")]


def test_a_first_run_ends_in_a_release_with_a_ledger_that_holds(repository):
    """The run does not use DVC. A later test runs every stage with DVC, after one more image."""
    text = repository.stage("run --no-dvc")
    assert {*STAGES, "prepare sensitive", "plan", "ledger write", "report"} <= {*commands(text)}
    images = np.load(repository.path / "artifacts/synthesize/images.npy")
    labels = np.load(repository.path / "artifacts/synthesize/labels.npy")
    assert images.shape == (120, 8, 8, 1) and images.dtype == np.uint8
    assert labels.shape == (120,) and set(labels) <= set(range(10))
    assert sorted(repository.opened()) == QUERIES
    repository.stage("ledger check --epsilon 1 --artifacts")
    ledger = json.loads((repository.path / "ledger.json").read_text())
    assert 0.9 < ledger["epsilon"]["rdp"] <= 1 and len(ledger["records"]) == len(QUERIES)
    assert (repository.path / "artifacts/report/index.html").stat().st_size > 10_000
    assert (repository.path / "evaluation/report.html").exists()
    repository.stage("ledger check --epsilon 0.5", "exceeds the limit 0.5", code=3)


def test_dvc_continues_a_run_that_began_without_it(repository):
    assert repository.run("dvc", "commit")[0] == 0
    assert ran(repository.repro()) == set()
    assert commands(repository.stage("run --no-dvc")) == []


def test_changed_files_and_trimmed_ledgers_are_found(repository):
    folder = repository.path / "artifacts/synthesize"
    ledger = repository.path / "ledger.json"
    labels = folder / "labels.npy"
    cost = folder / "privacy.json"
    content = json.loads(cost.read_text())
    whole = json.loads(ledger.read_text())
    trimmed = {key: value for key, value in whole.items() if key != "digest"}
    trimmed["records"] = [record for record in whole["records"] if record["stage"] != "frequency"]
    for file, edit, *words in (
        (labels, labels.read_bytes()[:-1] + b"\x07", "labels.npy"),
        (cost, content | {"records": {}}, "lacks records of"),
        (cost, content | {"stage": "auxiliary"}, "was written by `auxiliary`"),
        (
            cost,
            content | {"records": dict(list(content["records"].items())[:-1])},
            "lacks records of",
        ),
        (ledger, trimmed | {"digest": digest_of(trimmed)}, "frequency ran", "md5"),
    ):
        before = file.read_bytes()
        file.chmod(0o644)
        file.write_bytes(edit if isinstance(edit, bytes) else json.dumps(edit).encode())
        repository.stage("ledger check --artifacts", *words, code=3)
        file.write_bytes(before)
    folder.rename(folder.with_name("aside"))
    repository.stage("ledger check --artifacts", "artifacts/synthesize is not an artifact", code=3)
    folder.with_name("aside").rename(folder)
    repository.stage("ledger check --artifacts")


def test_git_contains_no_size_count_or_hash_of_images(repository):
    state = repository.path / "state" / "data" / "small"
    tracked = repository.run("git", "ls-files", "-co", "--exclude-standard")[1].split()
    assert {"dvc.lock", "ledger.json"} <= set(tracked)
    assert not any(name.startswith(("metrics.json", "evaluation", "artifacts")) for name in tracked)
    of_the_owner = ("state/", "source.npz", "sfumato/", "stages/", "params.yaml", "pipelines/")
    written = {
        name: (repository.path / name).read_text()
        for name in tracked
        if not name.startswith(of_the_owner)
    }
    numbers = [SIZE]
    hashes = []
    for part in ("sensitive", "holdout"):
        labels = np.load(state / part / "labels.npy")
        numbers.append(len(labels))
        hashes += [str(np.bincount(labels, minlength=10).tolist())]
        for file in (state / part).glob("*.npy"):
            hashes += [
                hashlib.new(kind, file.read_bytes()).hexdigest()
                for kind in ("md5", "sha256", "sha1")
            ]
    # DVC notes the size of every file. A file made only from public parameters may have, by chance,
    # the number of images as its size.
    public = ("params.yaml", "pipelines", "sfumato", "stages", "data/", "artifacts/plan")
    lock = written["dvc.lock"]
    for entry in re.findall(r"- path: (?:\S+)\n(?: {6}\S.*\n)+", lock):
        if entry.split()[2].startswith(public):
            lock = lock.replace(entry, re.sub(r"size: \d+", "size: of a public file", entry))
    assert lock.count("size: of a public file") > 20
    written["dvc.lock"] = lock
    for name, text in written.items():
        assert not [
            number for number in numbers if re.search(rf"(?<![\w.]){number}(?![\w.])", text)
        ], name
        assert not [secret for secret in hashes if secret in text], name
    lock = yaml.safe_load((repository.path / "dvc.lock").read_text())["stages"]
    # A hash of numbers from the hold-out would change with one of its pixels
    assert "outs" not in lock["evaluate"]
    named = [
        entry["path"]
        for stage in lock.values()
        for entry in [*stage.get("deps", []), *stage.get("outs", [])]
    ]
    assert not any("state" in name or name.endswith((".npz", "metrics.json")) for name in named)


def test_a_saved_experiment_holds_no_numbers_from_real_images(repository):
    """DVC commits every metric and plot in dvc.yaml with an experiment, even if git ignores it."""
    files = ("dvc.yaml", "dvc.lock", "ledger.json", "params.yaml", ".gitignore", ".dvcignore")
    owner = ("-c", "user.name=owner", "-c", "user.email=owner@localhost")
    commit = ("git", *owner, "commit", "-qm", "a first release")
    for words in (("git", "add", *files), commit, ("dvc", "exp", "save", "--name", "kept")):
        code, text = repository.run(*words)
        assert code == 0, text
    _, refs = repository.run("git", "for-each-ref", "--format=%(refname)", "refs/exps")
    saved = next(ref for ref in refs.split() if ref.endswith("/kept"))
    named = repository.run("git", "ls-tree", "-r", "--name-only", saved)[1].split()
    assert {"dvc.lock", "ledger.json"} <= set(named)
    assert (repository.path / "metrics.json").exists()
    assert not any(name.startswith(("metrics.json", "evaluation", "dvc_plots")) for name in named)
    assert repository.run("dvc", "exp", "remove", "kept")[0] == 0


def test_stage_run_runs_changes_and_hides_disabled_stages(repository):
    repository.edit(synthesize={"count": 110})
    text = repository.stage("run")
    assert "leaked" not in text
    shown = {name.split()[0] for name in commands(text)}
    assert shown <= {"prepare", "plan", *AFTER} and "synthesize" in shown
    assert sorted(repository.opened()) == QUERIES
    before = (repository.path / "dvc.lock").read_bytes()
    assert commands(repository.stage("run --no-dvc")) == []
    assert (repository.path / "dvc.lock").read_bytes() == before


def test_a_lost_release_is_restored_without_dvc_at_no_cost(repository):
    repository.run("rm", "-r", "artifacts/count")
    text = repository.stage("run --no-dvc", "restored, nothing is charged")
    assert commands(text) == ["count"]
    assert sorted(repository.opened()) == QUERIES


def test_other_code_under_the_same_revisions_runs_nothing(repository, monkeypatch):
    monkeypatch.setattr(repository, "forked", False)
    whole = {}
    for name in (
        "sfumato/queries/count.py",
        "sfumato/training/curriculum.py",
        "sfumato/privacy/noise.py",
    ):
        file = repository.path / name
        whole[file] = file.read_text()
        file.write_text(whole[file] + "\nANOTHER = 1\n")
    text = repository.stage("plan --dry-run")
    assert text.count(": already released as") == len(QUERIES)
    assert "next: `stage run`, which spends nothing" in text.splitlines()
    assert ran(repository.repro()) <= {"plan", *AFTER}  # no query, and no stage before one
    assert sorted(repository.opened()) == QUERIES
    for file, content in whole.items():
        file.write_text(content)


# Queries before and after the warm-up
UPSTREAM = {"count", "central", "frequency", "teacher"}
DOWNSTREAM = ["finetune", "saliency"]


def test_changing_the_warm_up_spends_downstream_only(repository):
    before = len(repository.opened())
    edits = {
        "select": {"images": 40},
        "auxiliary": {"steps": 7},
        "pretrain": {"amp": {"radius": 0.01}},
    }
    for stage, edit in edits.items():
        repository.edit(**{stage: edit})
        text = repository.stage("plan --dry-run", f"depends on {stage}")
        assert all(f"{query}: would again spend" in text for query in DOWNSTREAM)
        assert all(f"{query}: already released" in text for query in UPSTREAM)
    released = (repository.path / "artifacts/teacher/privacy.json").read_bytes()
    text = repository.repro()
    # For DVC, any teacher may read the generator, although this one does not. So `teacher` runs,
    # and finds its release
    assert UPSTREAM & ran(text) == {"teacher"} and text.count("restored, nothing is charged") == 1
    assert (repository.path / "artifacts/teacher/privacy.json").read_bytes() == released
    assert sorted(repository.opened()[before:]) == DOWNSTREAM
    ledger = json.loads((repository.path / "ledger.json").read_text())
    held = {path.parent.name for path in (repository.path / "state/runs").glob("*/released")}
    assert held >= {record["id"] for record in ledger["records"]}


def cache_object(repository, file: str):
    """Return the path of a file's bytes in DVC's cache."""
    md5 = hashlib.md5((repository.path / file).read_bytes()).hexdigest()
    return repository.path / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def test_a_flipped_bit_in_the_cache_is_repaired_as_described(repository):
    before = repository.opened()
    file = repository.path / "artifacts/count/counts.json"
    whole = file.read_bytes()
    kept = cache_object(repository, "artifacts/count/counts.json")
    kept.chmod(0o644)
    kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    kept.chmod(0o444)
    shutil.rmtree(repository.path / "artifacts/count")
    assert (
        repository.run("dvc", "checkout", "artifacts/count")[0] == 0 and file.read_bytes() != whole
    )
    text = repository.stage("ledger check --artifacts", "no longer has the bytes", code=3)
    assert "spend_again" not in text
    first, second = re.findall(r"`(chmod [^`]+)` and `(dvc repro)`", text)[0]
    assert repository.run(*first.split())[0] == 0
    assert "count: already released as" in repository.repro(*second.split()[2:])
    assert file.read_bytes() == kept.read_bytes() == whole
    repository.stage("ledger check --artifacts")
    assert repository.opened() == before


def test_a_forced_run_without_copies_is_refused(repository):
    before = repository.opened()
    text = repository.repro("-f")
    assert text.count("restored, nothing is charged") == len(QUERIES)
    shutil.rmtree(repository.path / "state/runs")
    code, text = repository.run("dvc", "repro", "-f")
    assert (
        code != 0
        and "already released" in text
        and "spend_again" in text
        and "Traceback" not in text
    )
    assert repository.opened() == before
    assert repository.run("dvc", "checkout", "--force")[0] == 0
    assert ran(repository.repro()) <= PREPARED


def test_a_paid_release_that_no_ledger_held_yet_keeps_its_copy(repository):
    """The test simulates a kill before the release was copied to the project.

    The ledger then contains only the earlier releases.
    """
    artifact = repository.path / "artifacts/count"
    repository.edit(privacy={"spend_again": ["count"]})
    repository.stage("plan")
    shutil.rmtree(artifact)
    repository.stage("count")
    paid = list((repository.path / "state/runs").glob("*/released"))
    released = (artifact / "privacy.json").read_bytes()
    shutil.rmtree(artifact)
    assert (
        len(paid) == 1 and repository.run("dvc", "checkout", "--force", "artifacts/count")[0] == 0
    )
    assert (artifact / "privacy.json").read_bytes() != released
    repository.stage("ledger write")
    assert paid[0].exists()
    shutil.rmtree(artifact)
    repository.stage("count", "restored, nothing is charged")
    assert (artifact / "privacy.json").read_bytes() == released


# --- what one more image costs, and what a kill leaves --------------------------------------------


def test_an_image_more_runs_every_query(repository):
    """The queries run only when the owner states that the images changed.

    Nothing public reveals the change, so nothing spends without this statement.
    """
    repository.edit(privacy={"spend_again": []})
    repository.write_source(SIZE + 1)
    before = len(repository.opened())
    card = (repository.path / "data/sensitive/card.json").read_text()
    repository.stage("prepare sensitive")
    assert (repository.path / "data/sensitive/card.json").read_text() == card
    repository.edit(data={"version": "2"})
    repository.repro()
    assert sorted(repository.opened()[before:]) == QUERIES


def test_a_killed_run_resumes_and_is_paid_for_once(repository):
    # new work on the same saliency release
    repository.edit(finetune={"learning_rate": 1e-4, "draws": 3})
    before = len(repository.opened())
    repository.stage("plan")
    for uses in (0, 3, 7):
        entries = len(repository.journal())

        def reached(entries: int = entries, uses: int = uses) -> bool:
            coming = repository.journal()[entries:]
            return any(
                entry["kind"] == "open" if uses == 0 else entry.get("uses", 0) >= uses
                for entry in coming
            )

        repository.kill("finetune", reached)
    run = repository.path / "state" / "runs" / repository.journal()[-1]["id"]
    shutil.copytree(run, repository.path / "aside")
    text = repository.repro()
    assert "resuming run" in text and "finetune" in ran(text)
    assert repository.opened()[before:] == ["finetune"]
    log = (repository.path / "artifacts/finetune/log.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in log[1:]] == list(range(1, 15))
    assert not list(run.glob("checkpoint-*"))


def test_a_checkpoint_kept_aside_cannot_be_resumed_for_free(repository):
    closed = [entry["id"] for entry in repository.journal() if entry["kind"] == "close"][-1]
    run = repository.path / "state" / "runs" / closed
    shutil.copytree(repository.path / "aside", run, dirs_exist_ok=True)
    text = repository.stage("finetune", "already released", code=3)
    before = len(repository.opened())
    repository.edit(privacy={"spend_again": ["finetune"]})
    repository.stage("plan")
    text = repository.stage("finetune")
    assert "resuming" not in text
    assert repository.opened()[before:] == ["finetune"]


@pytest.mark.parametrize("words", ["run", "run --no-dvc", "run --no-dvc plan"])
def test_a_stage_that_fails_ends_the_run_with_its_exit_code(repository, words):
    edits = repository.edits
    repository.edit(privacy={"epsilon": 0})
    repository.stage(words, "privacy.epsilon=0 is not valid", code=2)
    repository.edits = edits
    repository.edit()
