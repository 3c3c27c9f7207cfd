"""`stage recipe list|show`: list and show the available methods."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.settings.stage import RECIPES
from stages.plan import ParamsPath
from stages.screen import table_console

app = typer.Typer(
    no_args_is_help=True,
    help="List and show recipes: methods from the literature, stored as parameters in pipelines/.",
)


@app.command("list")
def list_recipes() -> None:
    """List all recipes and profiles."""
    from rich.table import Table

    from sfumato.settings.recipes import read_layer, recipe_files

    names = recipe_files(RECIPES)
    names |= {f"profile {name}": path for name, path in recipe_files(RECIPES, "profile").items()}
    table = Table("name", "description")
    for name, path in names.items():
        table.add_row(name, str(read_layer(path).get("description", "")))
    table_console().print(table)


@app.command("show")
def show_recipe(
    name: Annotated[
        str | None, typer.Argument(help="Recipe. Default: the one in params.yaml.")
    ] = None,
    params: ParamsPath = Path("params.yaml"),
) -> None:
    """Show every parameter, merged from defaults, profile, recipe and params.yaml."""
    from sfumato.settings.recipes import as_yaml, load_params

    typer.echo(as_yaml(load_params(params, RECIPES, recipe=name).model_dump(mode="json")))
