"""Plan a project from its folder: read its parameters, its cards, the listing of its images, and
the journal.

The functions do not change the current folder, so threads may plan several projects at once.
"""

from dataclasses import replace
from pathlib import Path

from sfumato.data.cards import (
    CARD,
    Card,
    PublicCard,
    dataset_directory,
    read_card,
    read_public_card,
)
from sfumato.data.prepare import (
    LISTING,
    conversions,
    expected_public,
    listing_of,
    prepare_sensitive,
    secret_key,
    unnamed_version,
)
from sfumato.data.rendered import DRAWN
from sfumato.data.sources import read_source
from sfumato.data.sources.packed import unpacking
from sfumato.data.tables import check_parquet
from sfumato.errors import UNREADABLE, ConfigError, DataError, passing_over, reading_sensitive
from sfumato.planning.kept import known_past
from sfumato.planning.make import ProjectPlan
from sfumato.planning.project_files import renew
from sfumato.planning.proposal import proposed_card
from sfumato.planning.resolve import make_plan
from sfumato.privacy.odometer import Odometer, Seen
from sfumato.privacy.project_ledger import seen_in_project
from sfumato.runtime.progress import Say, discard
from sfumato.settings.data import Data, is_url
from sfumato.settings.params import Params
from sfumato.settings.recipes import load_params
from sfumato.settings.sources import OF_THE_OWNER
from sfumato.settings.stage import CARD_PATH, PUBLIC, RECIPES
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import Artifact, merge_records, read_artifact

PUBLIC_CARD = PUBLIC / CARD


def resolve_project(
    folder: Path,
    state: Path,
    params: Path,
    *,
    dry_run: bool = False,
    say: Say = discard,
    see: Say | None = None,
) -> ProjectPlan:
    """Compute the plan of a project.

    Writes nothing, except that an outdated `dvc.yaml` is updated if `dry_run` is False.

    params: path of the parameters, relative to the folder;
    dry_run: allow a project with unprepared images or an outdated `dvc.yaml`;
    say: function that shows a note;
    see: function that shows a note to the owner only. With None, such notes are not shown.

    Raises ConfigError, DataError or BudgetError if the project's settings, images and charges
    contradict each other.
    """
    loaded = load_params(folder / params, folder / RECIPES)
    if not dry_run and renew(folder / "dvc.yaml"):
        raise ConfigError("dvc.yaml was outdated and has been updated: run `dvc repro` again")
    if loaded.runs("synthesize") and "parquet" in loaded.synthesize.export:
        check_parquet()  # checked before anything is spent
    # Public models are read before any sensitive file, so that logs can still show an error
    inputs = [
        release for name in loaded.run for release in STAGES[name].inherited(folder, loaded, state)
    ]
    card, prepared = card_of_plan(folder, loaded, state, dry_run, say)
    odometer = Odometer(state, card.dataset_id)
    # Raises ConfigError if budget was spent on this version of the images with other settings
    conversions(loaded.data, dataset_directory(state, card.dataset_id), odometer)
    # Only the owner may learn whether pictures changed
    if see is not None and (note := changed_pictures(folder, loaded, state)):
        see(note)
    if loaded.privacy.unit is None and loaded.data.groups is None and card.source in OF_THE_OWNER:
        say(
            "warning: privacy.unit is not set, so each image is protected separately, and the "
            "costs of several images of one person add up. If a person can have several images, "
            "set privacy.unit: group and data.groups. If not, set privacy.unit: image. Reports "
            "then state that, as you confirmed, no two images show the same person"
        )
    public_card, earlier_releases, public_prepared = public_of_plan(
        folder, loaded, card, state, dry_run, say
    )
    ready = {"prepare sensitive": prepared, "prepare public": public_prepared}
    inherited = list(merge_records([*earlier_releases, *inputs]).values())
    past = known_past(state, card, folder, declared_size=loaded.privacy.declared_size)
    seen = Seen()
    if odometer.head() is not None:
        seen = seen_in_project(card.dataset_id, folder, state)
    return ProjectPlan(
        **vars(make_plan(loaded, card, public_card, past.runs, inherited)),
        card=card,
        public=public_card,
        inherited=inherited,
        past=past,
        seen=seen,
        unprepared=frozenset(name for name, is_ready in ready.items() if not is_ready),
    )


