"""The program as a user meets it: exit codes, errors in one sentence, no traceback, and no
half-written files.
"""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from program import call

from sfumato.dpsgd.run import step_noise
from sfumato.errors import DataError
from sfumato.settings.stages import STAGES
from sfumato.storage.documents import read_json
from stages import cli
from stages.cli import app, machine_problem, main
from stages.runner import keep_memory_off_disk

ROOT = Path(__file__).resolve().parents[2]
OWN = {
    "recipe": "dpdm",
    "profile": None,
    "privacy": {"size_hint": 100},
    "data": {"dataset_id": "own", "source": "imagefolder", "path": "images"},
}


@pytest.fixture
def desk(desk):
    desk.base = {"recipe": "feta-pro"}
    desk.params()
    return desk


@pytest.fixture
def planned(desk):
    """Prepare the digits, and write a plan."""
    desk.run_all("prepare sensitive", "plan")
    return desk


@pytest.fixture
def own(desk):
    """Write 40 pictures of cats and as many of dogs, not prepared yet."""
    for i, name in enumerate(("cat", "dog")):
        Path("images", name).mkdir(parents=True)
        for j in range(40):
            Image.fromarray(np.full((9, 9), 100 * i + j, dtype=np.uint8)).save(
                f"images/{name}/{j}.png"
            )
    desk.base = OWN
    desk.params()
    return desk


@pytest.mark.parametrize(
    "command", [*STAGES, "plan", "report", "prepare", "ledger", "recipe", "doctor"]
)
def test_every_command_explains_itself_without_reading_anything(desk, command):
    desk.run(f"{command} --help", "Usage")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_a_console_without_greek_letters_shows_their_escapes(desk, encoding):
    shown = b""
    for words in ("--help", "plan --help", "init --help", "ledger check --help", "recipe list"):
        screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert call(main, "stage", *words.split(), screen=screen) == 0
        screen.flush()
        shown += screen.buffer.getvalue()
    # Click writes UTF-8 if a stream claims to be ASCII
    assert rb"\u" in shown or "ε".encode() in shown


def test_files_are_read_without_core_dumps_and_waiting_pipes(monkeypatch, uninstall, tmp_path):
    uninstall("resource")
    monkeypatch.delattr(os, "O_NONBLOCK")
    (tmp_path / "a.json").write_text('{"ε": 1}', encoding="utf-8")
    keep_memory_off_disk()
    assert read_json(tmp_path / "a.json") == {"ε": 1}


HELP = (
    "import stages.cli; sys.argv = ['stage', '--help']\ntry: stages.cli.main()\nexcept SystemExit: "
    "pass"
)
LIBRARY = """
import sfumato.privacy.charge, sfumato.privacy.ledger, sfumato.planning.resolve, sfumato.dpsgd.run
import sfumato.release.synthesis, sfumato.evaluation.scores, sfumato.training.curriculum
import sfumato.data.prepare
"""


@pytest.mark.parametrize(
    ("code", "unasked"),
    [
        (HELP, ["torch", "torchvision", "dvc", "opacus", "sklearn", "dp_accounting", "pandas"]),
        (LIBRARY, ["torchvision", "dvc", "opacus", "diffusers"]),
        ("import sfumato.privacy.check, sfumato.privacy.opinions", ["torch"]),
    ],
    ids=["help", "library", "ledger"],
)
def test_nothing_heavy_is_imported_unasked(code, unasked):
    """The time limit is so large that only a heavy import exceeds it, even on a busy machine."""
    start = time.perf_counter()
    code = f"import sys\n{code}\nprint([name for name in {unasked} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip().endswith("[]")
    assert "--help" not in code or time.perf_counter() - start < 5


