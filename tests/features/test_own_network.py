"""A network of one's own: its rows are functions of one image each, and what could break that is refused."""

import hashlib
import shutil
import warnings

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from small_release import RECORD
from torch import nn

from sfumato.data.images import ImageSet
from sfumato.data.lineage import refuse_private_network
from sfumato.errors import ConfigError, DataError
from sfumato.evaluation.extractors import build_extractor
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.fourier import FourierFeatures
from sfumato.features.own_network import OWN, OwnFeatures
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.teacher_network import TeacherNetwork, fit_features, load_teacher, save_teacher
from sfumato.queries.feature_means import encoding_alone
from sfumato.settings.evaluate import Evaluate
from sfumato.settings.own_network import OwnNetwork
from sfumato.settings.queries import FeatureMap, Teacher
from sfumato.storage.artifacts import writing

SHAPE = (1, 8, 8)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.drop = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        return self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class KeepsInPlace(Plain):
    def forward(self, x):
        row = self.conv(x).mean((2, 3))
        found = row + self.seen
        self.seen.copy_(row[0])
        return found


class KeepsAttribute(Plain):
    def forward(self, x):
        row = self.conv(x).mean((2, 3))
        found = row + self.seen
        self.seen = row[0]
        return found


class KeepsStatistics(Plain):
    def forward(self, x):
        normed = nn.functional.batch_norm(self.conv(x), self.norm.running_mean, self.norm.running_var, training=True)
        return normed.mean((2, 3)) + self.norm.running_mean


class Random(Plain):
    def forward(self, x):
        return self.conv(x).mean((2, 3)) + torch.rand(6)


class Drops(Plain):
    def forward(self, x):
        return nn.functional.dropout(self.conv(x).mean((2, 3)), 0.5, True)


class Attends(Plain):
    def forward(self, x):
        row = self.conv(x).flatten(2)
        return nn.functional.scaled_dot_product_attention(row, row, row).mean(2)


class AttendsToSome(Plain):
    def forward(self, x):
        row = self.conv(x).flatten(2)
        return nn.functional.scaled_dot_product_attention(row, row, row, dropout_p=0.5).mean(2)


class Prints(Plain):
    def forward(self, x):
        print(x[0, 0, 0, 0])
        return self.conv(x).mean((2, 3))


class Mixes(Plain):
    """A row depends on the other images of the batch."""

    def forward(self, x):
        row = self.conv(x).mean((2, 3))
        return row - row.mean(0)


def written(tmp_path, network, **more) -> OwnNetwork:
    path = tmp_path / "network.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(network.eval()).save(str(path))
    return named(path, **more)


def named(path, **more) -> OwnNetwork:
    return OwnNetwork(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest(), **more)


def features_of(settings) -> OwnFeatures:
    return OwnFeatures(**settings.arguments())


def test_a_script_gives_what_its_network_gives_in_evaluation_mode(tmp_path, digits):
    images = digits.batch(range(20))[0]
    found = features_of(written(tmp_path, Plain(), mean=(0.4,), std=(0.5,)))(images)
    assert torch.allclose(found, Plain().eval()((images.expand(-1, 3, -1, -1) - 0.4) / 0.5), atol=1e-6)


@pytest.mark.parametrize("kind", [KeepsInPlace, KeepsAttribute, KeepsStatistics, Random, Drops, AttendsToSome, Prints])
def test_a_script_that_keeps_shows_or_draws_something_is_refused(tmp_path, kind):
    with pytest.raises(DataError, match="could keep or show something of an image"):
        features_of(written(tmp_path, kind()))


@pytest.mark.parametrize("kind", [Plain, Mixes, Attends])
def test_a_row_is_the_same_to_the_last_bit_in_any_company_and_at_any_time(tmp_path, digits, kind):
    """Ten calls: the executor would optimise after the first two."""
    features = features_of(written(tmp_path, kind()))
    images, matters = digits.batch(range(150))[0], place_matters(features, SHAPE, torch.device("cpu"))
    assert matters or kind is not Mixes
    whole = rows_alone(features, images, matters)
    for removed in range(0, 150, 15):
        rest = torch.cat([images[:removed], images[removed + 1 :]]).contiguous(memory_format=torch.channels_last)
        rows = rows_alone(features, rest, matters)
        assert torch.equal(rows, torch.cat([whole[:removed], whole[removed + 1 :]]))


class MixesSometimes(Plain):
    """As Mixes, where an image is bright: random images do not show it."""

    def forward(self, x):
        row = self.conv(x).mean((2, 3))
        if bool(x.mean((1, 2, 3)).max() > 0.9):
            row = row - row.mean(0)
        return row


