import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.distances import (
    frechet_distance,
    inception_score,
    kernel_distance,
    sliced_distance,
)
from sfumato.evaluation.metrics.fidelity import METRICS, chosen_metrics, fidelity
from sfumato.evaluation.metrics.neighbours import NEIGHBOURS, precision_recall
from sfumato.settings.evaluate import Evaluate

RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(90, 4))
MORE = RNG.normal(size=(80, 4))
SYNTHETIC = RNG.normal(0.4, 1.1, size=(70, 4))
EMBEDDED = Extractor(name="cnn-glyphs-4", digest="a", embed=lambda images: images)
INCEPTION = dataclasses.replace(EMBEDDED, name="inception-2015-12-05", head=RNG.normal(size=(6, 4)))
ALL = chosen_metrics(Evaluate())
WITH_SCORE = chosen_metrics(Evaluate(extractor="inception"))


def measured(extractor=EMBEDDED, metrics=ALL, compared=SYNTHETIC):
    told: list[str] = []
    return fidelity(
        "release", compared, REAL, (compared, MORE, REAL), extractor, metrics, told.append
    ), told


def test_every_number_is_the_one_of_its_own_function():
    found, told = measured()
    assert found["frechet"] == frechet_distance(SYNTHETIC, REAL)
    assert (found["mmd"], found["mmd_std"]) == kernel_distance(SYNTHETIC, REAL)
    assert (found["mind"], found["mind_std"]) == sliced_distance(SYNTHETIC, REAL, 70)
    assert found["mind_real"] == sliced_distance(MORE, REAL, 70)[0]  # equally many images
    assert (
        precision_recall(SYNTHETIC, REAL, NEIGHBOURS).items() <= found.items()
        and found["neighbours"] == NEIGHBOURS
    )
    about = [found[key] for key in ("space", "reference", "images", "reference_images")]
    assert about == ["cnn-glyphs-4", "holdout", 70, 90]
    assert {
        "fld",
        "generalisation_gap",
        "authenticity",
        "distance_ratio",
    } <= found.keys() and told == []


def test_only_inception_has_fid_kid_and_inception_score():
    found, _ = measured(INCEPTION, WITH_SCORE)
    probabilities = torch.from_numpy(SYNTHETIC @ INCEPTION.head.T).softmax(dim=1).numpy()
    assert found["fid"] == frechet_distance(SYNTHETIC, REAL)
    assert found["inception_score"] == pytest.approx(inception_score(probabilities)[0])
    assert "kid" in found and not {"frechet", "mmd"} & found.keys()
    plain, _ = measured()
    assert not {"fid", "kid", "inception_score"} & plain.keys()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fld", ["generalisation_gap"]),
        ("authenticity", ["distance_ratio"]),
        ("frechet", []),
        ("mind", ["mind_std", "mind_real"]),
    ],
)
def test_only_what_was_asked_for_is_computed(name, more):
    found, _ = measured(metrics=(name,))
    assert found.keys() == {"space", "reference", "images", "reference_images", name, *more}


def test_numbers_of_limited_meaning_are_warned_of():
    found, told = measured(compared=SYNTHETIC[:4])
    assert "4 images in 4 dimensions is rank-deficient" in told[0]
    assert np.isfinite(found["frechet"]) and len(told) == 2
    found, told = measured(compared=SYNTHETIC[:3])
    assert found["neighbours"] == 2 and any("use 2 neighbours, not 5" in line for line in told)
    assert "fld" not in found and any("fld was not computed" in line for line in told)
    assert not measured(compared=SYNTHETIC[:20])[1]


def test_one_training_image_has_no_authenticity():
    """Authenticity needs a second training image near the first, so it is not computed for a single
    one. For "real", 2 of the 3 training images are compared with the third, as if they were
    released.
    """
    novel = MORE[:2], MORE[2:3], REAL
    found = fidelity("real", MORE[:3], REAL, novel, EMBEDDED, ALL, [].append)
    assert "frechet" in found and not {"authenticity", "distance_ratio"} & found.keys()


def test_every_metric_has_a_description_and_is_in_the_default():
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    described = reference.split("## Fidelity numbers")[1]
    assert [name for name in METRICS if f"| `{name}` |" not in described] == []
    assert set(WITH_SCORE) == set(METRICS) and set(METRICS) - set(ALL) == {"inception_score"}
    assert (
        chosen_metrics(Evaluate(fidelity=("mmd",))) == ("mmd",)
        and chosen_metrics(Evaluate(fidelity=())) == ()
    )
