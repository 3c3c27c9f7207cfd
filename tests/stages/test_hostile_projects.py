"""Hostile projects that are sent to `stage merge`. Their authors can also update the hashes.

Each is refused in one sentence, without a traceback.
"""

import os
import shutil
from pathlib import Path

import pytest
from clinics import begin_clinics
from hostile_files import KINDS, SIGNED, WORDS, edit, edit_records, replaced, sign

from sfumato.errors import SfumatoError
from sfumato.privacy.events import SEEDED, UNITS
from sfumato.settings.data import GROUP
from stages.merge import merge


@pytest.fixture(scope="module")
def clinics(tmp_path_factory, digits):
    """Create the projects of two clinics, which released counts and an embedding of their own
    digits.
    """
    return begin_clinics(
        tmp_path_factory.mktemp("clinics"), digits, north={"epsilon": 5}, south={"epsilon": 5}
    )


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


def test_there_are_many():
    assert len(MERGED) > 150


@pytest.fixture
def without_repository(monkeypatch) -> None:
    """Create no repository for a merged project, because that takes longer than the merge."""
    monkeypatch.setattr("sfumato.planning.project_files.begin_repository", lambda out, say: None)


def test_no_hostile_project_is_merged_or_ends_in_a_traceback(clinics, tmp_path, without_repository):
    """Each hostile project replaces one of the two clinics, in turn.

    The unchanged projects are merged.
    """
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


def test_a_merge_that_was_killed_anywhere_runs_again(clinics, tmp_path, without_repository):
    """The merge is killed at each file and folder that it renames.

    As after a power cut, nothing is cleaned up.
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
        if steps % 3 == 0:  # a merge succeeds despite what killed merges left
            assert merge_and_die(10**6) == 0
            shutil.rmtree(out)
        steps += 1
    assert code == 0 and steps > 10