def card_of_plan(
    folder: Path, params: Params, state: Path, dry_run: bool, say: Say
) -> tuple[Card, bool]:
    """Return the card of the sensitive images, and whether they are prepared as it describes."""
    prepared = (folder / CARD_PATH).exists()
    if prepared or not dry_run:
        card = read_card(folder / CARD_PATH)
    else:
        card = predict_card(folder, params, say)
    if not dry_run:
        return card, prepared
    unnamed = unnamed_version(dataset_directory(state, card.dataset_id))
    version = params.data.version or unnamed or card.version
    if version == card.version:
        return card, prepared
    say(
        f"the images are not prepared as version {version} yet: `dvc repro` will prepare them "
        "before it runs a query"
    )
    return replace(card, version=version), False


def public_of_plan(
    folder: Path, params: Params, card: Card, state: Path, dry_run: bool, say: Say
) -> tuple[PublicCard | None, list[Artifact], bool]:
    """Return the card of the public images (None if no stage reads them), the earlier releases from
    which they were made, and whether they are prepared as the card describes.
    """
    prepared = (folder / PUBLIC_CARD).exists()
    if not params.reads_public:
        return None, [], prepared
    public = None
    inputs = []
    if prepared or not dry_run:
        inputs = [read_artifact(folder / PUBLIC, "public")]
        public = read_public_card(folder / PUBLIC_CARD)
    if dry_run:
        prediction = predict_public_card(folder, params, card, state, public)
        if prediction is not None and prediction[0] != public:
            say("the public images of this plan are not prepared yet: `dvc repro` prepares them")
            return *prediction, False
    return public, inputs, prepared


def predict_card(folder: Path, params: Params, say: Say) -> Card:
    """Predict the card of images that are not prepared yet, by listing their files.

    Raises DataError if the images must be prepared first: their source is a published set, their
    path is a URL, or `data.size` or `data.channels` is not set.
    """
    reading_sensitive()
    data = resolve_paths(folder, params.data)
    listed = data.source in OF_THE_OWNER and data.path is not None and not is_url(data.path)
    if not listed or data.size is None or data.channels is None:
        return read_card(folder / CARD_PATH)
    with unpacking():
        source = read_source(data, folder / "data/raw")
    say("the images are not prepared yet: this plan is for the images now in the folder")
    return proposed_card(params, source.classes, source.test is not None)


def resolve_paths(folder: Path, data: Data) -> Data:
    """Return the settings with `path` and `groups.csv` relative to the current folder.

    In `data`, they are relative to the project's folder.
    """
    groups = data.groups
    if groups is not None and groups.csv is not None:
        csv = str(folder / Path(groups.csv).expanduser())
        data = data.model_copy(update={"groups": groups.model_copy(update={"csv": csv})})
    if data.path is None or is_url(data.path):
        return data
    return data.model_copy(update={"path": str(folder / Path(data.path).expanduser())})


def predict_public_card(
    folder: Path, params: Params, card: Card, state: Path, stored: PublicCard | None
) -> tuple[PublicCard, list[Artifact]] | None:
    """Predict the card that `stage prepare public` will store.

    stored: card of the public images that are stored now, or None if they are missing.

    Returns the card, and the earlier releases from which the public images were made; or None if
    the card cannot be predicted.
    """
    public = params.public
    if stored is not None and (
        stored.source != public.source or public.source not in (*DRAWN, *OF_THE_OWNER)
    ):
        return None
    if public.path is not None and not is_url(public.path):
        public = public.model_copy(update={"path": str(folder / Path(public.path).expanduser())})
    with passing_over(ConfigError, DataError, *UNREADABLE):
        return expected_public(public, card.shape, folder / "data/raw", params.seed, state)
    return None


def changed_pictures(folder: Path, params: Params, state: Path) -> str | None:
    """Return a note if the files of the sensitive images have changed since the preparation.

    DVC does not notice such changes. A change of the settings in `data` also leads to the note.
    """
    file = dataset_directory(state, params.data.name) / LISTING
    if not file.is_file() or is_url(params.data.path):  # planning must work offline
        return None
    key = secret_key(state, params.data.name)
    stored_listing = file.read_text(encoding="utf-8")
    # `prepare_images` may have been called from another folder, with absolute paths
    for data in (params.data, resolve_paths(folder.absolute(), params.data)):
        if listing_of(data, key) in (None, stored_listing):
            return None
    return (
        "note: the files of the sensitive images have changed since they were prepared. The "
        "release does not change until data.version in params.yaml gets a new value; every query "
        "then spends again"
    )


def prepare_images(folder: Path, state: Path) -> None:
    data = load_params(folder / "params.yaml", folder / RECIPES).data
    with unpacking():
        prepare_sensitive(
            resolve_paths(folder, data), state, folder / CARD_PATH, folder / "data/raw"
        )
