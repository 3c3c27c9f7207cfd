"""House rules: imports point one way, `dvc.yaml` is written from the table of stages, files stay
short.
"""

import ast
import builtins
import functools
import importlib
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from tokenize import generate_tokens

import pytest
import yaml

from sfumato.planning.project_files import dvc_text
from sfumato.settings.fields import Settings
from sfumato.settings.noise import QuerySettings
from sfumato.settings.params import Params
from sfumato.settings.stage import RECIPES, Kind
from sfumato.settings.stages import QUERIES, STAGES, dvc_stages

ROOT = Path(__file__).resolve().parent.parent
# Each folder or module may import those before it. A new one gets its place here.
ORDER = [
    "errors",
    "storage",
    "settings",
    "runtime",
    "data",
    "privacy",
    "diffusion",
    "text_to_image",
    "features",
    "dpsgd",
    "generators",
    "training",
    "queries",
    "baselines",
    "release",
    "evaluation",
    "planning",
    "__init__",  # the package itself, which exports names of the entries above
    "stages",
]
DELETABLE = {"text_to_image", "baselines"}  # rooms that may be deleted, see `test_rooms.py`


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that these statements import, such as `sfumato.data.images.ImageSet`.

    Imports for type checking are included.
    """
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def rooms(tree: ast.AST) -> set[str]:
    """Return the rooms that a module imports.

    The room of `sfumato.data.images` is `data`, and the room of `sfumato` itself is `__init__`.
    """
    found = set()
    for name in imported(ast.walk(tree)):
        package, _, rest = name.partition(".")
        room = rest.split(".")[0]
        if package == "sfumato":
            found.add(room if room in ORDER else "__init__")
        elif package == "stages":
            found.add("stages")
    return found


def against_the_arrows(tree: ast.AST, room: str) -> set[str]:
    """Return the forbidden imports of a module of `room`."""
    return {other for other in rooms(tree) if ORDER.index(other) > ORDER.index(room)}


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "stages" if parts[0] == "stages" else parts[1]


def early(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module that are outside functions.

    Imports inside functions are left out, because they run later and so may close a circle.
    """
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from early(node)


def arrows(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return, for each module, the other modules that it imports at import time or for type
    checking.

    texts: module name -> source; modules without a text are left out.
    """
    found: dict[str, set[str]] = {}
    for module, text in texts.items():
        names = imported(early(ast.parse(text)))
        found[module] = {
            name if name in texts else name.rpartition(".")[0] for name in names
        } & texts.keys()
    return found


def circle(texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return modules that import each other in a ring, or an empty tuple."""
    try:
        TopologicalSorter(arrows(texts)).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


MODULES = sorted(path for folder in ("sfumato", "stages") for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Parse each module of the product, by its path."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in MODULES}


@functools.cache
def all_nodes() -> tuple[ast.AST, ...]:
    """Return the nodes of all modules of the product."""
    return tuple(node for tree in trees().values() for node in ast.walk(tree))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    """Free the nodes after these tests.

    In later tests, the garbage collector would visit them again and again.
    """
    yield
    for cached in (trees, all_nodes, classes):
        cached.cache_clear()


def test_every_room_has_its_place():
    found = {room_of(path) for path in MODULES}
    assert found <= set(ORDER) and set(ORDER) - found <= DELETABLE


def test_imports_point_one_way():
    wrong = {
        path: sorted(found)
        for path, tree in trees().items()
        if (found := against_the_arrows(tree, room_of(ROOT / path)))
    }
    assert wrong == {}


def test_no_modules_import_each_other():
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES}
    assert (
        circle({name.removesuffix(".__init__"): path.read_text() for path, name in names.items()})
        == ()
    )


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("from sfumato.data.store import Card", True),
        ("from sfumato.data import store", True),
        ("import sfumato.data.store", True),
        ("if TYPE_CHECKING:\n    from sfumato.data.store import Card", True),
        ("class Image:\n    import sfumato.data.store", True),
        ("def late():\n    import sfumato.data.store", False),
        ("from sfumato.data.groups import store", False),
    ],
)
def test_a_circle_is_seen(line, seen):
    texts = {
        "sfumato.data.images": line,
        "sfumato.data.store": "from sfumato.data.images import ImageSet",
    }
    assert bool(circle(texts)) == seen


