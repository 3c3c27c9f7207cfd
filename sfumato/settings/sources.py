"""The sources of images. The keys of SOURCES are their names in the parameters."""

from dataclasses import dataclass

# Settings of `data` that apply only to an owner's own files
OWNERS = ("groups", "labels", "label_column", "skip", "compare_by", "volume")


@dataclass(frozen=True)
class SourceKind:
    """Properties of a source, which are known before its files are read.

    reader: "module:function" in sfumato/data/sources; the function takes a Request and the folder
    of downloads, and returns a Source;
    sections: sections of the parameters in which the source can be chosen;
    takes: the settings in OWNERS that the source supports; empty for a source that does not read an
    owner's own files.
    """

    reader: str
    sections: tuple[str, ...]
    takes: tuple[str, ...] = ()


SOURCES = {
    "digits": SourceKind("drawn:read_digits", ("data",)),
    "fashion-mnist": SourceKind("idx:read_idx_set", ("data",)),
    "mnist": SourceKind("idx:read_idx_set", ("data",)),
    "cifar10": SourceKind("cifar:read_cifar", ("data", "public")),
    "imagefolder": SourceKind("imagefolder:read_imagefolder", ("data", "public"), takes=OWNERS),
    "npz": SourceKind("npz:read_npz", ("data", "public"), takes=("groups", "labels")),
    "webdataset": SourceKind(
        "imagefolder:read_imagefolder", ("data",), takes=("groups", "label_column", "skip")
    ),
    "glyphs": SourceKind("drawn:read_drawn", ("public",)),
    "procedural": SourceKind("drawn:read_drawn", ("public",)),
    "photos": SourceKind("drawn:read_drawn", ("public",)),
    "emnist": SourceKind("idx:read_idx_set", ("public",)),
    "kmnist": SourceKind("idx:read_idx_set", ("public",)),
    "cifar100": SourceKind("cifar:read_cifar", ("public",)),
}
OF_THE_OWNER = tuple(name for name, kind in SOURCES.items() if kind.takes)


def sources_of(section: str) -> list[str]:
    """Return the sources that can be chosen in a section, "data" or "public"."""
    return [name for name, kind in SOURCES.items() if section in kind.sections]
