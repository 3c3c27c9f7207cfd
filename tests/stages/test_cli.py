"""The program as a user meets it: exit codes, one sentence, no traceback, nothing half-written."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from sfumato.errors import SfumatoError
from sfumato.settings.stages import STAGES
from stages.cli import app

ROOT = Path(__file__).resolve().parents[2]


def write_params(**content) -> None:
    Path("params.yaml").write_text(yaml.safe_dump({"recipe": "feta-pro", **content}))


def folder(classes=("cat", "dog"), count=40, size=(9, 9)) -> Path:
    path = Path("images")
    for i, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for j in range(count):
            Image.fromarray(np.full(size, 100 * i + j, dtype=np.uint8)).save(path / name / f"{j}.png")
    return path


def own(**data) -> dict:
    return {
        "recipe": "dpdm",
        "profile": None,
        "privacy": {"size_hint": 100},
        "data": {"dataset_id": "own", "source": "imagefolder", "path": "images", **data},
    }


def test_every_command_explains_itself_without_reading_anything(desk):
    for command in (*STAGES, "plan", "report", "compare", "prepare", "ledger", "recipe", "doctor"):
        code, text = desk(command, "--help")
        assert code == 0 and "Usage" in text


def test_help_loads_nothing_heavy():
    code = (
        "import sys; sys.argv=['stage','--help']\nimport stages.cli\ntry: stages.cli.main()\nexcept SystemExit: pass\n"
    )
    code += (
        "print([m for m in ('torch','torchvision','dvc','opacus','sklearn','dp_accounting','pandas') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip().endswith("[]")


def test_no_stage_imports_dvc_torchvision_or_opacus_unasked():
    code = (
        "import sys\nimport sfumato.privacy.charge, sfumato.privacy.ledger, sfumato.planning.resolve, "
        "sfumato.dpsgd.run, sfumato.release.synthesis, sfumato.evaluation.scores\n"
    )
    code += (
        "import sfumato.training.curriculum, sfumato.data.prepare\n"
        "print([m for m in ('torchvision','dvc','opacus','diffusers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_ledger_and_its_check_import_no_torch():
    code = "import sys\nimport sfumato.privacy.check, sfumato.privacy.opinions\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_a_recipe_with_public_images_says_how_to_get_them(desk):
    write_params(recipe="full")
    assert desk("prepare", "sensitive")[0] == 0
    code, text = desk("plan")
    assert code == 4 and "stage prepare public" in text and "Traceback" not in text
    write_params(recipe="full", public={"source": "imagefolder", "path": "nowhere"})
    code, text = desk("prepare", "public")
    assert code == 4 and "nowhere" in text and not Path("data/public").exists()


def test_budget_that_cannot_be_met_exits_3_and_writes_nothing(desk):
    write_params(privacy={"epsilon": 0.01}, central={"noise": 5.0})
    assert desk("prepare", "sensitive")[0] == 0
    code, text = desk("plan")
    assert code == 3 and "central alone costs" in text and "Traceback" not in text
    assert not Path("artifacts").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"privacy": {"epsilonn": 1}}, "privacy.epsilon"),
        ({"recipe": "nope"}, "recipe"),
        ({"finetune": {"steps": "many"}}, "finetune.steps"),
    ],
)
def test_bad_configuration_exits_2(desk, content, words):
    write_params(**content)
    code, text = desk("prepare", "sensitive")
    assert code == 2 and words in text and "Traceback" not in text and not Path("data").exists()


def test_unknown_options_and_commands_exit_2(desk):
    assert desk("count", "--colour")[0] == 2
    assert desk("sharpen")[0] == 2


@pytest.mark.parametrize(
    "stage", ["count", "central", "frequency", "auxiliary", "pretrain", "finetune", "synthesize", "evaluate"]
)
def test_a_stage_without_a_plan_says_so(desk, stage):
    code, text = desk(stage)
    assert code == 2 and "stage plan" in text


def test_an_image_folder_is_prepared_and_planned(desk):
    folder()
    write_params(**own())
    code, text = desk("prepare", "sensitive")
    assert code == 0, text
    card = json.loads(Path("data/sensitive/card.json").read_text())
    assert card["classes"] == ["cat", "dog"] and card["shape"] == [1, 9, 9]
    code, text = desk("plan", "--dry-run")
    assert code == 0 and "nothing was ever spent" in text and "would spend" in text and not Path("artifacts").exists()


@pytest.mark.parametrize(
    ("recipe", "finetune", "least"),
    [("feta-pro", {"trainable": "all"}, 20_000), ("feta-pro", {"trainable": "attention-lora"}, 1), ("dp-merf", {}, 0)],
)
def test_the_dry_run_says_how_much_of_a_step_of_dpsgd_is_noise(desk, recipe, finetune, least):
    import re

    from sfumato.dpsgd.run import step_noise

    write_params(
        recipe=recipe, finetune={"batch": 300, "steps": 7, **finetune}, synthesize={"sources": {"auxiliary": 1}}
    )
    desk("prepare", "sensitive")
    code, text = desk("plan", "--dry-run")
    assert code == 0, text
    found = re.search(
        r"the noise of a step is ([\d.]+) times as long as its signal can be, "
        r"over ([\d,]+) trained weights(: mostly noise)?",
        text,
    )
    assert bool(found) == bool(least) == ("finetune: memory about" in text)
    if found:
        multiplier = float(re.search(r"finetune: would spend .*noise_multiplier=([\d.]+)", text)[1])
        length, weights = float(found[1]), int(found[2].replace(",", ""))
        assert weights >= least and length == pytest.approx(step_noise(multiplier, weights, 300), rel=0.05)
        assert bool(found[3]) == (length > 1)


def test_a_network_without_attention_has_a_dry_run_too(desk):
    write_params(recipe="dpdm", model={"attention": []})
    desk("prepare", "sensitive")
    code, text = desk("plan", "--dry-run")
    assert code == 0 and "the noise of a step" in text, text


def spoil_empty():
    Path("images").mkdir()


def spoil_corrupt():
    folder()
    Path("images/dog/3.png").write_bytes(b"not a picture")


def spoil_one_class():
    folder(classes=("cat",))


def spoil_sizes():
    folder()
    Image.fromarray(np.zeros((5, 5), dtype=np.uint8)).save("images/cat/odd.png")


def spoil_missing():
    pass


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_empty, "images"),
        (spoil_corrupt, "3.png"),
        (spoil_one_class, "cat"),
        (spoil_sizes, "odd.png|data.size"),
        (spoil_missing, "images"),
    ],
)
def test_bad_images_exit_4_name_the_file_and_leave_nothing(desk, spoil, words):
    import re

    spoil()
    write_params(**own())
    code, text = desk("prepare", "sensitive")
    assert code == 4 and re.search(words, text) and "Traceback" not in text
    assert not Path("data").exists() and not list(Path("state").rglob("*.npy"))


def journalled() -> list[str]:
    """The kinds of the entries of the journal."""
    return [json.loads(line)["kind"] for line in Path("state/odometer/digits.jsonl").read_text().splitlines()]


def test_dry_run_says_what_would_be_charged_and_does_nothing(desk):
    write_params()
    desk("prepare", "sensitive")
    desk("plan")
    code, text = desk("central", "--dry-run")
    assert code == 0 and "charges noise_multiplier=" in text and not Path("artifacts/central").exists()
    assert journalled() == ["genesis"]


def test_a_stage_switched_off_writes_the_empty_artifact_and_charges_nothing(desk):
    write_params(recipe="dpdm")
    desk("prepare", "sensitive")
    desk("plan")
    for stage in ("count", "central", "frequency", "auxiliary"):
        assert desk(stage)[0] == 0
    assert journalled() == ["genesis"]
    assert json.loads(Path("artifacts/central/privacy.json").read_text())["enabled"] is False


def test_queries_charge_once_and_a_second_time_is_refused(desk):
    write_params(central={"pool": 2})
    desk("prepare", "sensitive")
    desk("plan")
    for stage in ("count", "central"):
        assert desk(stage)[0] == 0
    before = Path("artifacts/count/privacy.json").read_bytes()
    code, text = desk("count")
    assert code == 3 and "already released" in text and "spend_again" in text
    assert Path("artifacts/count/privacy.json").read_bytes() == before
    code, text = desk("plan", "--dry-run")
    assert "count: already released" in text and "frequency: would spend" in text
    code, text = desk("ledger", "history")
    assert code == 0 and "2 charges" in text
    write_params(central={"pool": 2}, privacy={"spend_again": ["count"]})
    desk("plan")
    assert desk("count")[0] == 0
    assert "3 charges" in desk("ledger", "history")[1]


def test_a_kill_between_the_release_and_its_taking_over_costs_nothing(desk):
    write_params()
    desk("prepare", "sensitive")
    desk("plan")
    desk("count")
    before = Path("artifacts/count/counts.json").read_bytes()
    shutil.rmtree("artifacts/count")  # as DVC does before it runs a stage that never returned to it
    code, text = desk("count")
    assert code == 0 and "nothing is charged" in text
    assert Path("artifacts/count/counts.json").read_bytes() == before
    assert "1 charge," in desk("ledger", "history")[1]
    assert desk("count")[0] == 3


def test_an_output_that_cannot_be_written_is_found_before_a_charge_is_opened(desk):
    write_params()
    desk("prepare", "sensitive")
    assert desk("plan")[0] == 0
    Path("file").write_text("")
    code, text = desk("count", "--out", "file/count")
    assert code == 4 and "file" in text and "Traceback" not in text
    assert journalled() == ["genesis"]


def test_another_card_than_the_planned_one_is_refused(desk):
    write_params()
    desk("prepare", "sensitive")
    desk("plan")
    card = Path("data/sensitive/card.json")
    card.write_text(card.read_text().replace('"digits"', '"other"'))
    assert desk("count")[0] in (2, 4)
    assert journalled() == ["genesis"]


def test_a_lifetime_budget_that_would_end_half_way_is_refused_before_the_first_query(desk):
    folder()
    own_plan = own() | {"recipe": "dp-feta"}
    write_params(**own_plan | {"privacy": {"size_hint": 100, "epsilon": 5, "lifetime_epsilon": 1}})
    assert desk("prepare", "sensitive")[0] == 0
    for words in (("plan",), ("plan", "--dry-run")):
        code, text = desk(*words)
        assert code == 3 and "privacy.lifetime_epsilon=1" in text and not Path("artifacts").exists()
    write_params(**own_plan | {"privacy": {"size_hint": 100, "epsilon": 5, "lifetime_epsilon": 6}})
    assert desk("plan")[0] == 0


def test_a_card_of_another_size_than_params_asks_for_is_refused(desk):
    folder()
    write_params(**own(size=8))
    assert desk("prepare", "sensitive")[0] == 0
    write_params(**own(size=6))
    code, text = desk("plan")
    assert code == 2 and "data.size=6, but 8 was prepared" in text


def test_the_doctor_survives_what_it_diagnoses(desk):
    for broken in ("{", "{}"):
        Path("card.json").write_text(broken)
        code, text = desk("doctor", "--card", "card.json")
        assert code == 0 and "is not a data card" in "".join(text.replace("│", "").split("\n")).replace("  ", "")


@pytest.mark.parametrize(
    "words", [("--epsilon", "nan"), ("--epsilon", "-1"), ("--epsilon", "inf"), ("--delta", "0"), ("--delta", "nan")]
)
def test_a_bound_that_is_none_is_refused(desk, words):
    code, text = desk("ledger", "check", *words)
    assert code == 2 and words[0] in text and "positive number" in text


def test_a_state_directory_that_cannot_be_is_one_sentence(desk, monkeypatch):
    folder()
    write_params(**own())
    Path("file").write_text("")
    monkeypatch.setenv("SFUMATO_STATE", str(Path("file").resolve()))
    code, text = desk("prepare", "sensitive")
    assert code == 2 and "is a file: name a folder in SFUMATO_STATE" in text and "Traceback" not in text
    monkeypatch.setenv("SFUMATO_STATE", "state")
    code, text = desk("prepare", "sensitive")
    assert code == 2 and "relative" in text


def test_recipes_are_listed_and_shown(desk):
    assert desk("recipe", "list", "--recipes", "nowhere")[0] == 2
    code, text = desk("recipe", "list")
    assert code == 0 and "dp-merf" in text and "profile digits" in text
    write_params()
    code, text = desk("recipe", "show", "dp-merf")
    assert code == 0 and "finetune" not in yaml.safe_load(text)["run"]


def test_no_history_is_said(desk):
    write_params()
    desk("prepare", "sensitive")
    assert "no history" in desk("ledger", "history")[1]


def test_locals_are_never_shown():
    assert app.pretty_exceptions_show_locals is False
    assert issubclass(SfumatoError, Exception)


def test_help_answers_at_once():
    """No timing assertion on noisy machines beyond one that only a heavy import breaks."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "stages.cli", "--help"], capture_output=True, cwd=ROOT, check=True)
    assert time.perf_counter() - start < 5
