"""Pack a finished project's release for Zenodo, or for a dataset hub.

    python benchmarks/release_archive.py PROJECT release.zip
        --source "Brain MRI, M. Nickparvar, Kaggle" --source-licence cc0-1.0

The archive contains `release/`, with a README.md that starts with the header of a Hugging Face
dataset card; `check/`, the package of `stage egress` with ledger and `verify.py`; and
`zenodo.json`, the metadata of a deposit. You must state the licence of the release (setting
`release.licence`) and the licence of the source: the program cannot find them in the images.
Packing the same release again gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from sfumato import __version__
from sfumato.release.egress import VERIFY, write_package
from sfumato.settings.stage import ARTIFACTS, LEDGER
from sfumato.storage.digest import digest_of_file
from sfumato.storage.files import replacing
from sfumato.storage.plain_json import read_json


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", type=Path, help="folder of a finished project")
    parser.add_argument("archive", type=Path, help="zip file to write")
    parser.add_argument("--source", required=True, help="name and publisher of the real images")
    parser.add_argument("--source-licence", required=True, help="SPDX id of their licence")
    given = parser.parse_args()
    write_archive(given.project, given.archive, given.source, given.source_licence)
    print(f"{given.archive}: SHA-256 {digest_of_file(given.archive)}")
    return 0


def write_archive(project: Path, archive: Path, source: str, source_licence: str) -> None:
    """Verify the release and pack it.

    Raises SystemExit if release.licence is missing or `verify.py` refuses the package, and the same
    errors as `stage egress`.
    """
    about = (
        yaml.safe_load((project / "params.yaml").read_text(encoding="utf-8")).get("release") or {}
    )
    if not about.get("licence"):
        sys.exit(
            f"{project / 'params.yaml'} does not set release.licence: set it, and run `stage run` "
            "again"
        )
    release = project / ARTIFACTS / "synthesize"
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "check"
        write_package(package, project)
        words = [sys.executable, "-I", VERIFY.name]
        done = subprocess.run(words, cwd=package, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{VERIFY.name} refuses the package:\n{done.stdout}{done.stderr}")
        deposit = deposit_of(package, about, source, source_licence)
        with (
            replacing(archive) as temporary,
            zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as target,
        ):
            text = json.dumps(deposit, indent=2, ensure_ascii=False) + "\n"
            target.writestr(zipfile.ZipInfo("zenodo.json"), text)  # dated 1980
            for name, file in (*named(release, "release"), *named(package, "check")):
                target.writestr(zipfile.ZipInfo(name), file.read_bytes())


def named(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """Yield the name in the archive and the path of each file below a folder, sorted by path."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield f"{prefix}/{file.relative_to(folder).as_posix()}", file


def deposit_of(package: Path, about: dict, source: str, source_licence: str) -> dict:
    """Return the metadata of a deposit in Zenodo's format."""
    card = read_json(package / "card.json")
    dataset = read_json(package / LEDGER)["odometer"]["dataset_id"]
    cost = f"ε = {card['epsilon']:.4g} at δ = {card['delta']:.3g}"
    description = (
        f"Labelled synthetic images, differentially private with {cost}. Made with Sfumato "
        f"{__version__} from: {source} (licence {source_licence}). To verify the privacy "
        "statement, run `python -I verify.py` in the folder `check`."
    )
    return {
        "title": f"{dataset}, synthetic and differentially private",
        "upload_type": "dataset",
        "description": description,
        "creators": [{"name": about.get("owner") or "unnamed"}],
        "license": about["licence"],
        "keywords": ["synthetic", "differential privacy"],
    }


if __name__ == "__main__":
    sys.exit(main())
