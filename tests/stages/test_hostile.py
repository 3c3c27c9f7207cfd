"""Hostile files in what others send: projects to `merge`, and a released teacher.

Whoever made them can sign them.

Each is refused in one sentence: never a traceback, never taken. `tests/privacy/test_own_query.py`
has the words that `sfumato.open_charge` is called with; `tests/queries/test_kept_feature_means.py`
and others, the forms of single files.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from clinics import begin_clinics

import sfumato
from sfumato.errors import DataError, SfumatoError
from sfumato.features.projection import CELLS, ProjectedFeatures
from sfumato.features.public_network import arguments_of, build_network
from sfumato.features.teacher_network import TeacherNetwork, save_teacher
from sfumato.privacy.events import SEEDED, UNITS
from sfumato.settings.data import GROUP
from sfumato.storage.artifacts import writing
from sfumato.storage.digest import digest_of_file
from stages.merge import merge

ROOT = Path(__file__).resolve().parents[2]
DEEP = "[" * 100_000
WORDS = (None, [], {}, "x", -1, 0, 1e300, 10**30, True, [[1.0]])  # replacements for any entry


@pytest.fixture(scope="module")
def clinics(tmp_path_factory, digits):
    """The projects of two clinics, which released counts and an embedding of their own digits."""
    return begin_clinics(tmp_path_factory.mktemp("clinics"), digits, north=5, south=5)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A released teacher."""
    path = tmp_path_factory.mktemp("released") / "teacher"
    features = ProjectedFeatures(
        CELLS, (1, 8, 8), 6, arguments_of(build_network("whitened", (1, 8, 8), 4, 4))
    )
    network = TeacherNetwork.of(features, torch.randn(features.dimension, 3))
    card = {"shape": [1, 8, 8], "classes": ["a", "b", "c"], "epsilon": 1.0, "delta": 1e-5}
    card["adjacency"] = "add-or-remove-one"
    with writing(path, "teacher") as directory:
        save_teacher(network, directory)
        (directory / "card.json").write_text(json.dumps(card))
    sfumato.load_teacher(path)
    return path


# --- attacks by the sender of a file --------------------------------------------------------------


def sign(artifact: Path, **said) -> None:
    """Set the hashes of an artifact to the hashes of its files. said: entries of `privacy.json`."""
    content = json.loads((artifact / "privacy.json").read_text()) | said
    if "files" not in said:
        found = (
            path
            for path in sorted(artifact.rglob("*"))
            if path.is_file() and path.name != "privacy.json"
        )
        content["files"] = {str(path.relative_to(artifact)): digest_of_file(path) for path in found}
    (artifact / "privacy.json").write_text(json.dumps(content))


