"""`stage serve`: show the project in a browser on this machine, with a button that starts
`dvc repro`.
"""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from mimetypes import guess_type
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.errors import UNREADABLE, ConfigError, SfumatoError, explained, reason_of
from sfumato.planning.running import holders
from sfumato.settings.stage import ARTIFACTS, CARD_PATH, LEDGER, PLAN, PROPOSAL, RECIPES
from sfumato.settings.stages import STAGES
from sfumato.storage.documents import read_json
from stages.report import METRICS_FILE, PAGES
from stages.runner import standing
from stages.screen import tell
from stages.state import PREVIEW, state_dir

if TYPE_CHECKING:
    from sfumato import Project

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    # With `no-referrer`, the browser would send no origin when the button is pressed, and the
    # request would be refused
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
CLOSED = (
    b"Open the address that `stage serve` printed, with its token, in a browser on the same "
    b"machine."
)


def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. Default: a free one.")] = 0,
) -> None:
    """[local] Show the project as a page in a browser on this machine, with a button that starts a
    run.
    """
    from sfumato import Project

    with explained(
        ConfigError,
        lambda error: (
            f"--port {port} cannot be opened ({error}): leave out --port to use a free port"
        ),
    ):
        server = Server(port, Project())
    tell(
        f"http://{server.hosts[0]}{server.base}\nOpen this address in a browser on this machine, "
        "and do not share it"
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        tell(
            "stopped. If this server had started a run, the run has stopped too. To resume it, use "
            "`stage run`: nothing is charged twice"
        )


class Server(ThreadingHTTPServer):
    """Serve browsers on this machine only, and run one `dvc repro` at a time.

    base: prefix of all paths, which contains the token.
    """

    def __init__(self, port: int, project: Project) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.base = f"/{secrets.token_urlsafe()}/"
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")]
        self.project = project
        self.problem = ""
        self.thread = Thread()
        self.starting = Lock()

    def stage(self) -> str | None:
        """Return the name of the running stage, even if another program started it.

        Returns "" if this server's run has no running stage now, for example before the first
        stage, and None if there is no run.
        """
        with suppress(*UNREADABLE):
            for holder in holders():
                if holder.path.parent == PLAN.absolute() and holder.runs:
                    return holder.path.stem
        if self.thread.is_alive():
            return ""
        return None

    def start(self) -> None:
        with self.starting:
            if self.stage() is None:
                self.thread = Thread(target=self.work, daemon=True)
                self.thread.start()

    def work(self) -> None:
        self.problem = ""
        try:
            self.project.run(progress=False)
        except (SfumatoError, OSError) as error:
            self.problem = str(error)


class Handler(BaseHTTPRequestHandler):
    """Handle one request.

    Guarantee: a request without the token, or under another host name, reads and starts nothing.
    """

    server: Server
    timeout = 10  # seconds for a request to arrive

    def do_GET(self) -> None:
        from jinja2 import UndefinedError

        causes: tuple[type[Exception], ...] = (SfumatoError, UndefinedError, *UNREADABLE)
        name = self.name()
        try:
            if name == "":
                self.answer(200, project_page(self.server).encode())
            elif name is not None and name in (paths := files()):
                self.answer(200, paths[name].read_bytes(), guess_type(name)[0])
            else:
                self.answer(403, CLOSED)
        except causes as error:
            text = str(error)
            if not isinstance(error, (SfumatoError, OSError)):
                text = (
                    "a JSON file of this project does not have the expected form "
                    f"({reason_of(error)}): restore it, or repeat the command that wrote it"
                )
            self.answer(500, text.encode(), "text/plain", Refresh="5")

    def do_POST(self) -> None:
        if self.name() == "start" and self.headers["Origin"] == f"http://{self.headers['Host']}":
            self.server.start()
            self.answer(303, b"", Location=self.server.base)
        else:
            self.answer(403, CLOSED)

    def name(self) -> str | None:
        """Return the part of the requested path after the token.

        Returns None if the path has no valid token, or if the request is for another host name.
        """
        base = self.server.base.encode()
        if self.headers["Host"] in self.server.hosts and hmac.compare_digest(
            self.path.encode()[: len(base)], base
        ):
            return self.path[len(base) :]
        return None

    def answer(
        self, status: int, content: bytes, kind: str | None = "text/html", **more: str
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **more}.items():
            self.send_header(key, value)
        with suppress(ConnectionError):  # the browser has closed the connection
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing, because addresses contain the token."""


def files() -> dict[str, Path]:
    """Return the files that the server sends unchanged, by their names after the token in the URL.

    Files that do not exist are left out. No request gets the bytes of any other file.
    """
    grids = [ARTIFACTS / "synthesize" / "grid.png", PREVIEW]
    paths = {f"{audience}.html": path for audience, path in PAGES.items()}
    paths["grid.png"] = next(filter(Path.is_file, grids), grids[0])
    return {name: path for name, path in paths.items() if path.is_file()}


def content_of(path: Path, otherwise: Any = None) -> Any:
    with suppress(FileNotFoundError):
        return read_json(path)
    return otherwise


def project_page(server: Server) -> str:
    """Return the page as HTML.

    Raises SfumatoError, or one of UNREADABLE, if the project cannot be read.
    """
    from sfumato.evaluation.identity import measured_another
    from sfumato.planning.estimate import expected_seconds
    from sfumato.privacy.profile import bound_text
    from sfumato.release import card
    from sfumato.settings.recipes import load_params

    params = load_params(Path("params.yaml"), RECIPES)
    steps = {name: stage.summary for name, stage in STAGES.items() if params.runs(name)}
    proposal = content_of(Path(PROPOSAL), {})
    seconds = proposal.get("seconds", {})
    if card_content := content_of(CARD_PATH):
        seconds = expected_seconds(
            params, tuple(card_content["shape"]), len(card_content["classes"]), state_dir()
        )
    stage = server.stage()
    metrics = content_of(METRICS_FILE)
    # A run may replace the release, and comparing large releases every five seconds takes too long
    if metrics and (stage is not None or measured_another(metrics, ARTIFACTS / "synthesize")):
        metrics = None
    report = Path(card.__file__).with_name("report.html").read_text(encoding="utf-8")
    return card.template("serve.html", autoescape=True, bound=bound_text).render(
        server=server,
        style=report[report.index("<style>") : report.index("</style>")],
        params=params,
        steps=steps,
        stage=stage,
        standing=standing,
        files=files(),
        proposal=proposal,
        plan=content_of(PLAN / "budget.json"),
        minutes={name: (value or 0) / 60 for name, value in seconds.items()},
        release=content_of(ARTIFACTS / "synthesize" / "card.json"),
        ledger=content_of(LEDGER),
        metrics=metrics,
    )
