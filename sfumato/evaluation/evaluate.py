"""Evaluate a release in a folder on the real images from which it was made.

The results are numbers and pictures, all local.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from sfumato.data.cards import Card
from sfumato.data.images import ImageSet, load_images
from sfumato.data.prepare import secret_key
from sfumato.evaluation.detector import detections
from sfumato.evaluation.disclosure import disclosure, membership
from sfumato.evaluation.extractors import Extractor, build_extractor
from sfumato.evaluation.holdout import lost_classes, without_copies, without_repeats
from sfumato.evaluation.identity import identity, made_from_others
from sfumato.evaluation.metrics.fidelity import chosen_metrics
from sfumato.evaluation.plots import plot_detected, plot_neighbours
from sfumato.evaluation.public_student import public_extractor, score_students
from sfumato.evaluation.scores import (
    RELEASE,
    Metrics,
    evaluate_release,
    looked_at,
    released_accuracy,
)
from sfumato.evaluation.verdict import Verdict, classifier_rows, unjudged, verdict
from sfumato.features.teacher_network import ImageClassifier, load_teacher_network
from sfumato.privacy.authorize import open_local
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.resolved import StagePlan
from sfumato.release.release import generated_images, plain_images, requested_agreement
from sfumato.release.stream import further_images
from sfumato.release.student import load_student_network
from sfumato.release.variation import PLAIN
from sfumato.runtime import distributed
from sfumato.runtime.compute import device
from sfumato.runtime.progress import Say, discard
from sfumato.settings.evaluate import Evaluate
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.documents import read_json
from sfumato.storage.files import keep_private

LOADERS: dict[str, Callable[[Path], ImageClassifier]] = {
    "teacher": load_teacher_network,
    "student": load_student_network,
}
MOST_DRAWN = 10_000  # Maximum number of images drawn from released networks to search for copies
NOT_BY_CHANCE = (
    "The hold-out was provided, not drawn at random, so it may differ from the training images for "
    "reasons other than copying."
)
OTHER_IMAGES = (
    "the training images have changed since this release was made, so there is no verdict and no "
    "test for copies. If you have only removed or added images, the accuracies remain valid, and "
    "nothing needs to be done. After any other change, the hold-out may contain images from which "
    "the release was made, and accuracies on them are too high: undo the change of "
    "data.holdout_fraction, of other settings of data, or of the files, then run `stage prepare "
    "sensitive` and `stage evaluate`. To keep the change, set a new data.version and pay for a new "
    "release"
)


def evaluate_folder(
    plan: StagePlan[Evaluate],
    release: Path,
    classifiers: Mapping[str, Path],
    state: Path,
    card: Card,
    out: Path,
    progress: Say = discard,
) -> Metrics | None:
    """Measure the release in a folder on the real images that `card` describes.

    The journal records that this function opens the real images. All processes must call this
    function. After their shared work, the process group ends, and only the first process continues.

    classifiers: folder of each classifier in LOADERS. A folder may be missing;
    out: folder for pictures.

    Returns the content of metrics.json in the first process, and None in all others.
    """
    synthetic = released_sets(release, plan)
    networks = load_classifiers(classifiers)
    # This step fails if a file is missing, so it comes before the real images are opened
    extractor = build_extractor(plan.settings, plan.shape, progress)
    student_warnings: list[str] = []
    public = public_extractor(plan.settings, plan.shape, student_warnings)
    train, held_out = open_local(state, card, "evaluate", everywhere=True)
    holdout, copy_warnings = without_copies(held_out, train, card.split)
    metrics = evaluate_release(synthetic, train, holdout, plan.settings, extractor, progress)
    leads = distributed.is_main()
    distributed.leave_group()
    if not leads:
        return None
    metrics["warnings"] = copy_warnings + student_warnings + metrics["warnings"]
    key = secret_key(state, plan.dataset_id)
    metrics["identity"] = identity(plan, key, card.version, train, holdout, extractor, release)
    artifacts = (release, *classifiers.values())
    odometer = Odometer(state, plan.dataset_id)
    images_changed = made_from_others(artifacts, odometer, metrics["identity"]["data"])
    if images_changed:
        metrics["warnings"].append(OTHER_IMAGES)
    # If `measured` is False, the last warning gives the reason. If the hold-out is `unusable`,
    # there are no rows
    measured = not images_changed and bool(classifier_rows(metrics[RELEASE]))
    metric_names = chosen_metrics(plan.settings) if measured else ()
    tested_sets = (
        without_repeats(train, held_out) if copy_warnings and measured else (train, holdout)
    )
    for name, network in networks.items() if measured else ():
        progress(name)
        metrics[name] = released_accuracy(network, holdout)
        metrics[name]["membership"] = membership(network, *tested_sets)
    if public is not None and measured:
        progress("second student")
        sets = {RELEASE: synthetic[RELEASE]}
        if plan.settings.bound:
            sets["real"] = train
        metrics["public_student"] = score_students(public, sets, holdout, plan.settings.seeds)
    if extractor is not None and "disclosure" in metric_names:
        progress("copies of training images")
        metrics["disclosure"] = search_copies(release, synthetic[RELEASE], *tested_sets, extractor)
        if card.split == "official":
            metrics["disclosure"]["sentence"] += f" {NOT_BY_CHANCE}"
    metrics |= labelling_of(synthetic, release)
    metrics["verdict"] = judge(metrics, held_out, holdout, measured)
    keep_private(out)
    # Remove old pictures, because this evaluation may not draw new ones in their place
    for picture in ("accuracy.png", "detected.png"):
        (out / picture).unlink(missing_ok=True)
    if "detector" in metric_names:
        progress("detector")
        measure_detection(metrics, synthetic, train, holdout, out / "detected.png")
    if extractor is not None:
        progress("plots")
        plot_neighbours(
            extractor, synthetic.get(PLAIN, synthetic[RELEASE]), train, out / "neighbours.png"
        )
    return metrics


def judge(metrics: Metrics, held_out: ImageSet, holdout: ImageSet, measured: bool) -> Verdict:
    """Judge the release, or state why it cannot be judged.

    held_out: the hold-out; holdout: the hold-out without copies; measured: whether the numbers
    allow a verdict. If not, the last warning gives the reason.
    """
    reason = lost_classes(held_out, holdout)
    if measured and reason is None:
        return verdict(metrics, holdout.labels, len(holdout.classes), holdout.groups)
    return unjudged(reason or metrics["warnings"][-1])


def load_classifiers(classifiers: Mapping[str, Path]) -> dict[str, ImageClassifier]:
    """Load the released classifiers, by stage.

    A folder is left out if it is missing, or if the recipe did not use its stage.
    """
    return {
        name: LOADERS[name](folder).to(device())
        for name, folder in classifiers.items()
        if folder.exists() and read_artifact(folder, name).enabled
    }


def card_of(release: Path) -> Mapping[str, object]:
    """Return a release's `card.json`, or {} if a version before 0.3 made the release."""
    with suppress(FileNotFoundError):
        return dict(read_json(release / "card.json"))
    return {}