@pytest.mark.parametrize(
    "line",
    [
        "from sfumato.evaluation.downstream import fit",
        "def late():\n    import sfumato.evaluation.downstream",
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from "
            "sfumato.evaluation.plots import save"
        ),
        "from stages.screen import say",
        "import sfumato",
        "from sfumato import __version__",
    ],
)
def test_an_import_against_the_arrows_is_seen(line):
    assert against_the_arrows(ast.parse(line), "dpsgd")
    for line in ("from sfumato.data.images import ImageSet", "from sfumato import errors"):
        assert not against_the_arrows(ast.parse(line), "dpsgd")


def test_dp_sgd_imports_no_text_to_image_model():
    for path in (ROOT / "sfumato/dpsgd").glob("*.py"):
        assert "text_to_image" not in rooms(ast.parse(path.read_text())), path
        assert "isinstance(model" not in path.read_text(), path


# Modules and functions that unpickle or run the content of a file (RUNS). SAYS lists calls that may
# do so, each with the argument that prevents it
RUNS = {
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "runpy",
    "jit",
    "read_pickle",
    "unsafe_load",
}
RUNS |= {
    "full_load",
    "exec_module",
    "spec_from_file_location",
    "eval(",
    "exec(",
    "compile(",
    "__import__(",
}
SAYS = {
    "torch.load(": "weights_only=True",
    "np.load(": "allow_pickle=False",
    "yaml.load(": "PlainYaml",
}
LOOSENED = re.compile(
    r"weights_only\W+False|allow_pickle\W+True|use_safetensors\W+False|trust_remote_code"
)


def runs_files(tree: ast.AST) -> list[str]:
    """List the calls in a module that could run a program from a file."""
    found = [match[0] for match in LOOSENED.finditer(ast.unparse(tree))]
    for node in ast.walk(tree):
        words = set()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            text = ast.unparse(node)
            words = set(re.findall(r"\w+", text)) | set(
                re.findall("^from (?:torch|numpy|yaml) import .*load.*", text)
            )
        elif isinstance(node, ast.Attribute):
            words = {node.attr}
        elif isinstance(node, ast.Call):
            words = {f"{ast.unparse(node.func)}("}
        imports = {word for word in words if word.startswith("from ")}
        if imports or words & (RUNS | SAYS.keys()):
            text = ast.unparse(node)
            unsaid = {word for word in words if SAYS.get(word, "") not in text}
            found += [text] if imports or unsaid or words & RUNS else []
    return found


def test_nothing_in_a_file_is_run():
    """Only two pickles are read, and their bytes are known.

    Modules to import by name are named in tables in the code, not in files.
    """
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in MODULES}
    assert {name: found for name, tree in trees().items() if (found := runs_files(tree))} == {}
    # Modules that unpickle a file of a known sha256
    pickled = ["sfumato/evaluation/extractors.py", "sfumato/features/efficientnet_lite.py"]
    assert [name for name, text in texts.items() if "torch.load(" in text] == pickled
    by_name = [name for name, text in texts.items() if "import_module(" in text]
    assert by_name == [
        "sfumato/__init__.py",
        "sfumato/features/__init__.py",
        "sfumato/settings/stages.py",
        "stages/fork_server.py",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "torch.jit.load(file)",
        "from torch import jit",
        "from torch import load",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "import pickle",
        "import joblib as archive",
        "np.load(file)",
        "np.load(file, allow_pickle=True)",
        "yaml.load(text, yaml.Loader)",
        "pandas.read_pickle(file)",
        "eval(text)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "options = {'use_safetensors': False}",
    ],
)
def test_what_could_run_a_file_is_seen(line):
    assert runs_files(ast.parse(line))
    safe = (
        "torch.load(file, weights_only=True)\nnetwork.eval()\nre.compile('x')\nnp.load(file, "
        "allow_pickle=False)"
    )
    assert not runs_files(ast.parse(safe))


