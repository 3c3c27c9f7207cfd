"""A certificate authority for tests. It issues PEM chains for signing and for time stamps."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SIGNING = ExtendedKeyUsageOID.EMAIL_PROTECTION  # C2PA accepts this usage
STAMPING = ExtendedKeyUsageOID.TIME_STAMPING
KEYS = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}


def named(common: str) -> x509.Name:
    parts = {NameOID.ORGANIZATION_NAME: "The clinic", NameOID.COMMON_NAME: common}
    return x509.Name([x509.NameAttribute(kind, text) for kind, text in parts.items()])


def certificate(
    common: str, key, issuer: str, issuer_key, purpose=None, lasts=timedelta(days=30)
) -> bytes:
    """Issue a certificate in PEM. purpose: extended key usage; None for an authority."""
    authority = purpose is None
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    usage |= {"digital_signature": not authority, "key_cert_sign": authority, "crl_sign": authority}
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(named(common))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if not authority:
        built = built.add_extension(x509.ExtendedKeyUsage([purpose]), critical=purpose == STAMPING)
    return built.sign(issuer_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def write_chain(
    folder: Path, common: str, purpose=SIGNING, kind: str = "P-256", **more: timedelta
) -> tuple[Path, Path]:
    """Write a chain and its key. Returns their paths."""
    above = KEYS["P-256"]()
    key = KEYS[kind]()
    chain = folder / f"{common}.pem"
    secret = folder / f"{common}.key"
    chain.write_bytes(
        certificate(common, key, "CA", above, purpose, **more)
        + certificate("CA", above, "CA", above)
    )
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return chain, secret


def time_stamp(folder: Path, chain: Path, key: Path, query: bytes) -> bytes:
    """Answer a query for a time stamp (RFC 3161), as OpenSSL does."""
    (folder / "serial").write_text("01\n")
    (folder / "tsa.cnf").write_text(
        f"[tsa]\nserial = {folder}/serial\nsigner_digest = sha256\ndigests = sha256, sha384, "
        "sha512\ndefault_policy = 1.2.3.4\nordering = yes\ntsa_name = yes\ness_cert_id_chain = "
        "no\ness_cert_id_alg = sha256\n"
    )
    (folder / "query").write_bytes(query)
    files = ["-queryfile", folder / "query", "-signer", chain, "-inkey", key, "-chain", chain]
    words = ["openssl", "ts", "-reply", "-config", folder / "tsa.cnf", "-section", "tsa", *files]
    return subprocess.run(words, capture_output=True, check=True).stdout
