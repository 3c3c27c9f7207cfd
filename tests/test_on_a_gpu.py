"""Each part of the pipeline on a simulated GPU: nothing mixes devices, and only known places wait
for the card.

A new place costs speed, because the card idles while the program waits. Remove the wait, or add the
place to its part.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretended_gpu import Card, pretended_gpu
from small_network import draw_images
from torch import Tensor

from sfumato.data.images import ImageSet, Shape
from sfumato.data.store import LatentSet
from sfumato.diffusion.sampler import sample
from sfumato.diffusion.unet import GroupNorm, UNet
from sfumato.dpsgd.gradients import Microbatch, clipped_gradient_sum, draw
from sfumato.dpsgd.run import Gradients, State, step
from sfumato.dpsgd.trainable import candidates, check_trained, choose_trainable
from sfumato.evaluation import downstream
from sfumato.evaluation.classifiers import CLASSIFIERS
from sfumato.evaluation.extractors import embedded_extractor
from sfumato.features import FeatureMeans
from sfumato.features.fourier import FourierFeatures
from sfumato.features.projection import FEATURE_BATCH, ProjectedFeatures
from sfumato.features.public_network import build_network
from sfumato.features.teacher_network import (
    TeacherNetwork,
    classify,
    fit_features,
    guide_by,
    relabelled,
)
from sfumato.generators.gaussian import GaussianGenerator
from sfumato.generators.one_step import Target, fit_generator, new_generator
from sfumato.privacy.charge import Charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import NoiseSource
from sfumato.queries.feature_means import (
    cosine_moments,
    encoding_alone,
    learned_features,
    moment_features,
    query_feature_means,
    train_feature_network,
)
from sfumato.queries.histogram import query_histogram
from sfumato.queries.saliency import query_saliency
from sfumato.queries.teacher import query_teacher
from sfumato.release.variation import vary
from sfumato.settings.dpsgd import Finetune, Saliency
from sfumato.settings.noise_levels import LogNormal, TimestepMixture
from sfumato.settings.queries import FeatureMap, Teacher
from sfumato.settings.release import Synthesize
from sfumato.settings.training import Amp, Architecture, Auxiliary, Classifier, Phase
from sfumato.training.curriculum import warm_up
from sfumato.training.public_classifier import train_public_classifier
from sfumato.training.supervised import Schedule, train_supervised

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
CUDA = torch.device("cuda")
SHAPE = (1, 16, 16)
CLASSES = 10
FEW = 12  # number of images, for queries that compute features of one image at a time
ONE_LEVEL = {"multipliers": (1,), "attention": (0,)}  # any small network
EVEN = torch.full((CLASSES,), 1 / CLASSES).double()
DRAWN = "privacy/charge.py Charge._noised"  # copies a sum to the CPU, where noise is added
# Runs once before a charge, to find out whether an image's place in a batch matters
TRIED = "features/batch_invariant.py place_matters"
SUMMED = {"privacy/charge.py Charge.sum", "privacy/rows.py bounded_sum"}
LABELLED = "features/teacher_network.py probabilities_of"
# Places where batch norms wait for the card, because their statistics are plain means over all
# batches
SETTLED = {
    f"generators/network.py {name}.forward" for name in ("Widen", "GeneratorBlock", "Generator")
}
PARTS: dict[str, tuple[Callable[[], object], set[str]]] = {}


def part(*waits: str | set[str]) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Add a part to the table. waits: exactly the places that wait for the card."""

    def entered(function: Callable[[], object]) -> Callable[[], object]:
        known = {
            place for entry in waits for place in ({entry} if isinstance(entry, str) else entry)
        }
        PARTS[function.__name__] = function, known
        return function

    return entered


@functools.cache
def card_after(name: str) -> Card:
    """Run a part, unless it has run already. Returns how it used the graphics card."""
    with pretended_gpu() as card:
        PARTS[name][0]()
    return card


# --- inputs of the parts --------------------------------------------------------------------------


def images(count: int = 40, shape: Shape = SHAPE) -> ImageSet:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, *shape[1:], shape[0]), dtype=np.uint8)
    return ImageSet(pixels, np.arange(count) % CLASSES, tuple(map(str, range(CLASSES))))


def charge(drawn: ImageSet | LatentSet, max_norm: float = 1.0, uses: int = 3) -> Charge:
    """Open a charge on images in memory, without a budget."""
    mechanism = Mechanism(noise_multiplier=1.0, sample_rate=1.0, uses=uses)
    record = {"stage": "count", "max_norm": max_norm, "event": mechanism.to_json()}
    return Charge(record, drawn, odometer=None, noise=NoiseSource(0), run=Path(), lock=ExitStack())