def test_a_recipe_with_public_images_states_their_source(desk):
    desk.params(recipe="full")
    desk.run("prepare sensitive")
    desk.run("plan", "stage prepare public", code=4)
    desk.params(recipe="full", public={"source": "imagefolder", "path": "nowhere"})
    desk.run("prepare public", "nowhere", code=4)
    assert not Path("data/public").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"privacy": {"epsilonn": 1}}, "privacy.epsilon"),
        ({"recipe": "nope"}, "recipe"),
        ({"finetune": {"steps": "many"}}, "finetune.steps"),
        ({"central": {"repeats": 10**10}}, "central.repeats"),
        ({"privacy": {"spend_again": True}}, "spend_again must not be true or false"),
        (
            {"privacy": {"spend_again": ["pretrain"]}},
            "params.yaml: privacy.spend_again: 'pretrain' is not a query",
        ),
    ],
)
def test_bad_configuration_exits_2(desk, content, words):
    desk.params(**content)
    desk.run("prepare sensitive", words, code=2)
    assert not Path("data").exists()


@pytest.mark.parametrize("command", ["count --colour", "sharpen", "serve --port -1"])
def test_unknown_options_and_commands_exit_2(desk, command):
    desk.run(command, code=2)


def test_a_stage_without_a_plan_asks_for_one(desk):
    for stage in (
        "count",
        "central",
        "frequency",
        "auxiliary",
        "pretrain",
        "finetune",
        "synthesize",
        "evaluate",
    ):
        desk.run(stage, "stage plan", code=2)


def test_a_folder_is_planned_at_the_size_it_was_prepared(own):
    own.run("prepare sensitive")
    card = json.loads(Path("data/sensitive/card.json").read_text())
    assert card["classes"] == ["cat", "dog"] and card["shape"] == [1, 9, 9]
    own.run("plan --dry-run", "no charge on dataset", "would spend")
    own.params(data={"size": 6})
    own.run("plan", "data.size=6, but the images were prepared with data.size=9", code=2)
    assert not Path("artifacts").exists()


NOISE = (
    r"with ([\d,]+) trained weights, the noise of a step is ([\d.]+) times the step's largest "
    r"possible signal(, so a step is mostly noise)?"
)


@pytest.mark.parametrize(
    ("recipe", "changes", "least"),
    [
        ("feta-pro", {"finetune": {"trainable": "all"}}, 20_000),
        ("feta-pro", {"finetune": {"trainable": "attention-lora"}}, 1),
        ("dpdm", {"model": {"attention": []}}, 1),
        ("dp-merf", {}, 0),
    ],
)
def test_the_dry_run_states_the_noise_of_a_step_of_dpsgd(desk, recipe, changes, least):
    desk.base = {"recipe": recipe, "finetune": {"batch": 300, "steps": 7}}
    desk.params(**changes)
    desk.run("prepare sensitive")
    text = desk.run("plan --dry-run")
    found = re.search(NOISE, text)
    assert bool(found) == bool(least) == ("finetune: memory about" in text)
    if found:
        multiplier = float(re.search(r"finetune: would spend .*noise_multiplier=([\d.]+)", text)[1])
        weights = int(found[1].replace(",", ""))
        length = float(found[2])
        assert weights >= least and length == pytest.approx(
            step_noise(multiplier, weights, 300), rel=0.05
        )
        assert bool(found[3]) == (length > 1)


def test_noise_over_all_images_is_lowered_by_fewer_steps(desk):
    """At a sample rate of 1, a larger batch draws no more images."""
    desk.run("prepare sensitive")
    for batch, remedy in ((300, "raise finetune.batch"), (10**6, "lower finetune.steps")):
        desk.params(finetune={"batch": batch, "steps": 7})
        desk.run("plan --dry-run", "mostly noise", f"train fewer weights, or {remedy}")


def test_bad_images_exit_4_name_the_file_and_leave_nothing(own):
    Path("images/dog/3.png").write_bytes(b"not a picture")
    own.run("prepare sensitive", "3.png", code=4)
    shutil.rmtree("images")
    own.run("prepare sensitive", "images does not exist", code=4)
    assert not Path("data").exists() and not list(Path("state").rglob("*.npy"))


def test_a_dry_run_or_unwritable_output_opens_no_charge(planned):
    planned.run("central --dry-run", "charges noise_multiplier=")
    Path("file").write_text("")
    planned.run("count --out file/count", "file", code=4)
    assert not Path("artifacts/central").exists() and "no history" in planned.run("ledger history")
    card = Path("data/sensitive/card.json")
    card.write_text(card.read_text().replace('"digits"', '"other"'))
    assert planned("count")[0] in (2, 4)
    assert [entry["kind"] for entry in planned.journal] == ["genesis"]