def test_each_image_goes_alone_through_a_network_of_one_s_own(tmp_path, digits):
    """Also where it is a part of the features, as in the query that learns on a teacher's."""
    images = digits.images[:90].copy()
    images[40] = 250
    bright = ImageSet(images, digits.labels[:90], digits.classes)
    own = ProjectedFeatures(OWN, SHAPE, 5, written(tmp_path, MixesSometimes()).arguments())
    own.fit(digits.batch(range(90))[0], 0.5, seed=0)
    parts = [FeatureMap(map="own", kernel="linear")]
    whole = FourierFeatures(SHAPE, parts, 2, seed=0, maps={"own": lambda _: own})
    for function in (own, whole.vectors):
        encode = encoding_alone(function, SHAPE, torch.device("cpu"))
        rows = encode(bright.batch(range(90))[0])
        rest = encode(bright.batch(np.delete(np.arange(90), 40))[0])
        assert torch.equal(torch.cat([rows[:40], rows[41:]]), rest)


def test_an_architecture_gives_the_input_of_its_last_layer(tmp_path):
    from torchvision import models

    torch.manual_seed(0)
    network = models.resnet18(num_classes=7).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    settings = named(tmp_path / "weights.safetensors", architecture="resnet18", side=32)
    images = torch.rand(2, 1, 16, 16)
    found = features_of(settings)(images.requires_grad_())
    assert found.shape == (2, 512)
    shown = nn.functional.interpolate(images.expand(-1, 3, -1, -1), (32, 32), mode="bilinear")
    assert torch.allclose(network.fc(found), network(shown), atol=1e-5)
    found.sum().backward()  # a generator can be fitted through it
    assert images.grad.abs().sum() > 0
    with pytest.raises(ConfigError, match="did you mean 'resnet18'"):
        features_of(settings.model_copy(update={"architecture": "resnet8"}))
    with pytest.raises(DataError, match="does not hold a resnet34"):
        features_of(settings.model_copy(update={"architecture": "resnet34"}))


def test_a_pickle_is_refused_and_does_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return ran.touch, ()

    for saved in (Bomb(), {"weight": torch.zeros(2)}, Plain()):
        torch.save(saved, tmp_path / "network.pt")
        for architecture in (None, "resnet18"):
            with pytest.raises(DataError):
                features_of(named(tmp_path / "network.pt", architecture=architecture))
    assert not ran.exists()


def test_another_file_than_the_named_one_is_refused(tmp_path):
    settings = written(tmp_path, Plain())
    (tmp_path / "network.pt").write_bytes(b"other")
    with pytest.raises(DataError, match="has sha256 d9298a10"):
        features_of(settings)


def test_a_network_must_be_declared_public_and_not_be_a_release(tmp_path):
    settings = written(tmp_path, Plain())
    with pytest.raises(ConfigError, match="declared_public: true"):
        refuse_private_network(settings, tmp_path / "state")
    declared = settings.model_copy(update={"declared_public": True})
    refuse_private_network(declared, tmp_path / "state")
    with writing(tmp_path / "released", "finetune", records=[RECORD]) as directory:
        shutil.copy(declared.path, directory / "network.pt")
    released = declared.model_copy(update={"path": str(tmp_path / "released" / "network.pt")})
    with pytest.raises(ConfigError, match="was released from sensitive images"):
        refuse_private_network(released, tmp_path / "state")


def test_a_teacher_takes_its_network_along(tmp_path, digits):
    settings = Teacher(feature="own", network=written(tmp_path, Plain()), dimension=5)
    features, _ = fit_features(settings, SHAPE, None, digits, seed=0)
    teacher = TeacherNetwork.of(features, torch.rand(5, 10, dtype=torch.float64))
    (tmp_path / "teacher").mkdir()
    save_teacher(teacher, tmp_path / "teacher")
    (tmp_path / "network.pt").unlink()
    images = digits.batch(range(30))[0]
    assert torch.equal(load_teacher(tmp_path / "teacher")(images), teacher(images))


def test_distances_are_measured_in_it_under_its_own_name(tmp_path):
    network = written(tmp_path, Plain())
    extractor = build_extractor(Evaluate(network=network), SHAPE, lambda _: None)
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    assert extractor(images).shape == (5, 6) and extractor.name == f"own-{network.sha256[:8]}"


@pytest.mark.parametrize("given", [{"feature": "own"}, {"network": {"path": "x", "sha256": "0" * 64}}])
def test_a_feature_and_its_network_go_together(given):
    with pytest.raises(ValidationError, match="go together"):
        Teacher(**given)
