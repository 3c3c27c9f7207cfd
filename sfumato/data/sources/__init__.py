"""Open a source of images by its name in SOURCES of `settings/sources.py`.

Every source yields one image at a time, converted to the requested size and channels. The
conversion of an image depends only on that image and the request.
"""

from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

from sfumato.data.images import Shape
from sfumato.data.sources.packed import unpacked
from sfumato.data.sources.source import Example, Request, Shard, Source
from sfumato.errors import ConfigError, DataError, explained, public, reading_sensitive
from sfumato.settings.data import OUTER, SEVERAL, Data, Groups, Public, is_url
from sfumato.settings.fields import both_sides
from sfumato.settings.sources import SOURCES
from sfumato.storage.documents import class_name

# Columns other than labels in `png/metadata.csv` and in the table of `Release.to_pandas`
OTHER_COLUMNS = ("file_name", "image", "kind")

__all__ = ["Example", "Source", "read_public", "read_source"]


def read_source(data: Data, raw: Path, shard: Shard | None = None) -> Source:
    """Open the sensitive source that `data` names, or a shard of it.

    This call checks the names of files and classes, and the shapes of arrays. Pictures are decoded,
    and unusable pictures are refused, only when the source is iterated. raw: folder of downloads.

    Raises ConfigError if `data` is incomplete, and DataError if files are missing or unusable.
    """
    size = None if data.size is None else both_sides(data.size)
    names = (
        "path",
        "channels",
        "groups",
        "range",
        "classes",
        "label_column",
        "compare_by",
        "skip",
        "volume",
    )
    options = {name: getattr(data, name) for name in names}
    several = data.labels == SEVERAL
    outer = data.groups is not None and data.groups.folder == OUTER
    if data.classes is None and (
        data.label_column is not None or data.source == "webdataset" or outer
    ):
        # A list collected from the labels would depend on the images.
        raise public(
            ConfigError(
                "data.classes is missing: list the classes, such as [a, b]. `stage init` lists the "
                "classes that occur"
            )
        )
    request = Request(
        section="data",
        name=data.source,
        size=size,
        pad=data.fit == "pad",
        several=several,
        **options,
    )
    return open_source(replace(request, shard=shard), raw)


def check_there(path: str | None, groups: Groups | None) -> None:
    """Raise ConfigError for a URL, and DataError if a path in the settings does not exist.

    The error is marked as `public`, so a log may show its text. No file of the owner has been
    opened yet, so the text depends only on the settings and on whether the path exists.
    """
    if is_url(path):
        raise public(
            ConfigError(
                f"data.path={path} is a URL, which these settings do not support: copy the files "
                "into a local folder. URLs are supported for tar files (data.source: webdataset) "
                "and Parquet files (data.source: imagefolder), if each picture has one label and "
                "data.groups uses column, pattern or dicom"
            )
        )
    paths = {"data.path": path}
    if groups is not None:
        paths["data.groups.csv"] = groups.csv
    for option, text in paths.items():
        if text is not None and not Path(text).expanduser().exists():
            raise public(
                DataError(f"{option}={text} does not exist: correct the path, or mount its disk")
            )


def read_public(public: Public, shape: Shape, raw: Path, seed: int) -> Source:
    """Open the training part of the source that `public` names.

    shape: requested channels, height and width, (C, H, W). Images are yielded as (H, W, C);
    seed: seed of sources that the program draws.

    Raises the errors of `read_source`.
    """
    channels, height, width = shape
    options = public.model_dump(include={"path", "per_class"})
    request = Request(
        section="public",
        name=public.source,
        size=(height, width),
        channels=channels,
        seed=seed,
        **options,
    )
    return open_source(request, raw)


def open_source(request: Request, raw: Path) -> Source:
    """Open a source.

    Raises DataError if the source has fewer than two classes.
    """
    if request.sensitive:
        check_there(request.path, request.groups)
        reading_sensitive()
        if request.path is not None and (request.shard is None or request.name != "webdataset"):
            request = replace(request, path=str(unpacked(Path(request.path).expanduser())))
    read = resolve_name(f"{__name__}.{SOURCES[request.name].reader}")
    source = replace(read(request, raw), converted=request.converted, left_out=request.left_out)
    with explained(
        DataError,
        lambda error: f"{request.section}.source={request.name}: {error}. Rename the class.",
    ):
        for name in source.classes:
            class_name(name)
            if request.several and name in OTHER_COLUMNS:
                raise ValueError(
                    f"{name!r} cannot be a label, because tables of the release have another "
                    "column with this name"
                )
    if len(source.classes) < 2:
        raise DataError(
            f"{request.section}.source={request.name} has {len(source.classes)} class(es), "
            "expected two or more: add images of another class."
        )
    refuse_shared_persons(source, request.path)
    return source


def refuse_shared_persons(source: Source, path: str | None) -> None:
    """Raise DataError if a person is both in the training part and in the hold-out of a source."""
    ids = source.groups or []
    train_size = source.size - source.held_out
    if shared := {*ids[:train_size]} & {*ids[train_size:]} - {None}:
        raise DataError(
            f"data.groups: {len(shared)} person(s) have pictures in both train and test of {path}. "
            "The guarantee does not cover the hold-out (test): move all pictures of a person into "
            "one part, or merge the two parts"
        )
