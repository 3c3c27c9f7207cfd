"""`stage brief`: write the request for permission to spend ε."""

from pathlib import Path
from typing import Annotated

import typer

from stages.screen import say, tell
from stages.state import state_dir

OutOption = Annotated[Path, typer.Option(help="Folder for `brief.html` and `brief.md`.")]


def brief(out: OutOption = Path("brief")) -> None:
    """[free] Write the page for those who decide whether to permit the release. It states the
    request, its privacy cost, and what is not protected.
    """
    from sfumato.planning.brief import PAGE, write_brief
    from sfumato.planning.folder import resolve_project

    unanswered = write_brief(
        resolve_project(Path(), state_dir(), Path("params.yaml"), dry_run=True, say=say), out
    )
    if unanswered:
        say(f"the page lacks some answers: set {', '.join(unanswered)} in params.yaml")
    tell(
        f"{out / PAGE}: before the first run, everyone who must permit the release signs this page"
    )
