"""`stage init`: from a folder of images to a project that `dvc repro` runs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato import errors
from sfumato.errors import ConfigError
from sfumato.settings.data import GROUP
from sfumato.settings.fields import part_of
from sfumato.storage.documents import read_yaml
from sfumato.storage.in_use import use_until_the_end
from stages.plan import show_budget, show_minutes
from stages.screen import say, show_numbers, tell, wrapped
from stages.state import state_dir

if TYPE_CHECKING:
    from sfumato.planning.create import Owner, Proposed

HELP: dict[str, str] = dict(read_yaml(Path(__file__).with_suffix(".yaml")))  # by parameter


def init(
    images: Annotated[Path, typer.Argument(help=HELP["images"], metavar="FOLDER")],
    epsilon: Annotated[float | None, typer.Option(min=0.0, help="Privacy budget ε, which the owner decides.")] = None,
    groups: Annotated[str | None, typer.Option(help=HELP["groups"])] = None,
    alone: Annotated[bool, typer.Option("--alone", help=HELP["alone"])] = False,
    one_image_each: Annotated[bool, typer.Option("--one-image-each", help=HELP["one_image_each"])] = False,
    range: Annotated[str | None, typer.Option(help=HELP["range"])] = None,
    label_column: Annotated[str | None, typer.Option(help=HELP["label_column"])] = None,
    classes: Annotated[str | None, typer.Option(help=HELP["classes"])] = None,
    skip: Annotated[float, typer.Option(parser=part_of, help=HELP["skip"], metavar="SHARE")] = 0.0,
    fit: Annotated[str, typer.Option(help=HELP["fit"], metavar="crop|pad")] = "crop",
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Minutes that a run may take on this machine.")] = None,
    size: Annotated[str | None, typer.Option(help=HELP["size"])] = None,
    size_hint: Annotated[int | None, typer.Option(min=3, help=HELP["size_hint"])] = None,
    dataset_id: Annotated[str | None, typer.Option(help=HELP["dataset_id"])] = None,
    public: Annotated[Path | None, typer.Option(help="Folder of public images, one folder per class.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate/--no-evaluate", help=HELP["evaluate"])] = True,
    out: Annotated[Path, typer.Option(help="Folder of the project.")] = Path("."),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; use the defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files of an earlier project.")] = False,
) -> None:
    """Local: read a folder of images, and write a project with parameters that fit them, ε and the minutes."""
    given = dict(locals())  # by the names of the parameters of `propose_project`
    del given["yes"]
    from sfumato.planning.create import Owner, propose_project, summary, warnings
    from sfumato.planning.project_files import unsaid

    use_until_the_end(state_dir())  # which dataset it looks at is not known yet

    decided = [name for name in ("epsilon", "dataset_id", "minutes", "size_hint") if given[name] is None]
    lacking = ", ".join([*(f"--{name.replace('_', '-')}" for name in decided), "--groups or --one-image-each"])
    owner = Owner(None if yes else partial(ask, lacking), say if sys.stderr.isatty() else unsaid)
    made = propose_project(owner=owner, state=state_dir(), **given)
    from sfumato.planning.make import risk_line  # slow to import: pictures that cannot be used are named first

    say(*summary(made))
    show_budget(made.plan)
    tell(risk_line(made.plan))
    say(*warnings(made, state_dir()))
    show_minutes(made.chosen.params, made.seconds)
    show_sizes(made)
    if not owner.answer("Write the project?", True, None):
        raise typer.Exit(1)
    made.write(say, force=force, more=officers_words(owner))
    following = "dvc repro"
    if made.out != Path.cwd():
        following = f"cd {made.out} && dvc repro"
    say(f"\nwritten to {made.out}. Next: {following}")


def ask(lacking: str, question: str, default: Any, kind: type | None) -> Any:
    """What somebody answers. lacking: options. Raises ConfigError where nobody can, as without a terminal."""
    question = wrapped(question, sys.stderr)
    try:
        if kind is None:
            return typer.confirm(question, err=True, default=default)
        return typer.prompt(question, err=True, default=default, type=kind)
    except typer.Abort as abort:
        if isinstance(abort.__context__, EOFError):
            text = f"cannot ask without a terminal: give {lacking}, or accept the defaults with --yes"
            raise errors.public(ConfigError(text)) from abort
        raise


def officers_words(owner: Owner) -> dict[str, Any]:
    """The section `release` in the words of a data protection officer: on a terminal only, and one Enter skips it."""
    from sfumato.release.card import WORDS

    keys = ("controller", "purpose", "legal_basis", "recipients", "retention")
    question = (
        f"State now, for the report: {', '.join(WORDS['about'][key] for key in keys)}? (or later, in params.yaml)"
    )
    if owner.ask is None or not sys.stdin.isatty() or not owner.answer(question, False, None):
        return {}
    texts = {key: typer.prompt(WORDS["about"][key], err=True, default="", show_default=False) for key in keys}
    return {"release": {key: text.strip() for key, text in texts.items() if text.strip()}}


def show_sizes(made: Proposed) -> None:
    """A row a size: its minutes, and how useful the release will probably be; and what would make it better."""
    from sfumato.planning.create import size_rows
    from sfumato.planning.forecast import advice

    columns = "pixels per side", "minutes", "useful up to minute", "expected usefulness (range)"
    show_numbers("sizes, to choose from with --size", columns, size_rows(made), words=columns[3:])
    if kind := made.chosen.kind:
        privacy = made.chosen.params.privacy
        units = "persons" if privacy.unit == GROUP else "images"
        say(f"forecast {advice(kind, privacy.size, privacy.epsilon, units)}")
