"""The utility protocol of DP-Diffusion (§5.6, §6): accuracy by size, ensembles, model selection.

All results are local. Within a part, every classifier is trained for the same number of gradient
steps, so that a curve shows the effect of more images, not of more training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from axes import LEGEND, log_ticks, on_a_grid

from sfumato.data.images import ImageSet
from sfumato.evaluation.downstream import (
    aggregate,
    evaluate_classifier,
    fit_classifier,
    mean_and_std,
)
from sfumato.evaluation.plots import CAPTION, new_figure, save
from sfumato.training.supervised import Schedule, accuracy, logits

KEPT = 0.1  # Share of the synthetic images set aside to rank models, as a third party would
SCORED = 5000  # Largest number of images to rank models by
COLOURS = ("#253d5b", "#e07a1f", "#5c9e6b", "#9b59b6", "#9db4c0", "#c0392b")
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A choice of hyper-parameters.

    `rate`: factor on the learning rate of the classifier's schedule.
    """

    classifier: str
    rate: float
    weight_decay: float

    def schedule(self, schedule: Schedule) -> Schedule:
        return replace(
            schedule,
            learning_rate=self.rate * schedule.learning_rate,
            weight_decay=self.weight_decay,
        )

    def accuracies(
        self, schedule: Schedule, trained: ImageSet, scored: Sequence[ImageSet]
    ) -> list[float]:
        """Train on `trained` with this setting; return the accuracy on each set of `scored`."""
        own = self.schedule(schedule)
        model = fit_classifier(
            self.classifier, trained.images, trained.labels, len(trained.classes), own, seed=0
        )
        return [accuracy(model, part) for part in scored]


def grid(
    classifiers: Sequence[str], rates: Sequence[float], decays: Sequence[float]
) -> list[Setting]:
    """List every combination of classifier, factor on the learning rate, and weight decay."""
    every = itertools.product(classifiers, rates, decays)
    return [Setting(classifier=name, rate=rate, weight_decay=decay) for name, rate, decay in every]


def subset(image_set: ImageSet, count: int) -> ImageSet:
    """Draw `count` images with a fixed seed. A smaller subset is part of every larger one."""
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
    """Measure the accuracy of classifier `name` after training on each number of synthetic images.

    sizes: in increasing order, at most len(synthetic). Returns one row per size: the result of
    `aggregate`, and "images". Source: DP-Diffusion Figure 3.
    """
    rows = []
    for size in sizes:
        progress(f"{name} on {size} images")
        part = subset(synthetic, size)
        found = [evaluate_classifier(name, part, holdout, schedule, {}, seed) for seed in seeds]
        rows.append({"images": size} | aggregate(found, part.classes))
    return rows


def ensemble(
    name: str,
    synthetic: ImageSet,
    holdout: ImageSet,
    schedule: Schedule,
    members: int,
    progress: Progress = lambda _: None,
) -> dict:
    """Measure the accuracy of an ensemble: it averages the probabilities of `members` classifiers.

    The members differ by their seed, which sets the initialisation, the order of the images and
    dropout. Returns {"members", "images", "accuracy", "alone": {"mean", "std"}}; "alone" is for
    single members. Source: DP-Diffusion §5.6 (five members).
    """
    whole = np.zeros((len(holdout), len(holdout.classes)))
    alone = []
    for seed in range(members):
        progress(f"{name}: member {seed + 1} of {members}")
        model = fit_classifier(
            name, synthetic.images, synthetic.labels, len(synthetic.classes), schedule, seed
        )
        probabilities = torch.softmax(
            torch.from_numpy(logits(model, holdout.images)).double(), dim=1
        ).numpy()
        alone.append(float((probabilities.argmax(axis=1) == holdout.labels).mean()))
        whole += probabilities
    right = float((whole.argmax(axis=1) == holdout.labels).mean())
    return {
        "members": members,
        "images": len(synthetic),
        "accuracy": right,
        "alone": mean_and_std(alone),
    }