def dvc_yaml() -> dict:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())


def test_dvc_yaml_is_written_from_the_table_of_stages():
    assert (ROOT / "dvc.yaml").read_text() == dvc_text(clone=True), "run `python docs/generate.py`"


def test_an_own_project_gets_the_same_pipeline():
    own = yaml.safe_load(dvc_text())["stages"]
    assert own["plan"]["always_changed"] and not any(
        str(RECIPES) in stage.get("deps", []) for stage in own.values()
    )
    for name, stage in dvc_yaml()["stages"].items():
        assert set(own[name].get("deps", [])) == set(stage.get("deps", [])) - {str(RECIPES)}, name


def test_dvc_never_brings_an_old_card_or_an_old_total_back():
    """Without `persist`, DVC's run cache could restore an old card or an old ledger. An old ledger
    lacks later charges.
    """
    stages = dvc_yaml()["stages"]
    for name, key in (("prepare-sensitive", "outs"), ("ledger", "metrics")):
        (entry,) = stages[name][key]
        assert next(iter(entry.values()))["persist"] is True


def test_no_sensitive_path_is_ever_dvc_s():
    for _, reads, writes in dvc_stages().values():
        for path in reads + writes:
            assert not path.startswith((".sfumato", "metrics.json", "evaluation", "data/raw")), path


@pytest.mark.parametrize("name", list(STAGES))
def test_every_stage_has_settings_function_and_inputs(name):
    stage = STAGES[name]
    assert issubclass(stage.settings, QuerySettings) == (stage.kind is Kind.QUERY)
    assert stage.run is getattr(importlib.import_module(f"stages.{name}"), name)
    before = list(STAGES)[: list(STAGES).index(name)]
    assert set(stage.upstream) <= set(before)
    assert set(STAGES) == {
        key for key, field in Params.model_fields.items() if isinstance(field.default, Settings)
    }


def test_recipes_name_their_stages_in_the_order_of_the_table():
    for path in sorted((ROOT / "pipelines").glob("*.yaml")):
        run = yaml.safe_load(path.read_text())["run"]
        assert run == [name for name in STAGES if name in run], path.name


@pytest.mark.parametrize("name", list(STAGES))
def test_stage_modules_are_thin(name):
    """The module of a stage names what the stage reads, calls the library and saves the results.

    It also estimates the running time, and lists problems of the settings.
    """
    tree = ast.parse((ROOT / "stages" / f"{name}.py").read_text())
    assert sum(isinstance(node, ast.FunctionDef) for node in ast.walk(tree)) <= 5
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert all(
        ast.unparse(base).endswith("Settings") for node in classes for base in node.bases or [node]
    )


def code_tokens(node: ast.AST) -> int:
    """Return the number of code tokens of a function, without strings, comments and line ends."""
    text = io.StringIO(ast.unparse(node)).readline
    layout = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "STRING", "ENDMARKER"}
    return sum(tokenize.tok_name[found.type] not in layout for found in generate_tokens(text))


COMMANDS = {"init", "plan", "ledger", "merge"} & {path.stem for path in MODULES}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_commands_are_thin(name):
    """A command's module parses options, asks and prints. The library does the work, so that
    `Project` can do it, too.
    """
    text = (ROOT / "stages" / f"{name}.py").read_text()
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    assert [
        node.name for node in functions if code_tokens(node) > 500 or isinstance(node, ast.ClassDef)
    ] == []
    assert not re.findall(
        r"subprocess|shutil|replace_file|write_text|unlink|make_plan|check_ledger|read_artifact",
        text,
    )


def test_the_library_starts_only_dvc_and_git():
    """The library also neither reads nor changes the current folder.

    If one thread changed the current folder, another thread would work in the wrong folder.
    """
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for path in MODULES
        if room_of(path) != "stages"
    }
    assert [
        name for name, text in texts.items() if re.search(r"chdir|[Pp]ath\.cwd|getcwd", text)
    ] == []
    starting = [name for name, text in texts.items() if "subprocess" in text]
    assert starting == ["sfumato/planning/project.py", "sfumato/storage/state_directory.py"]


