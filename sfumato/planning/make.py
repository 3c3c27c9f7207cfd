"""Plan a project from its cards: resolve parameters, calibrate the noise, and list what the next
run would spend.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sfumato.data.cards import Card, PublicCard
from sfumato.errors import ConfigError
from sfumato.planning.kept import Past, Plan, spending_of, stages_before
from sfumato.planning.resolve import plan_texts, policy_of, warnings_of
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.decision import Decision
from sfumato.privacy.odometer import Odometer, Seen
from sfumato.privacy.policy import check_known, check_lifetime
from sfumato.privacy.profile import best_guess, noise_for_guess, percent_up
from sfumato.settings.data import GROUP
from sfumato.settings.fields import REST
from sfumato.settings.params import Params
from sfumato.settings.privacy import UNLIMITED
from sfumato.settings.stage import PLAN
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.files import make_folder, replace_file


@dataclass(frozen=True, kw_only=True)
class ProjectPlan(Plan):
    """The plan of a project, before it is written.

    card: card of the prepared images, or the card that they will have once they are prepared;
    public: card of the public images, if a stage reads them;
    inherited: charges of earlier releases from which public images or a public model were made;
    past: earlier charges;
    seen: entries of the journal to which the project refers; empty if there is no journal;
    unprepared: commands, "prepare sensitive" or "prepare public", that have not prepared their
    images yet.
    """

    card: Card
    public: PublicCard | None
    inherited: Sequence[dict]
    past: Past
    seen: Seen
    unprepared: frozenset[str]

    @property
    def odometer(self) -> Odometer:
        return Odometer(self.past.state, self.card.dataset_id)

    def remarks(self) -> Iterator[str]:
        """Yield lines for the owner: charges of earlier releases that the budget includes, warnings
        about settings, and queries that run in only one process.
        """
        if self.inherited:
            ids = ", ".join(sorted({record["dataset_id"] for record in self.inherited}))
            number = len(self.inherited)
            charges = "1 charge" if number == 1 else f"{number} charges"
            yield (
                f"the budget includes {charges} of earlier releases (dataset ids: {ids}), because "
                "public inputs were made from these releases"
            )
        for warning in warnings_of(self.params, self.budget["delta"], len(self.card.classes)):
            yield f"warning: {warning}"
        for name in self.mechanisms:
            if STAGES[name].one_process:
                yield (
                    f"{name} runs in one process: if SFUMATO_LAUNCH is set, unset it for this stage"
                )

    def spending(self) -> tuple[list[Decision], set[str]]:
        """Decide what each query will do, and which stages will run.

        Raises BudgetError if the journal lacks charges that the project's files contain.
        """
        if self.odometer.head() is not None:
            check_known(
                self.odometer, self.card, self.seen, self.params.privacy.lifetime != UNLIMITED
            )
        return spending_of(self, self.past, self.past.folder / PLAN)

    def seconds(self) -> dict[str, float | None]:
        from sfumato.planning import estimate  # slow to import, and needed only to show minutes

        public_images = self.public.images if self.public else 0
        classes = len(self.card.classes)
        return estimate.expected_seconds(
            self.params, self.card.shape, classes, self.past.state, public_images
        )

    def check_lifetime(self, spending: Sequence[Decision]) -> None:
        """Raise BudgetError, before the first query, if any query of the run would exceed the
        lifetime budget.
        """
        mechanisms = {entry.stage: self.mechanisms[entry.stage] for entry in spending if entry.pays}
        if mechanisms:
            check_lifetime(
                self.odometer, mechanisms, policy_of(self), self.params.privacy.protected
            )

    def write(self) -> None:
        write_texts(self.past.folder / PLAN, plan_texts(self, self.past.folder / PLAN))


def write_texts(out: Path, texts: Mapping[str, str]) -> None:
    """Replace the files that have changed, and remove files of an older plan."""
    removed = (".yaml", ".json", ".csv", ".tmp", ".DS_Store", "Thumbs.db", "desktop.ini")
    if any(not path.name.endswith(removed) for path in out.glob("*")):
        raise ConfigError(
            f"{out} contains files that do not belong to a plan: move these files elsewhere"
        )
    make_folder(out)
    for name, text in texts.items():
        if not (out / name).is_file() or (out / name).read_bytes() != text.encode():
            replace_file(out / name, text.encode())
    for path in out.iterdir():
        if path.name not in texts:
            path.unlink()


def risk_line(plan: Plan) -> str:
    """State how often an attacker's guess can be right: with this plan, and at a smaller ε.

    At the smaller ε, the attacker's advantage over a coin toss is half as large. The smaller ε is
    left out if both percentages would be the same.
    """
    mechanisms = tuple(plan.mechanisms.values())
    adjacency = plan.budget["adjacency"]
    unit = "person" if plan.params.privacy.unit == GROUP else "image"
    guess = best_guess(mechanisms, adjacency)
    smaller = (guess + 0.5) / 2
    risk = (
        f"risk: an attacker who guesses whether one {unit} is in the set is right at most "
        f"{percent_up(guess)} % of the time (chance: 50 %), even if they know all other {unit}s"
    )
    if percent_up(smaller) == percent_up(guess):
        return risk
    half = noise_for_guess(mechanisms, smaller, adjacency)
    events = [
        replace(each, noise_multiplier=half * each.noise_multiplier).event for each in mechanisms
    ]
    lower = epsilon(events, plan.budget["delta"], plan.budget["accountant"], adjacency)
    return (
        f"{risk}. At ε = {lower:.2g}, the attacker would be right at most {percent_up(smaller)} % "
        "of the time"
    )


def share_lines(plan: Plan, content: Mapping[str, object], file: Path) -> Iterator[str]:
    """Yield lines about queries whose share of the budget differs from the requested share, and
    explain the difference.

    content: the owner's settings; file: path of `params.yaml`, which contains them.
    """
    differences = []
    for name in plan.mechanisms:
        noise = getattr(plan.params, name).noise
        share = plan.budget["stages"][name]["share"]
        section = content.get(name)
        if noise == REST and isinstance(section, dict) and str(section.get("noise", REST)) != REST:
            yield (
                f"{file} requests {section['noise']} of the budget for {name}. This request is not "
                f"used, because recipe {plan.params.recipe} gives {name} the rest of the budget"
            )
        elif (
            isinstance(noise, str)
            and noise != REST
            and abs(share - float(noise.rstrip("%")) / 100) > 0.001
        ):
            differences.append(f"{name} {noise}")
    if differences:
        yield (
            f"requested shares: {', '.join(differences)}. The shares in the table differ slightly, "
            "because the table uses the Rényi order that gives the least total ε. The total ε is "
            "not affected"
        )


def spending_lines(plan: ProjectPlan, spending: Sequence[Decision]) -> Iterator[str]:
    """Yield one line per query: its earlier release, the run that it resumes, or what it would
    spend and why.

    If a query will be refused, its line contains the reason. If the dataset has no charge yet, an
    additional first line states this.
    """
    odometer = plan.odometer
    charged_stages = {record["stage"] for record in odometer.opened()}
    if not charged_stages:
        yield (
            f"no charge on dataset {odometer.dataset_id!r} so far, according to the journal in "
            f"{odometer.path.parent}"
        )
    for entry in spending:
        stage = entry.stage
        if not entry.pays:
            yield f"{stage}: {entry.words}"
            continue
        cost = f"ε = {plan.budget['stages'][stage]['epsilon']:.3f} alone ({plan.mechanisms[stage]})"
        if stage not in charged_stages:
            yield f"{stage}: would spend {cost}, because it has no charge on this dataset yet"
            continue
        yield f"{stage}: would again spend {cost}, because {reason_to_spend_again(plan, entry)}"


def reason_to_spend_again(plan: ProjectPlan, entry: Decision) -> str:
    stage = entry.stage
    spend_again = plan.params.privacy.spend_again
    causes = [other for other in stages_before(stage, plan.params) if other in spend_again]
    if entry.run is not None:
        return f"the checkpoint of its unfinished run {entry.run.id[:8]} is lost"
    if plan.lineage[stage].again and stage in spend_again:
        return "privacy.spend_again names it"
    if plan.lineage[stage].again and causes:
        return f"it depends on {causes[0]}, which privacy.spend_again names"
    if entry.cause == "public" and plan.public is None:
        return (
            "it depends on the public images, which are missing: run `stage prepare public` and "
            "plan again, to find out whether its release can be restored"
        )
    if entry.cause == "public":
        return "it depends on the public images, which have changed"
    if entry.cause != stage:
        return f"it depends on {entry.cause}, which has changed"
    return "none of its releases was made with these settings and this data.version"


def final_settings_lines(params: Params) -> Iterator[str]:
    """Yield a line for each free stage whose settings must be final before the first run, because
    queries depend on it.
    """
    upstream = {query: stages_before(query, params) for query in QUERIES if params.runs(query)}
    for name in (name for name in STAGES if name not in QUERIES):
        if readers := [query for query, names in upstream.items() if name in names]:
            yield (
                f"choose the settings of {name} before the first run. If you change them later, "
                f"these queries spend again: {', '.join(readers)}"
            )


def next_lines(plan: Plan, spending: Sequence[Decision]) -> Iterator[str]:
    paying_stages = [entry.stage for entry in spending if entry.pays]
    costs = ", ".join(
        f"{name} (ε = {plan.budget['stages'][name]['epsilon']:.3f} alone)" for name in paying_stages
    )
    granted = [
        entry.stage
        for entry in spending
        if not entry.pays and entry.stage in plan.params.privacy.spend_again
    ]
    if granted:
        setting = ", ".join(f"{name}: {plan.lineage[name].again + 1}" for name in granted)
        yield (
            f"privacy.spend_again was already applied to: {', '.join(granted)}. To pay once more, "
            f"set privacy.spend_again: {{{setting}}}"
        )
    yield (
        f"next: `stage run` will spend: {costs}"
        if paying_stages
        else "next: `stage run`, which spends nothing"
    )
