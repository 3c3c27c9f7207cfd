"""`stage egress`: write the package for the output checker of a secure environment."""

from pathlib import Path
from typing import Annotated

import typer

FolderArgument = Annotated[Path, typer.Argument(help="Folder to write: empty, or one that does not exist.")]


def egress(folder: FolderArgument) -> None:
    """Free: write a folder for an output checker, with pictures, tables, ledger, risk form and a verifier."""
    from sfumato.release.egress import write_package

    sha256 = write_package(folder)
    typer.echo(f"{folder}: may leave once the output checker has signed {folder / 'risk-form.md'}")
    typer.echo(f"SHA-256 of {folder / 'manifest.json'}: {sha256} (send it separately)")
