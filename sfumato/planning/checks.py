"""Check parameters before anything is spent: required stages, names, shapes and sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from sfumato.data.cards import Card, PublicCard
from sfumato.errors import ConfigError
from sfumato.settings.data import GROUP, SEVERAL
from sfumato.settings.fields import size_of
from sfumato.settings.params import Params
from sfumato.settings.stage import one_label_only
from sfumato.settings.stages import STAGES
from sfumato.settings.training import PUBLIC_MODEL

Problems = Iterator[str]  # one sentence for each mistake in the settings


@dataclass(frozen=True)
class Setup:
    """The parameters of a plan, and the cards of the images for which it is made.

    Args:
        params: All parameters.
        card: Card of the sensitive set.
        public: Card of the public set, or None if it is not prepared.
    """

    params: Params
    card: Card
    public: PublicCard | None


def check_consistent(params: Params, card: Card, public: PublicCard | None = None) -> None:
    """Raise ConfigError if a required stage is off, or if the parameters do not match the
    images.
    """
    setup = Setup(params, card, public)
    of_the_stages = (STAGES[name].problems(setup) for name in params.run)
    for problem in chain(
        card_problems(params, card, public),
        label_problems(params, card),
        missing_stages(params),
        public_model_problems(params, card),
        *of_the_stages,
    ):
        raise ConfigError(problem)


def card_problems(params: Params, card: Card, public: PublicCard | None) -> Problems:
    """Yield mismatches between params.yaml and the prepared images."""
    data = params.data
    prepare_again = "run `stage prepare sensitive`, or correct params.yaml"
    if card.dataset_id != data.name:
        yield (
            f"data.dataset_id={data.name!r}, but the prepared images belong to dataset "
            f"{card.dataset_id!r}: {prepare_again}"
        )
    if public is not None and public.source not in (None, params.public.source):
        yield (
            f"public.source={params.public.source}, but the prepared public images are from "
            f"{public.source}: run `stage prepare public`"
        )
    shape = {"size": size_of(card.shape[1:]), "channels": card.shape[0]}
    for key, prepared in {"source": card.source, "labels": card.labels, **shape}.items():
        if (setting := getattr(data, key)) not in (None, prepared):
            yield (
                f"data.{key}={setting}, but the images were prepared with data.{key}={prepared}: "
                f"{prepare_again}"
            )
    privacy = params.privacy
    groups = data.groups
    if groups is not None and privacy.unit != GROUP:
        remedy = (
            "set privacy.unit to group, and set privacy.size_hint to the number of persons. If "
            "images should be protected separately, remove data.groups instead"
        )
        yield f"data.groups is set, but privacy.unit is {privacy.unit or 'null'}: {remedy}"
    if groups is None and privacy.unit == GROUP:
        remedy = (
            "set data.groups, for example to {pattern: '^(P\\d+)_'}, and run `stage prepare "
            "sensitive`"
        )
        yield (
            "privacy.unit=group protects all images of a person, but data.groups is missing: "
            f"{remedy}"
        )
    if card.unit != privacy.protected:
        yield (
            f"privacy.unit={privacy.protected}, but the images were prepared for the unit "
            f"{card.unit}: {prepare_again}"
        )
    if privacy.group_cap is not None and not params.runs("count"):
        yield (
            f"privacy.group_cap={privacy.group_cap} requires the stage `count`: add count to "
            f"`run`. Persons with fewer than {privacy.group_cap} images have smaller weights, and "
            "`count` measures the sum of all weights"
        )


def label_problems(params: Params, card: Card) -> Problems:
    """Yield an error for each stage that does not support several labels per image, and one if
    `count` is off.

    If images have one label each, nothing is yielded.
    """
    if card.labels != SEVERAL:
        return
    for name in params.run:
        if not STAGES[name].several_labels:
            yield one_label_only(name)
    if not params.runs("count"):
        yield (
            "data.labels=several requires the stage `count`, which measures how many images have "
            "each label: add count to `run`"
        )


def missing_stages(params: Params) -> Problems:
    """Yield an error for each stage that is off although a stage of `run` requires it, and one if
    `synthesize` is off.
    """
    recipe = f"recipe={params.recipe!r}"
    if not params.runs("synthesize"):
        yield (
            f"{recipe}: run={list(params.run)} does not contain synthesize, so nothing would be "
            "released: add synthesize"
        )
    for name in params.run:
        stage = STAGES[name]
        settings = getattr(params, name)
        choice = getattr(settings, settings.chooser, None)
        subject = f"{name}.{settings.chooser}={choice}" if isinstance(choice, str) else name
        way_out = f"change {name}.{settings.chooser}" if settings.chooser else f"remove {name}"
        for other in stage.upstream:
            if not params.runs(other) and other not in stage.optional and settings.reads(other):
                yield (
                    f"{recipe}: {subject} requires {other}, which is switched off. Add {other} to "
                    f"run, or {way_out}. If params.yaml contains run, it replaces the recipe's "
                    "list: to use the recipe's list, remove run from params.yaml"
                )


def public_model_problems(params: Params, card: Card) -> Problems:
    """Yield problems with a public text-to-image model: it is required but not set, or it does not
    fit the images.
    """
    model = params.model
    _, height, width = card.shape
    settings = ", ".join(
        f"model.{name}" for name in PUBLIC_MODEL if getattr(model, name) and name != "directory"
    )
    if model.directory is None and settings:
        yield (
            f"model.directory is not set, but these settings require a public model: {settings}. "
            "Set model.directory, or remove these settings"
        )
    if model.directory is not None and height != width:
        yield (
            f"model.directory is set, but a public model draws only square images, not {height}×"
            f"{width} pixels: set data.size to one number"
        )
