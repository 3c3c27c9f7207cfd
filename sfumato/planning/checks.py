"""Check parameters before anything is spent: required stages, names, shapes and sizes."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain

from sfumato.data.cards import Card, PublicCard
from sfumato.errors import ConfigError, nearest
from sfumato.evaluation.classifiers import CLASSIFIERS
from sfumato.evaluation.metrics.fidelity import METRICS
from sfumato.features import FEATURES
from sfumato.features.efficientnet_lite import INSTALL, PACKAGE
from sfumato.features.own_network import OWN
from sfumato.features.projection import CLASSIFIER
from sfumato.queries.count import several_bound
from sfumato.release.synthesizer import outline
from sfumato.settings.data import GROUP, SEVERAL
from sfumato.settings.fields import size_of
from sfumato.settings.params import Params
from sfumato.settings.sources import names_in
from sfumato.settings.stages import STAGES
from sfumato.settings.training import PUBLIC_MODEL
from sfumato.text_to_image.reference import class_prompts
from sfumato.training.selection import number_to_keep


def check_consistent(params: Params, card: Card, public: PublicCard | None = None) -> None:
    """Raise ConfigError if a required stage is off, or if the parameters do not match the images."""
    of_the_card = card_problems(params, card), label_problems(params, card)
    of_the_stages = missing_stages(params), name_problems(params), public_model_problems(params)
    for problem in chain(*of_the_card, *of_the_stages, shape_problems(params, card), release_problems(params)):
        raise ConfigError(problem)
    if params.model.directory is not None:
        class_prompts(params.model, card.dataset_id, card.classes)  # raises ConfigError if a prompt cannot be made
    elif params.runs("pretrain"):
        outline(params.model, card.shape, len(card.classes))  # raises ConfigError if widths and levels do not fit
    if public is not None:
        for problem in public_problems(params, public, len(card.classes)):
            raise ConfigError(problem)


def card_problems(params: Params, card: Card) -> Iterator[str]:
    """Yield mismatches between params.yaml and the prepared images."""
    data = params.data
    prepare_again = "run `stage prepare sensitive`, or correct params.yaml"
    if card.dataset_id != data.name:
        yield f"data.dataset_id={data.name!r}, but {card.dataset_id!r} was prepared: {prepare_again}"
    if data.holdout_fraction == 0 and card.split == "keyed" and params.runs("evaluate"):
        yield "data.holdout_fraction=0 leaves evaluate without hold-out images: raise it, or remove evaluate from run"
    shape = {"size": size_of(card.shape[1:]), "channels": card.shape[0]}
    for key, prepared in {"source": card.source, "labels": card.labels, **shape}.items():
        if (asked := getattr(data, key)) not in (None, prepared):
            yield f"data.{key}={asked}, but {prepared} was prepared: {prepare_again}"
    privacy = params.privacy
    groups = data.groups
    if groups is not None and privacy.unit != GROUP:
        remedy = "set privacy.unit: group (and the number of persons as privacy.size_hint), or remove data.groups"
        yield f"data.groups is set, but privacy.unit={privacy.unit or 'null'}: {remedy}"
    if groups is None and privacy.unit == GROUP:
        remedy = "set it, for example to {pattern: '^(P\\d+)_'}, and run `stage prepare sensitive`"
        yield f"privacy.unit=group protects all images of a person, but data.groups is missing: {remedy}"
    if card.unit != privacy.protected:
        yield f"privacy.unit={privacy.protected}, but the images were prepared for one {card.unit}: {prepare_again}"
    if privacy.group_cap is not None and not params.runs("count"):
        yield "privacy.group_cap gives small groups less weight than privacy.size_hint assumes: add count to run"


# Stages that accept several labels per image
SEVERAL_LABELS = (
    *("count", "frequency", "classifier", "moments", "auxiliary", "teacher"),
    *("pretrain", "finetune", "synthesize", "student", "evaluate"),
)


def label_problems(params: Params, card: Card) -> Iterator[str]:
    """Yield what images with several labels exclude (stages and options with one label), and what they require."""
    if card.labels != SEVERAL:
        return
    made = params.synthesize
    varied = made.labels == "uniform" or made.distorted + made.mixed + made.teacher_guidance > 0 or made.herding > 1
    options = (  # these require one label per image
        ("auxiliary", "auxiliary.target=covariance", params.auxiliary.target == "covariance"),
        ("pretrain", "model.directory", params.model.directory is not None),
        ("synthesize", "synthesize.labels: uniform, distorted, mixed, herding or teacher_guidance", varied),
    )
    refused = [name for name in params.run if name not in SEVERAL_LABELS]
    refused += [option for stage, option, chosen in options if chosen and params.runs(stage)]
    ways = "use recipe: dp-merf, dp-mepf or feta-pro-f, or prepare the images with one label each (data.labels: one)"
    for name in refused:
        yield f"{name} requires one label per image, but data.labels=several: remove it; {ways}"
    if not params.runs("count"):
        yield "data.labels=several requires the share of images with each label: add count to run"
    elif not isinstance(noise := params.count.noise, str):
        size = params.privacy.size
        spread = noise * several_bound(len(card.classes))
        if spread > 0.05 * size:
            numbers = (
                f"the number of images with each of {len(card.classes)} labels by about {spread:.3g}, out of {size}"
            )
            yield f"count.noise={noise:g} changes {numbers}: lower it, or set a share, such as count.noise: 10%"


def missing_stages(params: Params) -> Iterator[str]:
    """Yield each stage that is on and requires a stage that is off."""
    recipe = f"recipe={params.recipe!r}"
    if not params.runs("synthesize"):
        yield f"{recipe}: run={list(params.run)} does not contain synthesize, so nothing would be released: add it"
    for name in params.run:
        stage = STAGES[name]
        settings = getattr(params, name)
        chosen = getattr(settings, settings.chooser, None)
        who = f"{name}.{settings.chooser}={chosen}" if isinstance(chosen, str) else name
        way_out = f"change {name}.{settings.chooser}" if settings.chooser else f"remove {name}"
        for other in stage.upstream:
            if not params.runs(other) and other not in stage.optional and settings.reads(other):
                yield f"{recipe}: {who} requires {other}, which is switched off. Add {other} to run, or {way_out}"
    voted = params.runs("select") and params.select.by == "votes" and params.select.ratio < 1
    if voted and not params.runs("histogram"):
        yield f"{recipe}: select.ratio below 1 requires histogram. Add histogram to run, or set select.ratio: 1"


def name_problems(params: Params) -> Iterator[str]:
    """Yield unknown sources, feature maps, classifiers and metrics, and metrics without their extractor."""
    of_teachers = (CLASSIFIER, *FEATURES, OWN)
    for used, key, names, existing in (
        (True, "data.source", [params.data.source], names_in("data")),
        (params.reads_public, "public.source", [params.public.source], names_in("public")),
        (params.runs("frequency"), "frequency.features", [one.map for one in params.frequency.features], (*FEATURES,)),
        (params.runs("teacher"), "teacher.feature", [part.map for part in params.teacher.maps], of_teachers),
        (params.runs("evaluate"), "evaluate.classifiers", params.evaluate.classifiers, (*CLASSIFIERS,)),
        (params.runs("evaluate"), "evaluate.fidelity", params.evaluate.fidelity or (), (*METRICS,)),
    ):
        for name in names if used else ():
            if name not in existing:
                yield f"{key} names {name!r}, which does not exist: {nearest(name, existing)}"
            if name.startswith("imagenet") and find_spec(PACKAGE) is None:
                yield f"{key} names {name}, whose weights are not installed: {INSTALL}"
    needs = {f"fidelity: {key}": METRICS[key].needs for key in params.evaluate.fidelity or () if key in METRICS}
    if params.evaluate.weights:
        needs["weights"] = "inception"
    for key, extractor in needs.items():
        if extractor not in ("", params.evaluate.extractor):
            yield f"evaluate.{key} requires evaluate.extractor: {extractor}, not {params.evaluate.extractor}"


def shape_problems(params: Params, card: Card) -> Iterator[str]:
    _, height, width = card.shape
    central = params.central
    frequency = params.frequency
    if params.runs("central") and central.statistic == "mode" and central.max_norm is not None:
        yield f"central.max_norm={central.max_norm} has no effect on the mode, whose bound is fixed: remove it"
    number = sum(len(feature.length_scales) for feature in frequency.features)
    if params.runs("frequency") and frequency.size < 2 * number:
        yield f"frequency.size={frequency.size} is too small for {number} length-scales: expected at least {2 * number}"
    if params.runs("refine") and params.auxiliary.target == "covariance":
        yield "refine requires a network, and auxiliary.target=covariance has none: remove refine, or change the target"
    if params.model.directory is not None and height != width:
        yield f"model.directory: a public model draws squares, not {height}×{width}: set data.size to one number"
    if params.runs("evolve") and params.evolve.population < len(card.classes):
        yield f"evolve.population={params.evolve.population} is below the {len(card.classes)} classes: raise it"


def release_problems(params: Params) -> Iterator[str]:
    """Yield faults of `synthesize`, such as public images without a sensitive class, or unused guidance."""
    made = params.synthesize
    if params.runs("synthesize") and made.teacher_guidance > 0:
        if not {"pretrain", "finetune"} & set(made.sources):
            yield "synthesize.teacher_guidance requires a diffusion model in synthesize.sources: add one, or remove it"
        elif params.model.directory is not None:
            yield "synthesize.teacher_guidance does not apply to a public model, which draws latents: remove it"
    if made.choose and not ("select" in made.sources and len(made.sources) > 1 and made.labels == "uniform"):
        yield "synthesize.choose requires select and another stage in synthesize.sources, and labels: uniform: set them"
    if made.herding > 1 and "select" in made.sources and not made.choose:
        yield "synthesize.herding chooses among drawn images, and select provides public ones: remove one of them"
    if params.runs("synthesize") and made.stream and not made.networks(params.model.directory is not None):
        yield (
            f"synthesize.stream requires a network of this recipe in synthesize.sources={[*made.sources]}: "
            "recipients cannot draw on from public images, from a kept population or from a public model. "
            "Set synthesize.stream: false"
        )
    if params.runs("student") and not made.stream:
        yield "student learns from the stream of the release: set synthesize.stream: true, or remove student from run"
    labelled = params.select.by == "teacher" or (params.runs("histogram") and params.histogram.per_class)
    if params.runs("synthesize") and "select" in made.sources and not labelled:
        remedy = "set select.by: teacher, or histogram.per_class: true"
        yield f"synthesize.sources contains select, whose images would keep their public labels: {remedy}"


def public_model_problems(params: Params) -> Iterator[str]:
    """Yield networks that are not declared public, and settings that a public text-to-image model excludes or needs."""
    model = params.model
    for part in params.teacher.maps:
        if params.runs("teacher") and part.network is not None and not part.network.declared_public:
            yield f"teacher: {part.network.path}: set its declared_public: true if no sensitive image trained it"
    given = ", ".join(f"model.{name}" for name in PUBLIC_MODEL if getattr(model, name) and name != "directory")
    if model.directory is None:
        if given:
            yield f"{given} apply to a public model only, but model.directory is not set: set it, or remove them"
        return
    if params.runs("pretrain") and params.pretrain.phases:
        remedy = "Set pretrain.phases: [], or use one of the recipes dp-sapf, dp-lora, dp-ldm, dp-finetune"
        yield f"model.directory={model.directory}: a public model has no warm-up. {remedy}"


def public_problems(params: Params, public: PublicCard, sensitive: int) -> Iterator[str]:
    """Yield requests for public classes or images that do not exist or are too few for the sensitive classes."""
    select = params.select
    histogram = params.histogram
    classes = len(public.classes)
    if public.source not in (None, params.public.source):
        yield f"public.source={params.public.source}, but {public.source} was prepared: run `stage prepare public`"
    if params.runs("select") and select.by == "teacher":
        if not sensitive <= select.images <= public.images:
            remedy = f"set it between {sensitive} and {public.images}"
            yield f"select.images={select.images} of {public.images} public images in {sensitive} classes: {remedy}"
    elif params.runs("select") and params.runs("histogram") and histogram.per_class:
        kept = number_to_keep(select, classes)
        remedy = f"select.ratio must be at least {sensitive / classes:.4g}"
        if classes < sensitive:
            remedy = "use another public set, or histogram.per_class: false"
        if kept < sensitive:
            needs = f"but each of the {sensitive} sensitive ones needs its own: {remedy}"
            yield f"select.ratio={select.ratio:g} keeps {kept} of {classes} public classes, {needs}"
    if params.runs("histogram") and histogram.votes > classes:
        yield f"histogram.votes={histogram.votes} exceeds the number of public classes, {classes}: lower it"