def unet(several: bool = False, **options: Any) -> UNet:
    torch.manual_seed(0)
    chosen = Architecture(**{"width": 8, "multipliers": (1, 2), "attention": (1,), **options})
    return UNet(SHAPE[1], SHAPE[0], CLASSES, chosen, several=several).to(CUDA)


def maps(*features: FeatureMap, shape: Shape = SHAPE) -> FourierFeatures:
    return FourierFeatures(shape, features, 120, seed=0)


def teacher() -> TeacherNetwork:
    features = ProjectedFeatures("deep-scattering", SHAPE, 32)
    return TeacherNetwork.of(features, torch.zeros(features.dimension, CLASSES)).to(CUDA)


def latents(features: Any, function: Callable[[Tensor], Tensor]) -> LatentSet:
    """Encode images on the card by `function`. Returns the vectors, as a charge draws them."""
    drawn = images(FEW)
    rows = encoding_alone(function, SHAPE, CUDA)(drawn.batch(np.arange(len(drawn)))[0])
    return LatentSet(rows.cpu().half().numpy(), drawn.labels, drawn.classes)


# --- DP-SGD ---------------------------------------------------------------------------------------


def gradient_sum_of(
    model: UNet,
    *,
    groups: bool = False,
    autocast: bool = False,
    law: Any = None,
    in_parts: bool = False,
    **more: Any,
) -> None:
    """Compute a sum of clipped gradients.

    in_parts: whether to split the images into two chunks, and the draws of each image into two
    parts.
    """
    count, draws = (6, 4) if in_parts else (4, 2)
    shape = (count, 4) if groups else (count,)
    shown = torch.rand(*shape, *SHAPE, device=CUDA)
    labels = torch.zeros(*shape, *[CLASSES] * model.several, dtype=torch.int64, device=CUDA)
    drawn = draw(model, shown, draws, law or LogNormal(), torch.Generator(CUDA), label_dropout=0.1)
    parameters = more.pop("parameters", None) or dict(model.named_parameters())
    total = clipped_gradient_sum(
        model, parameters, shown, labels, drawn, 1.0, Microbatch(4, 2, autocast)
    )
    assert total.device.type == "cuda"


@part()
def dp_sgd_in_float32() -> None:
    gradient_sum_of(unet(), in_parts=True)


@part()
def dp_sgd_in_bfloat16() -> None:
    gradient_sum_of(unet(), autocast=True)


@part()
def dp_sgd_at_the_times_of_a_public_model() -> None:
    gradient_sum_of(unet(), law=TimestepMixture(weights=(0.5, 0.5), bounds=(0, 200, 1000)))


@part()
def dp_sgd_by_products() -> None:
    model = unet()
    model.use_products = True
    gradient_sum_of(model, autocast=True)


@part()
def dp_sgd_in_small_groups_of_channels() -> None:
    gradient_sum_of(unet(width=24, unshuffle=2, blocks=2))


@part()
def dp_sgd_of_groups_of_images() -> None:
    gradient_sum_of(unet(), groups=True, in_parts=True)


@part()
def dp_sgd_of_several_labels() -> None:
    gradient_sum_of(unet(several=True))


@part()
def dp_sgd_of_adapters() -> None:
    model = unet()
    names = choose_trainable(model, Finetune(trainable="attention-lora"), None, 0)
    gradient_sum_of(
        model, autocast=True, parameters={name: model.get_parameter(name) for name in names}
    )


def state() -> State:
    config = Finetune(draws=2, max_grad_norm=1.0, steps=3, microbatch_size=16)
    return State(unet(**ONE_LEVEL), config, public_batch=40.0, autocast=True)


@part(
    DRAWN, "dpsgd/run.py update", "dpsgd/run.py State.tensors", "dpsgd/trainable.py check_trained"
)
def dp_sgd_resumed() -> None:
    run = state()
    before = {name: value.to("cpu", copy=True) for name, value in run.model.state_dict().items()}
    drawn = charge(images(20))
    step(run, drawn)
    run.load(run.tensors())
    step(run, drawn)
    check_trained(before, run.model, [name for name, _ in run.model.named_parameters()])


@part("queries/saliency.py query_saliency")
def query_of_saliency() -> None:
    model = unet(**ONE_LEVEL)
    parameters = {name: model.get_parameter(name) for name in candidates(model)}
    query_saliency(charge(images()), Gradients(model, parameters, Saliency(), 40.0, autocast=False))


def test_a_step_waits_twice_and_copies_only_the_noise():
    with pretended_gpu() as card:
        run = state()
        drawn = charge(images(20))  # two chunks
        card.waits.clear()
        card.copies.clear()
        step(run, drawn)
    assert {place: count for (place, _, _), count in card.waits.items()} == {
        DRAWN: 1,
        "dpsgd/run.py update": 1,
    }
    assert card.copying == {DRAWN}


