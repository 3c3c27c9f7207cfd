"""`stage forget` and `stage du`: delete, or list, the private files of a dataset."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import ConfigError
from sfumato.settings.stage import CARD_PATH
from stages.dvc_lock import drop_stage
from stages.screen import tell
from stages.state import EVALUATION, dataset_of_project, state_dir


def forget(
    dataset: Annotated[str | None, typer.Option(help="Dataset id. Default: the project's.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """[local] Delete a dataset's real images, and numbers measured on them, from $SFUMATO_STATE and
    from this project.

    The journal of charges is kept.
    """
    from sfumato.data.sources.packed import remove_unpacked
    from sfumato.planning import forget as library

    state = state_dir()
    remove_unpacked(state)
    mine = dataset_of_project()
    name = dataset or mine
    known = library.datasets(state)
    others = f"Known datasets: {', '.join(known) or 'none'}"
    if name is None:
        raise ConfigError(
            f"this folder contains no project: choose a dataset in {state} with --dataset. {others}"
        )
    here = local_files() if name == mine else []
    if name not in known and not here:
        raise ConfigError(
            f"dataset {name!r} has no files here or in {state}: correct --dataset, or set "
            f"SFUMATO_STATE to the state directory that contains them. {others}"
        )
    kept = library.private_files(state, name) | {"in this project": here}
    any_files = any(paths for kind, paths in kept.items() if kind != library.OF_ANY)
    if any_files:
        show_kinds(name, kept)
        tell(
            Path(library.__file__)
            .with_suffix(".md")
            .read_text("utf-8")
            .format(state=state, name=name)
        )
        if not yes:
            typer.confirm("Delete the files listed above?", abort=True, err=True)
    if here:
        drop_stage("evaluate")  # DVC does not track its results
    if name not in known:
        library.delete(here)
        return tell(
            f"deleted the files in this project. {state} has no files of dataset {name!r}. If its "
            "images are in another state directory, set SFUMATO_STATE to that directory, and run "
            "`stage forget` again"
        )
    problem = None
    if any_files or library.forgotten_on(state, name) is None:
        problem = library.forget_dataset(state, name, here)
    if problem is not None:
        tell(
            f"no files of dataset {name!r} are left. Its journal is invalid and was not changed: "
            f"{problem}"
        )
    elif any_files:
        tell(f"dataset {name!r} is forgotten, and its journal records this")
    else:
        tell(
            f"no files of dataset {name!r} are left: it was forgotten on "
            f"{library.forgotten_on(state, name)}"
        )


def du() -> None:
    """[local] List the private files of each dataset, and the sizes of the state directory and of
    this project.
    """
    from sfumato.planning.forget import datasets, private_files

    for name in datasets(state_dir()):
        show_kinds(name, private_files(state_dir(), name))
    show_kinds(
        "total",
        {
            "state directory": [state_dir()],
            "this project": [Path()],
            "its local files": local_files(),
        },
    )


def local_files() -> list[Path]:
    """Return the files made from sensitive images, in this project and in its DVC experiments.

    DVC's cache contains no such files.
    """
    # Killed evaluations leave files that match the last pattern
    numbers = (str(EVALUATION), "metrics.json", ".metrics.json.*.tmp")
    tried = [path for name in numbers for path in Path(".dvc/tmp/exps").rglob(name)]
    found = [path for name in numbers for path in Path().glob(name)]
    return [*found, *tried, *filter(Path.exists, [CARD_PATH.parent])]


def show_kinds(title: str, kinds: Mapping[str, Sequence[Path]]) -> None:
    """Print one line per kind of files.

    Sizes are shown on a terminal only, because they reveal the number of images. Two files list the
    broken pictures that were left out of a set. The names of these two files are also shown on a
    terminal only.
    """
    from sfumato.data.left_out import LEFT_OUT, LEFT_OUT_FILES

    terminal = sys.stdout.isatty()
    unnamed = () if terminal else (LEFT_OUT, LEFT_OUT_FILES)
    tell(f"{title}:")
    for what, paths in kinds.items():
        every = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
        size = ""
        if terminal:
            size = f"{sum(file.stat().st_size for file in every) / 1e6:12,.1f} MB"
        place = Path(os.path.commonpath(paths or [Path("none")]))
        named = [path for path in paths if path != place and path.name not in unnamed]
        names = sorted(str(path.relative_to(place)) for path in named)
        if len(names) > 4:
            names[4:] = [f"{len(names) - 4} more"]
        tell(f"  {what:<32}{size}  {place}{': ' * bool(names)}{', '.join(names)}")
