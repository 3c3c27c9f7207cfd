"""`stage init` and `Project.create` take the same options. Each names them in its own way."""

import ast
import csv
import io
import os
import re
from pathlib import Path

import pytest
import yaml
from layouts import folders
from test_init import ROOT, write_shapes

import sfumato
from sfumato.errors import ConfigError, SfumatoError
from sfumato.planning.create import (
    Owner,
    ask_for_groups,
    look_for_persons,
    propose_project,
    survey_and_ask,
)
from sfumato.settings.data import Groups
from sfumato.settings.options import InitOptions

CLASSES = ["lung, left", '5" cut', '"large"', "stage: 2", "-none", "--groups", "{option.size}"]
FOLDERS = [
    "scans--left",
    "--force",
    "a --out b",
    "x--one-image-each.d",
    "{option.size}--size",
    "--groups=1",
]


def labelled(folder: Path, classes: list[str]) -> Path:
    """Write a folder of pictures, and a table that assigns the classes to the pictures in turn."""
    write_shapes(folder / "pictures", each=12)
    files = sorted(file.relative_to(folder) for file in folder.rglob("*.png"))
    with (folder / "metadata.csv").open("w", newline="") as table:
        rows = [(file, classes[number % len(classes)]) for number, file in enumerate(files)]
        csv.writer(table).writerows([("file_name", "label"), *rows])
    return folder


