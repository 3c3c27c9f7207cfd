"""`stage egress`: the package for an output checker, or the reason why there is none."""

import csv
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from certificates import write_chain
from small_release import enlarged, write_project

from sfumato.data.decoding import decode
from sfumato.data.lineage import digests, recognised
from sfumato.privacy.ledger import read_ledger
from sfumato.release import egress, exports
from sfumato.release.egress import write_package
from sfumato.release.loading import load_release
from sfumato.release.verify import results_of
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.state_directory import state_dir


@pytest.fixture
def project(here, digits) -> Path:
    return write_project(here, digits, kinds=np.repeat(["plain", "distorted"], 20))


def read_table(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_package_is_complete_and_verifies(project, desk):
    text = desk.run("egress out/package")
    package = Path("out/package")
    assert digest_of_file(package / "manifest.json") in text
    assert {path.name for path in package.iterdir()} == {
        *("README.md", "card.json", "dictionary.csv", "images-01.zip", "labels.csv", "ledger.json"),
        *("manifest.json", "report.html", "risk-form.html", "verify.py"),
    }
    assert all(passed for passed, text in results_of(package) if passed is not None)
    with zipfile.ZipFile(package / "images-01.zip") as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.namelist() == [f"{number:06d}.png" for number in range(1, 41)]
    release = load_release("artifacts/synthesize")
    rows = read_table(package / "labels.csv")
    assert [int(row["label"]) for row in rows] == release.labels.tolist()
    assert [row["kind"] for row in rows] == release.kinds.tolist()
    assert [row["column"] for row in read_table(package / "dictionary.csv")] == list(rows[0])


def test_the_package_is_the_same_bytes_each_time(project):
    assert write_package(project / "a") == write_package(project / "b")


def test_the_risk_form_states_the_bounds_of_the_report(project):
    write_package(project / "out")
    form = (project / "out" / "risk-form.html").read_text()
    facts = egress.what_it_means(read_ledger(Path("ledger.json")))
    for words in (
        f"at most {facts['guess']} %",
        f"at most {facts['hits']} in 100",
        "one image with its label",
    ):
        assert words in form
    for criterion in ("Singling out", "Linkability", "Inference", "Decision", "signature"):
        assert criterion in form
    assert "conform" not in form.lower() and "complian" not in form.lower()
    assert all(line in form for line in egress.not_covered(by_person=False))


def test_several_labels_have_one_column_each(here, digits, monkeypatch):
    write_project(here, digits)
    release = load_release(here / "artifacts" / "synthesize")
    several = np.eye(10, dtype=np.uint8)[release.labels]
    monkeypatch.setattr(
        egress, "load_release", lambda path: egress.Release(**vars(release) | {"labels": several})
    )
    write_package(here / "out")
    rows = read_table(here / "out" / "labels.csv")
    assert list(rows[0]) == ["file_name", *(f"label {name}" for name in release.classes), "kind"]
    assert [
        [int(row[f"label {name}"]) for name in release.classes] for row in rows
    ] == several.tolist()


def test_a_large_release_still_has_few_files(project, monkeypatch):
    monkeypatch.setattr(exports, "SHARD", 1)
    write_package(project / "out")
    assert (
        len(list((project / "out").iterdir())) <= 20
        and (project / "out" / "images-10.zip").exists()
    )
    assert all(passed for passed, text in results_of(project / "out") if passed is not None)


@pytest.mark.parametrize(
    "folder", ["full", "file", "artifacts/out", "artifacts", "data/public/out", "."]
)
def test_a_folder_that_cannot_take_it_is_refused(project, desk, folder):
    Path("full").mkdir()
    for name in ("full/x", "file"):
        Path(name).write_text("x")
    desk.run(f"egress {folder}", "name a folder", code=2)
    assert not Path("artifacts/out").exists() and Path("full/x").read_text() == "x"


def test_an_incomplete_odometer_is_refused(here, desk, digits):
    write_project(here, digits, complete=False)
    desk.run("egress out", "incomplete odometer", code=3)
    assert not Path("out").exists()


def test_a_ledger_above_the_limit_of_the_plan_is_refused(here, desk, digits):
    write_project(here, digits, target=0.1)
    desk.run("egress out", "exceeds", code=3)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("name", "key", "value", "code"),
    [
        ("ledger.json", "digest", "0" * 64, 3),
        ("artifacts/synthesize/privacy.json", "local", True, 4),
        ("artifacts/synthesize/card.json", "epsilon", 0.1, 3),
    ],
)
def test_what_was_edited_or_is_local_is_refused(project, desk, name, key, value, code):
    content = json.loads(Path(name).read_text())
    Path(name).write_text(json.dumps(content | {key: value}))
    desk.run("egress out", code=code)
    assert not Path("out").exists()


def test_what_its_own_verifier_refuses_is_not_written(project, desk, monkeypatch):
    monkeypatch.setattr(egress, "png_bytes", lambda image, xmp: b"no picture")
    desk.run("egress out", "was not written", "pictures: ", code=4)
    assert not Path("out").exists()


def test_the_package_is_signed_and_states_this(project, desk):
    chain, key = write_chain(project, "Office")
    desk.run(f"egress out --certificate {chain} --key {key}")
    assert all(passed for passed, text in results_of(project / "out") if passed is not None)
    assert (
        "signed with the owner's certificate, without a time stamp"
        in Path("out/risk-form.html").read_text()
    )
    with zipfile.ZipFile("out/images-01.zip") as archive:
        archive.extractall("pictures")
    text = desk.run(
        "mark check pictures --card out/card.json", "(40 of 40 pictures): signed by Office"
    )
    assert "issuer was not checked" in text


@pytest.mark.parametrize(("factor", "found"), [(1, False), (2, True)])
def test_a_pattern_is_promised_only_if_it_can_be_found(here, digits, desk, factor, found):
    write_project(here, enlarged(digits, factor))
    desk.run("egress out")
    form = Path("out/risk-form.html").read_text()
    card = json.loads(Path("out/card.json").read_text())
    assert ("pattern" in card, "no pattern in the pixels" in form) == (found, not found)
    with zipfile.ZipFile("out/images-01.zip") as archive:
        archive.extractall("pictures")
    text = desk.run("mark check pictures --card out/card.json", code=int(not found))
    assert ("pattern: found" in text) == found


def test_pictures_with_the_pattern_are_recognised_as_released(here, digits, desk):
    """The pattern changes pixels, so these pictures once passed as public images, at no cost."""
    write_project(here, enlarged(digits, 2))
    desk.run("egress out")
    with zipfile.ZipFile("out/images-01.zip") as archive:
        picture = decode(Path(archive.extract("000001.png")))
    (digest,) = digests(picture[None])
    (found,) = recognised(state_dir(), [digest.hex()])
    assert found.records == read_artifact(Path("artifacts/synthesize")).records


def test_the_form_states_that_a_certificate_is_missing(project, desk):
    desk.run("egress out")
    assert "because no certificate was given" in Path("out/risk-form.html").read_text()


@pytest.mark.parametrize(
    "options", ["--certificate a.pem", "--key a.pem", "--time-service http://x"]
)
def test_half_a_signature_is_refused(project, desk, options):
    desk.run(f"egress out {options}", "requires both --certificate and --key", code=2)
    assert not Path("out").exists()


def test_without_the_extra_signing_names_the_package(project, desk, uninstall):
    chain, key = write_chain(project, "Office")
    uninstall("c2pa")
    desk.run(f"egress out --certificate {chain} --key {key}", "pip install c2pa-python", code=2)
    desk.run("egress out")
