"""Signed metadata in pictures: C2PA manifests, signed with the owner's certificate.

If the owner names a time service, hashes of the pictures are sent to it. Nothing else is sent
anywhere. The module needs the extra `marks`.

Source: C2PA specification 2.2 (https://spec.c2pa.org).
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from sfumato.errors import ConfigError, explained, requiring
from sfumato.release.exports import Mark
from sfumato.storage.documents import escaped

SIGNED_BY = "signed by"
MEDIA_TYPE = "image/png"
# No thumbnail is added, because it would be larger than the picture.
# Verification sends no request over the network.
SETTINGS = {
    "version": 1,
    "builder": {"thumbnail": {"enabled": False}},
    "verify": {"verify_after_sign": True, "remote_manifest_fetch": False, "ocsp_fetch": False},
}


def c2pa() -> ModuleType:
    with requiring("signed metadata"):
        import c2pa
    return c2pa


def algorithm_of(key: bytes) -> str:
    """Return C2PA's name for the signature algorithm of a private key in PEM.

    Raises ValueError if the key is of a kind that C2PA does not accept.
    """
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    private = load_pem_private_key(key, password=None)
    if isinstance(private, ec.EllipticCurvePrivateKey):
        names = {"secp256r1": "es256", "secp384r1": "es384", "secp521r1": "es512"}
        if private.curve.name in names:
            return names[private.curve.name]
    if isinstance(private, rsa.RSAPrivateKey):
        return "ps256"
    if isinstance(private, ed25519.Ed25519PrivateKey):
        return "ed25519"
    raise ValueError("expected a key for ECDSA (P-256, P-384, P-521), RSA or Ed25519")


@dataclass(frozen=True)
class Signing:
    """A certificate and a key that sign pictures.

    certificate: the signer's certificate and its chain of issuers, in PEM;
    key: the signer's private key, in PEM, without a passphrase;
    time_service: address of a time-stamping service (RFC 3161), which stamps each picture.
    """

    certificate: Path
    key: Path
    time_service: str | None = None


def png_signer(signing: Signing, mark: Mark) -> Callable[[bytes], bytes]:
    """Return a function that adds a signed manifest to a PNG.

    Both this function and the returned one raise ConfigError if pictures cannot be signed.
    """
    library = c2pa()
    action = {
        "action": "c2pa.created",
        "digitalSourceType": mark.source_type,
        "description": mark.description,
    }
    manifest = {
        "claim_generator_info": [{"name": "sfumato", "version": version("sfumato")}],
        "format": MEDIA_TYPE,
        "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": [action]}}],
    }
    context = library.Context(library.Settings.from_dict(SETTINGS))

    def cannot(error: Exception) -> str:
        return (
            f"{signing.certificate} and {signing.key} cannot sign pictures ({error}): expected a "
            "certificate chain for C2PA claims and its private key, both in PEM. If you named a "
            "time service, check that it can be reached"
        )

    def sign(picture: bytes) -> bytes:
        signed = io.BytesIO()
        with explained(ConfigError, cannot, causes=(library.C2paError,)):
            library.Builder(json.dumps(manifest), context).sign(
                signer, MEDIA_TYPE, io.BytesIO(picture), signed
            )
        return signed.getvalue()

    with explained(ConfigError, cannot, causes=(OSError, ValueError, TypeError, library.C2paError)):
        secret = signing.key.read_bytes()
        chain = signing.certificate.read_bytes()
        info = library.C2paSignerInfo(algorithm_of(secret), chain, secret, signing.time_service)
        signer = library.Signer.from_info(info)
    return sign


def signature_in(picture: Path) -> str:
    """State who signed a picture and when, or why it has no valid signature."""
    try:
        library = c2pa()
    except ConfigError as error:
        return f"not read: {error}"
    context = library.Context(library.Settings.from_dict(SETTINGS))
    try:
        reader = library.Reader(picture, context=context)
        signature = reader.get_active_manifest()["signature_info"]
    except (library.C2paError, KeyError) as error:
        if "ManifestNotFound" in str(error):
            return "none"
        return escaped(f"unreadable ({error})")
    time = signature.get("time", "no time stamp")
    failures = reader.get_validation_results()["activeManifest"]["failure"]
    codes = {failure["code"] for failure in failures} - {"signingCredential.untrusted"}
    if codes == {"signingCredential.expired"}:
        time += ", and the certificate has expired"
    elif reader.get_validation_state() == "Invalid":
        if any(code.endswith(".mismatch") for code in codes):
            return "invalid: the picture was changed after it was signed"
        return f"invalid: {', '.join(sorted(codes))}"
    return escaped(
        f"{SIGNED_BY} {signature['common_name']}, {signature['issuer']}; {time}; "
        "the issuer was not checked"
    )
