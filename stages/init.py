"""`stage init`: create a project from a folder of images."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato import errors
from sfumato.errors import ConfigError
from sfumato.settings.data import GROUP
from sfumato.settings.options import InitOptions
from sfumato.storage.documents import quoted, read_yaml
from sfumato.storage.in_use import use_until_the_end
from stages.flags import flag, with_flags
from stages.plan import show_budget, show_minutes
from stages.screen import say, show_numbers, tell, wrapped
from stages.state import state_dir

if TYPE_CHECKING:
    from sfumato.planning.create import Owner, Proposed

WHY_THIS_SIZE = (
    "Only sizes that a run can finish within --minutes are considered. The proposed size is the "
    "largest of these that is at least 90 % as useful as the most useful one. If no size can be "
    "finished in time, the smallest is proposed."
)
HELP: dict[str, str] = dict(read_yaml(Path(__file__).with_suffix(".yaml")))  # option -> text


@with_flags(HELP)
def init(
    options: InitOptions,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing; use the defaults.")
    ] = False,
) -> None:
    """[local] Read a folder of images, and write a project whose parameters suit the images, ε and
    the minutes that a run may take.
    """
    from sfumato.planning.create import Owner, propose_project, summary, warnings
    from sfumato.runtime.progress import discard

    use_until_the_end(state_dir())  # marks all datasets as in use: the name is not known yet

    decided = [
        name
        for name in ("epsilon", "dataset_id", "minutes", "size_hint")
        if getattr(options, name) is None
    ]
    missing_options = ", ".join([*map(flag, decided), "--groups or --one-image-each"])
    asking = None
    if not yes:
        asking = partial(ask, missing_options)
    owner = Owner(asking, say if sys.stderr.isatty() else discard, flag)
    proposal = propose_project(options, owner, state_dir())
    from sfumato.planning.make import risk_line  # imported late because it is slow

    say(*summary(proposal))
    show_budget(proposal.plan)
    tell(risk_line(proposal.plan))
    say(*warnings(proposal, state_dir()))
    show_minutes(proposal.chosen.params, proposal.seconds)
    show_sizes(proposal)
    if not owner.answer("Write the project?", True, None):
        raise typer.Exit(1)
    proposal.write(say, force=options.force, more=officers_words(owner))
    following = "stage run"
    if proposal.out != Path.cwd():
        following = f"cd {quoted(proposal.out)} && stage run"
    say(f"\nproject written to {proposal.out}. Next: {following}")
    say("If the release requires permission, `stage brief` writes the request for it.")


def ask(missing_options: str, question: str, default: Any, kind: type | None) -> Any:
    """Ask a question at the prompt, and return the answer.

    missing_options: listed in the error message. Raises ConfigError if there is no terminal.
    """
    question = wrapped(question, sys.stderr)
    try:
        if kind is None:
            # Without a default, Enter is no answer, and the question is asked again
            return typer.confirm(question, err=True, default=default)
        return typer.prompt(question, err=True, default=default, type=kind)
    except typer.Abort as abort:
        if isinstance(abort.__context__, EOFError) and not sys.stdin.isatty():
            text = (
                f"there is no terminal for questions: give {missing_options}, or accept the "
                "defaults with --yes"
            )
            raise errors.public(ConfigError(text)) from abort
        raise


def officers_words(owner: Owner) -> dict[str, object]:
    """Ask for the statements of the section `release`, if there is a terminal.

    Pressing Enter skips a statement. Returns {"release": statements by key}, or an empty dictionary
    if the owner declines or there is no terminal.
    """
    from sfumato.release.card import WORDS

    keys = ("controller", "purpose", "legal_basis", "recipients", "retention")
    statements = ", ".join(WORDS["about"][key] for key in keys)
    question = (
        f"The report quotes these statements: {statements}. Enter them now, instead of later in "
        "params.yaml?"
    )
    if owner.ask is None or not sys.stdin.isatty() or not owner.answer(question, False, None):
        return {}
    texts = {
        key: typer.prompt(WORDS["about"][key], err=True, default="", show_default=False)
        for key in keys
    }
    return {"release": {key: text.strip() for key, text in texts.items() if text.strip()}}


def show_sizes(proposal: Proposed) -> None:
    """Show one row per size, with its minutes and expected usefulness.

    After the rows, state how many images or persons, or what ε, would make the release more useful.
    """
    from sfumato.planning.create import size_rows
    from sfumato.planning.forecast import advice

    columns = (
        "pixels per side",
        "minutes",
        "longest useful run (min)",
        "expected usefulness (range)",
    )
    show_numbers(
        "proposed sizes (choose one with --size)",
        columns,
        size_rows(proposal),
        words=columns[3:],
        note=WHY_THIS_SIZE,
    )
    if kind := proposal.chosen.kind:
        privacy = proposal.chosen.params.privacy
        units = "persons" if privacy.unit == GROUP else "images"
        factor = proposal.chosen.size_factor
        say(f"forecast {advice(kind, privacy.size, privacy.epsilon, units, factor)}")
