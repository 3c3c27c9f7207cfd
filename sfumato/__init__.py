"""Sfumato: labelled synthetic images from sensitive ones, with a ledger of the privacy they cost.

`sfumato.Project` creates a release from a folder of images. `sfumato.load_release(folder)` loads a
release as arrays, which requires only NumPy. `sfumato.stream(folder)` draws any number of further
images. `sfumato.load_teacher(folder)` and `sfumato.load_student(folder)` load the classifiers that
some recipes train. `sfumato.open_charge` opens a charge for a custom query. Each name is imported
on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfumato.planning.project import Project
    from sfumato.privacy.own_query import open_charge
    from sfumato.release.loading import Release, load_release
    from sfumato.release.stream import stream
    from sfumato.release.student import load_student
    from sfumato.release.teacher import load_teacher

__version__ = "0.4.0"
__all__ = [
    "Project",
    "Release",
    "__version__",
    "load_release",
    "load_student",
    "load_teacher",
    "open_charge",
    "stream",
]
MODULE_OF = {
    "Project": "sfumato.planning.project",
    "Release": "sfumato.release.loading",
    "load_release": "sfumato.release.loading",
    "load_student": "sfumato.release.student",
    "load_teacher": "sfumato.release.teacher",
    "open_charge": "sfumato.privacy.own_query",
    "stream": "sfumato.release.stream",
}


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sfumato.errors import requiring

    with requiring(f"sfumato.{name}"):
        return getattr(import_module(MODULE_OF[name]), name)
