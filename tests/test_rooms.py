"""Three parts can be deleted, with their recipes: only the modules in PARTS import them."""

import ast
import functools
import re
import shutil
from pathlib import Path

import fresh_imports
import pytest
import yaml
from pydantic import BaseModel

from sfumato.settings.params import Params
from sfumato.settings.stages import BASELINES

ROOT = Path(__file__).resolve().parents[1]
NAMES = {*BASELINES}
OWN = {f"stages/{name}.py" for name in NAMES}
# Part -> its files and folders, and the modules that may import it
PARTS = {
    "baselines": ({"sfumato/baselines"} | OWN, set()),
    "text_to_image": (
        {"sfumato/text_to_image"},
        {"sfumato/release/synthesizer.py", "stages/pretrain.py"},
    ),
    "merge": (
        {"sfumato/planning/merge.py", "sfumato/queries/merging.py", "stages/merge.py"},
        {"stages/cli.py"},
    ),
}
MODULES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("sfumato", "stages")
    for path in (ROOT / folder).rglob("*.py")
    if "baselines" not in path.parent.name
}


def module_of(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".")


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a module imports, and all its strings.

    The strings may be arguments of `import_module`.
    """
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@functools.cache
def imported_by(text: str) -> set[str]:
    return imported(ast.parse(text))


@pytest.mark.parametrize("part", PARTS)
def test_nothing_else_leads_to_a_part(part):
    files, leading = PARTS[part]
    modules = tuple(map(module_of, files))
    found = {
        name
        for name, text in MODULES.items()
        if any(f"{one}.".startswith(tuple(f"{m}." for m in modules)) for one in imported_by(text))
    }
    assert {name for name in found if not name.startswith(tuple(files))} <= leading


def without(part: str, folder: Path) -> Path:
    """Copy the program to `folder`, without a part."""
    for name in ("sfumato", "stages", "pipelines"):
        # Compiled modules are copied too, except those that another process is writing
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    for path in (folder / name for name in PARTS[part][0]):
        if path.is_dir():
            shutil.rmtree(path)
        else:  # the part may have been deleted here, too
            path.unlink(missing_ok=True)
    return folder


def printed(program: str, folder: Path) -> str:
    """Return the output of a program that imports the copy in `folder`."""
    return fresh_imports.printed(program, folder, folder, {"PYTHONPATH": "."})


def names_in(text: str) -> set[str]:
    """Return the names in a module: attributes, arguments, keys."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        for key in ("attr", "arg", "value", "id"):
            found.add(getattr(node, key, None) if isinstance(getattr(node, key, None), str) else "")
    return found


def models_of(kind: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a model of settings, and all models within it."""
    within = {each for field in kind.model_fields.values() for each in types_in(field.annotation)}
    return {kind}.union(*(models_of(each) for each in within))


def types_in(annotation: object) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return set().union(*(types_in(part) for part in getattr(annotation, "__args__", ())))


def test_no_other_settings_have_a_baseline_option():
    named = set().union(*(names_in(text) for name, text in MODULES.items() if name not in OWN))
    models = models_of(Params)
    assert len(models) > 25
    others = {kind for kind in models if kind.__module__ != "sfumato.baselines.settings"}
    assert {
        f"{kind.__name__}.{key}" for kind in others for key in kind.model_fields if key not in named
    } == set()


def test_other_recipes_load_without_the_baselines(tmp_path):
    without("baselines", tmp_path)
    for path in (tmp_path / "pipelines").glob("*.yaml"):
        if NAMES & set(yaml.safe_load(path.read_text())["run"]):
            path.unlink()
    table = tmp_path / "sfumato/settings/stages.py"
    text = table.read_text()
    table.write_text(re.sub(r"^(BASELINES\b.*) = .*", r"\1 = ()", text, flags=re.M))
    (tmp_path / "none.yaml").write_text("{}\n")
    commands = {*printed(WITHOUT + COMMANDS, tmp_path).split()}
    assert not NAMES & commands and {"init", "plan", "finetune", "synthesize"} <= commands


def test_an_own_network_is_planned_without_public_models(tmp_path):
    printed(EVERY_MODULE + PLANNED, without("text_to_image", tmp_path))


def test_all_else_is_there_without_merge(tmp_path):
    without("merge", tmp_path)
    program = tmp_path / "stages/cli.py"
    text = program.read_text().replace("from stages.merge import merge\n", "")
    program.write_text(text.replace("evaluate, merge, ", "evaluate, "))
    commands = {*printed(EVERY_MODULE + COMMANDS, tmp_path).split()}
    assert "merge" not in commands and {"plan", "synthesize", "ledger"} <= commands


EVERY_MODULE = """
import pkgutil, sfumato, stages
from importlib import import_module
from pathlib import Path
for package in (sfumato, stages):
    assert Path(package.__file__).is_relative_to(Path.cwd())
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != "sfumato.__main__":
            import_module(module.name)
"""
COMMANDS = """
import stages.cli
from typer.main import get_command
print(*get_command(stages.cli.app).commands)
"""
PLANNED = """
from sfumato.release.synthesizer import load_start, outline
from sfumato.settings.training import Model
from sfumato.storage.weights import refers_to_public_model
outline(Model(), (1, 8, 8), 3)
assert not refers_to_public_model(Path("."))
"""
WITHOUT = f"""
from pathlib import Path
import stages.cli
from sfumato.planning.checks import missing_stages
from sfumato.planning.project_files import dvc_text
from sfumato.settings.recipes import load_params
assert Path(stages.cli.__file__).is_relative_to(Path.cwd())
for path in Path("pipelines").glob("*.yaml"):
    params = load_params(Path("none.yaml"), Path("pipelines"), recipe=path.stem)
    assert not list(missing_stages(params)), path
assert not any("artifacts/" + name in dvc_text() for name in {BASELINES})
"""
