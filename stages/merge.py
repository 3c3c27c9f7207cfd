"""`stage merge`: several owners' noisy sums as one release, from which everything free goes on."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.settings.stages import ARTIFACTS
from stages.screen import say, tell

PEOPLE_HELP = "Your confirmation that no person is among the images of two owners; ledger, card and report quote it."


def merge(
    folders: Annotated[list[Path], typer.Argument(help="Owners' projects or copies: artifacts/, data/public if used.")],
    different_people: Annotated[bool, typer.Option("--different-people", help=PEOPLE_HELP)] = False,
    out: Annotated[Path, typer.Option(help="Folder of the merged project.")] = Path("."),
) -> None:
    """Free: add up the noisy counts and means of owners with the same settings; each owner's ε stays their own."""
    from sfumato.planning.merge import merge_projects

    queries, apart = merge_projects(folders, out, say, different_people=different_people)
    tell(f"{out / ARTIFACTS}: {', '.join(queries)} of {', '.join(apart)}; nothing was charged")
    tell(f"next: cd {out} && dvc repro")
