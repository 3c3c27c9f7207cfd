"""Files of unknown origin: wrong content is refused at once and in one sentence."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from ruamel.yaml import YAML

from sfumato.storage.digest import digest_of
from sfumato.storage.documents import (
    DEEPEST,
    QuotingYaml,
    class_name,
    dataset_name,
    parse_json,
    parse_yaml,
    quoted,
    read_json,
    read_text,
    read_yaml,
    validated,
)

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(i + 1)}: &{chr(i + 1)} [{', '.join([f'*{chr(i)}'] * 9)}]\n"
    for i in range(ord("a"), ord("i"))
)


WRONG = {
    parse_json: {
        "": "Expecting value",
        '{"a": 1, "a": 2}': "appears twice",
        "[" * 100_000: "nested",
        "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1): "nested",
        '{"a": NaN}': "NaN and infinity",
        '{"a": 1e999}': "NaN and infinity",
        "1" * 5000: "NaN and infinity",
        '"\\ud800"': "surrogates",
    },
    parse_yaml: {
        BOMB: "alias",
        "a: &a [*a]": "alias",
        "[" * 100_000: "nested",
        "- " * 100_000: "nested",
        "a: 1\nb: 2\na: 3": "appears twice",
        f"a: {10**30}": "too large",
        "a: 1" + ":59" * 100_000: "too large",
        "a: 2026-99-99": "month",
        **dict.fromkeys(
            ("a: 010", "a: 1_000", "a: 1:30", "a: 0b11", "a: 1_0.5"),
            "is a number in some programs, but text or another number",
        ),
        "a: !!python/object:os.system x": "constructor",
        "a: !!timestamp x": "groupdict",
        '"\\uD800"': "Unicode character escape|surrogates",
        "? [a]\n: b": "unhashable",
        "\x00": "unacceptable",
    },
}


@pytest.mark.parametrize(
    ("parse", "text"), [(parse, text) for parse, why in WRONG.items() for text in why]
)
def test_a_text_that_is_wrong_is_one_sentence_at_once(parse, text):
    start = time.process_time()
    with pytest.raises(ValueError, match=WRONG[parse][text]):
        parse(text)
    assert time.process_time() - start < 5


def test_text_that_begins_as_a_number_is_text():
    """Digests in dvc.lock may begin like a number."""
    assert (
        parse_yaml("8e2276dfa18df3b844d8fb53ef8624a0.dir") == "8e2276dfa18df3b844d8fb53ef8624a0.dir"
    )


@pytest.mark.parametrize("text", ["1e-3", "1e4", "-1E4", "1.5e3", "1e-05"])
def test_numbers_with_exponents_are_read_as_dvc_reads_them(text):
    assert parse_yaml(f"a: {text}") == {"a": float(text)} == YAML(typ="safe").load(f"a: {text}")
    written = yaml.dump({"a": text}, Dumper=QuotingYaml)
    assert parse_yaml(written) == {"a": text} == YAML(typ="safe").load(written)


def test_an_integer_that_no_machine_has_is_never_taken_for_whole():
    assert parse_json(str(2**63 - 1)) == 2**63 - 1 and isinstance(parse_json(str(10**30)), float)
    with pytest.raises(ValueError, match="integer"):
        validated(int, parse_json(str(10**30)))


def test_a_pipe_or_a_huge_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_text(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read_yaml(tmp_path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)  # a sparse file, which takes no space
    with pytest.raises(ValueError, match="more than"):
        read_yaml(tmp_path / "huge")
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(ValueError, match="utf-8"):
        read_json(tmp_path / "latin")


@dataclass(frozen=True)
class Form:
    number: int
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "content", [[], None, {}, {"number": "1"}, {"number": True}, {"number": 1, "names": "ab"}]
)
def test_a_shape_is_held_to_its_type_and_nothing_is_converted(content):
    assert validated(Form, {"number": 1, "names": ["a"]}) == Form(1, ("a",))
    with pytest.raises(ValueError, match=r"the whole|number|names"):
        validated(Form, content)


def test_the_digest_ignores_key_order_and_refuses_nan():
    assert digest_of({"a": 1, "b": [1.5]}) == digest_of({"b": [1.5], "a": 1})
    with pytest.raises(ValueError, match="JSON"):
        digest_of(float("nan"))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "a\n", "-a", "a.journal", "é", "a" * 65]
)
def test_a_dataset_id_names_one_file_and_no_other(name):
    with pytest.raises(ValueError, match="dataset id"):
        dataset_name(name)
    assert dataset_name("clinic-2026.b_1") == "clinic-2026.b_1"


@pytest.mark.parametrize(
    "name", ["", "a\nb", "\x1b[31mred", "\u202egnp.exe", "caf\udce9", "a" * 256]
)
def test_a_class_name_can_be_shown_and_saved(name):
    with pytest.raises(ValueError, match="not a valid class name"):
        class_name(name)
    assert class_name("<b>=cat & dog") == "<b>=cat & dog"  # it is escaped when it is shown


def test_a_path_in_a_command_is_never_read_as_an_option():
    assert quoted(Path("-dash")) == "./-dash"
    assert quoted(Path("- b")) == "'./- b'"
    assert quoted(Path("a-b")) == "a-b"
