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
    """The number of pictures that accompany others. Private.

    count: number of pictures such as masks that accompany another picture;
    example: name of one of them, and name of the picture that it accompanies.
    """

    count: int
    example: tuple[str, str]


def companions_in(names: Sequence[str], folders: Sequence[str]) -> Companions | None:
    """Find pictures whose names equal another name in the same folder, apart from a word such as
    mask. Returns None if there are none.

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
    """Yield the words that the name of the accompanied picture may have.

    own: words in the name of the companion, such as a mask. The words of the other name are all of
    these except the words of COMPANION, or only those before the first word of COMPANION, because a
    number after it may count masks.
    """
    places = [place for place, word in enumerate(own) if COMPANION.fullmatch(word)]
    if places:
        yield without(PLAIN, without(COMPANION, own))
        yield without(PLAIN, own[: places[0]])
