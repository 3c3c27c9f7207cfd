"""`stage brief`: the request for permission, before ε is spent."""

from pathlib import Path
from typing import Annotated

import typer

from stages.screen import say, tell
from stages.state import state_dir

OutOption = Annotated[Path, typer.Option(help="Folder for `brief.html` and `brief.md`.")]


def brief(out: OutOption = Path("brief")) -> None:
    """Free: one page for those who permit the release: what is asked, what it costs, what stays unprotected."""
    from sfumato.planning.brief import PAGE, write_brief
    from sfumato.planning.folder import resolve_project

    unanswered = write_brief(resolve_project(Path(), state_dir(), Path("params.yaml"), dry_run=True, say=say), out)
    if unanswered:
        say(f"not answered yet, in params.yaml: {', '.join(unanswered)}")
    tell(f"{out / PAGE}: for those who permit the release; to be signed before `dvc repro`")
