"""Find pictures that accompany others, by their names: masks, annotations, thumbnails, overlays."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sfumato.data.names import SIDE_WORDS, SUFFIX

COMPANION = re.compile(
    r"(segmentation|segm?|mask|matte|gt|ground|(ground)?truth|label|lbl|annotation|annot?|ann|manual|contour|outline"
    r"|roi|thumb(nail)?|preview|overlay|heat|(heat)?map|(grad)?cam|saliency|attention|superpixel|pred(iction)?|bbox)s?"
)
PLAIN = re.compile(rf"image|img|photo|picture|scan|orig(inal)?|raw|rgb|{SIDE_WORDS}")

Words = tuple[str, ...]


@dataclass(frozen=True)
class Companions:
    """The number of pictures that accompany others.

    It is private. example: names of such a picture and of the one that it accompanies.
    """

    count: int
    example: tuple[str, str]


def companions_in(names: Sequence[str], folders: Sequence[str]) -> Companions | None:
    """Find pictures whose names differ from another name in the same folder by a word such as mask;
    None if there are none.

    folders: folder of each picture, in the order of `names`.
    """
    words = [name_words(name) for name in names]
    of_others = {
        (folder, without(PLAIN, own)): name
        for name, folder, own in zip(names, folders, words, strict=True)
        if not any(map(COMPANION.fullmatch, own))
    }
    pairs = []
    for name, folder, own in zip(names, folders, words, strict=True):
        found = (
            of_others[folder, key] for key in companion_keys(own) if (folder, key) in of_others
        )
        pairs += [(name, other) for other in [*found][:1]]
    if not pairs:
        return None
    return Companions(len(pairs), pairs[0])


def name_words(name: str) -> Words:
    """Split a name into words and numbers in lower case: x1_Mask.png into x, 1 and mask."""
    spaced = re.sub(r"(?<=[a-z\d])(?=[A-Z])", " ", SUFFIX.sub("", name))
    return tuple(re.findall(r"[^\W\d_]+|\d+", spaced.lower()))


def without(words: re.Pattern[str], own: Words) -> Words:
    return tuple(word for word in own if not words.fullmatch(word))


def companion_keys(own: Words) -> Iterator[Words]:
    """Yield the words that a picture's name may have if its companion's name has these: all but the
    words of COMPANION, or all before the first of them.

    A number after such a word is the number of a mask.
    """
    places = [place for place, word in enumerate(own) if COMPANION.fullmatch(word)]
    if places:
        yield without(PLAIN, without(COMPANION, own))
        yield without(PLAIN, own[: places[0]])
