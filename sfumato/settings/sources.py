"""Where images may come from: one entry of SOURCES each, by its name in the parameters."""

from dataclasses import dataclass

DATA_ONLY = ("data",)
PUBLIC_ONLY = ("public",)
EITHER = ("data", "public")
OWNERS = ("groups", "labels", "label_column", "skip", "compare_by")  # settings of `data` for an owner's own files


@dataclass(frozen=True)
class SourceKind:
    """What is known of a source before its files are.

    reader: "module:function" in sfumato/data/sources, from a Request and the folder of downloads to a Source; sections:
    those that may name it; takes: which of OWNERS it knows, none for a set that others have too.
    """

    reader: str
    sections: tuple[str, ...]
    takes: tuple[str, ...] = ()


SOURCES = {
    "digits": SourceKind("drawn:read_digits", DATA_ONLY),
    "fashion-mnist": SourceKind("idx:read_idx_set", DATA_ONLY),
    "mnist": SourceKind("idx:read_idx_set", DATA_ONLY),
    "cifar10": SourceKind("cifar:read_cifar", EITHER),
    "imagefolder": SourceKind("imagefolder:read_imagefolder", EITHER, takes=OWNERS),
    "npz": SourceKind("npz:read_npz", EITHER, takes=("groups", "labels")),
    "webdataset": SourceKind("imagefolder:read_imagefolder", DATA_ONLY, takes=("groups", "label_column", "skip")),
    "glyphs": SourceKind("drawn:read_drawn", PUBLIC_ONLY),
    "procedural": SourceKind("drawn:read_drawn", PUBLIC_ONLY),
    "photos": SourceKind("drawn:read_drawn", PUBLIC_ONLY),
    "emnist": SourceKind("idx:read_idx_set", PUBLIC_ONLY),
    "kmnist": SourceKind("idx:read_idx_set", PUBLIC_ONLY),
    "cifar100": SourceKind("cifar:read_cifar", PUBLIC_ONLY),
}
OF_THE_OWNER = tuple(name for name, kind in SOURCES.items() if kind.takes)


def names_in(section: str) -> list[str]:
    """The sources that may be named in a section, "data" or "public"."""
    return [name for name, kind in SOURCES.items() if section in kind.sections]
