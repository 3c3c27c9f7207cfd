"""A network of the owner's: a named architecture, with weights from a file.

Nothing in the file is run.
"""

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from small_own_network import ARCHITECTURE, named, small_file
from small_release import RECORD
from torch import nn

import sfumato
from sfumato.data.lineage import refuse_private_network
from sfumato.errors import ConfigError, DataError, SfumatoError
from sfumato.evaluation.extractors import build_extractor
from sfumato.features import OWN, own_network
from sfumato.features.efficientnet_lite import LITE0
from sfumato.features.fourier import FourierFeatures
from sfumato.features.own_network import OwnFeatures
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.teacher_network import (
    TeacherNetwork,
    fit_features,
    load_teacher_network,
    save_teacher,
)
from sfumato.queries.feature_means import encoding_alone
from sfumato.release.teacher import write_card
from sfumato.settings.evaluate import Evaluate
from sfumato.settings.queries import FeatureMap, OwnNetwork, Teacher
from sfumato.storage.artifacts import writing
from sfumato.storage.records import Records

SHAPE = (1, 8, 8)


def encoded(function, images) -> torch.Tensor:
    return encoding_alone(function, SHAPE, torch.device("cpu"))(images)


def test_it_gives_the_input_of_the_last_layer(tmp_path):
    from torchvision import models

    torch.manual_seed(0)
    network = models.resnet18(num_classes=7).eval()
    save_file(network.state_dict(), tmp_path / "weights")
    settings = named(
        tmp_path / "weights", architecture="resnet18", side=32, mean=(0.4,), std=(0.5,)
    )
    images = torch.rand(2, 1, 16, 16)
    found = OwnFeatures(settings)(images.requires_grad_())
    assert found.shape == (2, 512)
    shown = nn.functional.interpolate(images.expand(-1, 3, -1, -1), (32, 32), mode="bilinear")
    assert torch.allclose(network.fc(found), network((shown - 0.4) / 0.5), atol=1e-5)
    found.sum().backward()  # a generator can be fitted through the features
    assert images.grad.abs().sum() > 0
    with pytest.raises(ConfigError, match="did you mean 'resnet18'"):
        OwnFeatures(settings.model_copy(update={"architecture": "resnet8"}))
    with pytest.raises(DataError, match="does not contain the weights of a resnet34"):
        OwnFeatures(settings.model_copy(update={"architecture": "resnet34"}))


def test_a_network_may_take_one_channel(tmp_path):
    from torchvision import models

    torch.manual_seed(0)
    network = models.get_model(ARCHITECTURE).eval()
    network.features[0] = nn.Conv2d(1, 64, kernel_size=3, stride=2)
    save_file(network.state_dict(), tmp_path / "weights")
    features = OwnFeatures(named(tmp_path / "weights", architecture=ARCHITECTURE, channels=1))
    images = torch.rand(2, 3, 24, 24)
    grey = images.mean(1, keepdim=True)
    torch.testing.assert_close(features(grey), network(grey))
    torch.testing.assert_close(features(images), network(grey))


def test_the_weights_of_an_mnasnet_are_accepted(tmp_path):
    from torchvision import models

    network = models.mnasnet0_5().eval()
    save_file(network.state_dict(), tmp_path / "weights")
    settings = named(tmp_path / "weights", architecture="mnasnet0_5")
    images = torch.rand(2, 3, 32, 32)
    rows = OwnFeatures(settings)(images)
    torch.testing.assert_close(network.classifier(rows), network(images))


def test_images_of_a_size_that_a_network_cannot_take_are_refused(tmp_path):
    settings = small_file(tmp_path / "weights").model_copy(update={"side": None})
    with pytest.raises(ConfigError, match="does not accept images of shape 3×8×8 .*set `side`"):
        ProjectedFeatures(OWN, SHAPE, 5, settings.arguments())


