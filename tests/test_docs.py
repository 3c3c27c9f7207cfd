"""The site made of `docs/`: it builds and names every page; its links, commands and generated
tables are right.
"""

import csv
import importlib.util
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from urllib.parse import unquote, urlsplit

import pytest
import torch
import yaml
from pydantic import BaseModel

from sfumato.privacy.rows import bounded_sum
from sfumato.settings.params import Params

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROOT_PAGES = ("changelog", "code_of_conduct", "contributing", "releasing", "security")
GENERATED = {"index.md", "notes/index.md", *(f"{page}.md" for page in ROOT_PAGES)}


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Links(HTMLParser):
    """Collect the targets of a page's links, and its own anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        elif tag in ("img", "script", "link"):
            self.loaded |= {found[key] for key in ("src", "href") if found.get(key)}


def in_nav(entries):
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from in_nav(value) if isinstance(value, list) else [value]


def test_the_navigation_names_every_page_once():
    from mkdocs.config import load_config

    named = list(in_nav(load_config(str(ROOT / "mkdocs.yml"))["nav"]))
    docs = ROOT / "docs"
    notebooks = {
        path.relative_to(docs).with_suffix(".md").as_posix() for path in docs.rglob("*.ipynb")
    }
    assert len(named) == len({*named})
    # The cards of releases, to which the page of the gallery links
    cards = {*docs.glob("gallery/*/README.md")}
    pages = {path.relative_to(docs).as_posix() for path in {*docs.rglob("*.md")} - cards}
    assert {*named} == pages | notebooks | GENERATED


def test_every_link_of_the_site_leads_to_a_local_page(site):
    pages = {
        path: Links(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }
    broken = []
    foreign = []
    inner = 0
    for path, page in pages.items():
        for link in sorted(page.links | page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                foreign += (
                    [f"{path.name}: {link}"]
                    if link in page.loaded and parts.scheme != "data"
                    else []
                )
                continue
            inner += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.name}: {link}")
    assert inner > 500 and not broken and not foreign, (broken, foreign)


def commands_in(text):
    """Yield the arguments of each call of `stage` in a page's shell blocks."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line.split(" #")[0]):
                words = (
                    shlex.split(part)
                    if "stage " in part and "…" not in part and "<" not in part
                    else []
                )
                if words and words[0] in ("stage", ".venv/bin/stage"):
                    yield words[1:]


def test_every_command_in_the_docs_exists_with_its_options():
    from typer.main import get_command

    from stages.cli import app

    wrong = []
    seen = 0
    for page in PAGES:
        for words in commands_in(page.read_text(encoding="utf-8")):
            command = get_command(app)
            rest = list(words)
            while rest and hasattr(command, "commands"):
                command = command.commands.get(rest.pop(0))
            options = {
                name
                for param in getattr(command, "params", [])
                for name in (*param.opts, *param.secondary_opts)
            }
            unknown = {word.split("=")[0] for word in rest if word.startswith("--")} - options
            seen += 1
            if command is None or unknown:
                wrong.append((page.name, words, unknown))
    assert seen > 20 and not wrong, wrong


