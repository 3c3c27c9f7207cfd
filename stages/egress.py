"""`stage egress`: write the package for the output checker of a secure environment."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import ConfigError

CERTIFICATE_HELP = (
    "Certificate that signs the pictures' metadata (C2PA), with its issuers, in PEM. Default: "
    "unsigned."
)
CertificateOption = Annotated[Path | None, typer.Option(help=CERTIFICATE_HELP)]
KeyOption = Annotated[
    Path | None, typer.Option(help="Its private key, in PEM, without a passphrase.")
]
TimeOption = Annotated[
    str | None, typer.Option(help="Web address of a service that stamps each signature's time.")
]
FolderArgument = Annotated[
    Path, typer.Argument(help="Folder to write: empty, or one that does not exist.")
]


def egress(
    folder: FolderArgument,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    time_service: TimeOption = None,
) -> None:
    """Free: write a folder for an output checker: pictures, tables, ledger, risk form, and a
    program that verifies them.
    """
    from sfumato.release.egress import write_package
    from sfumato.release.signing import Signing

    signing = None
    if certificate is not None and key is not None:
        signing = Signing(certificate, key, time_service)
    elif certificate or key or time_service:
        raise ConfigError(
            "pictures are signed with --certificate and --key together: name both, or neither"
        )
    sha256 = write_package(folder, signing=signing)
    typer.echo(
        f"{folder}: may leave the secure environment once the output checker has signed "
        f"{folder / 'risk-form.html'}"
    )
    typer.echo(f"SHA-256 of {folder / 'manifest.json'}: {sha256} (send it separately)")
