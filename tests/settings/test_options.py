"""The options of a new project: text and values give one typed form, and a mistake names its
option.
"""

import ast
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from string import Formatter

import pytest

from sfumato.errors import ConfigError
from sfumato.settings.data import Groups
from sfumato.settings.options import InitOptions
from stages.flags import flag

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {  # case: option, its text, and the same value in Python
    "groups by order": ("groups", "class/person", Groups(folder=True)),
    "groups by order, outer": ("groups", "person/class", Groups(folder="outer")),
    "groups by pattern": ("groups", r"^(P\d+)_", Groups(pattern=r"^(P\d+)_")),
    "groups by column": ("groups", "patient--id", Groups(column="patient--id")),
    "all classes": ("classes", "all", "all"),
    "a class called all": ("classes", '"all"', ("all",)),
    "classes": ("classes", "a, b ,c", ("a", "b", "c")),
    "classes with commas": ("classes", '"lung, left","lung, right"', ("lung, left", "lung, right")),
    "classes with quotes": ("classes", 'a 5" cut,"""b"""', ('a 5" cut', '"b"')),
    "classes with marks": ("classes", "-a,b: c,--d,'e'", ("-a", "b: c", "--d", "'e'")),
    "a range": ("range", "-1000,400.5", (-1000.0, 400.5)),
    "squares": ("size", "64", 64),
    "rectangles": ("size", "96x128", (96, 128)),
    "a share": ("skip", "1%", 0.01),
    "a number": ("epsilon", "2.5", 2.5),
    "a whole number": ("size_hint", "300", 300),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_parsed_to_what_python_may_give(case):
    option, text, value = TEXTS[case]
    options = InitOptions(images="in", **{option: text})
    assert getattr(options, option) == value and type(getattr(options, option)) is type(value)
    assert options == InitOptions(images="in", **{option: value}) == replace(options)


MISTAKES = [
    ("epsilon", "much", "unable to parse"),
    ("epsilon", "1e-12", "greater than or equal to"),
    ("epsilon", "nan", "less than or equal to"),
    ("minutes", "-1", "greater than or equal to"),
    ("groups", "(a)(b)", "2 capturing groups"),
    ("classes", '"a"b,c', "a name that contains a comma in double quotes"),
    ("range", "4095", "expected two numbers"),
    ("skip", "2", "less than 1"),
    ("fit", "zoom", "'crop' or 'pad'"),
    ("size", "24x7", "expected 8 pixels per side or more"),
    ("size_hint", "2", "greater than or equal to 3"),
    ("size_hint", "1000000000000", "less than or equal to 1000000000"),
    ("dataset_id", "a b/../c", "is not a valid dataset id"),
]


@pytest.mark.parametrize("option, given, reason", MISTAKES)
def test_a_mistake_names_its_option_as_each_front_end_does(option, given, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        InitOptions(images="in", **{option: given})
    assert caught.value.option == option
    assert str(caught.value).startswith(f"{option}={given}: ")
    assert caught.value.spelled(flag).startswith(f"{flag(option)}={given}: ")


def test_a_table_of_persons_may_be_a_path():
    table = Path("patients.csv")
    options = InitOptions(images="in", groups=table)
    assert options == InitOptions(images="in", groups=str(table))
    assert options.groups == Groups(csv=str(table.resolve()))


@pytest.mark.parametrize("option", ["groups", "label_column", "dataset_id"])
def test_an_empty_text_is_one_sentence_or_text(option):
    try:
        assert getattr(InitOptions(images="in", **{option: ""}), option) == ""
    except ConfigError as error:
        assert "\n" not in str(error) and error.option == option


def test_values_of_a_mistake_are_never_templates():
    error = ConfigError(
        "{option.size}={given}, not {option.fit}", option="size", given="{option.fit}--out{0}"
    )
    assert str(error) == "size={option.fit}--out{0}, not fit"
    assert error.spelled(flag) == "--size={option.fit}--out{0}, not --fit"
    assert str(ConfigError("/x/{a}--b")) == ConfigError("/x/{a}--b").spelled(flag) == "/x/{a}--b"


def test_options_are_frozen_and_an_unknown_one_is_named():
    options = InitOptions(images="in")
    with pytest.raises(FrozenInstanceError):
        options.epsilon = 5.0
    with pytest.raises(TypeError, match="nonsense"):
        InitOptions(images="in", nonsense=1)
    assert options.images.is_absolute() and options.out.is_absolute()
    assert {field.name for field in fields(InitOptions)} >= {
        "images",
        "epsilon",
        "groups",
        "classes",
        "size",
    }


def templates(function: ast.FunctionDef):
    """Find the errors about options in a function. Yields the text of each error, and the names of
    the values that fill in the text.
    """
    assigned = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "text"
    ]
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        given = {keyword.arg for keyword in call.keywords}
        kind = getattr(call.func, "id", "")
        if (
            kind in ("ConfigError", "DataError", "Unclear")
            and "option" in given
            and None not in given
        ):
            text = call.args[0]
            if isinstance(text, ast.Name):  # the last `text` assigned before the call
                text = max(
                    (node for node in assigned if node.lineno < call.lineno),
                    key=lambda node: node.lineno,
                ).value
            if isinstance(text, ast.Constant):
                yield text.value, given


def test_every_error_about_an_option_is_given_its_values():
    """If a value were missing, formatting the message would itself raise an error."""
    known = {field.name for field in fields(InitOptions)} | {
        "delta",
        "different_people",
        "unit",
        "ledger_only",
        "artifacts",
        "opinions",
    }
    found = 0
    for path in (ROOT / "sfumato").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            for text, given in templates(function) if isinstance(function, ast.FunctionDef) else ():
                found += 1
                names = {field for _, field, _, _ in Formatter().parse(text) if field is not None}
                options = {
                    name.removeprefix("option.") for name in names if name.startswith("option.")
                }
                values = {name for name in names if not name.startswith("option.")}
                assert options <= known, (path.name, text)
                assert values == given - {"option", "proposed", "undecided"}, (path.name, text)
    assert found >= 15
