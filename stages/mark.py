"""`stage mark check`: look for the marks of a release in pictures."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import DataError, explained
from sfumato.settings.stage import ARTIFACTS
from stages.screen import tell

app = typer.Typer(no_args_is_help=True, help="Inspect the marks in pictures.")


@app.command("check")
def check_marks(
    pictures: Annotated[
        Path, typer.Argument(help="Picture, or folder of pictures of one release.")
    ],
    card: Annotated[Path, typer.Option(help="card.json of the release.")] = ARTIFACTS
    / "synthesize"
    / "card.json",
) -> None:
    """[free] Check pictures for the two marks of a release: signed metadata, and a pattern in the
    pixels. Exits with code 1 if neither is found.
    """
    from sfumato.data.sources.tabled import pictures_below
    from sfumato.release.pattern import FOUND, released_score
    from sfumato.release.signing import SIGNED_BY, signature_in
    from sfumato.storage.documents import read_json

    with explained(
        DataError,
        lambda error: (
            f"{card} is not the card of a release ({error!r}): give the release's card.json with "
            "--card"
        ),
    ):
        content = read_json(card)
        key = content.get("pattern")
        shape = tuple(content["shape"])
    files = [pictures]
    if pictures.is_dir():
        files = pictures_below(pictures)
    signatures = Counter(signature_in(file) for file in files)
    for signature, number in signatures.items():
        tell(f"signed metadata ({number} of {len(files)} pictures): {signature}")
    found = any(signature.startswith(SIGNED_BY) for signature in signatures)
    if key is None:
        tell("pattern: the pictures of this release have none")
    else:
        count, score = released_score(files, shape, key)
        words = "not found, or too few pictures"
        if score >= FOUND:
            words = "found"
        tell(
            f"pattern: {words}. {count} of {len(files)} pictures could be compared; together, "
            f"they have a score of {score:.1f}. The pattern counts as found at {FOUND} or more"
        )
        found = found or score >= FOUND
    raise typer.Exit(int(not found))
