"""The package for an output checker: plain files, and a program that verifies them."""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from sfumato.data.lineage import digests, remember_hashes
from sfumato.errors import BudgetError, ConfigError, DataError
from sfumato.privacy.check import Bound, Verified, verify
from sfumato.privacy.ledger import read_budget
from sfumato.release.card import WORDS, data_dictionary, page, plain, template
from sfumato.release.card_check import PUBLIC_KIND, ReleaseCard
from sfumato.release.exports import label_columns, mark_of, shards
from sfumato.release.loading import Release, load_release
from sfumato.release.pattern import add_pattern, carries_pattern, pattern_key
from sfumato.release.report import (
    Facts,
    grouped,
    not_covered,
    report_page,
    what_it_cost,
    what_it_means,
    what_was_released,
)
from sfumato.release.signing import Signing, png_signer
from sfumato.release.verify import MANIFEST, results_of
from sfumato.runtime.progress import Say, discard
from sfumato.settings.stage import ARTIFACTS, LEDGER, PLAN, PUBLIC
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.files import replacing_directory, write_csv, write_json
from sfumato.storage.png import png_bytes

# Maximum number of archives. With the nine other files, a package has fewer than 20 files
MOST_ARCHIVES = 10
VERIFY = Path(__file__).with_name("verify.py")
FORM = "risk-form.html"
COLUMNS = dict.fromkeys(("column", "meaning", "type", "values"), "")


def write_package(
    folder: Path,
    project: Path = Path(),
    signing: Signing | None = None,
    say: Say = discard,
    state: Path | None = None,
) -> str:
    """Write the files that an output checker needs, after verifying the ledger and the release.

    The folder is written completely or not at all.

    folder: an empty or new folder;
    project: the folder with `ledger.json`;
    signing: certificate and key that sign the pictures; None for unsigned pictures;
    state: state directory, in which pictures with a new pattern are remembered as released, so that
    they do not count as public images later.

    Returns the SHA-256 of the manifest, which must be sent separately. Raises ConfigError if the
    folder or the certificate cannot be used, BudgetError if the ledger is invalid, and DataError if
    the release is invalid.

    Guarantee: the package depends only on the release and the ledger, which are already released,
    and on `signing`.
    """
    folder = folder.resolve()
    check_folder(folder, project.resolve())
    path = project / LEDGER
    verified = verified_ledger(project)
    dataset = verified.ledger["odometer"]["dataset_id"]
    release_path = project / ARTIFACTS / "synthesize"
    if datasets := ", ".join(verified.ledger.get("apart", ())):
        say(
            f"note: {path} lists only the charges behind this release. All charges on the datasets "
            f"{datasets} are listed only in the journals of their owners. The output checker may "
            "ask each owner for the ledger.json of that owner's project"
        )
    report = report_page(release_path, path)  # raises DataError if the release is local
    release = load_release(release_path)
    card = release.card.copy()
    mark = mark_of(card["sources"])
    sign: Callable[[bytes], bytes] = bytes  # unsigned
    if mark.source_type:  # None if all images are public, because these need no mark
        if carries_pattern(card["shape"]):
            card.setdefault("pattern", pattern_key(dataset, 0))
        if signing:
            sign = png_signer(signing, mark)
    with replacing_directory(folder) as directory:
        marked_digests = write_pictures(directory, release, card, sign)
        write_tables(directory, release)
        write_json(directory / "card.json", card, ensure_ascii=False)
        for source in (path, VERIFY):
            (directory / source.name).write_bytes(source.read_bytes())
        (directory / "report.html").write_text(report, encoding="utf-8")
        facts = package_facts(release, verified.ledger, verified.epsilon)
        pattern = "pattern" in card
        facts |= {"generated": mark.source_type, "pattern": pattern, "signing": signing}
        readme, form = (
            template(name, autoescape=False, plain=plain).render(facts)
            for name in ("egress.md", "risk_form.md")
        )
        (directory / "README.md").write_text(readme, encoding="utf-8")
        (directory / FORM).write_text(
            page(form, f"Risk form: {facts['cost']['dataset']}"), encoding="utf-8"
        )
        write_manifest(directory)
        if failed := [text for passed, text in results_of(directory) if passed is False]:
            raise DataError(
                f"{folder} was not written, because {VERIFY.name} would refuse it: {failed[0]}"
            )
        if marked_digests and state is not None:
            remember_hashes(state, read_artifact(release_path).records, marked_digests)
        return digest_of_file(directory / MANIFEST)


