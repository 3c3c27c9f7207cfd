"""Where images may come from: one entry of SOURCES each, by its name in the parameters."""

from dataclasses import dataclass

SENSITIVE = ("data",)
PUBLIC = ("public",)
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
    "digits": SourceKind("drawn:read_digits", SENSITIVE),
    "fashion-mnist": SourceKind("idx:read_idx_set", SENSITIVE),
    "mnist": SourceKind("idx:read_idx_set", SENSITIVE),
    "cifar10": SourceKind("cifar:read_cifar", SENSITIVE + PUBLIC),
    "imagefolder": SourceKind("imagefolder:read_imagefolder", SENSITIVE + PUBLIC, takes=OWNERS),
    "npz": SourceKind("npz:read_npz", SENSITIVE + PUBLIC, takes=("groups", "labels")),
    "webdataset": SourceKind("imagefolder:read_imagefolder", SENSITIVE, takes=("groups", "label_column", "skip")),
    "glyphs": SourceKind("drawn:read_drawn", PUBLIC),
    "procedural": SourceKind("drawn:read_drawn", PUBLIC),
    "photos": SourceKind("drawn:read_drawn", PUBLIC),
    "emnist": SourceKind("idx:read_idx_set", PUBLIC),
    "kmnist": SourceKind("idx:read_idx_set", PUBLIC),
    "cifar100": SourceKind("cifar:read_cifar", PUBLIC),
    "imagenet32": SourceKind("npz:read_imagenet32", PUBLIC),
}
OF_THE_OWNER = tuple(name for name, kind in SOURCES.items() if kind.takes)


def names_in(section: str) -> list[str]:
    """The sources that may be named in a section, "data" or "public"."""
    return [name for name, kind in SOURCES.items() if section in kind.sections]