def test_it_stays_in_evaluation_mode(tmp_path, digits):
    features = OwnFeatures(small_file(tmp_path / "weights"))
    images = digits.batch(range(8))[0]
    rows = features(images)
    assert torch.equal(features.train()(images), rows), "no running statistics, no dropout"


def test_a_row_is_the_same_to_the_last_bit_in_any_company(tmp_path, digits):
    """Test the network by itself, and inside `FourierFeatures`, where the query with a teacher's
    features uses it.
    """
    images = digits.batch(range(40))[0]
    own = ProjectedFeatures(OWN, SHAPE, 5, small_file(tmp_path / "weights").arguments())
    own.fit(images, 0.5, seed=0)
    whole = FourierFeatures(
        SHAPE, [FeatureMap(map="own", kernel="linear")], 2, seed=0, maps={"own": lambda _: own}
    )
    for function in (own, whole.vectors):
        rows = encoded(function, images)
        rest = torch.cat([images[:15], images[16:]])
        rest = encoded(function, rest.contiguous(memory_format=torch.channels_last))
        assert torch.equal(torch.cat([rows[:15], rows[16:]]), rest)


BESIDE = [{"map": "patches"}, {"map": OWN, "weight": 0.5}, {"map": OWN}]


def side_by_side(path: Path, digits, **more) -> tuple[Teacher, ProjectedFeatures]:
    """Fit features of patches and two own networks. Returns their settings and the features."""
    first, second = (
        small_file(path / name, seed) for seed, name in enumerate(("weights", "others"))
    )
    maps = [BESIDE[0], BESIDE[1] | {"network": first}, BESIDE[2] | {"network": second}]
    settings = Teacher(features=maps, dimension=5, **more)
    return settings, fit_features(settings, SHAPE, None, digits.take(np.arange(60)), seed=0)[0]


def test_networks_beside_a_map_give_rows_of_single_images(tmp_path, digits):
    features = side_by_side(tmp_path, digits)[1]
    images = digits.batch(range(40))[0]
    rows = encoded(features, images)
    rest = torch.cat([images[:15], images[16:]])
    assert torch.equal(torch.cat([rows[:15], rows[16:]]), encoded(features, rest))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(40))


def test_each_image_goes_alone_through_a_network_of_one_s_own(tmp_path, digits):
    features = OwnFeatures(small_file(tmp_path / "weights"))
    sizes = []
    features.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    encoded(features, digits.batch(range(3))[0])
    assert len(sizes) >= 3 and {*sizes} == {1}


class Remembers(nn.Module):
    def forward(self, images):
        rows = images.flatten(1).clone()
        if hasattr(self, "last"):
            rows = rows + self.last
        self.last = images.flatten(1)[0]
        return rows


@pytest.mark.parametrize(
    "kind", [Remembers, nn.Flatten, lambda: nn.Sequential(nn.Flatten(), nn.Dropout())]
)
def test_sensitive_rows_need_a_network_without_memory(tmp_path, digits, monkeypatch, kind):
    """Another version of the library could have an architecture that remembers images or draws
    random numbers.
    """
    monkeypatch.setattr(own_network, "of_architecture", lambda *_: kind())
    features = OwnFeatures(small_file(tmp_path / "weights"))
    if kind is nn.Flatten:
        assert encoded(features, digits.batch(range(3))[0]).shape == (3, 3 * 24 * 24)
    else:
        with pytest.raises(DataError, match="returns different features for the same image"):
            encoded(features, digits.batch(range(3))[0])


def test_a_network_with_features_that_are_not_finite_is_refused(tmp_path, digits, monkeypatch):
    kind = nn.Sequential(nn.Flatten(), nn.Threshold(0.5, float("nan")))
    monkeypatch.setattr(own_network, "of_architecture", lambda *_: kind)
    features = OwnFeatures(small_file(tmp_path / "weights"))
    with pytest.raises(DataError, match="not finite numbers"):
        encoded(features, digits.batch(range(3))[0])


# --- nothing of a file is run ---------------------------------------------------------------------