def test_only_queries_open_charges():
    for name in STAGES:
        text = (ROOT / "stages" / f"{name}.py").read_text()
        opens = "open_charge" in text or "release_means" in text  # `release_means` opens a charge
        assert opens == (name in QUERIES), name


# A command in a message, up to the first value that may be a path and is not quoted
UNQUOTED = re.compile(
    r"\b(?:chmod|cd|cp|rm|mv|head -c|export|git (?:checkout|config)) [^`&]*?"
    r"\{(?!quoted\(|[A-Z_]+\})"
)


def test_commands_in_messages_quote_their_paths():
    """A path may contain spaces: ~/Library/Application Support/sfumato."""
    texts = [ast.unparse(node) for node in all_nodes() if isinstance(node, ast.JoinedStr)]
    assert UNQUOTED.search("f'run `chmod o-w {folder}`'")
    assert any("chmod o-w {quoted(" in text for text in texts)
    assert [text for text in texts if UNQUOTED.search(text)] == []


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    """Return the classes of all modules by their names."""
    return {node.name: node for node in all_nodes() if isinstance(node, ast.ClassDef)}


def documented_names(node: ast.AST) -> set[str]:
    """Return the names that a docstring may describe: parameters of a function; parameters and
    attributes of a class and its bases.
    """
    if not isinstance(node, ast.ClassDef):
        return {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
    bases = {getattr(base, "id", "") for base in node.bases} & set(classes())
    names = set().union(*(documented_names(classes()[base]) for base in bases))
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            names.add(part.target.id)
        elif isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "self":
            names.add(part.attr)
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            names |= documented_names(part)
    return names


def is_exception(name: str) -> bool:
    """Return whether this is an exception of Python or of the package."""
    if name in classes():
        return any(is_exception(getattr(base, "id", "")) for base in classes()[name].bases)
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception)


def names_in_section(title: str, node: ast.AST) -> list[str]:
    """List the names in a docstring's section in Google's format, such as `Args:`."""
    lines = r"((?: {4}.*(?:\n|$))+)"
    section = re.search(rf"^{title}:\n{lines}", ast.get_docstring(node), re.MULTILINE)
    return re.findall(r"^ {4}\*{0,2}(\w+): ", section[1], re.MULTILINE) if section else []


def docstring_mistakes(tree: ast.AST) -> list[str]:
    """List the mistakes in the docstrings of a module.

    Mistakes are described names that do not exist, exceptions that do not exist, and section
    headers of another form.
    """
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not ast.get_docstring(node):
            continue
        text = " ".join(ast.get_docstring(node).split())
        described = re.findall(r"(?:^|[.;] )([a-z]\w*(?:, [a-z]\w*)*): ", text)
        described += names_in_section("Args", node)
        unknown = {name for names in described for name in names.split(", ")} - documented_names(
            node
        )
        sentences = " ".join(re.findall(r"\bRaises [^.]*", text))
        raised = {*re.findall(r"(?:Raises|or|;) ([A-Z]\w+)", sentences)}
        raised |= {*names_in_section("Raises", node)}
        sections = r"(?m)^(?:Args|Returns|Raises|Yields):\n(?= {4}\S)"
        prose = re.sub(sections, "", ast.get_docstring(node))
        headers = re.findall(r"\b(?:Args|Arguments|Parameters|Returns|Raises|Yields):", prose)
        missing = {name for name in raised if not is_exception(name)}
        wrong += [f"{node.name}: {name}" for name in sorted(unknown | missing | {*headers})]
    return wrong


def test_docstrings_have_one_form_and_describe_what_exists():
    wrong = {path: found for path, tree in trees().items() if (found := docstring_mistakes(tree))}
    assert not wrong