def test_a_disabled_stage_writes_the_empty_artifact(desk):
    desk.params(recipe="dpdm")
    desk.run_all("prepare sensitive", "plan", "count", "central", "frequency", "auxiliary")
    assert [entry["kind"] for entry in desk.journal] == ["genesis"]
    assert json.loads(Path("artifacts/central/privacy.json").read_text())["enabled"] is False


def test_a_lifetime_ending_half_way_is_refused_at_the_start(own):
    own.base = OWN | {"recipe": "dp-feta"}
    own.params(privacy={"epsilon": 5, "lifetime_epsilon": 1})
    own.run("prepare sensitive")
    for command in ("plan", "plan --dry-run"):
        own.run(command, "privacy.lifetime_epsilon=1", code=3)
        assert not Path("artifacts").exists()
    own.params(privacy={"epsilon": 5, "lifetime_epsilon": 6})
    own.run("plan")


def test_the_doctor_survives_what_it_diagnoses(desk):
    for broken in ("{", "{}"):
        Path("data/sensitive").mkdir(parents=True, exist_ok=True)
        Path("data/sensitive/card.json").write_text(broken)
        text = desk.run("doctor")
        assert "is not a data card" in "".join(text.replace("│", "").split("\n")).replace("  ", "")


def test_the_doctor_names_a_folder_that_is_no_project(desk):
    Path("params.yaml").unlink()
    text = desk.run("doctor", "none in this folder", "`stage init` creates one")
    assert "prepare sensitive" not in text and "dvc init" not in text


@pytest.mark.parametrize(
    "words", ["--epsilon nan", "--epsilon -1", "--epsilon inf", "--delta 0", "--delta nan"]
)
def test_a_bound_that_is_none_is_refused(desk, words):
    desk.run(f"ledger check {words}", words.split()[0], "positive number", code=2)


def test_a_state_directory_that_cannot_be_is_one_sentence(own, environment):
    Path("file").write_text("")
    for state, said in {
        "state": "relative",
        str(Path("file").resolve()): "set SFUMATO_STATE to the path of a folder",
    }.items():
        environment["SFUMATO_STATE"] = state
        own.run("prepare sensitive", said, code=2)


def test_recipes_are_listed_and_shown(desk):
    desk.run("recipe list", "dp-merf", "profile digits")
    assert "finetune" not in yaml.safe_load(desk.run("recipe show dp-merf"))["run"]


def test_locals_are_never_shown():
    assert app.pretty_exceptions_show_locals is False


@pytest.fixture
def fails(desk, monkeypatch):
    """Return a function that runs a command in which a fault is raised.

    It returns the exit code and the output.
    """

    def with_fault(fault: BaseException) -> tuple[int, str]:
        def fail(**_: str) -> None:
            raise fault

        monkeypatch.setattr(cli, "app", fail)
        return desk("plan")

    return with_fault


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "x.npy"),
            4,
            "x.npy: No space left on device. No partial file",
        ),
        (OSError(errno.EROFS, "Read-only file system", "x"), 4, "x: Read-only"),
        (
            OSError(errno.EIO, "Input/output error", "x"),
            4,
            "x: Input/output error. Check the disk, its mount or",
        ),
        (
            OSError(errno.ESTALE, "Stale file handle", "x"),
            4,
            ". Check the disk, its mount or its network connection",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "x"),
            4,
            "x: Too many open files. Raise the limit on open files",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory", "x"),
            4,
            "x: Cannot allocate memory. Free memory",
        ),
        (
            MemoryError("x cannot be read as an image"),
            4,
            "x cannot be read as an image: this machine has too little memory",
        ),
        (MemoryError(), 4, "memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            4,
            "memory",
        ),
        (RecursionError("maximum recursion depth exceeded"), 4, "too many nested levels"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_what_the_machine_cannot_do_is_one_sentence(fails, fault, code, words):
    found, text = fails(fault)
    assert found == code and words in text


def test_permission_denied_names_the_command_to_grant_it(tmp_path):
    denied = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "x"))
    wanted = f"{tmp_path / 'x'}: Permission denied. Give yourself access: chmod u+rwX {tmp_path}"
    assert machine_problem(denied) == wanted, "of a file that is not there yet, to its folder"
    (tmp_path / "x").touch()
    assert machine_problem(denied) == f"{wanted}/x"
    assert "chmod" not in machine_problem(OSError(errno.ENOENT, "No such file", "x"))


