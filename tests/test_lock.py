"""`requirements.lock` names every package of an installation by exact version and hashes.

It does not name an index to download them from.
"""

import re
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, tuple[str, list[str]]]:
    """Return the version of each package and the sha256 of its files, by name."""
    found = {}
    for entry in re.split(r"\n(?=[^\s#])", "\n" + re.sub(r"(?m)^#.*\n", "", LOCK))[1:]:
        first, *hashes = re.split(r"\s*\\\n\s*", entry.strip())
        name, _, wanted = first.partition(" ")[0].partition("==")
        found[plain(name)] = (wanted, hashes)
    return found


PINS = pins()
CONSTRAINTS = (
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)
# Constraints on packages that are also in the lock
BOTH = {plain(name): said for name, said in CONSTRAINTS if plain(name) in PINS}


def test_every_package_has_one_version_and_sha256_hashes():
    assert len(PINS) > 150
    for name, (wanted, hashes) in PINS.items():
        assert re.fullmatch(r"[0-9][0-9A-Za-z.]*", wanted), name
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), (
            name
        )


def test_no_index_address_or_file_is_named():
    assert not re.search(r"://|^-|index-url|find-links| @ ", LOCK, re.M)


def test_all_requirements_and_build_tools_are_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    asked = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *chain.from_iterable(extras.values()),
    ]
    names = {plain(re.split(r"[\[<>=~! ;]", line)[0]) for line in asked} - {"sfumato"}
    assert names - PINS.keys() == set()


def test_the_lock_and_the_constraints_name_the_same_versions():
    assert len(BOTH) > 120 and {name: PINS[name][0] for name in BOTH} == BOTH


def test_what_is_installed_here_has_the_versions_of_the_lock():
    """`make install` uses the lock only with LOCKED=1. Otherwise, it uses `constraints.txt`, which
    contains the same versions.
    """
    here = {}
    for name in BOTH:
        with suppress(PackageNotFoundError):
            here[name] = version(name).partition("+")[0]
    assert here == {name: PINS[name][0] for name in here}
