"""Survey images with options of `stage init`, given as arguments."""

from pathlib import Path

from sfumato.data import layout
from sfumato.data import survey as surveys
from sfumato.settings.options import InitOptions


def survey(images: Path, state: Path | None = None, **options: object) -> surveys.Survey:
    return surveys.survey(InitOptions(images=images, **options), state)


def layout_of(images: Path, label: str | None = None, **options: object) -> layout.Layout:
    return layout.layout_of(InitOptions(images=images, label_column=label, **options))
