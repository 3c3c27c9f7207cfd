"""Write `docs/gallery`: one page per finished release, with its ledger and its first images.

    python benchmarks/gallery.py digits --work WORK
    # uses the Debian package dataset-fashion-mnist, or downloads the set
    python benchmarks/gallery.py clothes --work WORK
    # also for chest and cells; FOLDER has one folder per class
    python benchmarks/gallery.py mri --work WORK --images FOLDER

The project stays in the folder --work: a second call spends nothing and only writes the page again.
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
# A page has the first 1000 images of a release if each has at most this many pixels. Otherwise, it
# has the first 100
SMALL = 32 * 32
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
    "mri": {
        "epsilon": 10,
        "minutes": 13,
        "size": 64,
        "dataset_id": "brain-mri",
        "one_image_each": True,
    },
    "chest": {
        "epsilon": 10,
        "minutes": 60,
        "dataset_id": "chest-x-rays",
        "groups": r"^([A-Za-z]+-?\d+)_\d+\.",
    },
    "cells": {"epsilon": 10, "minutes": 60, "dataset_id": "blood-cells", "one_image_each": True},
}


def make(name: str, project: Path, images: Path | None) -> None:
    """Create the project unless it exists, and run everything but the evaluation on real images."""
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
    """Copy the released files, and write the first images as Parquet. Nothing local is copied."""
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
    # not index.html, because MkDocs turns README.md into index.html
    shutil.copyfile(report / "index.html", out / "report.html")
    shutil.copyfile(project / LEDGER, out / LEDGER)
    found = sfumato.load_release(release)
    shown = 1000 if found.images[0, :, :, 0].size <= SMALL else 100
    first = min(shown, found.card["kinds"]["plain"])  # plain images come first
    some = ImageSet(found.images[:first], found.labels[:first], found.classes)
    with tempfile.TemporaryDirectory() as written:
        save_parquet(Path(written), some, found.kinds[:first], mark_of(found.card["sources"]))
        (table,) = Path(written).rglob("*.parquet")
        # Compressed, because all PNGs contain the same mark
        smaller = out / f"first-{first}.parquet"
        parquet.write_table(parquet.read_table(table), smaller, compression="zstd")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*PARAMS, *FOLDERS])
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the projects and their private state"
    )
    parser.add_argument(
        "--images",
        type=Path,
        help="for mri, chest and cells: folder with one folder of pictures per class",
    )
    given = parser.parse_args()
    if given.name in FOLDERS and given.images is None:
        parser.error(f"{given.name}: give the folder of its pictures as --images")
    if given.name not in FOLDERS and given.images is not None:
        parser.error(f"{given.name}: remove --images, which is only for {', '.join(FOLDERS)}")
    os.environ.setdefault("SFUMATO_STATE", str(given.work.resolve() / "state"))
    os.environ.setdefault("DVC_SITE_CACHE_DIR", str(given.work.resolve() / "dvc"))
    make(given.name, given.work / given.name, given.images)
    collect(given.work / given.name, GALLERY / given.name)


if __name__ == "__main__":
    main()
