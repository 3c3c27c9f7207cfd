"""The page that `stage report` writes.

The public edition contains only the release and the ledger; the owner's edition states that it is
local.
"""

import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import typer
from opened_files import opened_files
from program import Terminal, call
from small_record import small_record

from sfumato.data.images import ImageSet, save_images
from sfumato.errors import BudgetError, ConfigError, DataError
from sfumato.evaluation.tables import read_local, tables_of
from sfumato.planning.forecast import curve, expected_part
from sfumato.privacy.accountant import default_delta
from sfumato.privacy.events import UNITS, Mechanism
from sfumato.privacy.ledger import build_ledger, ledger_text, read_ledger
from sfumato.privacy.profile import bound_text, percent_up
from sfumato.release.report import Local, report_page, scientific, what_was_released
from sfumato.storage.artifacts import PRIVACY, read_artifact, writing
from sfumato.storage.digest import digest_of
from sfumato.storage.png import save_png
from sfumato.storage.records import Records
from stages.report import report

HINT = 1500
BUDGET = {
    "recipe": "feta-pro",
    "accountant": "rdp",
    "delta": default_delta(HINT),
    "size_hint": HINT,
    "target": 10.0,
}
ACCURACY = {"mean": 0.8317, "std": 0.0123, "per_seed": [0.8317], "shifted": {}}
SPACE = {"space": "cnn-x", "reference": "holdout"}
DISTANCES = {"images": 6000, "frechet": 7.654321, "mmd": 0.4567, "mmd_std": 0.0321}
METRICS = {
    "scope": "local",
    "warnings": ["release: only 12 images"],
    "release": {
        "cnn": ACCURACY | {"per_class": [{"class": "benign", "mean": 0.7654, "std": 0.0123}]},
        "fidelity": SPACE | DISTANCES,
    },
    "real": {
        "cnn": {"mean": 0.9731, "std": 0.0048, "per_class": [], "shifted": {}},
        "fidelity": SPACE | {"frechet": 5.4321},
    },
    "verdict": {
        "level": "fair",
        "sentence": "fair (81 % of what there is to learn): much.",
        "learned": 0.81,
        "accuracy": {"chance": 0.5, "release": 0.8317},
        "balanced_accuracy": {"chance": 0.5, "release": 0.8217},
    },
}


def record(stage: str, number: int, mechanism: Mechanism) -> dict:
    about = {
        "dataset_id": "clinic-2026",
        "released": f"what {stage} gave",
        "time": 1_795_243_189 + number,
    }
    return small_record(number, mechanism, stage=stage, **about)


RECORDS = [
    record("count", 1, Mechanism(noise_multiplier=5)),
    record("frequency", 2, Mechanism(noise_multiplier=1.5)),
]
SOURCES = {"finetune": 4, "auxiliary": 8}
CLASSES = ("benign", "<script>alert(1)</script>")


def write_release(path: Path, records=RECORDS, sources=SOURCES, channels=1, **more) -> Path:
    with writing(path, "synthesize", records=records, **more) as directory:
        images = np.arange(12 * 64, dtype=np.uint8).reshape(12, 8, 8, 1)
        save_images(directory, ImageSet(images, np.arange(12) % 2, CLASSES))
        save_png(directory / "grid.png", images.reshape(96, 8))
        card = {"images": 12, "shape": [channels, 8, 8], "classes": CLASSES, "sources": sources}
        card["kinds"] = {"plain": 8, "distorted": 4}
        (directory / "card.json").write_text(json.dumps(card))
        save_png(directory / "png" / "0" / "0.png", images[0])
    return path


def write_ledger(path: Path, records=RECORDS, change=None, **budget) -> Path:
    ledger = build_ledger(BUDGET | budget, Records.of(map(dict, records)), [])
    if change:
        change(ledger)
        ledger["digest"] = digest_of(
            {key: value for key, value in ledger.items() if key != "digest"}
        )
    path.write_text(ledger_text(ledger))
    return path


def test_the_lifetime_line_states_where_it_is_incomplete(tmp_path):
    """With an empty state directory, an earlier version stated that no charge was ever opened."""
    release = write_release(tmp_path / "synthesize")
    ledger = write_ledger(tmp_path / "ledger.json")
    page = " ".join(report_page(release, ledger).split())
    assert (
        "At least 2 charges had been opened on dataset clinic-2026" in page
        and "This total is incomplete" in page
    )
    assert "0 charges" not in page
    write_ledger(ledger, change=lambda x: x["odometer"].update(complete=True, head="0" * 64))
    page = " ".join(report_page(release, ledger).split())
    assert ">2 charges had been opened on dataset clinic-2026" in page and "incomplete" not in page


