"""The longer utility protocol of DP-Diffusion (§5.6, §6): accuracy by number of images, ensembles, model selection.

All of it is local. Within a part, every training takes the same number of gradient steps: a curve then shows the effect
of more images, not of more training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from sfumato.data.images import ImageSet
from sfumato.errors import ConfigError
from sfumato.evaluation.downstream import Schedule, fit, logits, predict, score, summary
from sfumato.planning.clock import seconds_of_further_steps

KEPT = 0.1  # part of the synthetic images by which a third party would rank models
SCORED = 5000  # at most this many of them
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One choice of hyper-parameters. `rate`: factor on the learning rate of the classifier's schedule."""

    classifier: str
    rate: float
    weight_decay: float

    def schedule(self, schedule: Schedule) -> Schedule:
        return replace(schedule, learning_rate=self.rate * schedule.learning_rate, weight_decay=self.weight_decay)

    def accuracies(self, schedule: Schedule, trained: ImageSet, scored: Sequence[ImageSet]) -> list[float]:
        """On each of `scored`, after training on `trained` by this choice of `schedule`."""
        own = self.schedule(schedule)
        model, _ = fit(self.classifier, trained.images, trained.labels, len(trained.classes), own, seed=0)
        return [float((predict(model, part.images) == part.labels).mean()) for part in scored]


def grid(classifiers: Sequence[str], rates: Sequence[float], decays: Sequence[float]) -> list[Setting]:
    """Every combination."""
    every = itertools.product(classifiers, rates, decays)
    return [Setting(classifier=name, rate=rate, weight_decay=decay) for name, rate, decay in every]


def subset(image_set: ImageSet, count: int) -> ImageSet:
    """`count` images drawn with a fixed seed; a smaller subset is part of a larger one."""
    return image_set.take(np.sort(np.random.default_rng(0).permutation(len(image_set))[:count]))


def accuracy_by_size(
    name: str,
    synthetic: ImageSet,
    holdout: ImageSet,
    sizes: Sequence[int],
    schedule: Schedule,
    seeds: Sequence[int],
    progress: Progress = lambda _: None,
) -> list[dict]:
    """What `score` finds for classifier `name`, trained on each number of synthetic images.

    sizes: rising, none above len(synthetic). Returns a row per size, with "images". Source: DP-Diffusion Figure 3.
    """
    rows = []
    for size in sizes:
        progress(f"{name} on {size} images")
        rows.append({"images": size} | score(name, subset(synthetic, size), holdout, schedule, seeds))
    return rows


def ensemble(
    name: str,
    synthetic: ImageSet,
    holdout: ImageSet,
    schedule: Schedule,
    members: int,
    progress: Progress = lambda _: None,
) -> dict:
    """Accuracy of `members` classifiers together, their class probabilities averaged.

    The members differ in their seed: initialisation, order of the images, dropout.
    Returns {"members", "images", "accuracy", "alone": {"mean", "std"}}. Source: DP-Diffusion §5.6 (five members).
    """
    whole = np.zeros((len(holdout), len(holdout.classes)))
    alone = []
    for seed in range(members):
        progress(f"{name}: member {seed + 1} of {members}")
        model, _ = fit(name, synthetic.images, synthetic.labels, len(synthetic.classes), schedule, seed)
        probabilities = torch.softmax(torch.from_numpy(logits(model, holdout.images)).double(), dim=1).numpy()
        alone.append(float((probabilities.argmax(axis=1) == holdout.labels).mean()))
        whole += probabilities
    accuracy = float((whole.argmax(axis=1) == holdout.labels).mean())
    return {"members": members, "images": len(synthetic), "accuracy": accuracy, "alone": summary(alone)}