def sections_in(annotation):
    """Yield the sections in a type: the type itself, or types inside a list, mapping or union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def sections_below(kinds, name):
    """Return the sections that the key `name` of these sections may contain, or None if none of
    them has such a key.
    """
    every = [
        {field.alias or key: field for key, field in kind.model_fields.items()} for kind in kinds
    ]
    fields = [fields[name] for fields in every if name in fields]
    return [kind for field in fields for kind in sections_in(field.annotation)] if fields else None


def is_setting(key):
    kinds = [Params]
    for name in key.split("."):
        kinds = sections_below(kinds, name)
        if kinds is None:
            return False
    return True


def keys_of(values, kinds=(Params,), prefix=""):
    """Return the dotted keys of a block of YAML. Keys of a mapping without sections, such as
    weights, are left out.
    """
    for name, inner in values.items():
        yield f"{prefix}{name}"
        below = sections_below(kinds, name)
        if isinstance(inner, dict) and below:
            yield from keys_of(inner, below, f"{prefix}{name}.")


def settings_named_in(text):
    """Return settings named in prose, `finetune.steps` or `data.fit: pad`, and in blocks of a
    params.yaml.
    """
    sections = "|".join(
        name for name, field in Params.model_fields.items() if any(sections_in(field.annotation))
    )
    file_names = r"(?!\S*\.(?:csv|json|jsonl|npy|npz|html|png|yaml|py)\b)"
    yield from re.findall(rf"`{file_names}((?:{sections})(?:\.[a-z_]+)+)[`:=]", text)
    for block in re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        values = yaml.safe_load(block)
        if isinstance(values, dict) and {*values} & {*Params.model_fields}:
            values.pop("description", None)  # only recipes have one
            yield from keys_of(values)


def test_every_setting_named_in_the_docs_exists():
    """The changelog and the page on upgrading are left out, because they name removed settings."""
    left_out = {"CHANGELOG.md", "upgrading.md"}
    pages = [page for page in PAGES if page.name not in left_out and "gallery" not in page.parts]
    named = [
        (page.name, key)
        for page in pages
        for key in settings_named_in(page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 100 and [(page, key) for page, key in named if not is_setting(key)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Set `finetune.step` to 40.", ["finetune.step"]),
        ("`data.groups.folder: outer`, `count.csv`, `finetune.steps=40`", []),
        ("```yaml\ndata: {siz: 32, groups: {folder: true}}\n```", ["data.siz"]),
        ("```yaml\ncount: {noise: {1: 30%, 10: 3%}}\nnoise: 1\n```", ["noise"]),
    ],
)
def test_a_key_that_is_no_setting_is_seen(text, wrong):
    assert [key for key in settings_named_in(text) if not is_setting(key)] == wrong


TERMS = {  # anchor in the glossary: how the term looks in prose
    "epsilon": r"ε",
    "delta": r"δ",
    "unit": r"\bunit\b",
    "hold-out": r"\bhold-outs?\b",
    "release": r"\breleases?\b",
    "charge": r"\bcharges?\b",
    "odometer": r"\bodometers?\b",
    "local": r"\blocal\b",
}
UNLINKED = {"CHANGELOG.md", "SECURITY.md", "reference.md", "api.md", "glossary.md"}


def prose_lines(text):
    """Return the lines of a page without code, pictures and headings."""
    text = re.sub(r"^```.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`|!\[[^\]]*\]\([^)]*\)", "", text)
    return [line for line in text.splitlines() if not line.startswith("#")]


def unlinked_terms(text):
    """Yield the terms whose first line in a page does not link to their entry in the glossary."""
    lines = prose_lines(text)
    for anchor, pattern in TERMS.items():
        seen_in = (line for line in lines if re.search(pattern, re.sub(r"\]\([^)]*\)", "]", line)))
        first = next(seen_in, None)
        if first is not None and f"glossary.md#{anchor})" not in first:
            yield anchor


def test_pages_link_terms_to_the_glossary_at_first_use():
    pages = [page for page in PAGES if page.name not in UNLINKED and "gallery" not in page.parts]
    wrong = {
        page.name: found
        for page in pages
        if (found := [*unlinked_terms(page.read_text(encoding="utf-8"))])
    }
    assert len(pages) > 15 and wrong == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("At ε = 1.", ["epsilon"]),
        ("At [ε](glossary.md#epsilon) = 1.\nAt ε = 10.", []),
        ("At ε = 1.\nAt [ε](glossary.md#epsilon) = 10.", ["epsilon"]),
        ("# The release\n`--local`\n[x](page.md#choose-ε)", []),
    ],
)
def test_a_term_without_a_link_is_found(text, wrong):
    assert [*unlinked_terms(text)] == wrong


def rows_in(text):
    """Yield the rows of a page's tables, each as a mapping from column head to cell."""
    heads = []
    for line in text.splitlines():
        if not line.startswith("|"):
            heads = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not heads:
            heads = cells
        elif not re.fullmatch(":?-+:?", cells[0]):
            yield dict(zip(heads, cells, strict=False))


SEVERAL = re.compile(r"[\d.±*–]+(?: ?[/;,] [\d.±*–]+)+")


def test_a_cell_of_a_table_holds_one_measurement():
    cells = []
    for page in PAGES:
        if "gallery" not in page.parts:
            rows = rows_in(page.read_text(encoding="utf-8"))
            cells += [(page.name, cell) for row in rows for cell in row.values()]
    assert len(cells) > 1000
    assert [found for found in cells if SEVERAL.fullmatch(found[1])] == []


@pytest.mark.parametrize("cell", ["97.7; 96.9, 96.5", "**74.9** / 83.4", "10, 50"])
def test_a_cell_with_several_measurements_is_found(cell):
    assert SEVERAL.fullmatch(cell)


def first_number(cell):
    return float(re.search(r"\d+\.\d+", cell)[0])


# For each set, a text that is part of its name both in the results and in the table of leads
SETS = ("digits", "MNIST", "CIFAR-10", "brain MRI", "X-rays", "blood cells")


def set_in(name, otherwise=""):
    return next((part for part in SETS if part in name), otherwise)