def test_permission_denied_by_another_account_names_no_chmod(monkeypatch, tmp_path):
    """Only the owner of a folder can change its permissions."""
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    text = machine_problem(PermissionError(errno.EACCES, "Permission denied", f"{tmp_path}/x/y"))
    assert f"{tmp_path} belongs to another account" in text and "SFUMATO_STATE" in text
    assert "chmod" not in text


def test_a_name_in_an_error_cannot_paint_the_screen(fails):
    fault = DataError("a\x1b[2Jb\u202e is bad\nanother")
    assert fails(fault) == (4, "error: a\\x1b[2Jb\\u202e is bad\nanother\n")


def test_a_bug_is_no_fault_of_the_machine(fails):
    with pytest.raises(RuntimeError):
        fails(RuntimeError("shapes do not fit"))


def test_stopping_a_stage_states_what_resumes(desk, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sfumato.settings.recipes.load_params", stop)
    desk.run(
        "prepare sensitive",
        "a query resumes without a second charge, and any other stage restarts",
        code=130,
    )


TERMINATED = """
import os, signal, sys
import sfumato.settings.recipes, stages.cli
signal.signal(signal.{name}, signal.SIG_DFL)  # the tests may run under `nohup`
sfumato.settings.recipes.load_params = lambda *_: os.kill(os.getpid(), signal.{name})
sys.argv = ["stage", "prepare", "sensitive"]
stages.cli.main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stopped_container_or_closed_terminal_is_like_ctrl_c(name, desk):
    code = TERMINATED.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 130 and "without a second charge" in done.stdout + done.stderr


def test_an_interrupted_stage_ends_though_its_terminal_is_closed(desk):
    """The message about the interruption cannot be written, but the stage's exit code stays 130."""
    master, terminal = os.openpty()
    code = f"import os; os.read(0, 1)\n{TERMINATED.format(name='SIGHUP')}"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=terminal, stderr=terminal) as run:
        os.close(terminal)
        os.close(master)
        run.communicate(b"x", timeout=100)
    assert run.returncode == 130


CLOSED = """
import os, sys
for number in {numbers}:
    os.close(number)
words = ["init", "{folder}", "--epsilon", "1", "--yes"]
os.execv(sys.executable, [sys.executable, "-m", "stages.cli", *words])
"""


@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_a_closed_stream_is_no_failure(numbers, tmp_path):
    """The exit code stays 2, for the user's mistake. It does not become 1, for a crash."""
    code = CLOSED.format(numbers=numbers, folder=tmp_path / "missing")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert ("does not exist" in done.stderr) == (2 not in numbers)


@pytest.mark.parametrize("command", ["doctor", "run", "init in --epsilon 1 --yes"])
def test_a_deleted_current_folder_is_one_sentence(desk, command, tmp_path):
    (tmp_path / "deleted").mkdir()
    os.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    desk.run(command, "error: the current folder does not exist any more", code=2)


UNREAD = """
import sys
from stages import cli, screen
def print_many(**_):
    screen.hold_back()
    for line in range(100_000):
        screen.tell(f"line {line}")
cli.app = print_many
sys.argv = ["stage", "plan"]
cli.main()
"""


def test_a_reader_of_a_held_back_command_may_stop_reading(desk):
    """For example, `stage plan --dry-run | head -1` stops reading after one line."""
    command = [sys.executable, "-c", UNREAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a full device")
def test_a_full_disk_under_the_output_is_one_sentence(desk):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", UNREAD]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4
    assert done.stderr.startswith("error: No space left") and done.stderr.count("\n") == 1
