"""Checks before any spending: stages that need others, names, shapes and sizes."""

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
    """Raise ConfigError if a stage needs one that is switched off, or if parameters and images do not fit."""
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
    """What is asked for and was not prepared, and a unit of privacy that the images do not have."""
    data = params.data
    prepare_again = "run `stage prepare sensitive`, or mend params.yaml"
    if card.dataset_id != data.name:
        yield f"data.dataset_id={data.name!r}, but the prepared card is of {card.dataset_id!r}: {prepare_again}"
    if data.holdout_fraction == 0 and card.split == "keyed" and params.runs("evaluate"):
        yield "data.holdout_fraction=0 leaves evaluate nothing to judge by: raise it, or take evaluate out of run"
    shape = {"size": size_of(card.shape[1:]), "channels": card.shape[0]}
    for key, prepared in {"source": card.source, "labels": card.labels, **shape}.items():
        if (asked := getattr(data, key)) not in (None, prepared):
            yield f"data.{key}={asked}, but {prepared} was prepared: {prepare_again}"
    privacy = params.privacy
    groups = data.groups
    if groups is not None and privacy.unit != GROUP:
        remedy = "say privacy.unit: group (and count groups in privacy.size_hint), or take data.groups out"
        yield f"data.groups names groups, but privacy.unit={privacy.unit or 'null'}: {remedy}"
    if groups is None and privacy.unit == GROUP:
        remedy = "say which images are whose, such as {pattern: '^(P\\d+)_'}, and run `stage prepare sensitive`"
        yield f"privacy.unit=group protects all images of a person, but data.groups is missing: {remedy}"
    if card.unit != privacy.protected:
        yield f"privacy.unit={privacy.protected}, but the images were prepared for one {card.unit}: {prepare_again}"
    if privacy.group_cap is not None and not params.runs("count"):
        yield "privacy.group_cap gives small groups less weight than privacy.size_hint: add count to run"


# the stages that take several labels an image
SEVERAL_LABELS = (
    *("count", "frequency", "classifier", "moments", "auxiliary", "teacher"),
    *("pretrain", "finetune", "synthesize", "evaluate"),
)


def label_problems(params: Params, card: Card) -> Iterator[str]:
    """What takes one label an image, if images have several, and what several need."""
    if card.labels != SEVERAL:
        return
    made = params.synthesize
    varied = made.labels == "uniform" or made.distorted + made.mixed + made.teacher_guidance > 0 or made.herding > 1
    options = (  # which take one label an image
        ("auxiliary", "auxiliary.target=covariance", params.auxiliary.target == "covariance"),
        ("pretrain", "model.directory", params.model.directory is not None),
        ("synthesize", "synthesize.labels: uniform, distorted, mixed, herding or teacher_guidance", varied),
    )
    refused = [name for name in params.run if name not in SEVERAL_LABELS]
    refused += [option for stage, option, chosen in options if chosen and params.runs(stage)]
    ways = "use recipe: dp-merf, dp-mepf or feta-pro-f, or prepare the images with one label each (data.labels: one)"
    for name in refused:
        yield f"{name} takes one label an image, and data.labels=several: leave it out; {ways}"
    if not params.runs("count"):
        yield "data.labels=several needs the share of images that has each label: add count to run"
    elif not isinstance(noise := params.count.noise, str):
        size = params.privacy.size
        spread = noise * several_bound(len(card.classes))
        if spread > 0.05 * size:
            numbers = f"the number of images with each of {len(card.classes)} labels by about {spread:.3g}, of {size}"
            yield f"count.noise={noise:g} blurs {numbers}: lower it, or give it a share, such as count.noise: 10%"


def missing_stages(params: Params) -> Iterator[str]:
    """Stages that are switched on and read one that is not."""
    recipe = f"recipe={params.recipe!r}"
    if not params.runs("synthesize"):
        yield f"{recipe}: run={list(params.run)} does not name synthesize, so nothing would be released: add it"
    for name in params.run:
        stage = STAGES[name]
        settings = getattr(params, name)
        chosen = getattr(settings, settings.chooser, None)
        who = f"{name}.{settings.chooser}={chosen}" if isinstance(chosen, str) else name
        way_out = f"change {name}.{settings.chooser}" if settings.chooser else f"take {name} out"
        for other in stage.upstream:
            if not params.runs(other) and other not in stage.optional and settings.reads(other):
                yield f"{recipe}: {who} needs {other}, which is switched off. Add {other} to run, or {way_out}"
    voted = params.runs("select") and params.select.by == "votes" and params.select.ratio < 1
    if voted and not params.runs("histogram"):
        yield f"{recipe}: select.ratio below 1 needs histogram. Add histogram to run, or set select.ratio: 1"


