"""Sign the metadata of outgoing pictures with the owner's certificate, read the signature, and
detect changed pictures.
"""

import io
import threading
import time
import zipfile
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from certificates import KEYS, STAMPING, time_stamp, write_chain
from PIL import Image
from small_release import enlarged, write_project

from sfumato.errors import ConfigError
from sfumato.release.egress import write_package
from sfumato.release.exports import SOURCE_TYPE, mark_of
from sfumato.release.signing import SIGNED_BY, Signing, png_signer, signature_in
from sfumato.storage.png import png_bytes

MARK = mark_of(["finetune"])


@pytest.fixture
def picture() -> bytes:
    return png_bytes(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), MARK.xmp)


def read(tmp_path: Path, content: bytes) -> str:
    (tmp_path / "picture.png").write_bytes(content)
    return signature_in(tmp_path / "picture.png")


@pytest.mark.parametrize("kind", KEYS)
def test_a_signed_picture_names_its_signer_and_keeps_its_pixels(tmp_path, picture, kind):
    signed = png_signer(Signing(*write_chain(tmp_path, "Data office", kind=kind)), MARK)(picture)
    assert read(tmp_path, signed).startswith(f"{SIGNED_BY} Data office, The clinic; no time stamp")
    before, after = (np.asarray(Image.open(io.BytesIO(content))) for content in (picture, signed))
    assert (
        np.array_equal(before, after)
        and SOURCE_TYPE.encode() in signed
        and MARK.source_type.encode() in signed
    )
    assert len(signed) - len(picture) < 10_000, "no thumbnail"


def test_a_changed_pixel_and_an_unsigned_picture_are_told_apart(tmp_path, picture):
    assert read(tmp_path, picture) == "none"
    signed = bytearray(png_signer(Signing(*write_chain(tmp_path, "Data office")), MARK)(picture))
    signed[signed.index(b"IDAT") + 20] ^= 1
    assert read(tmp_path, bytes(signed)) == "invalid: the picture was changed after it was signed"


def test_an_expired_certificate_is_not_a_changed_picture(tmp_path, picture):
    chain = write_chain(tmp_path, "Data office", lasts=timedelta(seconds=2))
    signed = png_signer(Signing(*chain), MARK)(picture)
    deadline = time.monotonic() + 5
    while "expired" not in (text := read(tmp_path, signed)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert text.startswith(f"{SIGNED_BY} Data office, The clinic; no time stamp, and the cert")
    signed = bytearray(signed)
    signed[signed.index(b"IDAT") + 20] ^= 1
    assert "changed" in read(tmp_path, bytes(signed))


def test_a_signer_s_name_cannot_move_the_cursor(tmp_path, picture):
    signed = png_signer(Signing(*write_chain(tmp_path, "A\x1b[2J\nB")), MARK)(picture)
    assert r"A\x1b[2J\nB" in read(tmp_path, signed)


def test_the_time_service_that_is_named_stamps_the_signature(tmp_path, picture):
    chain, key = write_chain(tmp_path, "Clock", STAMPING, "RSA")

    class Service(BaseHTTPRequestHandler):
        def do_POST(self):
            query = self.rfile.read(int(self.headers["Content-Length"]))
            answer = time_stamp(tmp_path, chain, key, query)
            self.send_response(200)
            self.send_header("Content-Type", "application/timestamp-reply")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        service = f"http://127.0.0.1:{server.server_port}"
        sign = png_signer(Signing(*write_chain(tmp_path, "Data office"), service), MARK)
        assert "; 20" in read(tmp_path, sign(picture))
        server.shutdown()
    with pytest.raises(ConfigError, match="a time service, check that it can be reached"):
        sign(picture)


def test_files_that_cannot_sign_are_refused_in_a_sentence(tmp_path, picture):
    chain, key = write_chain(tmp_path, "Data office")
    other = write_chain(tmp_path, "Other")[1]
    for files in ((chain, chain), (tmp_path / "none.pem", key), (chain, other)):
        with pytest.raises(ConfigError, match="cannot sign pictures"):
            png_signer(Signing(*files), MARK)(picture)


def test_drawn_pictures_get_the_pattern_public_ones_do_not(here, digits):
    kinds = np.repeat(["plain", "public"], 20)
    sources = ["finetune"] * 20 + ["select"] * 20
    project = write_project(here, enlarged(digits, 2), sources=sources, kinds=kinds)
    write_package(project / "out", project)
    with zipfile.ZipFile(project / "out" / "images-01.zip") as archive:
        pictures = [
            np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in archive.namelist()
        ]
    before = np.load(project / "artifacts/synthesize/images.npy")[..., 0]
    moved = [np.abs(one.astype(int) - two).max() for one, two in zip(pictures, before, strict=True)]
    assert set(moved[:20]) == {1} and set(moved[20:]) == {0}
