"""Program that `test_full_disk.py` runs in a process with its own full disk.

    python full_disk.py FOLDER

FOLDER is the root of a small file system. The program prints JSON: what failed, and the files on
the disk afterwards.
"""

import errno
import json
import os
import sys
from pathlib import Path

import torch
from owners import Owner

from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import read_card
from sfumato.settings.data import Data
from sfumato.storage.artifacts import read_artifact, writing

PAGE = 4096
ROOM = range(12)  # numbers of free pages, from none to more than a charge needs


def fill(folder: Path, pages: int) -> Path:
    """Fill the disk, but leave `pages` free. Returns the file that fills it."""
    ballast = folder / "ballast"
    disk = os.statvfs(folder)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_bsize - pages * PAGE)
    return ballast


def spend(owner: Owner, plan: str, releases: Path) -> None:
    """Open a charge for `plan`, draw, release and close it, as a stage does."""
    charge = owner.open(plan=plan)
    seen = sum(len(images) for images, _ in charge.batches(512))
    with writing(releases / plan, "count", records=[charge.record]) as directory:
        released = charge.release(torch.full((10,), float(seen)), 1.0)
        (directory / "counts.json").write_text(json.dumps(released.tolist()))
        charge.close()


def main(folder: Path) -> None:
    state = folder / "state"
    releases = folder / "artifacts"
    prepare_sensitive(Data(), state, folder / "card.json", folder / "raw")
    owner = Owner(state, read_card(folder / "card.json"))
    releases.mkdir()
    found = []
    for pages in ROOM:
        plan = f"plan-{pages}"
        failed = ""
        ballast = fill(folder, pages)
        try:
            spend(owner, plan, releases)
        except OSError as error:
            failed = errno.errorcode[error.errno or 0]
        released = (releases / plan).is_dir()
        # The journal can be read while the disk is full, and is complete
        charges = len(owner.odometer.opened())
        ballast.unlink()
        if failed:
            spend(owner, f"{plan}-again", releases)  # the disk has room again: other work continues
        left = [path.name for path in releases.iterdir() if path.name.startswith(".")]
        found.append(
            {
                "pages": pages,
                "failed": failed,
                "released": released,
                "charges": charges,
                "left": left,
            }
        )
    records = [read_artifact(path).records for path in releases.iterdir()]
    journalled = {record["id"] for record in owner.odometer.opened()}
    whole = all(set(record) <= journalled for record in records) and owner.odometer.complete()
    print(
        json.dumps(
            {"runs": found, "whole": whole, "releases": len(records), "charges": len(journalled)}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
