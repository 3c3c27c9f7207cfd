"""`stage release check-mark`: search pictures for the pattern of a release."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import ConfigError, DataError, explained
from sfumato.settings.stage import ARTIFACTS

app = typer.Typer(no_args_is_help=True, help="Inspect released pictures.")


@app.command("check-mark")
def check_mark(
    pictures: Annotated[Path, typer.Argument(help="Picture, or folder of pictures of one release.")],
    card: Annotated[Path, typer.Option(help="card.json of the release.")] = ARTIFACTS / "synthesize" / "card.json",
) -> None:
    """Free: search pictures for the pattern of `synthesize.mark: pixels`. Exits with code 1 if it is not found."""
    import numpy as np

    from sfumato.data.sources.imagefolder import decode
    from sfumato.data.sources.tabled import pictures_below
    from sfumato.release.pattern import FOUND, pattern_score
    from sfumato.storage.documents import read_json

    with explained(DataError, lambda error: f"{card} is not the card of a release ({error!r}): name it with --card"):
        content = read_json(card)
        channels, *sides = content["shape"]
    if "pattern" not in content:
        raise ConfigError(f"{card} contains no pattern: the release was made without synthesize.mark: pixels")
    files = [pictures]
    if pictures.is_dir():
        files = pictures_below(pictures)
    images = [image for file in files if (image := decode(file)).shape == (*sides, channels)]
    if not images:
        raise DataError(f"{pictures} contains no picture of {sides[0]}×{sides[1]} pixels, the size of the release")
    score = pattern_score(np.stack(images), content["pattern"])
    words = "do not carry the pattern, or are too few to find it"
    if score >= FOUND:
        words = "carry the pattern"
    typer.echo(f"{len(images)} of {len(files)} pictures compared: together they {words} (score {score:.1f} of {FOUND})")
    raise typer.Exit(int(score < FOUND))