def test_the_lead_of_the_teacher_follows_from_the_results():
    leads = {name: set() for name in SETS}
    name = ""
    for row in rows_in((ROOT / "docs" / "results.md").read_text(encoding="utf-8")):
        name = set_in(row.get("set", "brain MRI"), name)  # the table of brain MRI names no set
        if row.get("teacher", "–") != "–":
            accuracy = row.get("accuracy") or row["release"]
            leads[name].add(round(first_number(row["teacher"]) - first_number(accuracy), 1))
    page = (ROOT / "docs" / "release-or-teacher.md").read_text(encoding="utf-8")
    rows = [row for row in rows_in(page) if "teacher ahead by" in row]
    assert {set_in(row["images"]) for row in rows} == {*SETS}
    for row in rows:
        stated = row["teacher ahead by"].replace("−", "-")
        numbers = {float(number) for number in re.findall(r"-?\d+\.\d", stated)}
        found = leads[set_in(row["images"])]
        assert numbers <= found, row
        assert (min(numbers), max(numbers)) == (min(found), max(found)), row


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_minutes_of_the_longest_run_were_measured(page):
    """For each epsilon, a page states the largest measured number of minutes."""
    measured = {}
    results = ROOT / "benchmarks" / "results" / "fashion-mnist-teacher.csv"
    for row in csv.DictReader(results.read_text(encoding="utf-8").splitlines()):
        if "synthesize.count=120000" in row["change"]:
            measured.setdefault(float(row["epsilon"]), []).append(float(row["minutes"]))
    text = (ROOT / page).read_text(encoding="utf-8").replace("[ε](glossary.md#epsilon)", "ε")
    stated = [(row.get("ε"), row.get("minutes")) for row in rows_in(text)]
    for epsilon, minutes in measured.items():
        assert (f"{epsilon:g}", f"{max(minutes):.0f}") in stated


def test_the_newest_changes_fit_on_a_page():
    """The newest section has at most 60 lines, about what an owner or a researcher notices, without
    refactorings.
    """
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = text.split("\n## ")[1]
    assert 10 < len(newest.splitlines()) <= 60


def test_the_reference_matches_the_code(generate):
    page = generate.REFERENCE.read_text(encoding="utf-8")
    assert generate.generated(page) == page, "run python docs/generate.py"


def test_every_setting_and_every_section_has_a_description(generate):
    assert [row[0] for row in generate.all_rows() if not row[3]] == []
    assert [
        name for name, kind in generate.sections().items() if not generate.docstring(kind)
    ] == []


CONTINUES_THE_NAME = (
    r"(of|by|for|from|in|to|as|with|until|at|on|below|above|beside|that|which|than)\b"
)


def test_a_description_stands_without_its_key(generate):
    """No description begins with a preposition or a relative pronoun, and each begins with a
    capital letter.
    """
    described = {key: text for key, _, _, text in generate.all_rows()}
    fragments = {
        key: text for key, text in described.items() if re.match(CONTINUES_THE_NAME, text.lower())
    }
    assert len(described) > 150 and not fragments, fragments
    assert {key: text for key, text in described.items() if not text[0].isupper()} == {}


class Parent(BaseModel):
    size: int = 1  # height and width


class Child(Parent):
    size: int = 2
    # how many;
    # None: all
    count: int | None = None


def test_a_description_is_the_fields_comment_or_inherited(generate):
    assert generate.description(Child, "size") == "height and width"
    assert generate.description(Child, "count") == "how many; `null`: all"
    assert list(generate.rows_of(Child, ""))[1][1:3] == ("integer or `null`", "`null`")


CLAIMS = re.compile(
    r"\b(complian\w*|compl(?:y|ies) with|conform(?:s|ity)? (?:to|with)|in conformity|fulfils"
    r" the)\b",
    re.I,
)


def test_no_page_or_form_claims_that_a_law_or_standard_is_met():
    forms = [
        path for kind in ("md", "html", "yaml") for path in (ROOT / "sfumato").rglob(f"*.{kind}")
    ]
    found = {
        str(path): CLAIMS.findall(path.read_text(encoding="utf-8")) for path in [*PAGES, *forms]
    }
    assert len(found) > 40 and {name: words for name, words in found.items() if words} == {}


def test_each_mapping_names_clause_and_file():
    """The request has one row per clause of the standards, with the file that contains the
    material.
    """
    text = (ROOT / "sfumato" / "planning" / "brief.md").read_text(encoding="utf-8")
    tables = re.findall(r'table\(\("(?:clause|part)", "\w+", "file"\), \[(.*?)\n\]\)', text, re.S)
    rows = [
        re.findall(r'"((?:[^"\\]|\\.)*)"', line)
        for table in tables
        for line in table.strip().splitlines()
    ]
    assert len(tables) == 2 and len(rows) > 14
    assert all(row[0].strip() and row[-1].strip() for row in rows)
    clauses = [row[0] for row in rows[:9]]
    assert all(re.match(r"[6-9]\.\d ", clause) for clause in clauses)


def test_the_tutorial_query_runs_and_ignores_wrong_labels():
    text = (ROOT / "docs/tutorials/researchers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found: dict = {}
    exec(block, found)
    rows = found["brightness_rows"](torch.ones(3, 1, 8, 8), torch.tensor([1, -1, 2]), 2)
    assert bounded_sum(rows, max_norm=1).tolist() == [[0.0, 1.0]]