def csv_line(names: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(names)
    return text.getvalue().strip()


def written(folder: str) -> dict:
    return yaml.safe_load(Path(folder, "params.yaml").read_text())


@pytest.mark.parametrize("name", CLASSES)
def test_any_class_can_be_named_by_flag_and_in_python(desk, quick, tmp_path, name):
    classes = [name, "the other"]
    images = labelled(tmp_path / "in", classes)
    common = ["--epsilon", "5", "--minutes", "1", "--one-image-each", "--yes"]
    code, text = desk(
        "init", str(images), *common, "--classes", csv_line(classes), "--out", "by-flag"
    )
    assert code == 0, text
    sfumato.Project.create(
        "in-python",
        images=images,
        epsilon=5,
        minutes=1,
        one_image_each=True,
        classes=tuple(classes),
    )
    assert sorted(written("by-flag")["data"]["classes"]) == sorted(classes)
    assert Path("by-flag/params.yaml").read_bytes() == Path("in-python/params.yaml").read_bytes()


@pytest.mark.parametrize("name", FOLDERS)
def test_an_error_names_a_folder_as_it_is(desk, quick, tmp_path, name):
    """Test missing folders, unclear tables, and existing projects."""
    missing, unclear, there = (
        tmp_path / "of" / name / kind for kind in ("missing", "unclear", "there")
    )
    labelled(unclear, ["a", "b"])
    (unclear / "metadata.csv").write_text(
        "file_name,--alone,--size\n" + "pictures/disc/0.png,1,2\n" * 3
    )
    there.mkdir(parents=True)
    (there / "params.yaml").touch()
    pictures = write_shapes(tmp_path / "pictures", each=12)
    cases = {
        (missing, Path("out")): ("images", f"{missing} does not exist"),
        (unclear, Path("out")): (
            "label_column",
            f"{unclear}/metadata.csv has the columns --alone, --size: ",
        ),
        (pictures, there): ("out", f"{there} already contains params.yaml"),
    }
    if "{" in name:
        cases[pictures, there] = "out", f"the path of the project folder, {there}, contains braces"
    for (images, out), (option, start) in cases.items():
        with pytest.raises(SfumatoError) as caught:
            sfumato.Project.create(out, images=images, epsilon=5)
        assert str(caught.value).startswith(start) and caught.value.option == option
        assert "--" not in str(caught.value).removeprefix(start), "the library writes no flag"
        _, text = desk("init", str(images), "--epsilon", "5", "--yes", "--out", str(out))
        refused = Path(os.environ["SFUMATO_STATE"], "refused.txt")
        text = refused.read_text() if "refused.txt" in text else text.removeprefix("error: ")
        assert text.startswith(start)
        assert option == "images" or f"--{option.replace('_', '-')}" in text.removeprefix(start)


def test_python_is_shown_parameters_and_a_command_flags(desk, quick, tmp_path, capsys):
    images = write_shapes(tmp_path / "in", each=12)
    said = desk.run(f"init {images} --epsilon 5 --yes --out by-flag")
    capsys.readouterr()
    sfumato.Project.create("in-python", images=images, epsilon=5)
    shown = capsys.readouterr().out
    assert (
        "use --size-hint" in said
        and "use --groups; if no person has several images, use --one-image-each" in said
    )
    assert (
        "use size_hint" in shown
        and "use groups; if no person has several images, use one_image_each" in shown
        and " --" not in shown
    )
    with pytest.raises(ConfigError, match=r"^size=33 is larger than most images") as caught:
        sfumato.Project.create("other", images=images, epsilon=5, size=33)
    assert caught.value.option == "size"
    project = sfumato.Project("in-python")
    with pytest.raises(ConfigError, match=r"^unit person is not a unit"):
        project.check(unit="person")
    desk.run("ledger check --unit person", "error: --unit person is not a unit", code=2)


def test_persons_are_found_by_a_typed_value_as_by_its_text(quick, here, tmp_path):
    images = write_shapes(tmp_path / "in", each=12)
    texts = []
    for groups in (r"^(\d+)\.", Groups(pattern=r"^(\d+)\.")):
        sfumato.Project.create(
            "out", images=images, epsilon=5, groups=groups, size="8", fit="pad", force=True
        )
        texts.append(Path("out/params.yaml").read_text())
    assert texts[0] == texts[1]
    data = written("out")["data"]
    assert list(data)[-2:] == ["fit", "groups"] and data["groups"] == {"pattern": r"^(\d+)\."}
    assert written("out")["privacy"]["unit"] == "group"


def answering(*answers: object) -> Owner:
    """Return an owner who gives these answers one after another, as on a terminal."""
    remaining = iter(answers)
    return Owner(lambda question, default, kind: next(remaining))


def test_an_answer_that_is_not_valid_is_asked_for_again(here, tmp_path):
    images = write_shapes(tmp_path / "in", each=12)
    options = InitOptions(images=images)
    _, seen = survey_and_ask(options, Owner(), here)
    found = ask_for_groups(seen, options, answering(True, "(", "(a)(b)", r"^(\d+)\."))
    assert found.groups == Groups(pattern=r"^(\d+)\.")
    assert look_for_persons(seen, options, answering(False), here)[1] == "image"


def test_an_answer_that_does_not_suit_the_images_is_asked_again(here, tmp_path):
    images = write_shapes(tmp_path / "in", each=12)
    options = InitOptions(images=images)
    _, seen = survey_and_ask(options, Owner(), here)
    answers = (True, "missing.csv", True, "class/person", True, "column", True, r"^(\d+)\.")
    assert look_for_persons(seen, options, answering(*answers), here)[1] == "group"
    (images / "empty").mkdir()
    assert "empty" in survey_and_ask(options, answering("a,b", "all"), here)[1].classes


def test_a_missing_csv_file_is_asked_for_again(here, tmp_path):
    folders("{kind}/{person}/{i}.png")(tmp_path / "in")
    options = InitOptions(images=tmp_path / "in")
    answered, _ = survey_and_ask(options, answering("missing.csv", "class/person"), here)
    assert answered.groups == Groups(folder=True)


def test_a_number_or_name_that_is_not_valid_is_asked_for_again(quick, here, tmp_path):
    images = write_shapes(tmp_path / "in", each=12)
    options = InitOptions(images=images, out=Path("out"), one_image_each=True)
    answers = ("a/b", "clinic", 0, 5.0, -1, 1.0, "many", 10**12, "33")
    budget = propose_project(options, answering(*answers), here).plan.budget
    assert budget["size_hint"] == 33 and budget["epsilon"] == pytest.approx(5, rel=0.01)


def test_a_project_folder_that_cannot_be_made_is_refused_early(desk, tmp_path):
    images = write_shapes(tmp_path / "in", each=1)
    (tmp_path / "file").write_text("no folder")
    for out in ("file", "file/below"):
        text = desk.run(f"init {images} --epsilon 5 --yes --out {tmp_path / out}", code=2)
        assert f"{tmp_path / 'file'} is not a folder" in " ".join(text.split())
    assert not Path(os.environ["SFUMATO_STATE"], "survey_cache.json").exists()


def test_no_confirmation_is_written_that_the_owner_did_not_give(here, tmp_path):
    """The owner answers that some persons have several images, but gives no rule to find persons.

    So the owner has not confirmed that there is one image per person.
    """
    images = write_shapes(tmp_path / "in", each=12)
    options = InitOptions(images=images)
    _, seen = survey_and_ask(options, Owner(), here)
    assert look_for_persons(seen, options, answering(True, "(", "alone"), here)[1] is None


def test_only_a_number_counted_by_the_program_is_called_rounded(quick, here, tmp_path):
    images = write_shapes(tmp_path / "in", each=12)
    given = {"epsilon": 5.0, "minutes": 1.0, "one_image_each": True, "dataset_id": "clinic"}
    options = InitOptions(images=images, out=Path("out"), **given)
    for number in (33, 30):  # 0.8 · 36 images are rounded to 30
        made = propose_project(options, answering(number), here)
        assert made.plan.budget["size_hint"] == number and made.counted == (number == 30)


@pytest.mark.parametrize(
    "file",
    [
        "stages/init.py",
        "stages/flags.py",
        "sfumato/planning/create.py",
        "sfumato/planning/project.py",
    ],
)
def test_options_travel_as_one_value(file):
    text = (ROOT / file).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert len(node.args.args) + len(node.args.kwonlyargs) <= 7, node.name
    assert "locals()" not in text
    assert file.startswith("stages") or not re.search(r"\W--[a-z]", text.replace("dvc init --", ""))


@pytest.mark.parametrize("name", ["a{b}", "{", "x}"])
def test_a_project_folder_with_braces_is_refused_early(name, desk, tmp_path):
    text = desk.run(
        f"init {tmp_path / 'missing'} --epsilon 5 --yes --out {tmp_path / name}", code=2
    )
    assert "contains braces, which DVC cannot use" in " ".join(text.split()) and "--out" in text
    assert not (tmp_path / name).exists()


def test_a_project_folder_that_is_not_utf_8_is_refused_early(desk, tmp_path):
    out = tmp_path / os.fsdecode(b"r\xf6ntgen")
    code, text = desk("init", str(tmp_path / "in"), "--epsilon", "5", "--yes", "--out", str(out))
    assert code == 2 and "not UTF-8, which DVC cannot use" in text and "--out" in text
    assert not out.exists()


def test_a_folder_of_images_that_is_not_utf_8_is_refused_early(desk, tmp_path):
    images = tmp_path / os.fsdecode(b"r\xf6ntgen")
    images.mkdir()
    code, text = desk("init", str(images), "--epsilon", "5", "--yes", "--out", f"{tmp_path}/out")
    assert code == 2 and "not UTF-8, which params.yaml cannot contain" in " ".join(text.split())
