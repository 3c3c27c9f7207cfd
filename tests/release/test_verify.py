"""`verify.py` of an egress package: its epsilon is the accountant's, and every change of a file is
found.
"""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_plan import NAMES, PROFILES, card, params
from small_record import small_record
from small_release import write_project

from sfumato.planning.resolve import make_plan
from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.check import check_ledger
from sfumato.privacy.events import Mechanism
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.release import verify
from sfumato.release.egress import write_package
from sfumato.storage.digest import digest_of, digest_of_file
from sfumato.storage.files import write_json
from sfumato.storage.records import Records

COUNT = Mechanism(noise_multiplier=5.0)
SAMPLED = Mechanism(noise_multiplier=1.1, sample_rate=0.05, uses=40)
BUDGET = {"recipe": "one", "delta": default_delta(1500), "size_hint": 1500, "target": 10.0}


@pytest.fixture(scope="module")
def package(tmp_path_factory, digits) -> Path:
    path = tmp_path_factory.mktemp("egress")
    write_package(path / "package", write_project(path / "project", digits))
    return path / "package"


@pytest.fixture
def folder(package, tmp_path) -> Path:
    """A copy of the package, to be edited."""
    return shutil.copytree(package, tmp_path / "package")


def failures(folder: Path) -> list[str]:
    return [text for passed, text in verify.results_of(folder) if passed is False]


def redo_manifest(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.name != verify.MANIFEST]
    listed = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest_of_file(path)} for path in files
    }
    write_json(folder / verify.MANIFEST, listed, sort_keys=True)


def edit_json(path: Path, change) -> None:
    """Change a JSON file. Then update the manifest and the file's own digest, if it has one."""
    content = json.loads(path.read_text())
    change(content)
    if content.pop("digest", None):
        content["digest"] = digest_of(content)
    path.write_text(json.dumps(content))
    redo_manifest(path.parent)


def write_ledger(folder: Path, accountant: str, *mechanisms: Mechanism) -> dict:
    """Replace the package's ledger, and the epsilon of its card."""
    records = Records.of(small_record(i, one) for i, one in enumerate(mechanisms))
    ledger = build_ledger(BUDGET | {"accountant": accountant}, records, [], head="0" * 64)
    (folder / "ledger.json").write_text(ledger_text(ledger))
    spent = ledger["epsilon"][accountant]  # as in a release, the card states this ε
    edit_json(folder / "card.json", lambda content: content.update(epsilon=spent))
    return ledger


@pytest.mark.parametrize("recipe", NAMES)
def test_epsilon_equals_ledger_check_for_every_recipe(recipe):
    """If every query draws all images, `verify.py` computes the same epsilon as `stage ledger
    check`. Otherwise, its epsilon is never smaller, for any accountant.
    """
    loaded = params(recipe=recipe, profile="digits", privacy={"epsilon": 2.0})
    plan = make_plan(loaded, card(loaded.data.name, PROFILES["digits"]))
    chosen = enumerate(plan.mechanisms.items())
    records = Records.of(small_record(i, one, stage=name) for i, (name, one) in chosen)
    budget = {key: plan.budget[key] for key in ("delta", "size_hint")} | {
        "recipe": recipe,
        "target": 100.0,
    }
    parts = [verify.mechanism_of(record["event"]) for record in records.values()]
    over_all = all(rate == 1 for _, rate, _ in parts)
    accountant = ("pld", "exact")[over_all]
    ledger = build_ledger(budget | {"accountant": accountant}, records, [], head="0" * 64)
    checked, problems = check_ledger(ledger)
    assert problems == []
    bound = verify.renyi_epsilon(parts, ledger["delta"])
    assert bound == pytest.approx(ledger["epsilon"]["rdp"], abs=1e-6)
    assert bound >= max(checked, ledger["epsilon"]["pld"]) - 1e-9
    if over_all:
        assert verify.exact_epsilon(parts, ledger["delta"]) == pytest.approx(checked, abs=1e-6)


