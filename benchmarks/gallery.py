"""Write `docs/gallery`: finished releases as their own pages, with ledgers and first images.

    python benchmarks/gallery.py digits --work WORK
    # the Debian package dataset-fashion-mnist, or a download
    python benchmarks/gallery.py clothes --work WORK
    # and chest, cells: one folder per class
    python benchmarks/gallery.py mri --work WORK --images FOLDER

Results of earlier calls stay in the folder --work: a second call spends nothing and only writes the
pages again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pyarrow import parquet

import sfumato
from sfumato.data.images import ImageSet
from sfumato.planning.project import repro
from sfumato.planning.project_files import begin_repository, dvc_text, params_text
from sfumato.release.exports import mark_of, save_parquet
from sfumato.settings.stage import ARTIFACTS, LEDGER

GALLERY = Path(__file__).resolve().parent.parent / "docs" / "gallery"
SMALL = 32 * 32  # pixels, up to which a page has the first 1000 images; larger images, 100
PARAMS: dict[str, dict[str, Any]] = {
    "digits": {
        "recipe": "full",
        "profile": "digits",
        "seed": 0,
        "data": {},
        "privacy": {"epsilon": 10},
    },
    "clothes": {
        "recipe": "teacher-generator",
        "profile": "fashion-mnist-cpu",
        "seed": 0,
        "data": {},
        "privacy": {"epsilon": 1},
        "auxiliary": {"steps": 400, "images": 12000},
        "embedding": {"learned": {"steps": 300}},
        "refine": {"steps": 200, "images": 4000},
        "synthesize": {"count": 8000},
    },
}
FOLDERS: dict[str, dict[str, Any]] = {
    "mri": {"epsilon": 5, "minutes": 10, "dataset_id": "brain-mri"},
    "chest": {
        "epsilon": 10,
        "minutes": 60,
        "dataset_id": "chest-x-rays",
        "groups": r"^([A-Za-z]+-?\d+)_\d+\.",
    },
    "cells": {"epsilon": 10, "minutes": 60, "dataset_id": "blood-cells", "one_image_each": True},
}


def make(name: str, project: Path, images: Path | None) -> None:
    """Write the project, unless it exists, and run all but the numbers on real images."""
    if not (project / "params.yaml").is_file():
        if images is not None:
            sfumato.Project.create(project, images=images, **FOLDERS[name])
        else:
            project.mkdir(parents=True)
            (project / "params.yaml").write_text(params_text(PARAMS[name], {}), encoding="utf-8")
            (project / "dvc.yaml").write_text(dvc_text(), encoding="utf-8")
            begin_repository(project, print)
    repro(project, "report", shown=True)


def collect(project: Path, out: Path) -> None:
    """Copy the files for readers, and write the first images as Parquet. All of it was released."""
    release, report = project / ARTIFACTS / "synthesize", project / ARTIFACTS / "report"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in (
        release / "README.md",
        release / "card.json",
        release / "grid.png",
        release / "privacy.json",
    ):
        shutil.copyfile(file, out / file.name)
    shutil.copyfile(report / "index.html", out / "report.html")  # README.md is the index of a site
    shutil.copyfile(project / LEDGER, out / LEDGER)
    found = sfumato.load_release(release)
    shown = 1000 if found.images[0, :, :, 0].size <= SMALL else 100
    first = min(shown, found.card["kinds"]["plain"])  # distorted and mixed ones follow
    some = ImageSet(found.images[:first], found.labels[:first], found.classes)
    with tempfile.TemporaryDirectory() as written:
        save_parquet(Path(written), some, found.kinds[:first], mark_of(found.card["sources"]))
        (table,) = Path(written).rglob("*.parquet")
        smaller = out / f"first-{first}.parquet"  # compressed, because every PNG repeats its mark
        parquet.write_table(parquet.read_table(table), smaller, compression="zstd")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*PARAMS, *FOLDERS])
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the projects and of their private state"
    )
    parser.add_argument(
        "--images", type=Path, help="of mri, chest and cells: one folder of pictures a class"
    )
    given = parser.parse_args()
    if (given.name in FOLDERS) != (given.images is not None):
        parser.error(f"--images goes with {', '.join(FOLDERS)}, and they with --images")
    os.environ.setdefault("SFUMATO_STATE", str(given.work.resolve() / "state"))
    os.environ.setdefault("DVC_SITE_CACHE_DIR", str(given.work.resolve() / "dvc"))
    make(given.name, given.work / given.name, given.images)
    collect(given.work / given.name, GALLERY / given.name)


if __name__ == "__main__":
    main()
