"""`stage recipe list|show`: the methods at hand."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sfumato.errors import ConfigError
from sfumato.settings.recipes import as_yaml, load_params, read_yaml, recipes_at
from stages.plan import RECIPES, ParamsPath, RecipesPath
from stages.screen import table_console

app = typer.Typer(no_args_is_help=True, help="The recipes: methods of the literature as overlays in pipelines/.")


@app.command("list")
def list_recipes(recipes: RecipesPath = RECIPES) -> None:
    """Every recipe and profile, a line each."""
    folder = recipes_at(recipes)
    names = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    names |= {f"profile {path.stem}": path for path in sorted((folder / "profiles").glob("*.yaml"))}
    if not names:
        raise ConfigError(f"{folder} holds no recipes: name the folder `pipelines` of your clone with --recipes")
    table = Table("name", "what it is")
    for name, path in names.items():
        table.add_row(name, str(read_yaml(path).get("description", "")))
    table_console().print(table)


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="A recipe. Default: that of params.yaml.")] = None,
    params: ParamsPath = Path("params.yaml"),
    recipes: RecipesPath = RECIPES,
) -> None:
    """Every parameter, after defaults, profile, recipe and params.yaml."""
    typer.echo(as_yaml(load_params(params, recipes, recipe=name).model_dump(mode="json")))
