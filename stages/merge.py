"""`stage merge`: combine the noisy sums of several owners into one release."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.settings.stage import ARTIFACTS
from sfumato.storage.documents import quoted
from stages.screen import say, tell

PEOPLE_HELP = (
    "Confirm that no person has images in the sets of two owners. Ledger, card and report quote "
    "this confirmation."
)


def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Project folders of the owners, or folders with copies of the projects' "
            "artifacts/ and, if it exists, data/public/."
        ),
    ],
    different_people: Annotated[bool, typer.Option("--different-people", help=PEOPLE_HELP)] = False,
    out: Annotated[Path, typer.Option(help="Folder of the merged project.")] = Path("."),
) -> None:
    """[free] Add up the noisy counts and means of several owners whose settings are the same.

    Each owner's ε stays the same.
    """
    from sfumato.planning.merge import merge_projects

    queries, owners = merge_projects(folders, out, say, different_people=different_people)
    tell(
        f"{out / ARTIFACTS}: merged the releases of {', '.join(queries)} from the datasets "
        f"{', '.join(owners)}; nothing was charged"
    )
    tell(f"next: cd {quoted(out)} && stage run")
