"""`stage serve`: who may read the page and press its button, what it shows, and how it looks in a
browser.
"""

import contextlib
import http.client
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from test_init import write_shapes
from typer.testing import CliRunner

from sfumato.errors import ConfigError, DataError
from sfumato.settings.stage import PROPOSAL
from stages import serve as module
from stages.cli import app
from stages.serve import CLOSED, Server

SECRET = "a number from real images"
PARAMS = {
    "recipe": "dp-merf",
    "data": {
        "dataset_id": "lungs",
        "source": "imagefolder",
        "path": "/data/lungs",
        "size": 8,
        "channels": 1,
    },
    "privacy": {"epsilon": 5, "size_hint": 300, "unit": "image"},
}
BUDGET = {
    "stages": {"count": {"epsilon": 0.519}, "frequency": {"epsilon": 4.939}},
    "epsilon": 4.9998,
    "target": 5.0,
}
FOUND = {
    "images": 300,
    "persons": 120,
    "protects": "each person",
    "classes": {"ill <b>": 100, "well": 200},
    "sizes": [
        ["proposed 16", "12", "20", "fair, 79 % (51 to 93)"],
        ["8", "4", "6", "fair, 70 % (45 to 90)"],
    ],
    "budget": BUDGET,
    "seconds": {"count": 6.0, "auxiliary": 66.0, "plan": 30.0},
}


class Pretended:
    """A project whose runs wait for `go` and then raise `error`, if there is one."""

    def __init__(self, folder):
        self.folder = folder
        self.runs = 0
        self.error = None
        self.go = threading.Event()

    def run(self, progress):
        self.runs += 1
        assert self.go.wait(10) and not progress
        if self.error:
            raise self.error


@pytest.fixture
def server(here):
    """Serve the page of a small project until the test ends."""
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS))
    Path(PROPOSAL).parent.mkdir()
    Path(PROPOSAL).write_text(json.dumps(FOUND))
    Path("metrics.json").write_text(json.dumps({"verdict": {"sentence": f"fair: {SECRET}"}}))
    Path("evaluation/report.html").write_text(SECRET)
    grid = Path("artifacts/preview.png")
    grid.parent.mkdir(parents=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (120, 300), np.uint8)).save(grid)
    made = Server(0, Pretended(here))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.project.go.set()
    made.shutdown()
    thread.join()
    made.server_close()