def model_selection(
    settings: Sequence[Setting],
    schedules: Sequence[Schedule],
    synthetic: ImageSet,
    holdout: ImageSet,
    train: ImageSet | None = None,
    progress: Progress = lambda _: None,
) -> dict:
    """Whether the settings rank alike on synthetic and on real images (DP-Diffusion §6, Figure 4).

    Each setting is trained on nine tenths of the synthetic images and scored on the rest ("synthetic") and on `holdout`
    ("real"). With `train` it is also trained on as many real images and scored on `holdout` ("retrained").
    schedules: of the settings' classifiers, before `Setting.schedule`.
    Returns {"settings": one row each, "kept": synthetic images scored, "spearman", "kendall", "chosen": index of the
    best setting by "synthetic", "rank": of the chosen one by "real", 1 for the best, "regret": best "real" less that of
    the chosen one, …_retrained: the same for "retrained"}. A correlation is 0 where all scores are equal.
    """
    order = np.random.default_rng(1).permutation(len(synthetic))
    kept = min(max(1, round(KEPT * len(synthetic))), SCORED)
    judged, learnt = synthetic.take(order[:kept]), synthetic.take(np.sort(order[kept:]))
    rows = []
    for i, (setting, schedule) in enumerate(zip(settings, schedules, strict=True)):
        progress(
            f"setting {i + 1} of {len(settings)}: {setting.classifier}, rate × {setting.rate:g}, "
            f"weight decay {setting.weight_decay:g}"
        )
        row: dict = asdict(setting)
        row["synthetic"], row["real"] = setting.accuracies(schedule, learnt, [judged, holdout])
        if train is not None:
            real = subset(train, min(len(train), len(learnt)))
            (row["retrained"],) = setting.accuracies(schedule, real, [holdout])
        rows.append(row)
    found: dict = {"settings": rows, "kept": len(judged)} | agreement(rows, "real")
    if train is not None:
        found |= {f"{key}_retrained": value for key, value in agreement(rows, "retrained").items()}
    return found


def agreement(rows: Sequence[dict], measure: str) -> dict:
    """How far choosing by "synthetic" agrees with choosing by `measure`."""
    from scipy.stats import kendalltau, spearmanr

    synthetic, real = (np.array([row[key] for row in rows]) for key in ("synthetic", measure))
    varied = len(set(synthetic)) > 1 and len(set(real)) > 1
    chosen = int(synthetic.argmax())
    return {
        "spearman": float(spearmanr(synthetic, real).statistic) if varied else 0.0,
        "kendall": float(kendalltau(synthetic, real).statistic) if varied else 0.0,
        "chosen": chosen,
        "rank": int((real > real[chosen]).sum()) + 1,
        "regret": float(real.max() - real[chosen]),
    }


# --- how long it will take --------------------------------------------------------------------------------------------


def check_time(
    trainings: Sequence[tuple[str, Schedule, int]], shape: tuple[int, int, int], classes: int, minutes: float
) -> float:
    """The minutes that the trainings should take; each is (classifier, schedule, how many times).

    Timed on blank images, so it needs no data. Scoring, a few per cent, is not counted. Raises ConfigError above
    `minutes`.
    """
    kinds = {timed(name, schedule): schedule for name, schedule, _ in trainings}
    step = {key: seconds_per_step(key[0], schedule, shape, classes) for key, schedule in kinds.items()}
    expected = sum(step[timed(name, schedule)] * schedule.steps * times for name, schedule, times in trainings) / 60
    if expected > minutes:
        runs = sum(times for _, _, times in trainings)
        raise ConfigError(
            f"--minutes {minutes:g} is too little: {runs} trainings would take about {expected:.0f} minutes "
            "on this machine. Raise it, or lower --steps, or name fewer sizes, classifiers or settings"
        )
    return expected


def timed(name: str, schedule: Schedule) -> tuple[str, int, str]:
    """What the time of a step depends on."""
    return name, schedule.batch, schedule.size


def seconds_per_step(name: str, schedule: Schedule, shape: tuple[int, int, int], classes: int) -> float:
    """Seconds of one gradient step of a classifier's training, on blank images."""
    channels, height, width = shape
    blank = np.zeros((2 * schedule.batch, height, width, channels), dtype=np.uint8)
    labels = np.arange(len(blank)) % classes

    def train(steps: int) -> None:
        fit(name, blank, labels, classes, replace(schedule, steps=steps, kept=0.0), seed=0)

    return seconds_of_further_steps(train)