def verified_ledger(project: Path) -> Verified:
    """Verify the ledger of a project, and the files of the project's artifacts.

    Raises BudgetError if the ledger is invalid, or if entries of the journal may be missing. A
    ledger of several owners is accepted although it does not list all charges. The complete lists
    are the owners' journals.
    """
    path = project / LEDGER
    budget = read_budget(project / PLAN / "budget.json")
    verified = verify(path, Bound(limit=budget["target"]), artifacts=True)
    if not (verified.ledger["odometer"]["complete"] or verified.ledger.get("apart")):
        dataset = verified.ledger["odometer"]["dataset_id"]
        raise BudgetError(
            f"{path} has an incomplete odometer: more may have been spent on dataset {dataset!r} "
            "than the odometer lists. Restore the newest state directory and run `stage ledger "
            "write`"
        )
    return verified


def write_manifest(directory: Path) -> None:
    """Write the manifest, which lists the size and the SHA-256 of each other file."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": digest_of_file(file)}
        for file in sorted(directory.iterdir())
    }
    write_json(directory / MANIFEST, files, sort_keys=True)


def check_folder(folder: Path, project: Path) -> None:
    """Raise ConfigError if a folder is not empty, is a file, or lies where stages replace all
    files.

    A folder that does not exist yet is accepted.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a folder that is empty or does not exist")
    for inside in (project / ARTIFACTS, project / PUBLIC):
        if inside.resolve() in (folder, *folder.parents):
            raise ConfigError(
                f"{folder} lies in {inside}, and stages replace all files there: name a folder "
                "elsewhere"
            )


def file_name(number: int) -> str:
    return f"{number + 1:06d}.png"


def write_pictures(
    directory: Path, release: Release, card: ReleaseCard, sign: Callable[[bytes], bytes]
) -> list[str]:
    """Write the images of a release as PNGs into uncompressed zip archives.

    The same release always gives the same bytes, unless the pictures are signed.

    card: card of the package. If it has an entry `pattern`, and the card of the release has none,
    this pattern is added to all pictures except public ones.

    Returns the digests of the pictures to which the pattern was added.
    """
    mark = mark_of(card["sources"])
    marked_digests: list[str] = []
    needs_pattern = "pattern" in card and "pattern" not in release.card
    for number, indices in enumerate(shards(release.images, MOST_ARCHIVES), 1):
        with zipfile.ZipFile(
            directory / f"images-{number:02d}.zip", "w", zipfile.ZIP_STORED
        ) as archive:
            for i in indices:
                image = release.images[i : i + 1]
                if needs_pattern and release.kinds[i] != PUBLIC_KIND:
                    image = add_pattern(image, card["pattern"])
                    marked_digests += (digest.hex() for digest in digests(image))
                entry = zipfile.ZipInfo(file_name(i))  # always dated 1980, for equal bytes
                archive.writestr(entry, sign(png_bytes(image[0], mark.xmp)))
    return marked_digests


def write_tables(directory: Path, release: Release) -> None:
    """Write `labels.csv`, with one row per picture, and `dictionary.csv`, about its columns."""
    several = release.labels.ndim == 2
    names = release.classes
    if several:
        names = tuple(f"label {name}" for name in names)
    rows = [
        {"file_name": file_name(i), "kind": str(release.kinds[i])} | label_columns(label, names)
        for i, label in enumerate(release.labels.tolist())
    ]
    meanings = data_dictionary(release.card, several)
    dictionary = [
        dict(zip(COLUMNS, (name, *details), strict=True)) for name, details in meanings.items()
    ]
    write_csv(directory / "labels.csv", rows, dict.fromkeys(meanings, ""))
    write_csv(directory / "dictionary.csv", dictionary, COLUMNS)


def package_facts(release: Release, ledger: Mapping, epsilon: float) -> Facts:
    """Collect the facts for the package's texts, from the release and its ledger."""
    cost = what_it_cost(ledger, epsilon)
    return {
        "release": what_was_released(read_artifact(release.path, "synthesize")),
        "cost": cost,
        "one": ("image", "person")[cost["grouped"]],
        "size": grouped(ledger["size_hint"]),
        "ledger": ledger,
        "attacker": what_it_means(ledger),
        "not_covered": not_covered(cost["grouped"]),
        "words": WORDS["about"],
    }
