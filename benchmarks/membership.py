"""Attack a release by membership inference: guess which real images were in the sensitive set.

    python benchmarks/membership.py    # in the folder of a project that made a release

The results are local, for the owner. Members are the sensitive images. Non-members are the hold-out
images, and no released file depends on them. (Every evaluation contains a test for copies. It uses
only the real images nearest to the release. These attacks also use real images farther away.) An
attack that finds nothing proves nothing; an attack that finds more than the guarantee allows would
refute the guarantee.
"""

from dataclasses import dataclass

import numpy as np
import typer

from sfumato.data.images import ImageSet, load_images, strata
from sfumato.data.store import read_card
from sfumato.evaluation.downstream import interval_of, resampled, unit_numbers
from sfumato.evaluation.metrics.neighbours import nearest_rows
from sfumato.privacy.authorize import open_local
from sfumato.settings.stage import ARTIFACTS, CARD_PATH
from stages.state import state_dir

MOST = 5000  # Maximum number of members, and of non-members
TRAINED = 20_000  # Largest number of released images that the attacker's classifier learns from


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Result of an attack.

    auc: probability that a member scores above a non-member, 1/2 by chance; low, high: 95 %
    confidence interval of `auc`, over persons if they are known; hits: share of members found at
    1 % false alarms; members, others: numbers of members and of non-members.
    """

    name: str
    auc: float
    low: float
    high: float
    hits: float
    members: int
    others: int

    @property
    def outcome(self) -> str:
        return "members are distinguishable" if self.low > 0.5 else "finds nothing"


def some_of(image_set: ImageSet, count: int) -> ImageSet:
    """Take at most `count` images, by a fixed public seed."""
    return image_set.take(np.sort(np.random.default_rng(0).permutation(len(image_set))[:count]))


def pixels_of(part: ImageSet) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, d) pixels in [0, 1], and (n,) labels: all 0 if images have several labels."""
    return part.images.reshape(len(part), -1).astype(np.float32) / 255, strata(part.labels)


def score(name: str, members: np.ndarray, others: np.ndarray, persons: np.ndarray) -> Attack:
    """Evaluate an attack by its scores of n members and m non-members.

    Members should score higher. The interval is from a bootstrap over persons. persons: (n + m,),
    the number of each image's person, first for the members, then for the non-members.
    """
    weights = np.stack([*resampled(len(persons), persons)])
    inside, outside = np.split(weights, [len(members)], axis=1)
    above = (members[:, None] > others) + (members[:, None] == others) / 2  # (n, m)
    pairs = inside.sum(axis=1) * outside.sum(axis=1)
    drawn = ((inside @ above) * outside).sum(axis=1)[pairs > 0] / pairs[pairs > 0]
    low, high = interval_of(drawn)
    return Attack(
        name=name,
        auc=float(above.mean()),
        low=low,
        high=high,
        hits=float((members > np.quantile(others, 0.99)).mean()),
        members=len(members),
        others=len(others),
    )


def membership(release: ImageSet, sensitive: ImageSet, holdout: ImageSet) -> list[Attack]:
    """Attack a release by distances to its images, and by a classifier trained on it.

    The first attack scores an image by its distance to the nearest released image of its class. The
    second trains a logistic regression on the pixels of released images, and scores an image by the
    probability of its own label.
    """
    from sklearn.linear_model import LogisticRegression

    parts = [some_of(part, MOST) for part in (sensitive, holdout)]
    units = [unit_numbers(len(part), part.groups) for part in parts]
    persons = np.concatenate([units[0], -1 - units[1]])
    sets = [*map(pixels_of, parts)]
    known, labels = pixels_of(some_of(release, TRAINED))
    near = []
    for pixels, own in sets:
        # an image of a class that was not released counts as farthest
        found = np.full(len(pixels), -(pixels.shape[1] ** 0.5))
        for label in np.intersect1d(own, labels):
            found[own == label] = -nearest_rows(pixels[own == label], known[labels == label])[1]
        near.append(found)
    kind = "distance to the nearest released image" + (
        " of the same class" if release.labels.ndim == 1 else ""
    )
    attacks = [score(kind, near[0], near[1], persons)]
    if len(np.unique(labels)) > 1:
        model = LogisticRegression(max_iter=200).fit(known, labels)
        column = {label: i for i, label in enumerate(model.classes_)}
        sure = []
        for pixels, own in sets:
            chances = model.predict_proba(pixels)
            sure.append(
                np.array(
                    [
                        row[column[y]] if y in column else 0.0
                        for row, y in zip(chances, own, strict=True)
                    ]
                )
            )
        attacks.append(
            score("a classifier's confidence in the image's label", sure[0], sure[1], persons)
        )
    return attacks


def main() -> None:
    """Attack the release of the project in the current folder, and print each attack."""
    card = read_card(CARD_PATH)
    release = load_images(ARTIFACTS / "synthesize", card.classes, shape=card.shape)
    for one in membership(release, *open_local(state_dir(), card, "membership attack")):
        print(
            f"{one.name}: AUC {one.auc:.3f} (95 % interval: {one.low:.3f} to {one.high:.3f}), "
            f"{100 * one.hits:.1f} % of members found at 1 % false alarms: {one.outcome}"
        )


if __name__ == "__main__":
    typer.run(main)