@pytest.mark.parametrize("noise", [0.05, 0.5, 30.0, 1e4])
def test_epsilon_is_the_accountants_for_any_noise(noise):
    one = Mechanism(noise_multiplier=noise, uses=3)
    part = verify.mechanism_of(one.to_json())
    renyi = epsilon([one.event], 1e-5)
    assert verify.renyi_epsilon([part], 1e-5) == pytest.approx(renyi, rel=1e-9)
    if renyi < 100:  # from 100 on, `exact` is the Rényi bound
        assert verify.exact_epsilon([part], 1e-5) == pytest.approx(
            epsilon([one.event], 1e-5, "exact"), abs=1e-6
        )


def test_a_package_is_verified_without_any_package_of_python(package):
    sent = f" {digest_of_file(package / verify.MANIFEST).upper()}\n"  # pasted from an e-mail
    words = [sys.executable, "-I", "-S", str(package / "verify.py")]
    found = subprocess.run([*words, "--manifest", sent], capture_output=True, text=True)
    assert (
        (found.returncode, found.stderr) == (0, "")
        and "FAIL" not in found.stdout
        and "note" not in found.stdout
    )
    found = subprocess.run([*words, "--manifest", "0" * 64], capture_output=True, text=True)
    assert found.returncode == 1 and "FAIL manifest.json" in found.stdout
    assert {path.name for path in package.iterdir()} == {
        *json.loads((package / verify.MANIFEST).read_text())
    } | {verify.MANIFEST}, "it writes no file"


def test_the_program_runs_in_idle_and_in_a_notebook(package, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["verify.py", str(package)])
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # like IDLE's output, it has no `reconfigure`
    with pytest.raises(SystemExit) as end:
        verify.main()
    assert end.value.code == 0


def test_a_checker_can_read_the_program():
    lines = Path(verify.__file__).read_text().splitlines()
    assert len(lines) < 300 and max(map(len, lines)) < 100
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names


def test_one_flipped_byte_in_any_file_is_found(folder):
    assert failures(folder) == []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        step = len(content) // 2
        if path.name == verify.MANIFEST:
            step = 31
        for place in range(step, len(content), step):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            found = failures(folder)
            assert any(path.name in text or "check_files" in text for text in found), (
                path.name,
                place,
            )
        path.write_bytes(content)


def test_added_missing_and_replaced_files_are_named(folder):
    (folder / "ř中.txt").write_text("x")
    assert failures(folder) == ["ř中.txt: not listed in manifest.json"]
    found = subprocess.run(
        [sys.executable, str(folder / "verify.py")],
        env={"PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1 and r"FAIL \u0159\u4e2d.txt: not listed" in found.stdout
    (folder / "ř中.txt").unlink()
    (folder / "link").symlink_to(folder)
    assert failures(folder) == ["link: not listed in manifest.json"]
    (folder / "link").unlink()
    labels = (folder / "labels.csv").read_text()
    (folder / "labels.csv").write_text(labels.replace("plain", "blend", 1))
    assert [text.split(":")[0] for text in failures(folder)] == ["labels.csv"] * 2
    (folder / "labels.csv").unlink()
    assert failures(folder)[0] == "labels.csv: missing"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("000003.png", "000002.png", "pictures: "),
        (",plain", ",public", "labels.csv: kinds"),
        ("000001.png,0,", "000001.png,1,", "labels.csv: 1 labels do not fit"),
        ("000001.png,0,", "000001.png,-10,", "labels.csv: 1 labels do not fit"),
    ],
)
def test_labels_that_contradict_the_package_are_found(folder, old, new, problem):
    """Such labels are found even if the manifest was recreated."""
    text = (folder / "labels.csv").read_text()
    (folder / "labels.csv").write_text(text.replace(old, new, 1))
    redo_manifest(folder)
    (found,) = failures(folder)
    assert found.startswith(problem)


