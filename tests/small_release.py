"""Write a small release of digits, and a teacher, as `stage synthesize` and `stage teacher` do."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from small_record import small_record

from sfumato.data.images import ImageSet
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.teacher_network import TeacherNetwork, load_teacher_network, save_teacher
from sfumato.generators.gaussian import GaussianGenerator
from sfumato.generators.one_step import save_generator
from sfumato.privacy.accountant import default_delta
from sfumato.privacy.events import Mechanism
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.release.release import save_release
from sfumato.release.stream import save_networks
from sfumato.release.synthesis import draw_mixture
from sfumato.release.teacher import write_card
from sfumato.release.variation import Varied, vary
from sfumato.settings.release import Synthesize
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import writing
from sfumato.storage.digest import md5_of
from sfumato.storage.records import Records

ABOUT = {"id": "a" * 32, "dataset_id": "clinic-2026", "released": "counts", "time": 1_795_243_189}
RECORD = small_record(0, Mechanism(noise_multiplier=5), **ABOUT)


def write_release(
    path: Path,
    digits,
    sources=("finetune",),
    about=None,
    count=40,
    kinds=None,
    asked=None,
    prepared=None,
    **settings,
) -> Path:
    images = torch.from_numpy(digits.images[:count].copy()).permute(0, 3, 1, 2)
    kinds = np.full(count, "plain") if kinds is None else kinds
    varied = Varied(images, torch.from_numpy(digits.labels[:count]), kinds, asked)
    plan = release_plan(digits, about, prepared, **settings)
    drawn_by = np.array(sources)[np.arange(count) % len(sources)]
    with writing(path, "synthesize", records=[RECORD]) as directory:
        save_release(directory, varied, drawn_by, Records.of([RECORD]), plan)
    return path


def enlarged(digits: ImageSet, factor: int) -> ImageSet:
    """Return the digits with `factor` times as many pixels per side."""
    return replace(digits, images=digits.images.repeat(factor, axis=1).repeat(factor, axis=2))


def release_plan(digits, about=None, prepared=None, **settings) -> SimpleNamespace:
    return SimpleNamespace(
        dataset_id="clinic-2026",
        shape=(1, *digits.images.shape[1:3]),
        classes=digits.classes,
        size_hint=1500,
        delta=None,
        about=about or {},
        several=False,
        prepared=prepared or {},
        accountant="rdp",
        settings=Synthesize(**settings),
        seed=0,
    )


def mean_generator(digits) -> GaussianGenerator:
    """Return a generator that draws around the mean of each digit, with independent noise."""
    features = {
        "shape": (1, 8, 8),
        "frequencies": 64,
        "contrasts": 0,
        "bound": 0.5,
        "products": 0.5,
        "flip": False,
    }
    generator = GaussianGenerator(features, 10, 0)
    images, labels = digits.batch(range(600))
    coefficients = generator.features.coefficients(images)[:, generator.features.chosen]
    generator.means.copy_(torch.stack([coefficients[labels == m].mean(0) for m in range(10)]))
    generator.factors.copy_(0.1 * torch.eye(64).expand(10, 64, 64))
    return generator


def save_stream(path: Path, digits, about=None, flip=False, **settings) -> Path:
    """Write a release with the generator and the teacher that it is drawn from."""
    generator = mean_generator(digits)
    (path / "refine").mkdir(parents=True)
    save_generator(generator, path / "refine")
    paths = {"refine": path / "refine", "teacher": write_teacher(path / "teacher", digits, flip)}
    plan = release_plan(digits, about, sources={"refine": 1}, stream=True, count=40, **settings)
    teacher = load_teacher_network(paths["teacher"]) if plan.settings.relabel else None
    images, labels, sources = draw_mixture(paths, plan.settings, None, 0)
    varied = vary(images, labels, plan.settings, teacher, 0)
    with writing(path / "release", "synthesize", records=[RECORD]) as directory:
        recipe = asdict(save_networks(directory, paths, plan.settings, varied, None, 0, teacher))
        save_release(directory, varied, sources, Records.of([RECORD]), plan, stream=recipe)
    return path / "release"


def write_teacher(path: Path, digits, flip=False) -> Path:
    images, labels = digits.batch(range(600))
    features = ProjectedFeatures("pixels", (1, 8, 8), 40, flip=flip)
    features.fit(images, 0.5, seed=0)
    means = torch.stack([features(images[labels == m]).mean(0) for m in range(10)])
    about = {"dataset_id": "clinic-2026", "shape": (1, 8, 8), "size_hint": 1500, "delta": None}
    about |= {"prepared": {}, "accountant": "rdp", "about": {}}
    plan = SimpleNamespace(classes=digits.classes, **about)
    with writing(path, "teacher", records=[RECORD]) as directory:
        save_teacher(TeacherNetwork.of(features, 20 * means.T), directory)
        write_card(directory, plan, Records.of([RECORD]))
    return path


def write_project(
    path: Path, digits, *, complete=True, target=10.0, accountant="rdp", **release
) -> Path:
    """Write what `stage egress` reads: a release, its ledger, and the plan with its budget."""
    write_release(path / "artifacts" / "synthesize", digits, **release)
    budget = {
        "recipe": "one",
        "accountant": accountant,
        "delta": default_delta(1500),
        "size_hint": 1500,
        "target": 10.0,
    }
    head = None
    if complete:
        head = "0" * 64
    ledger = build_ledger(budget, Records.of([RECORD]), [], head=head)
    (path / "ledger.json").write_text(ledger_text(ledger))
    lock = {"path": "ledger.json", "hash": "md5", "md5": md5_of(ledger_text(ledger).encode())}
    (path / "dvc.lock").write_text(
        json.dumps({"schema": "2.0", "stages": {"ledger": {"outs": [lock]}}})
    )
    plan = path / "artifacts" / "plan"
    plan.mkdir()
    (plan / "budget.json").write_text(json.dumps(budget | {"target": target}))
    content = {"stage": "synthesize", "enabled": True, "shape": [1, 8, 8], "settings": {}}
    (plan / "synthesize.yaml").write_text(
        json.dumps(content | {"revision": STAGES["synthesize"].revision})
    )
    return path
