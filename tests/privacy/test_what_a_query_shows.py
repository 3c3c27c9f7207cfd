"""A query's results and output follow from the charge's releases: other images, or none, do not
change them.
"""

import functools

import pytest
import torch
from cases import CASES, Case, Recorder, central, classifier, drawn_images, saliency, teacher, unet
from parts import of_baselines
from torch import Tensor

from sfumato.dpsgd.run import State, step
from sfumato.features.batch_invariant import BATCH_SIZE
from sfumato.features.cosine import CosineMoments
from sfumato.features.fourier import FourierFeatures
from sfumato.features.public_network import WhitenedCNN
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import LogNormal

Images = tuple[Tensor, Tensor]


QUERIES = (
    CASES | of_baselines("baseline_cases", "CASES") | of_baselines("baseline_cases", "QUERIES")
)


def given(case: Case, drawn: Images) -> Recorder:
    """Return a charge that draws these images and releases fixed numbers.

    If the case has an encoder, the images are encoded first.
    """
    return Recorder(case.drawn(drawn[0].clone()), drawn[1].clone(), case.uses, given=True)


def parts(found: object) -> list[Tensor]:
    return list(found.values()) if isinstance(found, dict) else [found]  # type: ignore[list-item]


# many images, one or none; images of one class; dark and broken images
OTHERS = {
    "more": drawn_images(90, 1),
    "one": drawn_images(1, 2),
    "none": drawn_images(0, 3),
    "of one class": drawn_images(30, 4, classes=1),
    "dark": (torch.zeros(20, 1, 8, 8), torch.zeros(20).long()),
    "broken": (torch.full((3, 1, 8, 8), float("nan")), torch.tensor([-1, 99, 1])),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", QUERIES)
def test_a_query_reports_what_follows_from_the_release(name, other, capfd, caplog):
    """The result is not divided by a true count, and contains nothing of the true sum.

    Bounds and uses are public.
    """
    case = QUERIES[name]
    seen = []
    for drawn in (drawn_images(40, 0), OTHERS[other]):
        charge = given(case, drawn)
        found = parts(case.query(charge))
        asked = [(total.shape, bound, integer) for total, bound, integer in charge.asked]
        seen.append((asked, found, (*capfd.readouterr(), caplog.text)))
    (asked, first, said), (asked_other, second, said_other) = seen
    assert asked == asked_other and said == said_other
    assert len(asked) == case.uses
    assert {(bound, integer) for _, bound, integer in asked} == {(case.bound, case.integer)}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def trace(query) -> list[Tensor]:
    """Record what a query passes to the charge, and what it returns."""
    charge = Recorder(*drawn_images(40, 0), uses=5, given=True)
    found = parts(query(charge))
    return [*(total for total, _, _ in charge.asked), *found]


def salient(charge: Recorder, **settings) -> dict[str, Tensor]:
    return saliency(charge, generator=torch.Generator().manual_seed(1), **settings)


def teach(charge: Recorder, **settings) -> Tensor:
    charge.images = charge.images.flatten(1)[:, :6]
    return teacher(charge, **settings)


def differ(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) != len(other) or not all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


KEYS = {
    central: {"repeats": 3, "max_norm": 1.0, "statistic": "mode"},
    teach: {
        "learning_rate": 3.0,
        "last_rate": 0.9,
        "momentum": 0.5,
        "max_norm": 0.5,
        "ridge": 0.3,
        "average": 1.0,
    },
    salient: {"max_norm": 2e-3, "noise_levels": LogNormal(mean=1.0)},
}


@pytest.mark.parametrize(
    "query, keys, base",
    [
        *((query, {key: value}, {}) for query, keys in KEYS.items() for key, value in keys.items()),
        (central, {"bins": 5}, {"statistic": "mode"}),
    ],
)
def test_every_key_of_a_query_reaches_it(query, keys, base):
    """A key that the query ignores changes neither what it passes to the charge nor what it
    returns.
    """
    assert differ(
        *(trace(functools.partial(query, **settings)) for settings in (base, base | keys))
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"draws": 3},
        {"noise_levels": LogNormal(mean=1.0)},
        {"max_grad_norm": 1e-2},
        {"learning_rate": 1e-2},
    ],
)
def test_every_key_of_dpsgd_reaches_its_steps(keys):
    def after(**given) -> list[Tensor]:
        random = torch.Generator().manual_seed(3)
        settings = Finetune(**{"draws": 2, "microbatch_size": 4, **given})
        state = State(unet(), settings, public_batch=16.0, autocast=False, generator=random)
        charge = Recorder(*drawn_images(6, 0), 3, given=True)
        for _ in range(3):
            step(state, charge)
        return [charge.asked[0][0], *(value for name, value in sorted(state.tensors().items()))]

    assert differ(after(), after(**keys))


@pytest.mark.parametrize("name", ["frequency", "covariance", "histogram"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_maps_see_sensitive_images_in_batches_of_one_size(monkeypatch, name, count):
    """Kernels round differently for another batch size.

    A row, or a vote in a near tie, would then depend on the other images.
    """
    classifier()  # trained once, before sizes are counted
    sizes = set()
    for kind in (FourierFeatures, CosineMoments, WhitenedCNN):

        def seen(self, images, inner=kind.forward):
            sizes.add(len(images))
            return inner(self, images)

        monkeypatch.setattr(kind, "forward", seen)
    case = CASES[name]
    for matters, size in ((True, 1), (False, BATCH_SIZE)):
        for query in ("feature_means", "histogram"):
            monkeypatch.setattr(
                f"sfumato.queries.{query}.place_matters", lambda *_, matters=matters: matters
            )
        sizes.clear()
        case.query(given(case, drawn_images(count, 0)))
        assert sizes == {size}
