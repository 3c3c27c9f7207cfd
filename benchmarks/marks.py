"""Measure which marks survive what recipients do to pictures, and count false alarms.

    OMP_NUM_THREADS=1 python benchmarks/marks.py FOLDER [--side 128] [--marked 200]
        [--unmarked 10000]

FOLDER: pictures without marks, also in subfolders. Resized to SIDE pixels, they serve as a release.
Each of the first MARKED pictures gets three marks: signed metadata, unsigned metadata, and a
pattern in its pixels. The certificate for the signature is made for this run. Then each picture is
treated as a recipient might treat it. All marks are searched for in each picture, and the pattern
also in sets of 20 pictures. To count false alarms, the signature and the pattern are searched for
in UNMARKED pictures, one by one.
"""

import argparse
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from sfumato.data.decoding import decode
from sfumato.data.sources.tabled import pictures_below
from sfumato.release.exports import SOURCE_TYPE, mark_of
from sfumato.release.pattern import FOUND, add_pattern, pattern_key, released_score
from sfumato.release.signing import SIGNED_BY, Signing, png_signer, signature_in
from sfumato.storage.png import png_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from certificates import write_chain

SET = 20  # pictures in a set
KEY = pattern_key("marks", 0)


def saved(picture: bytes, form: str, shrink: int = 1, **options: int) -> bytes:
    """Open a picture, shrink it and save it again, as a program without support for marks does."""
    content = io.BytesIO()
    with Image.open(io.BytesIO(picture)) as opened:
        size = (opened.width // shrink, opened.height // shrink)
        opened.resize(size, Image.Resampling.LANCZOS).save(content, form, **options)
    return content.getvalue()


TREATMENTS: dict[str, Callable[[bytes], bytes]] = {
    "copied": bytes,
    "PNG saved again": lambda picture: saved(picture, "PNG"),
    "JPEG at quality 90": lambda picture: saved(picture, "JPEG", quality=90),
    "JPEG at quality 85": lambda picture: saved(picture, "JPEG", quality=85),
    "resized to half": lambda picture: saved(picture, "PNG", shrink=2),
}


def grey(path: Path, side: int) -> np.ndarray:
    """Read a picture as (side, side, 1) uint8."""
    picture = Image.fromarray(decode(path).squeeze()).convert("L")
    return np.asarray(picture.resize((side, side), Image.Resampling.LANCZOS))[..., None]


def score(files: list[Path], side: int) -> float:
    return released_score(files, (1, side, side), KEY)[1]


def survival(pictures: list[bytes], folder: Path, side: int) -> None:
    print(
        f"| treatment | signed metadata | metadata | pattern, one picture | pattern, {SET} "
        "pictures |"
    )
    print("|---|---|---|---|---|")
    for name, treat in TREATMENTS.items():
        files = []
        for number, picture in enumerate(pictures):
            files.append(folder / f"{number}.picture")
            files[-1].write_bytes(treat(picture))
        sets = [files[start : start + SET] for start in range(0, len(files), SET)]
        found = (
            np.mean([signature_in(file).startswith(SIGNED_BY) for file in files]),
            np.mean([SOURCE_TYPE.encode() in file.read_bytes() for file in files]),
            np.mean([score([file], side) >= FOUND for file in files]),
            np.mean([score(part, side) >= FOUND for part in sets]),
        )
        print(f"| {name} | {' | '.join(f'{share:.0%}' for share in found)} |", flush=True)


def false_alarms(paths: list[Path], folder: Path, side: int) -> None:
    signed = 0
    scores = []
    file = folder / "unmarked.png"
    for path in paths:
        file.write_bytes(png_bytes(grey(path, side)))
        signed += signature_in(file).startswith(SIGNED_BY)
        scores.append(score([file], side))
    alarms = sum(one >= FOUND for one in scores)
    print(
        f"{len(paths)} unmarked pictures: {signed} signed, {alarms} with the pattern; largest "
        f"score {max(scores):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--marked", type=int, default=200)
    parser.add_argument("--unmarked", type=int, default=10_000)
    options = parser.parse_args()
    paths = pictures_below(options.folder)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mark = mark_of(["finetune"])
        sign = png_signer(Signing(*write_chain(folder, "Office")), mark)
        chosen = np.stack([grey(path, options.side) for path in paths[: options.marked]])
        survival(
            [sign(png_bytes(image, mark.xmp)) for image in add_pattern(chosen, KEY)],
            folder,
            options.side,
        )
        false_alarms(paths[: options.unmarked], folder, options.side)


if __name__ == "__main__":
    main()