def ask(server, path, method="GET", **headers):
    """Send a request. Returns the status, headers and text of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode("latin-1")


def press(server, **headers):
    return ask(server, f"{server.base}start", "POST", **headers)


def wait(holds):
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_only_the_loopback_interface_is_listened_on(server):
    assert ipaddress.ip_address(server.server_address[0]).is_loopback


def test_each_server_draws_a_token_of_its_own(server):
    other = Server(0, server.project)
    other.server_close()
    assert other.base != server.base
    assert ask(server, other.base)[0] == 403


def test_no_log_gets_the_token(server, capsys):
    ask(server, server.base)
    press(server, Origin="http://evil.example")
    ask(server, f"{server.base}owner.html", "PUT")  # no such method
    assert server.base.strip("/") not in "".join(capsys.readouterr())


def test_every_answer_tells_the_browser_to_keep_other_sites_out(server):
    for path in (server.base, f"{server.base}owner.html", f"{server.base}grid.png", "/"):
        headers = ask(server, path)[1]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert headers["Referrer-Policy"] in ("same-origin", "no-referrer"), (
            "or a link would pass the token on"
        )
        assert (
            headers["X-Content-Type-Options"] == "nosniff"
            and headers["Cache-Control"] == "no-store"
        )


def test_nothing_is_shown_or_started_without_the_token(server):
    assert len(server.base) > 40
    origin = f"http://127.0.0.1:{server.server_port}"
    for token in (
        "/",
        "/x/",
        server.base[:-2] + "/",
        f"/{server.base[::-1]}",
        server.base.lower(),
        "/%C3%A9/",
    ):
        for name in ("", "owner.html", "grid.png", "start"):
            for answer in (
                ask(server, token + name),
                ask(server, token + name, "POST", Origin=origin),
            ):
                assert (answer[0], answer[2]) == (403, CLOSED.decode()), token + name
    assert server.project.runs == 0
    assert ask(server, f"{server.base}owner.html")[2] == SECRET  # the requested page exists


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:{port}.evil.example", ""],
)
def test_another_host_name_of_this_machine_reads_nothing(server, host):
    host = host.format(port=server.server_port)
    assert ask(server, server.base, Host=host)[0] == 403
    assert press(server, Host=host, Origin=f"http://{host}")[0] == 403
    assert ask(server, server.base, Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "https://127.0.0.1:{port}", "http://127.0.0.1"]
)
def test_only_the_page_s_own_button_starts_a_run(server, origin):
    headers = {} if origin is None else {"Origin": origin.format(port=server.server_port)}
    assert press(server, **headers)[0] == 403
    assert ask(server, f"{server.base}start")[0] == 403  # a link
    assert server.project.runs == 0


@pytest.mark.parametrize(
    "name",
    [
        *(
            "params.yaml",
            "metrics.json",
            "evaluation/proposal.json",
            "../params.yaml",
            "%2e%2e/params.yaml",
        ),
        *(
            "/etc/passwd",
            "artifacts/preview.png",
            "./owner.html",
            "owner.html?x",
            "owner.html/",
            "public.html",
        ),
    ],
)
def test_only_listed_files_are_opened(server, name):
    assert ask(server, server.base + name)[0] == 403


def test_a_run_starts_once_and_its_end_or_its_error_is_shown(server):
    origin = f"http://127.0.0.1:{server.server_port}"
    for _ in range(3):
        status, headers, _ = press(server, Origin=origin)
        assert (status, headers["Location"]) == (303, server.base)
    text = ask(server, server.base)[2]
    assert 'http-equiv="refresh"' in text and "<progress" in text and "<button" not in text
    server.project.error = DataError("artifacts/x <b>is damaged</b>: remove it")
    server.project.go.set()
    wait(lambda: server.problem)
    text = ask(server, server.base)[2]
    assert "artifacts/x &lt;b&gt;is damaged&lt;/b&gt;: remove it" in text
    assert 'http-equiv="refresh"' not in text and "<button" in text and server.project.runs == 1
    server.project.error = None
    wait(lambda: server.stage() is None)
    press(server, Origin=origin)
    wait(lambda: server.project.runs == 2 and server.stage() is None)
    assert "is damaged" not in ask(server, server.base)[2]


def test_two_presses_at_the_same_moment_start_one_run(server, monkeypatch):
    """Both presses may find that nothing runs. Even then, only one run starts."""
    both = threading.Barrier(2)
    looked = Server.stage
    started = []

    def look(self):
        found = looked(self)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return found

    class Run(threading.Thread):
        def start(self):
            started.append(self)
            super().start()

    monkeypatch.setattr(Server, "stage", look)
    monkeypatch.setattr(module, "Thread", Run)
    presses = [threading.Thread(target=server.start) for _ in range(2)]
    for one in presses:
        one.start()
    for one in presses:
        one.join()
    assert len(started) == 1


def test_the_page_shows_images_sizes_plan_verdict_and_pictures(server):
    status, headers, text = ask(server, server.base)
    text = text.encode("latin-1").decode()
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert (
        "script" not in headers["Content-Security-Policy"]
        and headers["Cache-Control"] == "no-store"
    )
    # On a narrow screen, a wide table scrolls by itself
    scrolled = re.findall(r'<div class="scroll(?: narrow)?">\s*<table', text)
    assert len(scrolled) == text.count("<table") == 3
    assert "<code>frequency</code>" in text and "`" not in text.split("</style>")[1]
    assert "<script" not in text and "Access-Control-Allow-Origin" not in headers
    for said in (
        "lungs",
        "300 images of 120 persons",
        "ill &lt;b&gt;",
        "proposed 16",
        "fair, 79 % (51 to 93)",
        "0.519",
    ):
        assert said in text
    assert SECRET not in text and "5.000 of 5" in text and ">1.7<" in text
    assert (
        f"{server.base}grid.png" in text
        and f"{server.base}owner.html" in text
        and "public.html" not in text
    )
    assert ask(server, f"{server.base}grid.png")[1]["Content-Type"].startswith("image/png")
    card = Path("artifacts/synthesize/card.json")
    card.parent.mkdir()
    card.write_text(json.dumps({"images": 600, "epsilon": 5.487}))
    Path("ledger.json").write_text(
        json.dumps({"accountant": "exact", "epsilon": {"exact": 4.99979, "rdp": 5.487}})
    )
    text = ask(server, server.base)[2].encode("latin-1").decode()
    # ε is computed by the ledger's accountant
    assert "600 images have been released, at a privacy cost of ε = 5." in text
    assert f"fair: {SECRET}" in text
    other = {"verdict": {"sentence": f"fair: {SECRET}"}, "identity": {"release": "another.dir"}}
    Path("metrics.json").write_text(json.dumps(other))
    assert SECRET not in ask(server, server.base)[2]


def test_a_run_from_elsewhere_is_seen_and_no_second_one_starts(server, monkeypatch):
    monkeypatch.setattr(module, "standing", lambda name: f"stage 3 of 5, {name}")
    running = Path(".dvc/tmp/rwlock")
    running.parent.mkdir(parents=True)
    plan = str(Path("artifacts/plan/auxiliary.yaml").absolute())
    mine = {"pid": os.getpid(), "cmd": " ".join(sys.orig_argv)}
    running.write_text(json.dumps({"read": {plan: [mine]}}))
    text = ask(server, server.base)[2]
    assert (
        "stage 3 of 5, auxiliary" in text and 'max="5" value="2"' in text and "<button" not in text
    )
    press(server, Origin=f"http://127.0.0.1:{server.server_port}")
    assert server.project.runs == 0
    running.write_text(json.dumps({"read": {plan: [{"pid": 2**22 + 1, "cmd": "dvc"}]}}))  # killed
    assert "<button" in ask(server, server.base)[2]
    # Another process now has its process id
    running.write_text(json.dumps({"read": {plan: [mine | {"cmd": "dvc repro never"}]}}))
    assert "<button" in ask(server, server.base)[2]


def test_a_project_without_a_plan_has_a_page(server):
    Path(PROPOSAL).unlink()
    status, _, text = ask(server, server.base)
    assert status == 200 and "Nothing has been released yet" in text
    Path("params.yaml").write_text("recipe: dp-merv\n")
    status, headers, text = ask(server, server.base)
    assert status == 500 and "dp-merv" in text and headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (PROPOSAL, [FOUND]),
        (PROPOSAL, FOUND | {"classes": ["ill", "well"]}),
        ("artifacts/plan/budget.json", {"stages": {"count": None}, "epsilon": 1.0, "target": 1.0}),
        ("data/sensitive/card.json", {"classes": ["ill"]}),
    ],
)
def test_a_file_of_another_form_is_reported(server, file, content):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(content))
    status, headers, text = ask(server, server.base)
    assert status == 500 and headers["Content-Type"].startswith("text/plain")
    assert "does not have the expected form" in text


def test_what_init_understood_and_proposed_is_kept_for_the_page(here, expect_seconds):
    expect_seconds(lambda params: {"count": 30.0, "evaluate": 60.0})
    images = write_shapes(here / "photos", each=20, side=16)
    folder = here / "project"
    words = [
        "init",
        str(images),
        "--yes",
        "--one-image-each",
        "--epsilon=5",
        "--minutes=9",
        f"--out={folder}",
    ]
    assert CliRunner().invoke(app, words).exit_code == 0
    file = folder / PROPOSAL
    assert file.stat().st_mode & 0o077 == 0  # it contains the number of images of each class
    with contextlib.chdir(folder):
        text = module.project_page(Server(0, Pretended(folder)))
    assert "60 images. Protected unit: each image (you confirmed" in text and '"n">20<' in text
    assert "proposed 16" in text and "of 5<" in text and '"n">0.5<' in text


def test_a_port_in_use_is_reported_in_a_sentence(server, monkeypatch):
    with pytest.raises(ConfigError, match=r"dvc\.yaml is missing"):
        module.serve(port=0)
    Path("dvc.yaml").touch()
    with pytest.raises(ConfigError, match=f"--port {server.server_port} cannot be opened"):
        module.serve(port=server.server_port)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_the_page(server, tmp_path, width):
    picture = tmp_path / "page.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'browser'}",
    ]
    options += [f"--window-size={width},1600", f"--screenshot={picture}"]
    address = f"http://127.0.0.1:{server.server_port}{server.base}"
    subprocess.run(["chromium", *options, address], check=True, capture_output=True, timeout=60)
    with Image.open(picture) as drawn:
        assert drawn.size == (width, 1600)
        colours = drawn.convert("RGB").getcolors(2**24)
    assert len(colours) > 200  # the grid's greys, letters, the button
    button = [count for count, colour in colours if colour == (0x2B, 0x5C, 0x7D)]
    assert button and button[0] > 1000
