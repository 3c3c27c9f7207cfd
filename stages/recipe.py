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
    table, recipes = Table("name", "what it is"), recipes_at(recipes)
    found = [*sorted(recipes.glob("*.yaml")), *sorted((recipes / "profiles").glob("*.yaml"))]
    if not found:
        raise ConfigError(f"{recipes} holds no recipes: name the folder `pipelines` of your clone with --recipes")
    for path in found:
        content = read_yaml(path)
        kind = "profile " if path.parent.name == "profiles" else ""
        table.add_row(kind + path.stem, str(content.get("description", "")))
    table_console().print(table)


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="A recipe. Default: that of params.yaml.")] = None,
    params: ParamsPath = Path("params.yaml"),
    recipes: RecipesPath = RECIPES,
) -> None:
    """Every parameter, after defaults, profile, recipe and params.yaml."""
    typer.echo(as_yaml(load_params(params, recipes, recipe=name).model_dump(mode="json")))