def name_problems(params: Params) -> Iterator[str]:
    """Names that no table has: sources, feature maps, classifiers and metrics; a metric without its extractor."""
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
            yield f"evaluate.{key} needs evaluate.extractor: {extractor}, not {params.evaluate.extractor}"


def shape_problems(params: Params, card: Card) -> Iterator[str]:
    _, height, width = card.shape
    central = params.central
    frequency = params.frequency
    if params.runs("central") and central.statistic == "mode" and central.max_norm is not None:
        yield f"central.max_norm={central.max_norm} has no effect on the mode, whose bound is fixed: leave it out"
    number = sum(len(feature.length_scales) for feature in frequency.features)
    if params.runs("frequency") and frequency.size < 2 * number:
        yield f"frequency.size={frequency.size} is too small for {number} length-scales: at least {2 * number}"
    if params.runs("refine") and params.auxiliary.target == "covariance":
        yield "refine fits a network further, and auxiliary.target=covariance has none: leave one of them out"
    if params.model.directory is not None and height != width:
        yield f"model.directory names a public model, which draws squares, not {height}×{width}: set data.size"
    if params.runs("evolve") and params.evolve.population < len(card.classes):
        yield f"evolve.population={params.evolve.population} is below the {len(card.classes)} classes: raise it"


def release_problems(params: Params) -> Iterator[str]:
    """Public images without a sensitive class, and a guide without a diffusion model."""
    made = params.synthesize
    if params.runs("synthesize") and made.teacher_guidance > 0:
        if not {"pretrain", "finetune"} & set(made.sources):
            yield "synthesize.teacher_guidance guides diffusion models, and synthesize.sources names none: leave it out"
        elif params.model.directory is not None:
            yield "synthesize.teacher_guidance does not go with a public model, which draws latents: leave it out"
    if made.choose and not ("select" in made.sources and len(made.sources) > 1 and made.labels == "uniform"):
        yield "synthesize.choose compares sources with select and without: name both, and set labels: uniform"
    if made.herding > 1 and "select" in made.sources and not made.choose:
        yield "synthesize.herding chooses among images that models draw, which select does not: leave one of them out"
    labelled = params.select.by == "teacher" or (params.runs("histogram") and params.histogram.per_class)
    if params.runs("synthesize") and "select" in made.sources and not labelled:
        remedy = "set select.by: teacher, or histogram.per_class: true"
        yield f"synthesize.sources names select, whose images keep their public labels: {remedy}"


def public_model_problems(params: Params) -> Iterator[str]:
    """A network that is not public; settings that do not fit a public text-to-image model, or its absence."""
    model = params.model
    for part in params.teacher.maps:
        if params.runs("teacher") and part.network is not None and not part.network.declared_public:
            yield f"teacher: {part.network.path}: set its declared_public: true if no sensitive images trained it"
    given = ", ".join(f"model.{name}" for name in PUBLIC_MODEL if getattr(model, name) and name != "directory")
    if model.directory is None:
        if given:
            yield f"{given} are of a public model, but model.directory names none: set it, or leave them out"
        return
    if params.runs("pretrain") and params.pretrain.phases:
        remedy = "Set pretrain.phases: [], or use one of the recipes dp-sapf, dp-lora, dp-ldm, dp-finetune"
        yield f"model.directory={model.directory}: a public model has no warm-up. {remedy}"


def public_problems(params: Params, public: PublicCard, sensitive: int) -> Iterator[str]:
    """More public classes than there are, or fewer than each sensitive one needs."""
    select = params.select
    histogram = params.histogram
    classes = len(public.classes)
    if public.source not in (None, params.public.source):
        yield f"public.source={params.public.source}, but {public.source} was prepared: run `stage prepare public`"
    if params.runs("select") and select.by == "teacher":
        if not sensitive <= select.images <= public.images:
            remedy = f"give between {sensitive} and {public.images}"
            yield f"select.images={select.images} of {public.images} public images in {sensitive} classes: {remedy}"
    elif params.runs("select") and params.runs("histogram") and histogram.per_class:
        kept = number_to_keep(select, classes)
        remedy = f"select.ratio must be at least {sensitive / classes:.4g}"
        if classes < sensitive:
            remedy = "take another public set, or histogram.per_class: false"
        if kept < sensitive:
            needs = f"but each of the {sensitive} sensitive ones needs its own: {remedy}"
            yield f"select.ratio={select.ratio:g} keeps {kept} of {classes} public classes, {needs}"
    if params.runs("histogram") and histogram.votes > classes:
        yield f"histogram.votes={histogram.votes} exceeds the {classes} public classes: lower it"
