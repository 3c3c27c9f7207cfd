"""`stage prepare`: take images from their source into the private state directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stages.common import CARD, CardPath, state_dir
from stages.plan import Params, Recipes

app = typer.Typer(no_args_is_help=True, help="Take images from their source; the sensitive ones never enter the repository.")


@app.command()
def sensitive(
    params: Params = Path("params.yaml"),
    recipes: Recipes = Path("pipelines"),
    card: CardPath = CARD,
    raw: Annotated[Path, typer.Option("--raw", help="Where downloads are looked for and kept.")] = Path("data/raw"),
) -> None:
    """Local: store sensitive and hold-out images under $SFUMATO_STATE, and write the public card."""
    from sfumato.plan import load_params
    from sfumato.prepare import prepare_sensitive

    data = load_params(params, recipes).data
    content = prepare_sensitive(data, state_dir(), card, raw)
    typer.echo(f"{card}: dataset {content['dataset_id']!r}, shape {content['shape']}, {len(content['classes'])} classes, {content['split']} hold-out")


@app.callback()
def prepare() -> None:
    """Keeps `sensitive` a subcommand while it is the only one."""
