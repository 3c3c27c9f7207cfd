"""`stage merge`: combine the noisy sums of several owners into one release."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.settings.stage import ARTIFACTS
from stages.screen import say, tell

PEOPLE_HELP = (
    "Confirm that no person is among the images of two owners. Ledger, card and report state this."
)


def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Projects of the owners, or copies of their artifacts/ (and data/public)."
        ),
    ],
    different_people: Annotated[bool, typer.Option("--different-people", help=PEOPLE_HELP)] = False,
    out: Annotated[Path, typer.Option(help="Folder of the merged project.")] = Path("."),
) -> None:
    """Free: add up the noisy counts and means of owners with the same settings.

    Each owner keeps their own ε.
    """
    from sfumato.planning.merge import merge_projects

    queries, owners = merge_projects(folders, out, say, different_people=different_people)
    tell(
        f"{out / ARTIFACTS}: merged {', '.join(queries)} of {', '.join(owners)}; "
        "nothing was charged"
    )
    tell(f"next: cd {out} && stage run")