def write_evaluation(folder: Path, seed: int) -> None:
    """Write numbers and a plot from real images, which only the owner may see."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = json.loads(json.dumps(METRICS).replace("0.8317", f"0.{8317 + seed}"))
    (folder / "metrics.json").write_text(json.dumps(metrics))
    save_png(folder / "evaluation" / "accuracy.png", np.full((4, 4), seed, np.uint8))
    (folder / "data").mkdir(exist_ok=True)
    np.save(folder / "data" / "holdout.npy", np.full(7 + seed, seed))


@pytest.fixture
def desk(here):
    """Return `stage report` as a function that raises its errors, in a folder with a release, its
    ledger and an evaluation.
    """
    write_release(here / "artifacts" / "synthesize")
    write_ledger(here / "ledger.json")
    write_evaluation(here, 0)
    app = typer.Typer()
    app.command()(report)

    def stage(*words: str, terminal: bool = False) -> str:
        screen = Terminal() if terminal else StringIO()
        call(app, "report", *words, screen=screen)
        return screen.getvalue()

    return stage


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("pages")
    release = write_release(path / "artifacts" / "synthesize")
    ledger = write_ledger(path / "ledger.json")
    write_evaluation(path, 0)
    local = read_local(path / "metrics.json", path / "evaluation", path / "artifacts")
    local = local._replace(curve=curve)
    return {"public": report_page(release, ledger), "owner": report_page(release, ledger, local)}


class Elements(HTMLParser):
    """All elements of a page, with their attributes. Tags that do not nest are an error."""

    VOID = frozenset(
        {"meta", "img", "br", "rect", "input", "line", "circle", "polyline", "polygon"}
    )

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):  # also called for <rect/>
        assert tag in self.VOID or self.open.pop() == tag


# ---- the public edition


def test_the_public_edition_does_not_depend_on_evaluation(desk, tmp_path):
    found = []
    for seed in (0, 3):
        write_evaluation(tmp_path, seed)
        assert "may be shared" in desk()
        found.append(
            {path.name: path.read_bytes() for path in (tmp_path / "artifacts" / "report").iterdir()}
        )
    assert found[0] == found[1] and set(found[0]) == {"index.html", "croissant.json", PRIVACY}
    artifact = read_artifact(tmp_path / "artifacts" / "report", "report")
    assert not artifact.local and set(artifact.records) == {r["id"] for r in RECORDS}
    (tmp_path / "metrics.json").unlink()
    desk()
    assert (tmp_path / "artifacts" / "report" / "index.html").read_bytes() == found[0]["index.html"]


def test_the_owners_edition_has_no_numbers_of_another_release(desk, tmp_path):
    """git and DVC track no evaluation, so it stays if an older release is checked out."""
    assert "fair" in desk("--audience", "owner", terminal=True)
    other = METRICS | {"identity": {"release": "another.dir"}}
    (tmp_path / "metrics.json").write_text(json.dumps(other))
    assert "none: run `stage evaluate`" in desk("--audience", "owner", terminal=True)
    local = read_local(tmp_path / "metrics.json", tmp_path / "evaluation", tmp_path / "artifacts")
    assert local.metrics == local.plots == ()


def test_the_public_edition_opens_only_release_and_ledger(desk, tmp_path):
    with opened_files() as opened:
        report_page(tmp_path / "artifacts" / "synthesize", tmp_path / "ledger.json")
    inside = {name for name in opened if str(tmp_path) in name}
    with opened_files() as opened:
        read_local(tmp_path / "metrics.json", tmp_path / "evaluation", tmp_path / "artifacts")
    assert any("metrics.json" in name for name in opened)  # the watch works
    allowed = (str(tmp_path / "artifacts" / "synthesize"), str(tmp_path / "ledger.json"))
    assert inside and all(name.startswith(allowed) for name in inside), inside


def test_the_public_edition_holds_no_number_of_the_evaluation(pages):
    numbers = re.findall(r"\d+\.\d+", json.dumps(METRICS))
    forms = [(scale, digits) for scale in (1, 100) for digits in (1, 2, 3, 4)]
    rounded = {
        *numbers,
        *(f"{float(n) * scale:.{digits}f}" for n in numbers for scale, digits in forms),
    }
    # Numbers of fewer than three digits may be equal by chance
    rounded = {n for n in rounded if len(n.replace(".", "").lstrip("0")) >= 3}
    text = re.sub(r"<style>.*?</style>|data:[^\"]*", "", pages["public"], flags=re.S)
    words = set(re.findall(r"\d+\.\d+", text))
    assert words and not words & rounded, words & rounded
    assert set(re.findall(r"\d+\.\d+", pages["owner"])) & rounded
    assert "local" not in re.sub(r"<style>.*?</style>", "", pages["public"], flags=re.S).lower()


@pytest.mark.parametrize("audience", ["public", "owner"])
def test_neither_edition_takes_a_local_or_changed_release(desk, tmp_path, audience):
    labels = tmp_path / "artifacts" / "synthesize" / "labels.npy"
    np.save(labels, np.zeros(12, np.int64))
    with pytest.raises(DataError, match=r"labels\.npy"):
        desk("--audience", audience)
    write_release(tmp_path / "artifacts" / "synthesize", local=True)
    with pytest.raises(DataError, match="local"):
        desk("--audience", audience)
    assert (
        not (tmp_path / "artifacts" / "report").exists()
        and not (tmp_path / "evaluation" / "report.html").exists()
    )


def test_an_invalid_or_foreign_ledger_is_refused(desk, tmp_path):
    odd = [{**r, "time": "yesterday"} for r in RECORDS]
    for records, ledger, words in (
        (RECORDS, {"change": lambda ledger: ledger["epsilon"].update(rdp=0.1)}, "records cost"),
        (
            RECORDS,
            {"change": lambda ledger: ledger["records"][0].update(noise_source="seeded")},
            "seeded noise source",
        ),
        (RECORDS, {"records": RECORDS[:1]}, "record of charge .* is missing"),
        (odd, {"records": odd}, "not a complete record"),
    ):
        write_release(tmp_path / "artifacts" / "synthesize", records)
        write_ledger(tmp_path / "ledger.json", **ledger)
        with pytest.raises(BudgetError, match=words):
            desk()
    (tmp_path / "ledger.json").unlink()
    with pytest.raises(BudgetError, match="ledger write"):
        desk()
    assert BudgetError.exit_code == 3 and not (tmp_path / "artifacts" / "report").exists()


# ---- the owner's edition


def test_the_owners_edition_is_marked_local_on_every_page(pages):
    body = pages["owner"].split("<body", 1)[1]
    assert (
        re.sub(r"<[^>]*>", "", body.split(">", 1)[1]).strip().startswith("local: not to be shared")
    )
    style = pages["owner"].split("@media print", 1)[1].split("</style>")[0]
    assert re.search(r"\.local \{[^}]*table-header-group", style) and re.search(
        r"\.mark \{[^}]*position: fixed", style
    )
    assert 'class="mark"' in body and 'class="mark"' not in pages["public"]


def test_the_owners_edition_shows_the_evaluation(desk, tmp_path):
    assert "not to be shared" in desk("--audience", "owner")
    text = (tmp_path / "evaluation" / "report.html").read_text()
    for words in ("Verdict: fair (81 %", "83.2 ± 1.2", "7.654", "only 12 images"):
        assert words in text
    assert text.index("Verdict: fair") < text.index("<section"), "before all else"
    assert text.count("data:image/png") == 2
    assert (
        not (tmp_path / "evaluation" / PRIVACY).exists()
        and not (tmp_path / "artifacts" / "report").exists()
    )


def test_the_owners_edition_shows_the_project_on_the_curve(desk, tmp_path):
    """The project lies at size_hint · ε on the horizontal axis, and at its forecast on the vertical
    one. All other points are public runs on grey images.
    """
    desk()
    assert "this project" not in (tmp_path / "artifacts" / "report" / "index.html").read_text()
    desk("--audience", "owner")
    elements = Elements((tmp_path / "evaluation" / "report.html").read_text()).found
    places = [
        (words["class"], float(words["cx"]), float(words["cy"]))
        for tag, words in elements
        if tag == "circle"
    ]
    _, x, y = places.pop()
    assert x == pytest.approx(112 * (math.log10(10 * HINT) - 1.5), abs=0.06)
    assert y == pytest.approx(200 * (1 - expected_part("grey", 10 * HINT)), abs=0.06)
    assert len(places) == len(curve("grey", 1)["runs"]) and all(
        0 <= x <= 560 and 0 <= y <= 200 for _, x, y in places
    )


@pytest.mark.parametrize(
    ("sources", "channels", "kind"),
    [
        ({"select": 12}, 1, "chosen"),
        ({"select": 12}, 3, "chosen"),
        ({"refine": 9, "select": 3}, 1, "grey"),
        ({"refine": 9, "select": 3}, 3, "colour"),
    ],
)
def test_the_curve_is_of_the_kind_that_init_forecasts(tmp_path, sources, channels, kind):
    """`forecast.kind_of` returns "chosen" only if all released images are public."""
    release = write_release(tmp_path / "release", sources=sources, channels=channels)
    kinds = []
    local = Local(curve=lambda *about: kinds.append(about[0]) or curve(*about))
    report_page(release, write_ledger(tmp_path / "ledger.json"), local)
    assert kinds == [kind]


def test_the_last_page_states_what_may_be_shared(desk):
    said = desk("--audience", "owner")
    assert "12 synthetic images (8 plain, 4 distorted), grey, 8 × 8, 2 classes" in said
    assert "one image with its label, in dataset clinic-2026" in said
    assert f"ε = {bound_text(read_ledger(Path('ledger.json'))['epsilon']['rdp'])} of 10" in said
    assert (
        "artifacts/synthesize/, artifacts/report/, ledger.json\n" in said
        and "git add ledger.json (" in said
    )
    for name in (
        ".gitignore",
        "README.md",
        "params.yaml",
        "pipelines/own.yaml",
        "artifacts/teacher/card.json",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    said = desk("--audience", "owner")
    assert "git add .gitignore README.md params.yaml pipelines ledger.json (" in said
    assert "ledger.json; artifacts/teacher/, a classifier (sfumato.load_teacher)" in said
    # Standard output is no terminal here, so it may be kept as a log
    assert "81 %" not in said and "metrics.json" in said
    assert "verdict   fair (81 % of what there is to learn): much." in desk(
        "--audience", "owner", terminal=True
    )
    assert "git add" not in desk()


def test_the_owners_edition_never_lands_in_an_artifact(desk, tmp_path):
    desk()
    before = (tmp_path / "artifacts" / "report" / "index.html").read_bytes()
    for name in ("report/index.html", "report/new/page.html", "synthesize/report.html"):
        with pytest.raises(ConfigError, match="may be shared"):
            desk("--audience", "owner", "--out", f"artifacts/{name}")
    assert (tmp_path / "artifacts" / "report" / "index.html").read_bytes() == before
    read_artifact(tmp_path / "artifacts" / "synthesize", "synthesize")


def test_a_page_never_replaces_what_is_not_a_report(desk, tmp_path):
    for out in ("artifacts/synthesize/x.html", "page.html", "artifacts"):
        why = "is a folder" if out == "artifacts" else "is not an artifact of `report`"
        with pytest.raises(ConfigError, match=why):
            desk("--out", out)
    assert (tmp_path / "ledger.json").exists()


def test_pictures_of_noisy_releases_are_shown_only_while_whole(desk, tmp_path):
    with writing(tmp_path / "artifacts" / "pretrain", "pretrain", records=RECORDS) as directory:
        save_png(directory / "central.png", np.zeros((4, 4), np.uint8))
    arguments = (tmp_path / "metrics.json", tmp_path / "evaluation", tmp_path / "artifacts")
    assert [item.title for item in read_local(*arguments).pictures] == ["pretrain, central"]
    save_png(tmp_path / "artifacts" / "pretrain" / "central.png", np.ones((4, 4), np.uint8))
    assert read_local(*arguments).pictures == ()


# ---- both


@pytest.mark.parametrize("edition", ["public", "owner"])
def test_the_page_fetches_nothing_and_runs_nothing(pages, edition):
    page = pages[edition]
    elements = Elements(page).found
    assert not {tag for tag, _ in elements} & {
        "script",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
    }
    for tag, attributes in elements:
        for name in ("src", "href", "srcset", "xlink:href", "action", "data"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    assert not re.search(r"https?://|url\(|@import|//cdn", page)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page, "names from the data are text"


@pytest.mark.parametrize("edition", ["public", "owner"])
def test_the_page_can_be_read_aloud(pages, edition):
    elements = Elements(pages[edition]).found
    assert all(attributes.get("alt") for tag, attributes in elements if tag == "img")
    assert all(attributes.get("aria-label") for tag, attributes in elements if tag == "input")
    assert all(
        about.get("role") == "img" and about.get("aria-label")
        for tag, about in elements
        if tag == "svg"
    )
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    named = {
        attributes["aria-labelledby"]
        for _, attributes in elements
        if "aria-labelledby" in attributes
    }
    assert len(ids) == len(set(ids)) and named <= set(ids)
    assert ("html", {"lang": "en"}) in elements and sum(tag == "h1" for tag, _ in elements) == 1
    for media in ("prefers-color-scheme: dark", "@media print", "width=device-width"):
        assert media in pages[edition]


@pytest.mark.parametrize(
    ("sources", "title", "kinds"),
    [
        (SOURCES, "Synthetic images made from", ["synthetic images"]),
        (
            {"auxiliary": 8, "select": 4},
            "Synthetic and public images for",
            ["synthetic images", "public images"],
        ),
        ({"select": 12}, "Public images chosen for", ["public images"]),
    ],
)
def test_the_page_calls_a_release_what_it_is(tmp_path, sources, title, kinds):
    release = write_release(tmp_path / "synthesize", sources=sources)
    assert title in report_page(release, write_ledger(tmp_path / "ledger.json"))
    kind = what_was_released(read_artifact(release))["kind"]
    assert [name for name in ("synthetic images", "public images") if name in kind] == kinds


def test_numbers_are_recomputed_and_hashes_match_the_files(tmp_path, pages):
    release = write_release(tmp_path / "synthesize")
    lie = {"epsilon": 0.001, "share": 0.0}
    ledger = write_ledger(
        tmp_path / "ledger.json", change=lambda x: x["stages"]["count"].update(lie)
    )
    with pytest.raises(BudgetError, match="it states epsilon=0.001 for count"):
        report_page(release, ledger)
    page = report_page(release, write_ledger(tmp_path / "ledger.json"))
    true = build_ledger(BUDGET, Records.of(RECORDS), [])
    stages = [true["stages"][name]["epsilon"] for name in ("count", "frequency")]
    for value in (true["epsilon"]["rdp"], true["epsilon"]["pld"], *stages):
        assert bound_text(value) in page
    assert f"{100 * true['stages']['count']['share']:.1f} %" in page and "0.001" not in page
    for name in ("images.npy", "labels.npy", "grid.png", "card.json", PRIVACY):
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() in page
    assert hashlib.sha256((tmp_path / "ledger.json").read_bytes()).hexdigest() in page
    assert "1 file, listed" in page


def test_a_declared_size_is_stated(tmp_path):
    records = [{**r, "adjacency": "zero-out-one"} for r in RECORDS]
    release = write_release(tmp_path / "synthesize", records)
    ledger = write_ledger(tmp_path / "ledger.json", records)
    page = report_page(release, ledger)
    assert (
        "declares that the set contains exactly 1\u202f500 images" in page
        and "put a blank in its place" in page
    )
    assert "is not disclosed" not in page


def test_printed_bounds_and_costs_are_never_too_low():
    assert [percent_up(x) for x in (0, 0.01, 0.0101, 0.99999, 1.0, 0.8437)] == [
        "0",
        "1",
        "1.1",
        "100",
        "100",
        "84.4",
    ]
    powers = ["9.12 × 10⁻⁵", "1 × 10⁻⁴", "1 × 10⁰", "2.21 × 10⁴"]
    assert [scientific(x) for x in (9.115e-5, 9.999e-5, 1.0, 22000.5)] == powers
    assert [bound_text(x) for x in (0.0, 9.99811, float("inf"), 0.12341)] == [
        "0",
        "9.999",
        "∞",
        "0.1235",
    ]


def test_metrics_become_tables_with_a_cell_for_each_set(tmp_path):
    accuracy, by_class, reliable, fidelity, verdict = tables_of(METRICS)
    assert accuracy.columns == ("trained on", "cnn")
    assert accuracy.rows == (("release", "83.2 ± 1.2"), ("real", "97.3 ± 0.5"))
    assert by_class.rows == (("benign", "76.5 ± 1.2"),)
    # METRICS is from a version without intervals
    assert reliable.rows == (("release: cnn", "–", "benign", "76.5", "0.0", "–"),)
    assert fidelity.title == "Fidelity to real images (holdout), feature space cnn-x (local)"
    assert fidelity.rows == (("frechet", "7.654", "5.432"), ("mmd", "0.4567 ± 0.0321", "–"))
    assert verdict.rows[1] == ("release", "83.2", "82.2")
    assert read_local(tmp_path / "metrics.json", tmp_path, tmp_path) == Local("", (), (), (), ())
    for damaged in (
        "{",
        "[]",
        '{"verdict": {}}',
        json.dumps(METRICS | {"verdict": None, "release": {}}),
    ):
        (tmp_path / "metrics.json").write_text(damaged)
        with pytest.raises(DataError, match=r"metrics\.json cannot be read"):
            read_local(tmp_path / "metrics.json", tmp_path, tmp_path)


def test_each_classifier_has_a_row_of_all_measures():
    rows = [
        {"class": "benign", "mean": 0.9, "std": None},
        {"class": "other", "mean": 0.7, "std": None},
    ]
    found = {"per_class": rows, "interval": [0.7812, 0.8391], "calibration": 0.0456, "shifted": {}}
    release = METRICS["release"] | {"cnn": ACCURACY | found}
    _, _, reliable, *_ = tables_of(
        METRICS | {"release": release, "teacher": found | {"accuracy": 0.8}}
    )
    cells = ("78.1 to 83.9", "other", "70.0", "10.0", "4.6")
    assert reliable.rows == (("release: cnn", *cells), ("teacher", *cells))


def of_persons(stage: str, number: int, mechanism: Mechanism) -> dict:
    return record(stage, number, mechanism) | {"unit": UNITS["group"], "group_weight": "mean"}


def test_a_release_of_persons_is_described_by_persons(tmp_path):
    """If persons are protected, the guarantee is stated for a person, not for an image.

    The word "image" is allowed elsewhere.
    """
    told = re.compile(
        r"(any|each|every other|one particular|an|one) (single )?(image|picture)\b|group of"
        r" images|patient"
    )
    for name, make in (("persons", of_persons), ("images", record)):
        records = [make("count", 1, Mechanism(noise_multiplier=5))]
        release = write_release(tmp_path / name, records)
        text = " ".join(
            report_page(release, write_ledger(tmp_path / f"{name}.json", records)).split()
        )
        plain = text.split('<h2 id="plain">')[1].split("</section>")[0]
        assert bool(told.search(text)) == (name == "images"), told.findall(text)
        assert f"For 1 500 {name} together, " in plain and "not stated yet" not in plain


def test_a_merged_release_is_not_made_by_one_owner(tmp_path):
    """No one has the images of all owners, and the merged project cannot run the queries."""
    pages = {}
    for names in (("north",), ("north", "south")):
        records = [
            record("count", i, Mechanism(noise_multiplier=5)) | {"dataset_id": name}
            for i, name in enumerate(names)
        ]
        owners = names if len(names) > 1 else ()
        release = write_release(tmp_path / "-".join(names), records)
        ledger = tmp_path / "ledger.json"
        ledger.write_text(ledger_text(build_ledger(BUDGET, Records.of(records, owners), [])))
        pages[len(names)] = " ".join(report_page(release, ledger).split())
    for of_one, of_several in (
        ("The owner of the images made this set", "The person who merged the owners’ noisy"),
        ("the owner of the sensitive images runs", "every owner ran the software on their own"),
        ("Anyone who has the sensitive images can", "Each owner can run the queries"),
    ):
        assert of_one in pages[1] and of_one not in pages[2]
        assert of_several in pages[2] and of_several not in pages[1]


def test_the_first_half_page_answers_an_officers_questions(tmp_path):
    """The page quotes the owner's statements, if there are any. Only the owner's edition lists
    missing statements. The chance that ε fails is stated for each image, and for all images
    together.
    """
    about = {
        "owner": "The clinic",
        "controller": "Its director",
        "recipients": "Two schools",
        "retention": "Ten years",
    }
    ledger = write_ledger(tmp_path / "ledger.json")
    release = write_release(tmp_path / "release")
    bare = report_page(release, ledger)
    owners = report_page(release, ledger, Local())
    card = release / "card.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"about": about}))
    with writing(tmp_path / "told", "synthesize", records=RECORDS) as directory:
        shutil.copytree(
            release, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(PRIVACY)
        )
    told = report_page(tmp_path / "told", ledger)
    for said in about.values():
        assert said in told.split('<h2 id="plain">')[1].split("</section>")[0] and said not in bare
    assert "Not stated yet (set release.retention" in owners and "ot stated yet" not in bare + told
    assert "For each image, this probability is at most 1 in" in bare
    # The true number of images may be larger than HINT, which is rounded
    together = percent_up(default_delta(HINT) * HINT)
    assert f"fails for at least one of them is at most {together} %" in bare
    assert bare.index('id="plain"') < bare.index('id="released"')