class Writes(nn.Module):
    """A program that writes a file. It could as well read a file, and hide images in its rows."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = str(place)

    def forward(self, x):
        written = torch.from_file(self.place, True, 4, dtype=torch.uint8).fill_(65)
        return x.flatten(1) + written.sum()


def program(path: Path, ran: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Writes(ran)).save(str(path))
    return path


class Bomb:
    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self):
        return self.ran.touch, ()


def pickled(path: Path, ran: Path) -> Path:
    torch.save({"weight": torch.zeros(2), "bomb": Bomb(ran)}, path)
    return path


ASKED = (
    r"programs are not run. Set `architecture` to a classification model of"
    r" torchvision.*safetensors .docs/howto.md"
)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("write", [program, pickled])
@pytest.mark.parametrize(
    "about", [{}, {"architecture": None}, {"architecture": ARCHITECTURE}, {"architecture": LITE0}]
)
def test_a_program_is_refused_by_teacher_and_evaluate(tmp_path, digits, write, about):
    file = write(tmp_path / "network.pt", tmp_path / "ran")
    ran = tmp_path / "ran"
    for settings, use in (
        (
            lambda own: Teacher(feature="own", network=own),
            lambda s: fit_features(s, SHAPE, None, digits, seed=0),
        ),
        (
            lambda own: Evaluate(network=own),
            lambda s: build_extractor(s, SHAPE, lambda _: None)(digits.images[:2]),
        ),
    ):
        with pytest.raises((SfumatoError, ValidationError), match=ASKED):
            use(settings(named(file, **about)))
    assert not ran.exists()
    (
        torch.jit.load(str(file))(torch.zeros(1, 1))
        if write is program
        else torch.load(file, weights_only=False)
    )
    assert ran.exists(), "it would have run"


@pytest.fixture
def released(tmp_path, digits) -> Path:
    """Release a teacher on a network of the owner's. Returns its folder."""
    (tmp_path / "owner").mkdir()
    settings = Teacher(
        feature="own", network=small_file(tmp_path / "owner" / "weights"), dimension=5
    )
    features, _ = fit_features(settings, SHAPE, None, digits.take(np.arange(60)), seed=0)
    teacher = TeacherNetwork.of(features, torch.arange(50.0, dtype=torch.float64).view(5, 10))
    return released_as(
        tmp_path / "teacher", digits, lambda directory: save_teacher(teacher, directory)
    )


def released_as(path: Path, digits, fill) -> Path:
    plan = SimpleNamespace(
        classes=digits.classes,
        dataset_id="clinic",
        shape=SHAPE,
        size_hint=1500,
        delta=None,
        prepared={},
        accountant="rdp",
        about={},
    )
    with writing(path, "teacher", records=[RECORD]) as directory:
        fill(directory)
        write_card(directory, plan, Records.of([RECORD]))
    return path


def test_a_released_teacher_contains_its_network_and_no_path(tmp_path, released, digits):
    shutil.rmtree(tmp_path / "owner")
    moved = shutil.copytree(released, tmp_path / "receiver" / "teacher")
    assert sfumato.load_teacher(moved).probabilities(digits.images[:4]).shape == (4, 10)
    again = load_teacher_network(moved)
    assert torch.equal(
        again(digits.batch(range(4))[0]), load_teacher_network(released)(digits.batch(range(4))[0])
    )
    for file in released.rglob("*"):
        assert str(tmp_path).encode() not in file.read_bytes(), file
    about = json.loads((released / "config.json").read_text())["network"]
    assert about["architecture"] == ARCHITECTURE and "path" not in about