# --- the rest -------------------------------------------------------------------------------------


def fitted(generator: Any, *features: Any, several: bool = False, **more: Any) -> Any:
    matches = [
        FeatureMeans(torch.zeros(each.size, CLASSES + several).to(CUDA), each) for each in features
    ]
    row_means = more.pop("row_means", None)
    target = Target(matches, **more)
    settings = Auxiliary(steps=2, batch=20)
    return fit_generator(generator, target, settings, EVEN, 0, row_means=row_means)


def small_generator(shape: Shape = SHAPE, several: bool = False) -> Any:
    return new_generator(shape, CLASSES, 8, 8, 0, several)


@part(SETTLED, "generators/one_step.py drawing")
def fit_to_fourier_features() -> None:
    chosen = (
        FeatureMap(length_scales=(0.3, 0.1)),
        FeatureMap(map="scattering"),
        FeatureMap(map="moduli"),
    )
    found = fitted(small_generator(), maps(*chosen))
    assert draw_images(found, 30, EVEN)[0].device.type == "cpu"


@part(SETTLED)
def fit_to_plain_and_local_maps() -> None:
    plain = FeatureMap(map="tangent", kernel="linear"), FeatureMap(map="moduli", kernel="squared")
    fitted(
        small_generator(),
        maps(*plain, FeatureMap(map="patches"), FeatureMap(kernel="rational-quadratic")),
    )


@part(SETTLED, {f"generators/network.py {name}.forward" for name in ("Enlarge", "GeneratorLevel")})
def fit_coarse_to_fine() -> None:
    shape = (1, 64, 64)
    fitted(small_generator(shape), maps(FeatureMap(), FeatureMap(block=2), shape=shape))


@part(SETTLED)
def fit_to_several_labels() -> None:
    shares = torch.full((CLASSES + 1,), 0.3).double()
    fitted(small_generator(several=True), maps(FeatureMap()), several=True, row_means=shares)


@part(SETTLED)
def fit_under_a_teacher() -> None:
    fitted(small_generator(), maps(FeatureMap()), teacher=teacher(), agreement=0.01)


@part(SETTLED)
def fit_to_moments_of_public_networks() -> None:
    for kind in ("residual", "whitened"):
        fitted(small_generator(), moment_features(build_network(kind, SHAPE, CLASSES, 8).eval()))


@part("generators/gaussian.py GaussianGenerator.forward", "generators/one_step.py drawing")
def drawing_of_gaussians() -> None:
    shape = (3, 32, 32)
    features = cosine_moments(shape, True)
    for details in (0, 20):
        draw_images(GaussianGenerator(features.arguments, CLASSES, details).to(CUDA), 20)


# --- queries --------------------------------------------------------------------------------------


@part(SUMMED, TRIED)
def query_of_fourier_features() -> None:
    features = maps(FeatureMap(map="deep-scattering"), FeatureMap(map="patches")).to(CUDA)
    query_feature_means(charge(images(FEW)), features, CLASSES, 40.0)


@part(SUMMED, TRIED)
def query_of_kept_features() -> None:
    features = maps(FeatureMap(map="deep-scattering")).to(CUDA)
    query_feature_means(
        charge(latents(features, features.vectors)), features, CLASSES, 40.0, cached=True
    )


@part(SUMMED, TRIED)
def query_of_covariances() -> None:
    shape = (3, 32, 32)
    query_feature_means(
        charge(images(FEW, shape)), cosine_moments(shape, True).to(CUDA), CLASSES, 40.0
    )


@part(TRIED, "queries/histogram.py query_histogram")
def query_of_votes() -> None:
    model = build_network("residual", SHAPE, CLASSES, 8).to(CUDA).eval()
    query_histogram(charge(images(FEW)), model, 1, CLASSES)


@part(
    TRIED,
    SUMMED,
    LABELLED,
    "queries/teacher.py query_teacher",
    "features/projection.py ProjectedFeatures.fit",
    "features/teacher_network.py TeacherNetwork.of",
)
def query_of_a_teacher() -> None:
    settings = Teacher(steps=2, dimension=32, feature="deep-scattering")
    features, spread = fit_features(settings, SHAPE, None, images(), 0)
    rows = latents(features.to(CUDA), features)
    drawn = charge(rows, settings.max_norm)
    weights = query_teacher(drawn, settings, CLASSES, 40.0, spread, lambda done, total: None)
    relabelled(TeacherNetwork.of(features, weights).to(CUDA), images())