@pytest.mark.parametrize(
    ("docstring", "mistake"),
    [
        (
            (
                "What it does.\n\nimages: (B,), by `labels`; size: of a batch. Raises DataError or "
                "ValueError."
            ),
            None,
        ),
        ("What it does. image: (B,).", "image"),
        ("What it does.\n\nimages, label: (B,).", "label"),
        ("What it does.\n\nimages: (B,);\nlabel: (B,).", "label"),
        ("What it does. Raises DataMistake if it cannot.", "DataMistake"),
        ("What it does. Raises DataError without images; DataMistake with them.", "DataMistake"),
        ("What it does.\n\nArgs:\n    images: (B,),\n        uint8.\n    labels: (B,).", None),
        ("What it does.\n\nArgs:\n    images: (B,).\n    label: (B,).", "label"),
        ("What it does.\n\nRaises:\n    DataMistake: It cannot.", "DataMistake"),
        ("What it does.\n\nArguments:\n    images: (B,).", "Arguments:"),
        ("What it does.\n\nArgs:\nimages: (B,).", "Args:"),
        ("What it does.\n\nReturns: (B,).", "Returns:"),
    ],
)
def test_a_docstring_that_describes_what_is_not_there_is_seen(docstring, mistake):
    tree = ast.parse(f'def work(images, *, labels, size=1):\n    """{docstring}"""')
    assert docstring_mistakes(tree) == ([f"work: {mistake}"] if mistake else [])


def test_a_class_may_describe_inherited_fields():
    model = ast.parse(
        'class Model(Denoiser):\n    """Draws.\n\nclasses: of labels; own: a field."""\n   '
        " own: int"
    )
    assert docstring_mistakes(model) == []
    model.body[0].bases = []
    assert docstring_mistakes(model) == ["Model: classes"]


# Counts, over all modules, of constructs that make a line hard to read: these numbers may only fall
MOST = {
    "ternaries": 375,
    "packed assignments": 12,
    "functions of more than 500 code tokens": 10,
    "constants of two values": 0,
}


def constants_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names in capitals that a module defines, each with its value as text."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (
            targets if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else ()
        ):
            values = (
                node.value.elts
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                else []
            )
            pairs = zip(target.elts, values, strict=False) if values else [(target, node.value)]
            yield from (
                (name.id, ast.unparse(value))
                for name, value in pairs
                if getattr(name, "id", "").isupper()
            )


def test_lines_do_not_become_denser():
    nodes = all_nodes()
    values: dict[str, set[str]] = {}
    for tree in trees().values():
        for name, value in constants_of(tree):
            values.setdefault(name, set()).add(value)
    doubled = [name for name, found in values.items() if len(found) > 1 and name != "STAGE"]
    counts = {
        "ternaries": sum(isinstance(node, ast.IfExp) for node in nodes),
        "packed assignments": sum(
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and any(isinstance(target, ast.Tuple) for target in node.targets)
            for node in nodes
        ),
        "functions of more than 500 code tokens": sum(
            code_tokens(node) > 500 for node in nodes if isinstance(node, ast.FunctionDef)
        ),
        "constants of two values": len(doubled),
    }
    denser = {name: (count, MOST[name]) for name, count in counts.items() if count > MOST[name]}
    assert denser == {}, (
        f"of each the count and its most; constants of two values: {', '.join(doubled) or 'none'}"
    )


LONGEST_TEST_NAME = 60


def test_names_of_tests_are_short():
    functions = [
        (path.name, name)
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"(?m)^ *def (test_\w+)", path.read_text(encoding="utf-8"))
    ]
    assert len(functions) > 1000
    assert [found for found in functions if len(found[1]) > LONGEST_TEST_NAME] == []


def test_a_first_run_in_a_clone_meets_no_ledger():
    """The charges of a committed ledger would be missing from a new user's journal.

    So the first run would call the odometer incomplete.
    """
    listed = subprocess.run(
        ["git", "ls-files", "ledger.json", "dvc.lock"], cwd=ROOT, capture_output=True, text=True
    )
    assert listed.stdout == ""