def released_sets(release: Path, plan: StagePlan[Evaluate]) -> dict[str, ImageSet]:
    """Return all images of the release, as RELEASE, and the plain images, as PLAIN.

    The plain images are labelled with the classes that were requested from the models. If the
    release does not record these classes, PLAIN is left out.
    """
    read_artifact(release, "synthesize")
    released = load_images(release, plan.classes, shape=plan.shape)
    plain = plain_images(released, release)
    if plain is None:
        return {RELEASE: released}
    return {RELEASE: released, PLAIN: plain}


def labelling_of(synthetic: Mapping[str, ImageSet], release: Path) -> Metrics:
    """Return facts about the labels of a release. Unknown entries are left out.

    "mixture" is the card's entry about the decision whether to include public images. "agreement"
    is the share of plain images that have the label requested from the generator, and
    "chance_agreement" is the share to expect by chance.
    """
    facts: Metrics = {key: value for key, value in card_of(release).items() if key == "mixture"}
    if PLAIN in synthetic:
        agreed, by_chance = requested_agreement(synthetic[RELEASE], release)
        facts |= {"agreement": agreed, "chance_agreement": by_chance}
    return facts


def search_copies(
    release: Path, released: ImageSet, train: ImageSet, holdout: ImageSet, extractor: Extractor
) -> Metrics:
    """Test whether a release, and further images drawn from its networks, contain copies."""
    extra_images = None
    if "stream" in card_of(release):
        extra_images = further_images(release, min(MOST_DRAWN, len(released)))
    return disclosure(generated_images(released, release), train, holdout, extractor, extra_images)


def measure_detection(
    metrics: Metrics,
    synthetic: Mapping[str, ImageSet],
    train: ImageSet,
    holdout: ImageSet,
    picture: Path,
) -> None:
    """Add a detector's accuracy to the fidelity of each set, and plot its clearest decisions.

    The plot shows the plain images or, if PLAIN is not among the sets, the release.
    """
    for name, detected in detections(looked_at(synthetic), train, holdout).items():
        metrics[name]["fidelity"]["detector"] = detected.accuracy
        if name in (RELEASE, PLAIN):
            plot_detected(detected, picture)