def test_features_learned_on_a_gpu_are_queried_there():
    with pretended_gpu() as card:
        known = teacher()
        network = train_feature_network(images(300), known, 2, 0, lambda done, total: None)
        features = learned_features(known.features, network, 100, 0)
        query_feature_means(charge(images(FEW)), features.to(CUDA), CLASSES, 40.0)
    fitted_there = {
        LABELLED,
        "training/supervised.py apply",
        "features/projection.py ProjectedFeatures.fit",
    }
    assert card.waiting == SUMMED | {TRIED} | fitted_there


def test_under_autocast_a_norm_keeps_the_type_of_its_images():
    """In float32, a step would need 50 % more memory, and would take a seventh longer."""
    with pretended_gpu():
        images = torch.zeros(4, 8, 6, 6, device="cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            assert GroupNorm(8).to("cuda")(images).dtype == torch.bfloat16


# --- training, drawing, evaluation ----------------------------------------------------------------


@part()
def warm_up_in_phases() -> None:
    known = torch.rand(20, *SHAPE), torch.arange(20) % CLASSES
    phase = Phase(sources={"central": 1.0}, steps=2, batch=16, augment=2, amp=Amp())
    warm_up(unet(**ONE_LEVEL), [phase], {"central": known}, 0)


def test_the_warm_up_copies_its_batches_from_pinned_memory():
    assert not card_after("warm_up_in_phases").copying


@part("diffusion/sampler.py sample")
def samples_with_and_without_guidance() -> None:
    labels = torch.arange(20) % CLASSES
    random = torch.Generator().manual_seed(0)
    sample(unet(**ONE_LEVEL), labels, 2, 0.5, random, True)
    sample(unet(**ONE_LEVEL), labels, 2, 0.0, random, True, guide_by(teacher(), 1.0))


@part(LABELLED)
def labels_of_a_teacher() -> None:
    pixels = torch.randint(0, 256, (100, *SHAPE), dtype=torch.uint8)
    settings = Synthesize(count=100, relabel=True, distorted=0.4, mixed=0.2)
    vary(pixels, torch.arange(100) % CLASSES, settings, teacher(), 0)
    classify(teacher(), images(300))


def test_supervised_training_copies_from_pinned_memory_only():
    schedule = Schedule(steps=2, learning_rate=0.1, weight_decay=0.0, augment=True)
    with pretended_gpu() as card:
        model = build_network("residual", (3, 16, 16), CLASSES, 8).to(CUDA)
        card.copies.clear()
        train_supervised(model, [(torch.rand(8, 3, 16, 16), torch.arange(8))] * 2, schedule)
    assert not card.copying and not card.waiting


def test_a_step_of_a_generator_copies_from_pinned_memory_only():
    def copies(steps: int) -> int:
        features = maps(FeatureMap())
        with pretended_gpu() as card:
            releases = [FeatureMeans(torch.zeros(features.size, CLASSES), features)]
            settings = Auxiliary(steps=steps, batch=20)
            fit_generator(small_generator(), Target(releases), settings, EVEN, 0)
        return sum(card.copies.values())

    assert copies(4) == copies(2)


def test_the_steps_of_a_teacher_run_on_the_card():
    with pretended_gpu() as card:
        settings = Teacher(steps=2, dimension=32, feature="deep-scattering")
        features, spread = fit_features(settings, SHAPE, None, images(300), 0)
        rows = latents(features, features)
        query_teacher(
            charge(rows, settings.max_norm),
            settings,
            CLASSES,
            40.0,
            spread,
            lambda done, total: None,
        )
    assert spread.device.type == "cuda" and not card.on_cpu


def test_public_images_are_classified_on_the_card_in_parts():
    def peak(count: int) -> int:
        with pretended_gpu() as card:
            classify(teacher(), images(count))
        assert not card.on_cpu
        return card.peak

    assert peak(4 * FEATURE_BATCH) == peak(FEATURE_BATCH)


@part("training/supervised.py apply")
def public_classifiers() -> None:
    for kind in ("residual", "whitened"):
        settings = Classifier(network=kind, steps=2, width=8)
        train_public_classifier(images(100), settings, 0)


@part("training/supervised.py apply")
def classifiers_of_the_evaluation() -> None:
    for name in CLASSIFIERS:
        # The training loop is the same for all, so one classifier with two steps suffices
        schedule = downstream.schedule_of(name, 40, 1, steps=2 if name == "cnn" else 1)
        downstream.evaluate_classifier(name, images(), images(), schedule, {}, 0)


@part("training/supervised.py apply", "evaluation/extractors.py embedded_extractor")
def features_of_the_evaluation() -> None:
    embedded_extractor(images(), "glyphs")(images(20).images)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_on_a_gpu_waits_only_where_expected(name, short_judging):
    assert card_after(name).waiting == PARTS[name][1]
