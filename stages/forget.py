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
    own_dataset = dataset_of_project()
    name = dataset or own_dataset
    known_datasets = library.datasets(state)
    hint = f"Known datasets: {', '.join(known_datasets) or 'none'}"
    if name is None:
        raise ConfigError(
            f"this folder contains no project: choose a dataset in {state} with --dataset. {hint}"
        )
    project_files = local_files() if name == own_dataset else []
    if name not in known_datasets and not project_files:
        raise ConfigError(
            f"dataset {name!r} has no files here or in {state}: correct --dataset, or set "
            f"SFUMATO_STATE to the state directory that contains them. {hint}"
        )
    files_by_kind = library.private_files(state, name) | {"in this project": project_files}
    any_files = any(paths for kind, paths in files_by_kind.items() if kind != library.OF_ANY)
    if any_files:
        show_kinds(name, files_by_kind)
        tell(
            Path(library.__file__)
            .with_suffix(".md")
            .read_text("utf-8")
            .format(state=state, name=name)
        )
        if not yes:
            typer.confirm("Delete the files listed above?", abort=True, err=True)
    if project_files:
        drop_stage("evaluate")  # DVC tracks no results of `evaluate`, so it would skip the stage
    if name not in known_datasets:
        library.delete(project_files)
        return tell(
            f"deleted the files in this project. {state} has no files of dataset {name!r}. If its "
            "images are in another state directory, set SFUMATO_STATE to that directory, and run "
            "`stage forget` again"
        )
    problem = None
    if any_files or library.forgotten_on(state, name) is None:
        problem = library.forget_dataset(state, name, project_files)
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
    experiment_files = [path for name in numbers for path in Path(".dvc/tmp/exps").rglob(name)]
    results = [path for name in numbers for path in Path().glob(name)]
    return [*results, *experiment_files, *filter(Path.exists, [CARD_PATH.parent])]


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
    for kind, paths in kinds.items():
        files = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
        size = ""
        if terminal:
            size = f"{sum(file.stat().st_size for file in files) / 1e6:12,.1f} MB"
        folder = Path(os.path.commonpath(paths or [Path("none")]))
        named_paths = [path for path in paths if path != folder and path.name not in unnamed]
        names = sorted(str(path.relative_to(folder)) for path in named_paths)
        if len(names) > 4:
            names[4:] = [f"{len(names) - 4} more"]
        tell(f"  {kind:<32}{size}  {folder}{': ' * bool(names)}{', '.join(names)}")