def test_a_teacher_takes_each_of_its_networks_along(tmp_path, digits):
    """The teacher needs no files of the owner's, and uses each network for its own features."""
    (tmp_path / "owner").mkdir()
    teacher = TeacherNetwork.of(
        side_by_side(tmp_path / "owner", digits)[1], torch.arange(50.0).double().view(5, 10)
    )
    wanted = teacher(digits.batch(range(4))[0])
    released = released_as(
        tmp_path / "teacher", digits, lambda directory: save_teacher(teacher, directory)
    )
    shutil.rmtree(tmp_path / "owner")
    assert torch.equal(load_teacher_network(released)(digits.batch(range(4))[0]), wanted)
    for file in released.rglob("*"):
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes(), file


@pytest.mark.parametrize("architecture", [None, ARCHITECTURE])
def test_a_program_in_place_of_a_released_network_is_refused(
    tmp_path, released, digits, architecture
):
    """The attacker has updated all hashes. If no architecture is named, the release has the form of
    releases by older versions.
    """
    ran = tmp_path / "ran"

    def fill(directory: Path) -> None:
        for name in ("config.json", "weights.safetensors"):
            shutil.copy(released / name, directory)
        file = program(directory / "own-network", ran)
        config = json.loads((directory / "config.json").read_text())
        config["network"] |= {
            "architecture": architecture,
            "sha256": named(file, architecture="any").sha256,
        }
        config["network"]["path"] = str(file)
        (directory / "config.json").write_text(json.dumps(config))

    changed = released_as(tmp_path / "changed", digits, fill)
    with pytest.raises(DataError, match=ASKED):
        sfumato.load_teacher(changed).probabilities(digits.images[:4])
    assert not ran.exists()


# --- the file is the named one, and public --------------------------------------------------------


def test_another_file_than_the_named_one_is_refused(tmp_path):
    settings = small_file(tmp_path / "weights")
    (tmp_path / "weights").write_bytes(b"other")
    with pytest.raises(DataError, match="has sha256 d9298a10"):
        OwnFeatures(settings)


def test_a_network_must_be_declared_public_and_not_be_a_release(tmp_path):
    settings = small_file(tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match="declared_public: true"):
        refuse_private_network(settings, tmp_path / "state")
    declared = settings.model_copy(update={"declared_public": True})
    refuse_private_network(declared, tmp_path / "state")
    with writing(tmp_path / "released", "finetune", records=[RECORD]) as directory:
        shutil.copy(declared.path, directory / "weights.safetensors")
    private = declared.model_copy(
        update={"path": str(tmp_path / "released" / "weights.safetensors")}
    )
    with pytest.raises(ConfigError, match="was made from sensitive images"):
        refuse_private_network(private, tmp_path / "state")


def test_distances_are_measured_in_it_under_its_own_name(tmp_path):
    network = small_file(tmp_path / "weights")
    extractor = build_extractor(Evaluate(network=network), SHAPE, lambda _: None)
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    assert extractor(images).shape[0] == 5 and extractor.name == f"own-{network.sha256[:8]}"


OWN_NETWORK = {"path": "x", "sha256": "0" * 64, "architecture": ARCHITECTURE}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"feature": "own"}, "requires a network of your own: add `network`"),
        ({"network": OWN_NETWORK}, "the map is `classifier`"),
        ({"features": [{"map": "own"}, {"map": "pixels"}]}, "requires a network of your own"),
        (
            {"features": [{"map": "patches", "network": OWN_NETWORK}, {"map": "pixels"}]},
            "the map is `patches`",
        ),
    ],
)
def test_a_feature_and_its_network_go_together(given, words):
    with pytest.raises(ValidationError, match=words):
        Teacher(**given)


@pytest.mark.parametrize(
    "given", [{"mean": (0.5, 0.5)}, {"std": (1.0,) * 4}, {"channels": 1, "mean": (0.1,) * 3}]
)
def test_a_mean_or_deviation_for_each_channel_or_one_for_all(given):
    with pytest.raises(ValidationError, match="one number, or one number per channel"):
        OwnNetwork(**OWN_NETWORK | given)
    OwnNetwork(**OWN_NETWORK | {"mean": (0.1, 0.2, 0.3), "std": (1.0,)})
