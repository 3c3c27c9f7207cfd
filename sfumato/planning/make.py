"""Plan a project: resolve every parameter, calibrate the noise, and list what the next run would spend.

All paths are relative to the project's folder, so threads may plan several projects at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sfumato.data.cards import Card, PublicCard, dataset_directory, read_card, read_public_card
from sfumato.data.lineage import lineage
from sfumato.data.prepare import LISTING, listing_of, prepare_sensitive, secret_key, unnamed_version
from sfumato.data.sources.imagefolder import list_folder
from sfumato.data.sources.packed import unpacking
from sfumato.data.sources.splits import split_of
from sfumato.data.tables import check_parquet
from sfumato.dpsgd.run import step_noise
from sfumato.dpsgd.trainable import trained_parameters
from sfumato.errors import ConfigError, reading_sensitive
from sfumato.planning.kept import Past, Plan, known_past, spending_of, stages_before
from sfumato.planning.project_files import Say, renew, unsaid
from sfumato.planning.proposal import proposed_card
from sfumato.planning.resolve import make_plan, plan_texts, policy_of, warnings_of
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.authorize import check_known, check_lifetime
from sfumato.privacy.decision import Decision
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.profile import best_guess, noise_for_guess, percent_up
from sfumato.privacy.project_ledger import seen_in_project
from sfumato.release.synthesizer import outline
from sfumato.settings.data import GROUP, OF_THE_OWNER, SEVERAL
from sfumato.settings.dpsgd import SALIENT
from sfumato.settings.fields import REST
from sfumato.settings.params import Params
from sfumato.settings.privacy import UNLIMITED
from sfumato.settings.recipes import load_params
from sfumato.settings.stages import CARD_PATH, PLAN, PUBLIC, QUERIES, RECIPES, STAGES
from sfumato.storage.artifacts import Artifact, merge_records, read_artifact
from sfumato.storage.files import make_folder, replace_file
from sfumato.text_to_image.directory import HUB, choose_image_size, locate, read_model_directory, require_library


@dataclass(frozen=True, kw_only=True)
class ProjectPlan(Plan):
    """The plan of a project, before it is written.

    card: card of the images as they are, or will be, prepared;
    public: card of the public images, if a stage reads them;
    inherited: records of the public images and of a public model;
    past: earlier charges;
    unprepared: commands that must prepare images first.
    """

    card: Card
    public: PublicCard | None
    inherited: Sequence[dict]
    past: Past
    unprepared: frozenset[str]

    @property
    def odometer(self) -> Odometer:
        return Odometer(self.past.state, self.card.dataset_id)

    def remarks(self) -> Iterator[str]:
        """Yield what the budget includes from earlier releases, and what weakens the guarantee."""
        if self.inherited:
            ids = ", ".join(sorted({record["dataset_id"] for record in self.inherited}))
            number = len(self.inherited)
            charges = "1 charge" if number == 1 else f"{number} charges"
            yield f"the budget includes {charges} of an earlier release, which public inputs come from (datasets {ids})"
        for warning in warnings_of(self.params, self.budget["delta"], len(self.card.classes)):
            yield f"warning: {warning}"

    def spending(self) -> tuple[list[Decision], set[str]]:
        """Decide on each query, and which stages will run. Raises BudgetError if the journal lacks charges."""
        if self.odometer.head() is not None:
            bounded = self.params.privacy.lifetime != UNLIMITED
            seen = seen_in_project(self.card.dataset_id, self.past.folder, self.past.state)
            check_known(self.odometer, self.card, seen, bounded)
        return spending_of(self, self.past, self.past.folder / PLAN)

    def seconds(self) -> dict[str, float | None]:
        from sfumato.planning import estimate  # slow to import: only where minutes are shown

        many = self.public.images if self.public else 0
        classes = len(self.card.classes)
        return estimate.expected_seconds(self.params, self.card.shape, classes, self.past.state, many)

    def check_lifetime(self, spending: Sequence[Decision]) -> None:
        """Raise BudgetError before the first query if a run would exceed the lifetime budget at a later one."""
        coming = {entry.stage: self.mechanisms[entry.stage] for entry in spending if entry.pays}
        if coming:
            check_lifetime(self.odometer, coming, policy_of(self), self.params.privacy.protected)

    def write(self) -> None:
        write_texts(self.past.folder / PLAN, plan_texts(self, self.past.folder / PLAN))


def resolve_project(
    folder: Path, state: Path, params: Path, *, dry_run: bool = False, say: Say = unsaid, see: Say | None = None
) -> ProjectPlan:
    """Compute the plan of a project. Writes nothing.

    params: path of the parameters, relative to the folder;
    dry_run: allow images that are not prepared;
    say: function that shows a note;
    see: function that shows a note to the owner only, or None.

    Raises ConfigError, DataError or BudgetError if the project's settings, images and charges do not match.
    """
    if not dry_run and renew(folder / "dvc.yaml"):
        raise ConfigError("dvc.yaml was written by an older version and has been updated: run `dvc repro` again")
    loaded = load_params(folder / params, folder / RECIPES)
    if loaded.runs("synthesize") and "parquet" in loaded.synthesize.export:
        check_parquet()  # checked before anything is spent
    prepared = (folder / CARD_PATH).exists()
    card = read_card(folder / CARD_PATH) if prepared or not dry_run else unprepared(folder, loaded, say)
    version = card.version
    if dry_run:
        version = loaded.data.version or unnamed_version(dataset_directory(state, card.dataset_id)) or version
    if version != card.version:
        say(f"the images are not yet prepared as version {version}: `dvc repro` prepares them first")
        card = replace(card, version=version)
        prepared = False
    if see is not None and (note := changed_pictures(loaded, state)):  # whether pictures changed is private
        see(note)
    if loaded.privacy.unit is None and loaded.data.groups is None and card.source in OF_THE_OWNER:
        say(
            "warning: privacy.unit is not set, so each image is protected separately, and the costs of several images "
            "of one person add up. If a person can have several, set privacy.unit: group and data.groups. If not, set "
            "privacy.unit: image, which reports quote as your confirmation"
        )
    public = folder / PUBLIC
    public_card = None
    inputs = []
    if loaded.reads_public and (public.exists() or not dry_run):
        inputs.append(read_artifact(public, "public"))
        public_card = read_public_card(public / "card.json")
    if loaded.model.directory is not None:
        inputs += lineage_of_model(folder, loaded, state)
    inherited = list(merge_records(inputs).values())
    past = known_past(state, card, folder, declared_size=loaded.privacy.declared_size)
    ready = {"prepare sensitive": prepared, "prepare public": (public / "card.json").exists()}
    return ProjectPlan(
        **vars(make_plan(loaded, card, public_card, past.runs, inherited)),
        card=card,
        public=public_card,
        inherited=inherited,
        past=past,
        unprepared=frozenset(name for name, there in ready.items() if not there),
    )


def lineage_of_model(folder: Path, params: Params, state: Path) -> list[Artifact]:
    """Return the releases that the public model was made from. Raises ConfigError if the model cannot be used."""
    model = params.model
    place = str(model.directory)
    require_library()
    if not place.startswith(HUB):
        place = str(folder / Path(place).expanduser())
    choose_image_size(read_model_directory(place), model)
    return lineage(locate(place), "model", model.declared_public, state)


def unprepared(folder: Path, params: Params, say: Say) -> Card:
    """Return the card that images in a folder will have. Raises DataError for other sources, to be prepared first."""
    reading_sensitive()
    data = params.data
    if data.source != "imagefolder" or data.path is None or data.size is None or data.channels is None:
        return read_card(folder / CARD_PATH)
    path = folder / Path(data.path).expanduser()
    classes = data.classes or list_folder(path).classes
    say("the images are not prepared yet: this plan is for the images in the folder")
    return proposed_card(params, classes, bool(split_of(path)[1]) and data.labels != SEVERAL)


def changed_pictures(params: Params, state: Path) -> str | None:
    """Return a note if pictures were added or removed since the preparation, which DVC does not notice."""
    file = dataset_directory(state, params.data.name) / LISTING
    if not file.is_file():
        return None
    listing = listing_of(params.data, secret_key(state, params.data.name))
    if listing is None or listing == file.read_text(encoding="utf-8"):
        return None
    return (
        "note: the files of the sensitive images have changed since they were prepared. The release does not change "
        "until data.version in params.yaml gets a new value; every query then spends again"
    )


def prepare_images(folder: Path, state: Path) -> None:
    data = load_params(folder / "params.yaml", folder / RECIPES).data
    if data.path is not None:
        data = data.model_copy(update={"path": str(folder / Path(data.path).expanduser())})
    with unpacking():
        prepare_sensitive(data, state, folder / CARD_PATH, folder / "data/raw")


def write_texts(out: Path, texts: Mapping[str, str]) -> None:
    """Replace the files that have changed, and remove files of an older plan."""
    ours = (".yaml", ".json", ".csv", ".tmp")
    if any(path.name not in texts and path.suffix not in ours for path in out.glob("*")):
        raise ConfigError(f"{out} contains files that are not part of a plan: move them elsewhere")
    make_folder(out)
    for name, text in texts.items():
        if not (out / name).is_file() or (out / name).read_bytes() != text.encode():
            replace_file(out / name, text.encode())
    for path in out.iterdir():
        if path.name not in texts:
            path.unlink()


def risk_line(made: Plan) -> str:
    """State how often an attacker can be right, and the ε at which the excess over chance is half as large."""
    mechanisms = tuple(made.mechanisms.values())
    adjacency = made.budget["adjacency"]
    one = "person" if made.params.privacy.unit == GROUP else "image"
    guess = best_guess(mechanisms, adjacency)
    half = noise_for_guess(mechanisms, (guess + 0.5) / 2, adjacency)
    events = [replace(each, noise_multiplier=half * each.noise_multiplier).event for each in mechanisms]
    lower = epsilon(events, made.budget["delta"], made.budget["accountant"], adjacency)
    most = f"at most {percent_up(guess)} % of the time (chance: 50 %), even if they know all others"
    less = f"at ε = {lower:.2g} at most {percent_up((guess + 0.5) / 2)} %"
    return f"risk: an attacker who guesses whether one {one} is in the set is right {most}; {less}"


def share_lines(made: Plan, content: Mapping[str, Any], file: Path) -> Iterator[str]:
    """Yield the stages whose share differs from the requested one, and why. content: content of `file`."""
    apart = []
    for name in made.mechanisms:
        noise = getattr(made.params, name).noise
        share = made.budget["stages"][name]["share"]
        section = content.get(name)
        if noise == REST and isinstance(section, dict) and str(section.get("noise", REST)) != REST:
            yield f"{name} takes the rest, as in recipe {made.params.recipe}, not the {section['noise']} of {file}"
        elif isinstance(noise, str) and noise != REST and abs(share - float(noise.rstrip("%")) / 100) > 0.001:
            apart.append(f"{name} {noise}")
    if apart:
        why = (
            "They differ from the table because a share is fixed at one Rényi order, and the table composes all queries"
        )
        yield f"requested shares: {', '.join(apart)}. {why}"


def spending_lines(made: ProjectPlan, spending: Sequence[Decision]) -> Iterator[str]:
    """Yield one line per query: already released, to be resumed, or what it would spend and why."""
    odometer = made.odometer
    before = {record["stage"] for record in odometer.opened()}
    if not before:
        yield f"no charge on dataset {odometer.dataset_id!r} so far, according to the journal in {odometer.path.parent}"
    for entry in spending:
        stage = entry.stage
        cost = f"ε = {made.budget['stages'][stage]['epsilon']:.3f} alone ({made.mechanisms[stage]})"
        if not entry.pays:
            yield f"{stage}: {entry.words}{f' ({cost})' if entry.kind == 'go on' else ''}"
            continue
        why = f"depends on {entry.cause}, which has changed"
        if made.lineage[stage].again:
            why = "is named in privacy.spend_again, or depends on a query that is"
        elif entry.cause == stage:
            why = "is new or has changed"
        yield f"{stage}: would {'re-spend' if stage in before else 'spend'} {cost}: it {why}"


def settings_for_ever_lines(params: Params) -> Iterator[str]:
    """Yield the free stages that must be set before the first run, because queries depend on them."""
    before = {query: stages_before(query, params) for query in QUERIES if params.runs(query)}
    for name in (name for name in STAGES if name not in QUERIES):
        if readers := [query for query, names in before.items() if name in names]:
            yield f"{name}: decide this before the first run; changing it later spends again on {', '.join(readers)}"


def step_noise_lines(made: Plan) -> Iterator[str]:
    """Compare the noise of a DP-SGD step with its longest possible signal, from public numbers."""
    params = made.params
    mechanism = made.mechanisms.get("finetune")
    if mechanism is None:
        return
    file = made.files["finetune"]
    model = outline(params.model, tuple(file["shape"]), len(file["classes"]))
    parameters = trained_parameters(model, params.finetune, params.seed)
    weights = sum(value.numel() for value in parameters.values())
    length = step_noise(mechanism.noise_multiplier, weights, mechanism.sample_rate * file["size_hint"])
    about = "about " if params.finetune.trainable in SALIENT else ""
    hint = ""
    if length > 1:
        hint = ", so a step is mostly noise. Raise the share, ε or batch, or train fewer weights"
    beside = f"{length:.2g} times its longest possible signal"
    yield f"finetune: the noise of a step is {beside}, with {about}{weights:,} trained weights{hint}"


def next_lines(made: Plan, spending: Sequence[Decision]) -> Iterator[str]:
    coming = [entry.stage for entry in spending if entry.pays]
    costs = ", ".join(f"{name} (ε = {made.budget['stages'][name]['epsilon']:.3f} alone)" for name in coming)
    granted = [one.stage for one in spending if not one.pays and one.stage in made.params.privacy.spend_again]
    if granted:
        more = ", ".join(f"{name}: {made.lineage[name].again + 1}" for name in granted)
        yield f"{', '.join(granted)} has been paid for again; to pay once more, set privacy.spend_again: {{{more}}}"
    yield f"next: `dvc repro` will spend: {costs}" if coming else "next: `dvc repro`, which spends nothing"
