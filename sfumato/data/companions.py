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
    word_lists = [name_words(name) for name in names]
    candidates = {
        (folder, without(PLAIN, words)): name
        for name, folder, words in zip(names, folders, word_lists, strict=True)
        if not any(map(COMPANION.fullmatch, words))
    }
    pairs = []
    for name, folder, words in zip(names, folders, word_lists, strict=True):
        matches = (
            candidates[folder, key] for key in companion_keys(words) if (folder, key) in candidates
        )
        pairs += [(name, match) for match in [*matches][:1]]
    if not pairs:
        return None
    return Companions(len(pairs), pairs[0])


def name_words(name: str) -> Words:
    """Split a name into words and numbers in lower case: x1_Mask.png into x, 1 and mask."""
    spaced = re.sub(r"(?<=[a-z\d])(?=[A-Z])", " ", SUFFIX.sub("", name))
    return tuple(re.findall(r"[^\W\d_]+|\d+", spaced.lower()))


def without(pattern: re.Pattern[str], words: Words) -> Words:
    return tuple(word for word in words if not pattern.fullmatch(word))


def companion_keys(words: Words) -> Iterator[Words]:
    """Yield the two sequences of words that the name of the accompanied picture may have.

    words: words in the name of a mask or another companion. The first sequence has all of these
    words except the words of COMPANION. The second sequence has only the words before the first
    word of COMPANION, because a number after that word may count masks. Both leave out the words of
    PLAIN, such as image.
    """
    positions = [position for position, word in enumerate(words) if COMPANION.fullmatch(word)]
    if positions:
        yield without(PLAIN, without(COMPANION, words))
        yield without(PLAIN, words[: positions[0]])
