"""`stage egress`: write the package for the output checker of a secure environment."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import ConfigError
from stages.screen import say
from stages.state import state_dir

CERTIFICATE_HELP = (
    "PEM file with the certificate that signs the pictures' metadata (C2PA), and with the "
    "certificates of its issuers. Default: no signature."
)
CertificateOption = Annotated[Path | None, typer.Option(help=CERTIFICATE_HELP)]
KeyOption = Annotated[
    Path | None,
    typer.Option(help="PEM file with the private key of the certificate, without a passphrase."),
]
TimeOption = Annotated[
    str | None, typer.Option(help="Web address of a time-stamping service for the signatures.")
]
FolderArgument = Annotated[
    Path, typer.Argument(help="Folder to write. It must be empty, or not exist yet.")
]


def egress(
    folder: FolderArgument,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    time_service: TimeOption = None,
) -> None:
    """[free] Write a folder for the output checker of a secure environment. It contains pictures,
    tables, the ledger, a risk form, and a program that verifies these files.
    """
    from sfumato.release.egress import write_package
    from sfumato.release.signing import Signing

    signing = None
    if certificate is not None and key is not None:
        signing = Signing(certificate, key, time_service)
    elif certificate or key or time_service:
        raise ConfigError(
            "signing pictures requires both --certificate and --key: give both, or leave out "
            "--certificate, --key and --time-service"
        )
    sha256 = write_package(folder, signing=signing, say=say, state=state_dir())
    typer.echo(
        f"{folder}: may leave the secure environment once the output checker has signed "
        f"{folder / 'risk-form.html'}"
    )
    typer.echo(f"SHA-256 of {folder / 'manifest.json'}: {sha256} (send it separately)")
