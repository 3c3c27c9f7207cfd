"""`docs/api.md` shows every public name with all parameters, and its examples run."""

import re
import shutil
import sys
from pathlib import Path

import griffe
import pytest
from PIL import Image
from small_release import write_release, write_teacher

import sfumato
from sfumato.data.prepare import prepare_sensitive
from sfumato.settings.data import Data

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
PLACES = {
    "/home/me/.local/state/sfumato": "digits-state",
    "/data/clinic": "images",
}  # name in the examples -> folder in the test


@pytest.fixture(scope="module")
def package():
    return griffe.load(
        "sfumato", search_paths=[ROOT], docstring_parser="google", resolve_aliases=True
    )


def shown(package):
    """Return the functions and classes on the page, and their methods, by name."""
    page = PAGE.read_text(encoding="utf-8")
    found = {}
    for name, members in re.findall(
        r"^::: sfumato\.([\w.]+)\n(?: .*\n +members: \[(.*)\])?", page, re.MULTILINE
    ):
        found[name] = package[name]
        for key, method in package[name].functions.items() if package[name].is_class else ():
            chosen = key in members.split(", ") if members else method.docstring is not None
            if chosen and not key.startswith("_"):
                found[f"{name}.{key}"] = method
    return found


def undocumented(thing):
    """Return the parameters of a function or class that its docstring does not describe."""
    if thing.is_class and "__init__" not in thing.members:
        return set()  # the base class describes them
    parameters = {parameter.name.lstrip("*") for parameter in thing.parameters} - {"self", "cls"}
    sections = [section.value for section in thing.docstring.parsed if section.kind == "parameters"]
    return parameters - {entry.name.lstrip("*") for section in sections for entry in section}


def test_the_page_shows_every_public_name(package):
    assert {*sfumato.__all__} - {"__version__"} <= {*shown(package)}


def test_every_parameter_on_the_page_is_described(package):
    made_elsewhere = {
        "privacy.own_query.OwnCharge",
        "privacy.charge.Charge",
    }  # `open_charge` makes them
    found = {name: thing for name, thing in shown(package).items() if name not in made_elsewhere}
    assert len(found) > 35
    assert {name: wrong for name, thing in found.items() if (wrong := undocumented(thing))} == {}


def test_a_parameter_without_a_description_is_found():
    docstring = "Add.\n\n    Args:\n        a: A number.\n        rows: Others.\n    "
    code = f'def f(a, *rows, b=1):\n    """{docstring}"""\n'
    with griffe.temporary_visited_module(code, docstring_parser="google") as module:
        assert undocumented(module["f"]) == {"b"}


@pytest.fixture
def project(digits, here, environment):
    """Create a release, a teacher, a ledger, images and a state, as the examples name them."""
    environment["DVC_SITE_CACHE_DIR"] = str(here / "dvc")
    environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    write_release(here / "artifacts" / "synthesize", digits)
    write_teacher(here / "artifacts" / "teacher", digits)
    shutil.copy(ROOT / "docs/gallery/digits/ledger.json", here)
    state = here / PLACES["/home/me/.local/state/sfumato"]
    prepare_sensitive(
        Data(dataset_id="ours"), state, here / "data" / "sensitive" / "card.json", here / "raw"
    )
    for i in range(40):
        folder = here / "images" / digits.classes[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[i, :, :, 0]).save(folder / f"{i}.png")
    return here


def test_the_examples_run_one_after_the_other(project, capsys):
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 15
    names: dict = {}
    for block in blocks:
        for place, here in PLACES.items():
            block = block.replace(place, str(project / here))
        exec(compile(block, str(PAGE), "exec"), names)
    assert "1.2000" in capsys.readouterr().out