@pytest.mark.parametrize("edit", ["missing picture", "not a PNG", "bytes after the end"])
def test_archives_of_other_pictures_are_found(folder, edit):
    with verify.zipfile.ZipFile(folder / "images-01.zip") as archive:
        pictures = {name: archive.read(name) for name in archive.namelist()}
    content = pictures.pop("000001.png")
    if edit == "not a PNG":
        pictures["000001.png"] = b"MZ" + content[2:]
    elif edit == "bytes after the end":
        pictures["000001.png"] = content + b"x"
    with verify.zipfile.ZipFile(folder / "images-01.zip", "w") as archive:
        for name, picture in pictures.items():
            archive.writestr(name, picture)
    redo_manifest(folder)
    (found,) = failures(folder)
    assert found.startswith("pictures: ")


@pytest.mark.parametrize("accountant", ["rdp", "pld", "exact"])
@pytest.mark.parametrize("mechanisms", [(COUNT,), (COUNT, SAMPLED)], ids=["all images", "sampled"])
def test_a_changed_sigma_never_fits_what_is_stated(folder, accountant, mechanisms):
    """A changed σ is found even if the ledger's digest and the manifest are recreated, for slightly
    more noise as well as for slightly less.
    """
    ledger = write_ledger(folder, accountant, *mechanisms)
    assert failures(folder) == []
    edit_json(folder / "card.json", lambda card: card.update(epsilon=ledger["epsilon"]["rdp"]))
    assert failures(folder) == []  # an older release: its card states the larger bound
    text = (folder / "ledger.json").read_text()
    for factor in (0.999, 1.001):

        def change(ledger: dict, factor: float = factor) -> None:
            ledger["records"][0]["event"]["noise_multiplier"] *= factor

        (folder / "ledger.json").write_text(text)
        edit_json(folder / "ledger.json", change)
        assert any(found.startswith("epsilon: at most") for found in failures(folder))


def test_a_bound_that_is_not_proven_here_is_a_note(folder):
    write_ledger(folder, "pld", SAMPLED)
    notes = [text for passed, text in verify.results_of(folder) if passed is None]
    assert any("That method is tighter, but not part of this program" in text for text in notes)


def test_owners_who_share_no_person_count_apart(folder):
    rows = [small_record(i, COUNT, dataset_id=name) for i, name in enumerate("ab")]
    records = Records.of(rows, ("a", "b"))
    ledger = build_ledger(BUDGET | {"accountant": "rdp"}, records, [], head="0" * 64)
    (folder / "ledger.json").write_text(ledger_text(ledger))
    edit_json(
        folder / "card.json", lambda content: content.update(epsilon=ledger["epsilon"]["rdp"])
    )
    assert failures(folder) == []
    edit_json(folder / "ledger.json", lambda content: content.pop("apart"))
    assert failures(folder)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda ledger: ledger["epsilon"].update(rdp=0.1), "epsilon: at most"),
        (
            lambda ledger: ledger["records"][0].update(noise_source="seeded: for tests only"),
            "mechanism",
        ),
        (lambda ledger: ledger["records"][0]["event"].update(noise_multiplier=0), "check_ledger"),
        (lambda ledger: ledger["records"][0]["event"].update(type="Laplace"), "check_ledger"),
        (
            lambda ledger: ledger["records"].append(small_record(7, COUNT, unit="all")),
            "ledger.json: at most one privacy unit",
        ),
        (lambda ledger: ledger.update(delta=0.1), "delta: "),
        (lambda ledger: ledger.update(target=0.1), "epsilon: must not exceed the budget"),
        (lambda ledger: ledger["odometer"].update(complete=False), "odometer: "),
    ],
)
def test_a_ledger_that_does_not_hold_is_found(folder, change, problem):
    edit_json(folder / "ledger.json", change)
    assert any(found.startswith(problem) for found in failures(folder))


def test_a_ledger_with_another_digest_is_found(folder):
    ledger = json.loads((folder / "ledger.json").read_text())
    (folder / "ledger.json").write_text(json.dumps(ledger | {"recipe": "other"}))
    redo_manifest(folder)
    assert failures(folder) == ["ledger.json: its digest must match its content"]


@pytest.mark.parametrize("change", [{"epsilon": 0.1}, {"delta": 1e-9}])
def test_a_card_with_another_cost_is_found(folder, change):
    edit_json(folder / "card.json", lambda card: card.update(change))
    (found,) = failures(folder)
    assert found.startswith("card.json: epsilon")
