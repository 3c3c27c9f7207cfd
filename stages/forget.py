"""`stage forget` and `stage du`: what is kept of the sensitive images, how much it is, and its end."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sfumato.settings.stages import CARD_PATH
from stages.screen import tell
from stages.state import EVALUATION, state_dir


def forget(
    dataset: Annotated[str | None, typer.Option(help="Dataset id. Default: that of the data card.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Local: delete what is kept of a dataset's real images, below $SFUMATO_STATE and here. The journal stays."""
    from sfumato.data.store import read_card
    from sfumato.planning import forget as library

    state = state_dir()
    mine = read_card(CARD_PATH).dataset_id if CARD_PATH.exists() or dataset is None else ""
    name = dataset or mine
    here = [path for path in local_files() if name == mine]
    show(name, library.private_files(state, name) | {"of this project": here})
    tell(Path(library.__file__).with_suffix(".md").read_text("utf-8").format(state=state, name=name))
    if not yes:
        typer.confirm("Delete what is listed?", abort=True, err=True)
    library.forget(state, name, here)
    tell(f"dataset {name!r} is forgotten, and its journal says so")


def du() -> None:
    """Local: what is kept of each dataset, what this project and the state directory hold, and how much it is."""
    from sfumato.planning.forget import private_files

    for file in sorted((state_dir() / "odometer").glob("*.jsonl")):
        show(file.stem, private_files(state_dir(), file.stem))
    show("in all", {"state directory": [state_dir()], "this project": [Path()], "its real images": local_files()})


def local_files() -> list[Path]:
    """What this project holds of its sensitive images, also where DVC tries experiments. DVC's cache holds none."""
    numbers = (str(EVALUATION), "metrics.json")
    tried = [path for name in numbers for path in Path(".dvc/tmp/exps").rglob(name)]
    return [path for path in (*map(Path, numbers), *tried, CARD_PATH.parent) if path.exists()]


def show(title: str, kinds: Mapping[str, Sequence[Path]]) -> None:
    """A line for each kind of files. Sizes tell how many images there are, so only a terminal shows them."""
    tell(f"{title}:")
    for what, paths in kinds.items():
        every = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
        size = f"{sum(file.stat().st_size for file in every) / 1e6:12,.1f} MB" if sys.stdout.isatty() else ""
        place = Path(os.path.commonpath(paths or [Path("none")]))
        names = sorted(str(path.relative_to(place)) for path in paths if path != place)
        if len(names) > 4:
            names[4:] = [f"{len(names) - 4} more"]
        tell(f"  {what:<32}{size}  {place}{': ' * bool(names)}{', '.join(names)}")