def edit(path: Path, *keys: str, value: object = None, drop: bool = False) -> None:
    """Change, or drop, the entry of a JSON or YAML file that lies under these keys."""
    read, dump = (
        (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    )
    content = part = read(path.read_text())
    for key in keys[:-1]:
        part = part[key]
    if drop:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    path.write_text(dump(content))


def edit_records(artifact: Path, **changes) -> None:
    """Change all records of an artifact, and its signature. A change to None drops the key."""
    records = json.loads((artifact / "privacy.json").read_text())["records"]
    changed = {
        key: {k: v for k, v in (record | changes).items() if v is not None}
        for key, record in records.items()
    }
    sign(artifact, records=changed)


def replaced(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "half":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "hole":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == "deep":
        path.write_text(DEEP)
    elif kind == "binary":
        path.write_bytes(bytes(range(256)))
    else:
        assert kind == "gone"


SIGNED = ("link", "device", "pipe", "folder", "half", "empty", "deep", "binary", "gone")
KINDS = (*SIGNED, "hole")

MERGED = {}  # name -> what is done to the folder of a clinic
PLAN, COUNT, FREQUENCY = (Path("artifacts") / name for name in ("plan", "count", "frequency"))
for file in ("budget.json", "count.yaml", "frequency.yaml", "synthesize.yaml", "auxiliary.yaml"):
    for kind in KINDS:
        MERGED[f"plan: {file} is {kind}"] = lambda own, f=file, k=kind: replaced(own / PLAN / f, k)
for artifact, file in (
    (COUNT, "counts.json"),
    (FREQUENCY, "features.json"),
    (FREQUENCY, "embedding.safetensors"),
):
    for kind in SIGNED:

        def signed(own, artifact=artifact, file=file, kind=kind):
            replaced(own / artifact / file, kind)
            sign(own / artifact)

        MERGED[f"{artifact.name}: {file} is {kind}, signed"] = signed
    MERGED[f"{artifact.name}: {file} is half, not signed"] = lambda own, a=artifact, f=file: (
        replaced(own / a / f, "half")
    )
for artifact in (COUNT, FREQUENCY):
    for kind in KINDS:
        MERGED[f"{artifact.name}: privacy.json is {kind}"] = lambda own, a=artifact, k=kind: (
            replaced(own / a / "privacy.json", k)
        )
for key, values in {
    "delta": (*WORDS, 0.9, 0.01, 1.0, -1e-5, 1e-300),
    "size_hint": (*WORDS, 1, 2, 301, 10**9),
    "target": (*(word for word in WORDS if word not in (1e300, 10**30)), 1e-3, 4.0),
    "accountant": (*WORDS, "gdp"),
    "recipe": tuple(word for word in WORDS if word != "x"),
}.items():
    for number, value in enumerate(values):
        MERGED[f"budget.{key} {number}"] = lambda own, k=key, v=value: edit(
            own / PLAN / "budget.json", k, value=v
        )
    MERGED[f"budget without {key}"] = lambda own, k=key: edit(
        own / PLAN / "budget.json", k, drop=True
    )
for stage in ("count", "frequency"):
    for key, values in {
        "size_hint": (0, -1, 299, 10**12, "300", None),
        "delta": (0.9, 1e-3, 0, "x"),
        "mechanism": (
            {},
            None,
            [],
            {"noise_multiplier": 0.0},
            {"noise_multiplier": -1.0},
            {"noise_multiplier": 1e-9},
            {"noise_multiplier": 5.0, "uses": 2.5},
            {"noise_multiplier": "x"},
            {"noise_multiplier": 5.0, "more": 1},
        ),
        "enabled": (False, "no", None),
        "dataset_id": ("", "../up", "other", 5),
        "classes": ([], ["a"], "abc"),
        "shape": ([1, 9, 9], [0, 8, 8], "x"),
        "revision": (0, 99),
        "unit": ("group", "patient"),
        "settings": ({"noise": 0.0}, [], {"unknown": 1}),
    }.items():
        for number, value in enumerate(values):
            MERGED[f"plan of {stage}: {key} {number}"] = lambda own, s=stage, k=key, v=value: edit(
                own / PLAN / f"{s}.yaml", k, value=v
            )
    MERGED[f"plan of {stage} without a dataset_id"] = lambda own, s=stage: edit(
        own / PLAN / f"{s}.yaml", "dataset_id", drop=True
    )
for name, changes in {
    "seeded noise": {"noise_source": SEEDED},
    "no noise": {"event": {"type": "Gaussian", "noise_multiplier": 0.0}},
    "hardly any noise": {"event": {"type": "Gaussian", "noise_multiplier": 1e-50}},
    "less noise than planned": {"event": {"type": "Gaussian", "noise_multiplier": 0.5}},
    "more noise than planned": {"event": {"type": "Gaussian", "noise_multiplier": 1e6}},
    "no mechanism": {"event": {"type": "NonPrivate"}},
    "another unit": {"unit": "one pixel"},
    "another adjacency": {"adjacency": "none"},
    "another owner": {"dataset_id": "elsewhere"},
    "another stage": {"stage": "finetune"},
    "no stage": {"stage": None},
    "no owner": {"dataset_id": None},
    "no unit": {"unit": None},
    "no event": {"event": None},
}.items():
    for artifact in (COUNT, FREQUENCY):
        MERGED[f"records of {artifact.name}: {name}"] = lambda own, a=artifact, c=changes: (
            edit_records(own / a, **c)
        )


def of_persons(own):
    for artifact in (COUNT, FREQUENCY):
        edit_records(own / artifact, unit=UNITS[GROUP], group_weight="mean")


MERGED["all records: another unit that is known"] = of_persons
for name, said in {
    "no records": {"records": {}},
    "records in a list": {"records": []},
    "switched off": {"enabled": False},
    "local": {"local": True},
    "of another stage": {"stage": "central"},
    "of one set apart": {"apart": ["north"]},
    "of others apart": {"apart": ["a", "b"]},
    "of a file elsewhere": {"files": {"../plan/budget.json": "0" * 64}},
}.items():
    for artifact in (COUNT, FREQUENCY):
        MERGED[f"{artifact.name}: {name}"] = lambda own, a=artifact, s=said: sign(own / a, **s)
for key in ("noisy", "total", "per_class", "priors"):
    for number, value in enumerate(
        (*WORDS, [], [1.0], [1.0] * 9, [1e300] * 10, ["1"] * 10, [[1.0]] * 10)
    ):
        if not (key == "total" and value is None):

            def counted(own, key=key, value=value):
                edit(own / COUNT / "counts.json", key, value=value)
                sign(own / COUNT)

            MERGED[f"counts.{key} {number}"] = counted
for name, path, target in (
    ("a file of data/public", "data/public/x.npy", "/etc/hostname"),
    ("data/public", "data/public", "/etc"),
    ("data", "data", "/etc"),
    ("artifacts", "artifacts", "/etc"),
    ("the plan", "artifacts/plan", "/etc"),
    ("a file of the plan", "artifacts/plan/more.yaml", "/etc/hostname"),
):

    def linked(own, path=path, target=target):
        place = own / path
        if place.is_dir():
            shutil.rmtree(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    MERGED[f"a link: {name}"] = linked

TAUGHT = {}  # the same for a released teacher
for file in ("config.json", "weights.safetensors", "card.json"):
    for kind in SIGNED:

        def signed(own, file=file, kind=kind):
            replaced(own / file, kind)
            sign(own)

        TAUGHT[f"{file} is {kind}, signed"] = signed
for kind in KINDS:
    TAUGHT[f"privacy.json is {kind}"] = lambda own, k=kind: replaced(own / "privacy.json", k)
for key, values in {
    "classes": WORDS,
    "feature": (*WORDS, "unknown"),
    "shape": (*WORDS, [0, 8, 8], [1, 9, 9]),
    "dimension": (*WORDS, 10**9),
    "network": WORDS[1:],
    "more": (1,),
}.items():
    for number, value in enumerate(values):

        def built(own, key=key, value=value):
            edit(own / "config.json", key, value=value)
            sign(own)

        TAUGHT[f"config.{key} {number}"] = built
for name, said in {
    "local": {"local": True},
    "off": {"enabled": False},
    "of another": {"stage": "count"},
}.items():
    TAUGHT[name] = lambda own, s=said: sign(own, **s)


# --- each is refused ------------------------------------------------------------------------------


def test_there_are_many():
    assert len(MERGED) + len(TAUGHT) > 200


@pytest.fixture
def without_repository(monkeypatch) -> None:
    """A merged project begins no repository, which takes longer than all else."""
    monkeypatch.setattr("sfumato.planning.project_files.begin_repository", lambda out, say: None)


def test_no_hostile_project_is_merged_or_ends_in_a_traceback(clinics, tmp_path, without_repository):
    """Each in the place of either clinic, in turns; without hostility the two are merged."""
    wrong = {}
    for number, (name, harm) in enumerate({"as they are": lambda own: None, **MERGED}.items()):
        folders = [clinics / owner for owner in ("north", "south")]
        hostile = folders[number % 2] = shutil.copytree(
            folders[number % 2], tmp_path / f"{number}" / "hostile"
        )
        harm(hostile)
        try:
            merge(folders, different_people=True, out=tmp_path / f"{number}" / "out")
            wrong[name] = "merged"
        except SfumatoError as error:
            if not str(error):
                wrong[name] = "no message"
        except Exception as error:  # the program would end with this
            wrong[name] = repr(error)
        shutil.rmtree(tmp_path / f"{number}")
    assert wrong.pop("as they are", None) == "merged"
    assert wrong == {}


def test_no_hostile_teacher_is_loaded_or_ends_in_a_traceback(teacher, tmp_path):
    wrong = {}
    for number, (name, harm) in enumerate(TAUGHT.items()):
        own = tmp_path / f"{number}"
        shutil.copytree(teacher, own)
        harm(own)
        try:
            sfumato.load_teacher(own)
            wrong[name] = "loaded"
        except SfumatoError as error:
            if not str(error):
                wrong[name] = "no message"
        except Exception as error:
            wrong[name] = repr(error)
    assert wrong == {}


HUGE = {
    "classes": ("classes", 10**8, "is larger than its files can fill"),
    "width": (
        "network",
        arguments_of(build_network("whitened", (1, 8, 8), 4, 4)) | {"width": 10**5},
        "files can fill",
    ),
    "shape": ("shape", [1, 10**5, 10**5], "at most 2048 pixels per side"),
}


@pytest.mark.parametrize("case", HUGE)
def test_a_configs_sizes_take_no_memory_beyond_its_files(teacher, tmp_path, case):
    key, value, why = HUGE[case]
    own = tmp_path / "teacher"
    shutil.copytree(teacher, own)
    edit(own / "config.json", key, value=value)
    sign(own)
    with pytest.raises(DataError, match=why):
        sfumato.load_teacher(own)


def test_a_merge_that_was_killed_anywhere_runs_again(clinics, tmp_path, without_repository):
    """At each file and folder that it puts in place, as a power cut would: nothing is cleaned
    up.
    """
    folders = [clinics / name for name in ("north", "south")]
    out = tmp_path / "out"
    rename = os.replace

    def merge_and_die(after: int) -> int:
        """Merge in another process, which ends at the `after`-th rename. Returns its exit code."""
        child = os.fork()
        if child == 0:
            left = iter(range(after))
            os.replace = lambda *paths: (
                rename(*paths) if next(left, None) is not None else os._exit(9)
            )
            try:
                merge(folders, different_people=True, out=out)
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    steps = 0
    while (code := merge_and_die(steps)) == 9:
        if steps % 3 == 0:  # otherwise, the next one runs in what several left behind
            assert merge_and_die(10**6) == 0
            shutil.rmtree(out)
        steps += 1
    assert code == 0 and steps > 10
