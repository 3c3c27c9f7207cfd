"""Find pictures that accompany other pictures, such as masks and thumbnails, by their names."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sfumato.data.names import SIDE_WORDS, SUFFIX

COMPANION = re.compile(
    r"(segmentation|segm?|mask|matte|gt|ground|(ground)?truth|label|lbl|annotation|annot?|ann"
    r"|manual|contour|outline|roi|thumb(nail)?|preview|overlay|heat|(heat)?map|(grad)?cam"
    r"|saliency|attention|superpixel|pred(iction)?|bbox)s?"
)
PLAIN = re.compile(rf"image|img|photo|picture|scan|orig(inal)?|raw|rgb|{SIDE_WORDS}")

Words = tuple[str, ...]


@dataclass(frozen=True)
class Companions:
    """The pictures of a set that accompany other pictures, such as masks. Private.

    count: number of the accompanying pictures;
    example: name of an accompanying picture, and name of the picture that it accompanies.
    """

    count: int
    example: tuple[str, str]


def companions_in(names: Sequence[str], folders: Sequence[str]) -> Companions | None:
    """Find pictures such as masks by their names. Returns None if there are none.

    A picture accompanies another picture of its folder if the two names are equal apart from a word
    such as mask. folders: folder of each picture, in the order of `names`.
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
    """Yield the two sequences of words that the name of the accompanied picture may have.

    own: words in the name of a mask or another companion. The first sequence has all of these words
    except the words of COMPANION. The second sequence has only the words before the first word of
    COMPANION, because a number after that word may count masks. Both leave out the words of PLAIN,
    such as image.
    """
    places = [place for place, word in enumerate(own) if COMPANION.fullmatch(word)]
    if places:
        yield without(PLAIN, without(COMPANION, own))
        yield without(PLAIN, own[: places[0]])
