"""Write the page that requests permission to spend ε."""

import math
from collections.abc import Iterator
from pathlib import Path

from sfumato.planning.forecast import forecast, kind_of
from sfumato.planning.make import ProjectPlan
from sfumato.privacy.events import PROTECTED, UNITS, event_of
from sfumato.privacy.profile import bound_text, privacy_profile
from sfumato.release.card import WORDS, page, plain, table, template
from sfumato.release.exports import PUBLIC_SOURCE
from sfumato.release.report import (
    Facts,
    attack_bounds,
    grouped,
    not_covered,
    scientific,
    who_is_trusted,
)
from sfumato.settings.data import GROUP
from sfumato.settings.stages import STAGES
from sfumato.storage.files import make_folder, replace_file

MARKDOWN = "brief.md"
PAGE = "brief.html"
# Questions of a review board, as keys of the section `release`
ANSWERS = (
    *("purpose", "recipients", "legal_basis", "controller", "owner", "contact"),
    *("retention", "withdrawal", "incident_contact", "licence"),
)


def write_brief(plan: ProjectPlan, folder: Path) -> list[str]:
    """Write the request as `brief.md` and `brief.html`.

    Returns the names of the settings, such as `release.purpose`, that the page needs and the owner
    has not set.

    Guarantee: no image is read. The page depends only on the settings, the card of the sensitive
    images, the charges in the journal, and the inherited charges (see `ProjectPlan`).
    """
    text = template(Path(__file__).with_name(MARKDOWN), autoescape=False, plain=plain).render(
        brief_facts(plan)
    )
    title = f"Request: {plan.card.dataset_id}, ε = {bound_text(plan.budget['epsilon'])}"
    make_folder(folder)
    replace_file(folder / MARKDOWN, text.encode())
    replace_file(folder / PAGE, page(text, title).encode())
    return [f"release.{key}" for key in ANSWERS if getattr(plan.params.release, key) is None]


def brief_facts(plan: ProjectPlan) -> Facts:
    """Return the values that fill the template of the page, by name."""
    params = plan.params
    budget = plan.budget
    by_person = params.privacy.unit == GROUP
    events = [*map(event_of, plan.inherited), *(m.event for m in plan.mechanisms.values())]
    return {
        "dataset": plan.card.dataset_id,
        "one": ("image", "person")[by_person],
        "unit": PROTECTED[UNITS[params.privacy.protected]],
        "size": grouped(params.privacy.size),
        "epsilon": bound_text(budget["epsilon"]),
        "delta": scientific(budget["delta"]),
        "factor": bound_text(math.exp(budget["epsilon"]), 3),
        "one_in": grouped(math.floor(1 / budget["delta"])),
        "attacker": attack_bounds([privacy_profile(events, budget["adjacency"])]),
        "spent": spent_so_far(plan),
        "lifetime": params.privacy.lifetime,
        "answers": list(answers(plan)),
        "measurements": [
            (name, STAGES[name].summary, bound_text(budget["stages"][name]["epsilon"]))
            for name in plan.mechanisms
        ],
        "usefulness": usefulness(plan),
        "not_covered": not_covered(by_person),
        "trust": who_is_trusted(several_owners=False),
        "table": table,
        **release_facts(plan),
    }


def release_facts(plan: ProjectPlan) -> Facts:
    """Describe what would be shared."""
    synthesize = plan.params.synthesize
    kind = "synthetic images"
    if {*synthesize.sources} == {PUBLIC_SOURCE}:
        kind = "privately selected public images"
    elif PUBLIC_SOURCE in synthesize.sources:
        kind = "synthetic and privately selected public images"
        if synthesize.choose:
            kind = (
                "synthetic images (and privately selected public images, unless they make the "
                "release less useful)"
            )
    _, height, width = plan.card.shape
    return {
        "images": grouped(synthesize.count),
        "kind": kind,
        "shape": f"{height} × {width}",
        "classes": plan.card.classes,
        "classifier": "teacher" in plan.mechanisms,
    }


def answers(plan: ProjectPlan) -> Iterator[tuple[str, str]]:
    for key in ANSWERS:
        yield (
            WORDS["about"][key],
            getattr(plan.params.release, key) or f"not answered yet (release.{key})",
        )


def spent_so_far(plan: ProjectPlan) -> str:
    charges = len(plan.odometer.opened())
    if not charges:
        return "nothing, according to the journal on this machine"
    return (
        f"{charges} measurement{'s' * (charges > 1)}, according to the journal on this machine "
        "(`stage ledger history` lists them)"
    )


def usefulness(plan: ProjectPlan) -> str:
    """Forecast how useful the release will be, with a range, from results on public sets."""
    params = plan.params
    kind = kind_of(params, plan.card.shape[0])
    if kind is None:
        return "Unknown: no public set with several labels per image was measured."
    expected = forecast(kind, params.privacy.size, params.privacy.epsilon, 1.0)
    return (
        f"{expected.capitalize()}. 100 % means that a classifier learns as much from the release "
        "as from the real images. The forecast was fitted to results on public sets. It assumes "
        "the longest training that `stage init` proposes. To test the range, public sets were "
        "left out of the fit in turn. In at least seven of eight cases, the range then contained "
        "the result of the set that was left out."
    )
