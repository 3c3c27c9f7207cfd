"""`stage prepare`: copy images from their source.

Sensitive images go into the private state directory, public ones into a public folder.
"""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sfumato.settings.stage import CARD_PATH, PUBLIC, RECIPES
from sfumato.storage.in_use import use_until_the_end
from stages import launch
from stages.flags import CardPath
from stages.plan import ParamsPath
from stages.screen import named, tell
from stages.state import state_dir

RAW = Path("data/raw")  # folder of downloads
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of processes that convert shards. A shard is a tar file, a Parquet file, or a "
        "part of a large folder. Each process uses one thread. Sets without shards, such as "
        "slices of volumes and images with several labels, are always converted in one process. "
        "Without this option, one process uses several threads.",
    ),
]

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare images from their source. Sensitive images never enter the repository.",
)


@app.command()
def sensitive(
    params: ParamsPath = Path("params.yaml"), card: CardPath = CARD_PATH, workers: Workers = None
) -> None:
    """[local] Store the sensitive images and the hold-out images under $SFUMATO_STATE, and write
    their public card.
    """
    from sfumato.data.prepare import prepare_sensitive
    from sfumato.data.shards import help_first, shards_in
    from sfumato.runtime import distributed
    from sfumato.settings.recipes import load_params

    data = load_params(params, RECIPES).data
    # Mark the dataset before any sensitive file is opened. Once one is open, a failure may write
    # its reason to a private file. Without the mark, a `stage forget` that runs at the same time
    # could miss that file
    use_until_the_end(state_dir(), data.name)
    if launch.is_configured() and not distributed.launched() and shards_in(data):
        # `shards_in` has opened sensitive files, so the output of this process already goes to a
        # private file. The new processes get the original streams
        raise SystemExit(launch.again(**named))
    if distributed.launched():
        os.environ["SFUMATO_DEVICE"] = "cpu"  # pictures are decoded without GPUs
    distributed.join()
    if not distributed.is_main():
        help_first(data)
        return distributed.leave_group()
    try:
        content = prepare_sensitive(data, state_dir(), card, RAW, workers)
    finally:
        distributed.broadcast_object(None)  # ends `help_first`
        distributed.leave_group()
    if different := {*(data.classes or content["classes"])} ^ {*content["classes"]}:
        tell(
            "note: the files define the classes themselves, so data.classes is not used. Names in "
            f"the files only, or in data.classes only: {', '.join(sorted(different))}"
        )
    holdout = "from the test split of the source"
    if content["split"] == "keyed":
        holdout = "chosen at random"
    shape = f"shape {list(content['shape'])}, {len(content['classes'])} classes, hold-out {holdout}"
    tell(f"{card}: dataset {content['dataset_id']!r}, {shape}")


@app.command("public")
def public_set(
    params: ParamsPath = Path("params.yaml"),
    card: CardPath = CARD_PATH,
    out: Annotated[Path, typer.Option(help="Directory to write.")] = PUBLIC,
) -> None:
    """[free] Store labelled public images in the shape of the sensitive images, or no images if no
    stage reads public ones.
    """
    from sfumato.data.cards import read_card, write_no_public
    from sfumato.settings.recipes import load_params

    loaded = load_params(params, RECIPES)
    sensitive_card = read_card(card)
    if not loaded.reads_public:
        write_no_public(out)
        return tell(f"no stage reads public images, so {out} contains none")
    from sfumato.data.prepare import prepare_public, refuse_sensitive_as_public
    from sfumato.privacy.authorize import open_local

    refuse_sensitive_as_public(loaded.data, loaded.public)
    state = state_dir()
    private = partial(open_local, state, sensitive_card, "overlap check")
    content = prepare_public(
        loaded.public, sensitive_card.shape, out, RAW, loaded.seed, private=private, state=state
    )
    shape = f"shape {list(content['shape'])}, {len(content['classes'])} classes"
    tell(f"{out}: {content['images']} images from the source {content['source']!r}, {shape}")
