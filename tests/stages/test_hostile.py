"""Hostile files of a released teacher. Their author can also update the hashes.

Each is refused in one sentence, without a traceback. Other tests of hostile input: for arguments of
`sfumato.open_charge`, `tests/privacy/test_own_query.py`; for single files,
`tests/queries/test_kept_feature_means.py` and others; for complete projects,
`test_hostile_projects.py`.
"""

import json
import shutil

import pytest
import torch
from hostile_files import KINDS, SIGNED, WORDS, edit, replaced, sign

import sfumato
from sfumato.errors import DataError, SfumatoError
from sfumato.features import CELLS
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.public_network import arguments_of, build_network
from sfumato.features.teacher_network import TeacherNetwork, save_teacher
from sfumato.storage.artifacts import writing


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Write a released teacher."""
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


TAUGHT = {}  # name -> what is done to the folder of a released teacher
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


def test_there_are_many():
    assert len(TAUGHT) > 50


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
    "classes": ("classes", 10**8, "more elements than the files can contain"),
    "width": (
        "network",
        arguments_of(build_network("whitened", (1, 8, 8), 4, 4)) | {"width": 10**5},
        "files can contain",
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
