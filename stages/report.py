"""`stage report`: write one self-contained page.

The public edition may be shared, but the owner's edition may not.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import ConfigError
from sfumato.settings.stage import ARTIFACTS, LEDGER, PLAN
from sfumato.storage.artifacts import check_out, read_artifact, writing
from sfumato.storage.files import write_local
from sfumato.storage.in_use import use_until_the_end
from stages.screen import say, tell
from stages.state import EVALUATION, check_local, state_dir

AUDIENCE_HELP = (
    "Readers of the page. public: the page uses only the release and the ledger. owner: the page "
    "also contains numbers from real images, and must not be shared."
)
OUT_HELP = (
    "HTML file to write. Default: artifacts/report/index.html, or evaluation/report.html for the "
    "owner."
)
METRICS_FILE = Path("metrics.json")  # numbers of `stage evaluate`
# Audience -> page
PAGES = {"public": ARTIFACTS / "report" / "index.html", "owner": Path("evaluation/report.html")}


def report(
    audience: Annotated[str, typer.Option(help=AUDIENCE_HELP, metavar="public|owner")] = "public",
    out: Annotated[Path | None, typer.Option(help=OUT_HELP)] = None,
) -> None:
    """[free] Write an HTML page that states what was released, its privacy cost, and what this cost
    means.

    The page for the owner is local: it must not be shared.
    """
    if audience not in PAGES:
        raise ConfigError(f"--audience {audience}: expected public or owner")
    page = out or PAGES[audience]
    release = ARTIFACTS / "synthesize"
    from sfumato.evaluation.tables import read_local
    from sfumato.planning.forecast import curve
    from sfumato.planning.project_files import TRACKED
    from sfumato.release.report import report_page, summary_lines
    from sfumato.release.statements import write_statements

    if page.is_dir():
        raise ConfigError(
            f"--out {page} is a folder: give the path of a file, such as {page / 'index.html'}"
        )
    if audience == "public":
        check_out(page.parent, "report")
        text = report_page(release, LEDGER)
        with writing(page.parent, "report", [read_artifact(release, "synthesize")]) as directory:
            (directory / page.name).write_text(text, encoding="utf-8")
            missing_settings = write_statements(release, LEDGER, directory)
        for name, settings in missing_settings.items():
            if Path("params.yaml").exists():
                say(f"{name} was not written: set {', '.join(settings)} in params.yaml")
            else:  # a merged project
                keys = ", ".join(settings).replace("release.", "")
                say(f"{name} was not written: set {keys} under `about` in {PLAN}/synthesize.yaml")
        return typer.echo(f"{page}: may be shared with the release")
    check_local("--out", page)
    # Mark all datasets as in use before numbers from real images are read
    use_until_the_end(state_dir())
    local = read_local(METRICS_FILE, EVALUATION, ARTIFACTS)._replace(curve=curve)
    write_local(page, report_page(release, LEDGER, local).encode())
    typer.echo(f"{page}: local, not to be shared")
    verdict = local.verdict or "none: run `stage evaluate`"
    if local.verdict and not sys.stdout.isatty():
        verdict = f"local, so it is shown only on a terminal, in {METRICS_FILE} and in {page}"
    # `git add` adds nothing if one of the paths is missing
    tracked = " ".join(name for name in TRACKED.split() if Path(name).exists())
    # `dvc repro` ends with these lines
    tell(*summary_lines(release, LEDGER, PAGES["public"].parent, verdict, tracked))