def model_selection(
    settings: Sequence[Setting],
    schedules: Sequence[Schedule],
    synthetic: ImageSet,
    holdout: ImageSet,
    train: ImageSet | None = None,
    progress: Progress = lambda _: None,
) -> dict:
    """Measure whether settings rank alike on synthetic and on real images.

    A tenth of the synthetic images, at most SCORED, is set aside. Each setting is trained on the
    other synthetic images, and scored on the images set aside ("synthetic") and on `holdout`
    ("real"). With `train`, each setting is also trained on the same number of real images (all, if
    there are fewer), and scored on `holdout` ("retrained"). Source: DP-Diffusion §6, Figure 4.

    Args:
        settings: Settings to compare.
        schedules: One schedule per setting, before `Setting.schedule` changes it.
        synthetic: Released images.
        holdout: Real images to score on.
        train: Real images to train on, or None.
        progress: Called with a line before each training.

    Returns:
        "settings": one row per setting; "kept": number of synthetic images set aside; "spearman",
        "kendall": rank correlations of "synthetic" and "real", 0 if either score is the same for
        all settings; "chosen": index of the best setting by "synthetic"; "rank": its rank by
        "real", 1 for the best; "regret": the best "real" minus the "real" of the chosen setting.
        With `train`, there are five more keys: "spearman_retrained" to "regret_retrained". They
        compare "synthetic" with "retrained" instead of "real".
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
    """Compare the ranking of the rows by "synthetic" with their ranking by `measure`."""
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


def plot_protocol(found: Mapping, path: Path) -> None:
    """Plot the results of `benchmarks/utility.py`.

    One panel shows accuracy against the number of images, with ensembles. The other shows the real
    score of each setting against its synthetic score (see `model_selection`).
    """
    panels = [
        draw
        for name, draw in (("sizes", draw_sizes), ("selection", draw_selection))
        if found.get(name)
    ]
    figure = new_figure(5.2 * len(panels), 4.2)
    for draw, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw(axes, found)
        axes.legend(**LEGEND)
        on_a_grid(axes, "both")
    figure.suptitle(CAPTION, fontsize=9, color="#666666")
    save(figure, path)


def draw_sizes(axes, found: Mapping) -> None:
    for i, (name, rows) in enumerate(found["sizes"].items()):
        counts, means, spreads = np.array(
            [(row["images"], 100 * row["mean"], 100 * (row["std"] or 0)) for row in rows]
        ).T
        colour = COLOURS[i % 6]
        axes.errorbar(counts, means, yerr=spreads, marker="o", capsize=3, color=colour, label=name)
        if together := found.get("ensemble", {}).get(name):
            star = {"marker": "*", "markersize": 12, "linestyle": "none", "color": colour}
            label = f"{name}, ensemble of {together['members']}"
            axes.plot(together["images"], 100 * together["accuracy"], label=label, **star)
    every = {row["images"] for rows in found["sizes"].values() for row in rows}
    log_ticks(
        axes, {count: f"{count / 1000:g} K" if count >= 1000 else str(count) for count in every}
    )
    axes.set(xlabel="synthetic images, log scale", ylabel="accuracy on the real hold-out, %")
    axes.set_title("Accuracy against the number of images", fontsize=10)


def draw_selection(axes, found: Mapping) -> None:
    settings = found["selection"]["settings"]
    for i, name in enumerate(dict.fromkeys(row["classifier"] for row in settings)):
        own = [row for row in settings if row["classifier"] == name]
        synthetic, real = ([100 * row[key] for row in own] for key in ("synthetic", "real"))
        axes.scatter(synthetic, real, color=COLOURS[i % 6], s=28, label=name)
    axes.set(
        xlabel="accuracy on synthetic images set aside, %",
        ylabel="accuracy on the real hold-out, %",
    )
    axes.set_title(
        f"Model selection: rank correlation {found['selection']['spearman']:.2f}", fontsize=10
    )
