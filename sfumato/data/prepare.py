"""Copy images from their source: sensitive ones into the private state directory, public ones into
an artifact.

Layout of the private part: `<state>/keys/<dataset_id>` (the secret key) and
`<state>/data/<dataset_id>/{sensitive,holdout,card.json,origin.json}`. Directories have mode 0700,
files mode 0600.
Guarantee: the conversion of an image, and its assignment to the sensitive set or the hold-out,
depend only on that image, the key and the section `data`. There are three exceptions. If the source
has a test split, this split is the hold-out. With groups, the assignment depends on the id of the
group instead of the image. The conversion of a slice depends on its volume, which shows one person.
The card does not depend on the images, except on their shape if `data` does not set `size` and
`channels`.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import chain, compress, repeat
from pathlib import Path

import numpy as np

from sfumato.data.cards import CARD, Card, PublicCard, card_text, dataset_directory, read_card
from sfumato.data.decoding import with_progress
from sfumato.data.duplicates import (
    ORIGIN,
    images_charged,
    refuse_another_id,
    refuse_another_split,
    refuse_regrouping,
)
from sfumato.data.groups import GroupIndex, refuse_crowd
from sfumato.data.images import COMPARED_FILE, ImageSet, ImageWriter, load_images
from sfumato.data.left_out import LEFT_OUT, still_broken, texts_left_out
from sfumato.data.lineage import digests, lineage, recognised, refuse_overlap
from sfumato.data.rendered import DRAWN
from sfumato.data.shards import FRESH, place_shards, read_shards, shards_folder, shards_in
from sfumato.data.sources import Example, Source, read_public, read_source
from sfumato.data.sources.packed import naming_archives
from sfumato.data.sources.remote import remote_files
from sfumato.data.store import HOLDOUT, SENSITIVE, load_prepared
from sfumato.errors import ConfigError, DataError, reading_sensitive
from sfumato.settings.data import GROUP, IMAGE, SEVERAL, Data, Public, is_url
from sfumato.settings.sources import OF_THE_OWNER
from sfumato.storage.artifacts import Artifact, writing
from sfumato.storage.digest import canonical
from sfumato.storage.documents import quoted, read_json
from sfumato.storage.files import (
    clear_leftovers,
    entries_below,
    make_folder,
    open_private,
    replace_file,
    replace_private,
    replacing_directory,
    write_local,
)
from sfumato.storage.journal import ADOPT, Journal
from sfumato.storage.locks import file_lock, holding
from sfumato.storage.png import save_png, to_grid

KEY_BYTES = 32
FINGERPRINT_DIGITS = 64
PREPARE_REVISION = 2  # raise this if the same source is stored differently than before
LISTING = "listing"  # file with a keyed digest of the source's files; private
# File with the random version that the images got while data.version was not set
UNNAMED = "unnamed"
# File with the settings in CONVERSION that were used for each version of the images; private
CONVERTED = "converted.json"
CONVERSION = {"fit", "range"}  # settings that cards state, but no plan digest covers


@naming_archives()
def prepare_sensitive(
    data: Data, state: Path, card: Path, raw: Path, workers: int | None = None
) -> dict:
    """Store the sensitive and hold-out images of the source in `data`, and write the public card.

    Returns the content of the card.

    An older set of the same id is kept if it was made from the same files with the same settings.
    Otherwise, it is replaced when the new set is complete. The card contains no number of images or
    groups, and no hash of any kind. Its version is `data.version`. If that is not set, an earlier
    random version of the dataset is used again. A dataset that never had a random version keeps the
    version of the older set. The first set of a dataset gets a new random version.

    state: state directory for the images; card: path of the card; workers: number of processes that
    convert shards, see `read_shards`.

    Raises ConfigError or DataError if the source cannot be used (see `sources.read_source`), if the
    same images are already counted under another id, if charged images would move between the
    sensitive images and the hold-out, or if they would change their groups and the owner has not
    confirmed this (`data.other_groups`). The older set and card are then unchanged. Raises
    BudgetError if the journal is lost or invalid.
    """
    home = dataset_directory(state, data.name)
    for directory in (state, home.parent, state / "keys"):
        make_private(directory)
    journal = Journal(state, data.name)
    journal.begin()
    with holding(file_lock(home.with_name(f".{home.name}.lock"))):
        clear_leftovers(home)  # leftovers may include images of a person who has withdrawn
        key = secret_key(state, data.name)
        settings_by_version = conversions(data, home, journal)
        listing = listing_of(data, key)
        if (
            listing is not None
            and (card_bytes := prepared_from(home, listing, data, state)) is not None
        ):
            kept_card = read_card(home / CARD)
            # Compute the fingerprint if the last process was killed before computing it
            kept_fingerprint(state, kept_card)
            # The set was prepared by an older program
            if kept_card.version not in settings_by_version:
                settings_by_version[kept_card.version] = data.model_dump(
                    mode="json", include=CONVERSION
                )
                write_local(home / CONVERTED, json.dumps(settings_by_version).encode())
            replace_file(card, card_bytes)
            shutil.rmtree(shards_folder(home), ignore_errors=True)
            return json.loads(card_bytes)  # type: ignore[no-any-return]
        unnamed = unnamed_version(home)
        source = open_whole(data, raw, home, listing, key, workers)
        with replacing_directory(home, private=True) as new_home:
            image_set = split(source, key, data.holdout_fraction, new_home, data.labels == SEVERAL)
            if data.groups is not None and image_set.groups is not None:
                refuse_crowd(GroupIndex(image_set.groups).sizes, data.groups)
            public = Card(
                dataset_id=data.name,
                source=data.source,
                shape=image_set.shape,
                classes=source.classes,
                split="keyed" if source.test is None else "official",
                version=data.version or unnamed or kept_version(home) or secrets.token_hex(8),
                unit=IMAGE if source.groups is None else GROUP,
                labels=data.labels,
            )
            if data.version is None:
                unnamed = public.version
            origin = {"source": data.source, "path": data.path and resolved(data.path)}
            if not data.different_people:
                refuse_another_id(home, new_home, image_set.shape, origin)
            images = fingerprint(image_set, key)
            if kept_version(home) == public.version:
                refuse_another_split(home, new_home, public.version, journal, images)
            refuse_regrouping(data, home, new_home, journal)
            text = card_text(public.content())
            write_local(new_home / CARD, text)
            charged_fingerprints = images_charged(journal, public.version)
            if (
                public.version in settings_by_version
                or not charged_fingerprints
                or images in charged_fingerprints
            ):
                settings_by_version[public.version] = data.model_dump(
                    mode="json", include=CONVERSION
                )
            private_files = {ORIGIN: json.dumps(origin), LISTING: listing, UNNAMED: unnamed}
            private_files[CONVERTED] = json.dumps(settings_by_version)
            for name, content in (private_files | texts_left_out(source)).items():
                if content:
                    write_local(new_home / name, content.encode())
        shutil.rmtree(shards_folder(home), ignore_errors=True)
        kept_fingerprint(state, public)
        replace_file(card, text)
    print_conversions(source, home / LEFT_OUT)
    return public.content()


def open_whole(
    data: Data, raw: Path, home: Path, listing: str | None, key: bytes, workers: int | None
) -> Source:
    """Open the source. If it has several shards, convert them first.

    listing: see `listing_of`.
    """
    folder = shards_folder(home)
    shards = shards_in(data)
    if not shards:
        shutil.rmtree(folder, ignore_errors=True)  # shards converted with earlier settings
        return read_source(data, raw)
    make_private(folder)
    return read_shards(data, place_shards(shards, folder, key, decisive(data), listing), workers)


def print_conversions(source: Source, list_path: Path) -> None:
    """Print how many images were converted in each way, if standard error is a terminal.

    Numbers of images are private, so they must not be in a log. list_path: path of the list of
    pictures that were left out.
    """
    if source.left_out:
        source.converted[f"left out (listed in {list_path})"] = len(source.left_out)
    if source.converted and sys.stderr.isatty():
        print(
            ", ".join(f"{kind}: {count}" for kind, count in source.converted.items()),
            file=sys.stderr,
        )


def make_private(directory: Path) -> None:
    """Create a folder that only its owner may open.

    Raises ConfigError if this account lacks the permission.
    """
    make_folder(directory, 0o700)
    try:
        directory.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"{directory} may be readable by other accounts, and this account cannot change its "
            f"permissions ({error.strerror}): run `chmod 700 {quoted(directory)}` as its owner, or "
            "set SFUMATO_STATE to a folder of your own"
        ) from error


def listing_of(data: Data, key: bytes) -> str | None:
    """Compute a keyed digest of everything that determines a prepared set.

    The digest covers the settings, PREPARE_REVISION and all files. A file is identified by its
    name, mode, size, inode, and the times when its content and its status last changed. Programs
    cannot reset the time of a status change. Returns None if the digest could miss a change: if
    there is no path, if a file changed just now, if a file is a link, or if a server does not state
    when its files change.
    """
    mac = hmac.new(key, canonical(decisive(data)), "sha256")
    if data.path is not None and is_url(data.path):
        files = remote_files(data.path)
        mac.update(json.dumps([[file.url, file.state] for file in files]).encode())
        if not all(file.state for file in files):
            return None
        return mac.hexdigest()
    path_settings = [data.path, data.groups.csv] if data.groups is not None else [data.path]
    paths = [Path(resolved(name)) for name in path_settings if name is not None]
    if data.path is None or not all(path.exists() for path in paths):
        return None
    reading_sensitive()
    latest = time.time_ns() - int(FRESH * 1e9)
    for name, status in chain.from_iterable(map(statuses, paths)):
        if stat.S_ISLNK(status.st_mode) or max(status.st_ctime_ns, status.st_mtime_ns) > latest:
            return None
        entry = [
            name,
            status.st_mode,
            status.st_size,
            status.st_ino,
            status.st_mtime_ns,
            status.st_ctime_ns,
        ]
        mac.update(json.dumps(entry).encode())
    return mac.hexdigest()


def decisive(data: Data) -> dict[str, object]:
    """Return everything that decides how images are stored, except for the files themselves."""
    return {
        "data": data.model_dump(mode="json"),
        "path": data.path and resolved(data.path),
        "revision": PREPARE_REVISION,
    }


def resolved(path: str) -> str:
    """Return the absolute form of a path. A URL is returned unchanged."""
    if is_url(path):
        return path
    return str(Path(path).expanduser().resolve())


def statuses(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and the status of `path` and of every file, folder and link below it."""
    yield str(path), path.stat()
    for file in entries_below(path):
        yield file, os.lstat(file)


def prepared_from(home: Path, listing: str, data: Data, state: Path) -> bytes | None:
    """Return the card of the set in `home` if the set is up to date, otherwise None.

    It is up to date if it is complete and was made from the files of `listing`, and if the pictures
    that were left out still cannot be read.
    """
    with suppress(FileNotFoundError, DataError, ValueError, TypeError):
        if (home / LISTING).read_text(encoding="utf-8") == listing and still_broken(home, data):
            for part in (SENSITIVE, HOLDOUT):
                load_prepared(state, read_card(home / CARD), part)
            return (home / CARD).read_bytes()
    return None


def unnamed_version(home: Path) -> str | None:
    """Return the random version of the images, or None if they never had one.

    Images get a random version if `data.version` is not set. They keep it, even if `data.version`
    is set later.
    """
    if (home / UNNAMED).is_file():
        return (home / UNNAMED).read_text(encoding="utf-8")
    version = kept_version(home)
    if version is not None and re.fullmatch("[0-9a-f]{16}", version):
        return version
    return None


def conversions(data: Data, home: Path, journal: Journal) -> dict[str, dict]:
    """Return the settings in CONVERSION that were used for each version of the images.

    A version that an older program prepared is missing until it is prepared again. Raises
    ConfigError if budget was spent on the version in `data` with other settings. Otherwise, the
    releases of this version would be restored at no cost, with cards that contain the new settings,
    although the releases were made with the earlier ones.
    """
    settings_by_version: dict[str, dict] = {}
    if (home / CONVERTED).is_file():
        settings_by_version = read_json(home / CONVERTED)
    version = data.version or unnamed_version(home) or kept_version(home) or ""
    new_settings = data.model_dump(mode="json", include=CONVERSION)
    old_settings = settings_by_version.get(version, new_settings)
    if old_settings != new_settings and any(
        record["data_version"] == version for record in journal.records()
    ):
        earlier = ", ".join(
            f"data.{key}: {json.dumps(old_settings[key])}" for key in sorted(old_settings)
        )
        raise ConfigError(
            f"data.fit or data.range has changed, but budget was already spent on data.version="
            f"{version}, which was prepared with {earlier}. Restore these settings. To use the "
            "new ones, set a new data.version: every query then spends again"
        )
    return settings_by_version


def kept_version(home: Path) -> str | None:
    """Return the version of the images from an earlier preparation, or None."""
    with suppress(DataError):
        return read_card(home / CARD).version
    return None


@naming_archives()
def prepare_public(
    public: Public,
    shape: tuple[int, int, int],
    out: Path,
    raw: Path,
    seed: int,
    *,
    private: Callable[[], Iterable[ImageSet]] = tuple,
    state: Path | None = None,
) -> dict:
    """Write the public set as the artifact `out`: images, labels, card and a grid of some images.

    Returns the content of its card.

    Images are converted to `shape`, (C, H, W), one by one, so memory does not grow with their
    number.

    private: function that opens the sensitive and hold-out images, which must not be among the
    public ones. It is not called for images that the program draws;
    state: state directory, which lists earlier releases. A public set that was made from a release
    inherits the records of that release.

    Raises ConfigError or DataError if the images cannot be used, or if a private image is among
    them. `out` is then unchanged.
    """
    # The releases from which the images were made. The block below fills this list, and `writing`
    # reads it when the block ends
    inputs: list[Artifact] = []
    with writing(out, "public", inputs) as directory:
        source = read_public(public, shape, raw, seed)
        inputs += releases_behind(public, state)
        images = write_public(source, shape, directory)
        if (filled := len(np.unique(images.labels))) < 2:
            raise DataError(
                f"public.source={public.source} has images of {filled} class(es), expected two or "
                "more: add images of another class."
            )
        if public.source not in DRAWN:
            refuse_overlap(images, private())
            inputs += recognised(state, (value.hex() for value in digests(images.images)))
        card = public_card(public, shape, source, len(images))
        (directory / CARD).write_bytes(card_text(asdict(card)))
    return asdict(card)


def expected_public(
    public: Public, shape: tuple[int, int, int], raw: Path, seed: int, state: Path | None = None
) -> tuple[PublicCard, list[Artifact]]:
    """Predict the card that `prepare_public` would write, and find the releases from which the
    public images were made.

    Decodes no image, downloads nothing and writes nothing. Raises ConfigError or DataError if the
    images cannot be read, or if they have not been downloaded.
    """
    if is_url(public.path):
        raise DataError(f"public.path={public.path} is a URL: run `stage prepare public` first")
    public_with_path = public
    if public.path is None and public.source not in DRAWN:
        public_with_path = public.model_copy(update={"path": str(raw)})
    source = read_public(public_with_path, shape, raw, seed)
    card = public_card(public, shape, source, source.size - source.held_out)
    return card, releases_behind(public, state)


def public_card(
    public: Public, shape: tuple[int, int, int], source: Source, images: int
) -> PublicCard:
    """Describe a public set of `images` images, which have the classes of `source`."""
    return PublicCard(
        enabled=True, source=public.source, shape=shape, classes=source.classes, images=images
    )


def releases_behind(public: Public, state: Path | None) -> list[Artifact]:
    """Return the releases from which the files of the public images were made."""
    if public.path is None:
        return []
    declared = public.declared_public or public.source in DRAWN
    return lineage(Path(public.path), "public", declared, state)


def write_public(source: Source, shape: tuple[int, int, int], directory: Path) -> ImageSet:
    """Write images and labels into `directory`, and a grid of the first images of each class.

    Returns the set, memory-mapped.
    """
    with ImageWriter(directory, shape, source.classes) as writer:
        for image, label in with_progress(source.train, source.size):
            writer.append(image, label)
    image_set = load_images(directory, source.classes)
    columns = 10
    tiles = np.full(
        (min(len(source.classes), 20), columns, *image_set.images.shape[1:]), 255, np.uint8
    )
    for label, row in enumerate(tiles):
        first = np.flatnonzero(image_set.labels == label)[:columns]
        row[: len(first)] = image_set.images[first]
    grid = to_grid(tiles.reshape(-1, *tiles.shape[2:]).transpose(0, 3, 1, 2) / 255, columns)
    save_png(directory / "grid.png", grid)
    return image_set


def refuse_sensitive_as_public(data: Data, public: Public) -> None:
    """Raise ConfigError if the settings name the sensitive images as the public set.

    The guarantee does not cover public images.
    """
    if data.path and public.path and resolved(data.path) == resolved(public.path):
        raise ConfigError(
            f"public.path={public.path} is the path of the sensitive images themselves: choose "
            "other images."
        )
    if public.source == data.source and data.source not in OF_THE_OWNER:
        raise ConfigError(
            f"public.source={public.source} is the source of the sensitive images themselves: "
            "choose another source."
        )


def secret_key(state: Path, dataset_id: str) -> bytes:
    """Return the key of a dataset.

    The first call creates the key from the operating system's random numbers. For this call, the
    caller must hold the lock of the dataset. The key never changes after that. Raises DataError if
    the key is missing or damaged, but may have been used.
    """
    path = state / "keys" / dataset_id
    key = b""
    if path.exists():
        key = path.read_bytes()
    if len(key) != KEY_BYTES:
        refuse_another_key(path, len(key), Journal(state, dataset_id))
        key = os.urandom(KEY_BYTES)
        write_local(path, key)
    return key


def refuse_another_key(path: Path, size: int, journal: Journal) -> None:
    """Raise DataError if a key that is missing or damaged may have been used.

    The key was used if prepared images exist, and may have been used if there is a charge. path:
    file of the key; size: its number of bytes, 0 if it is missing.
    """
    prepared = (journal.images / CARD).exists() or (journal.images / SENSITIVE).exists()
    if prepared or journal.records() or ADOPT in {entry["kind"] for entry in journal.entries()}:
        raise DataError(
            f"{path} is missing or damaged ({size} bytes, expected {KEY_BYTES}). This key decided "
            f"which images of {journal.dataset_id!r} are held out: restore it from a backup of the "
            f"state directory. If there is no backup, create a new key: `head -c {KEY_BYTES} "
            f"/dev/urandom > {quoted(path)}`. The new hold-out will contain images that earlier "
            "releases were trained on, so never evaluate those releases again"
        )


def split(
    source: Source, key: bytes, holdout_fraction: float, directory: Path, several: bool = False
) -> ImageSet:
    """Write the source's images into `directory/sensitive` and `directory/holdout`.

    Returns the sensitive part.

    The hold-out is the official test split of the source. Without one, a keyed hash of each image
    decides its part, so that identical images are in the same part. With groups, a keyed hash of
    the group's id decides, so that all images of a group are in the same part.

    several: whether images can have several labels.
    """
    writers: dict[str, ImageWriter] = {}
    parts: list[bool] = []  # whether each image is held out
    grouped = source.groups is not None
    numbers: dict[bytes, int] = {}  # numbers of the groups, in the order of their first image
    with ExitStack() as stack:
        for held_out, group, (image, label) in with_progress(
            assigned(source, key, holdout_fraction), source.size
        ):
            if not writers:
                height, width, channels = image.shape
                for part in (SENSITIVE, HOLDOUT):
                    (directory / part).mkdir(mode=0o700)
                    writer = ImageWriter(
                        directory / part,
                        (channels, height, width),
                        source.classes,
                        grouped,
                        several,
                    )
                    writers[part] = stack.enter_context(writer)
            number = None if group is None else numbers.setdefault(group, len(numbers))
            writers[HOLDOUT if held_out else SENSITIVE].append(image, label, number)
            parts.append(held_out)
    expected_parts = (SENSITIVE, HOLDOUT) if holdout_fraction else (SENSITIVE,)
    if empty := [part for part in expected_parts if not writers or not writers[part].count]:
        raise DataError(
            f"the split leaves the part {empty[0]!r} without images, because identical images, and "
            "all images of a person, stay together. Add more distinct images, or put your own "
            "hold-out into test/."
        )
    if source.compared:
        cells = (cell for i, cell in enumerate(source.compared) if i not in source.left_out)
        with open_private(directory / HOLDOUT / COMPARED_FILE) as file:
            np.save(file, np.array([*compress(cells, parts)], dtype=np.str_))
    return load_images(directory / SENSITIVE, source.classes, grouped=grouped)


def assigned(
    source: Source, key: bytes, fraction: float
) -> Iterator[tuple[bool, bytes | None, Example]]:
    """Yield, for each image: whether it is held out, the keyed hash of its group, and the example.

    The hash is None if the source has no groups.
    """
    is_keyed = source.test is None
    examples = chain(zip(repeat(False), source.train), zip(repeat(True), source.test or ()))
    if source.groups is None:
        for in_test, example in examples:
            yield in_test or (is_keyed and is_held_out(example[0], key, fraction)), None, example
        return
    # A generator, not a list, because `left_out` is filled while the examples are read
    names = (name for i, name in enumerate(source.groups) if i not in source.left_out)
    for (in_test, example), name in zip(examples, names, strict=True):
        group = group_hash(name, example[0], key)
        yield in_test or (is_keyed and is_below(group, fraction)), group, example


def group_hash(name: str | None, image: np.ndarray, key: bytes) -> bytes:
    """Return the HMAC of a group's id.

    If the image has no id, return the HMAC of the image, so that it forms a group with its copies.
    """
    if name is None:
        return keyed("alone", image, key)
    # An id from a file or folder name that is not valid UTF-8 contains surrogates
    return hmac.digest(key, f"group {name}".encode(errors="surrogatepass"), "sha256")


def is_held_out(image: np.ndarray, key: bytes, fraction: float) -> bool:
    """Return whether HMAC(key, image), as a number in [0, 1), is below `fraction`.

    image: (H, W, C) uint8, as it will be stored. Guarantee: the result depends neither on other
    images nor on the label of this image.
    """
    return is_below(keyed("holdout", image, key), fraction)


def keyed(purpose: str, image: np.ndarray, key: bytes) -> bytes:
    """Return the HMAC of an image for one purpose."""
    return hmac.digest(key, f"{purpose} {image.shape} ".encode() + image.tobytes(), "sha256")


def is_below(digest: bytes, fraction: float) -> bool:
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def kept_fingerprint(state: Path, card: Card) -> str:
    """Return the `fingerprint`, a keyed hash, of the images that charges draw.

    It is computed once per preparation and stored.
    """
    path = dataset_directory(state, card.dataset_id) / "fingerprint"
    # Compute it if the file is missing, or was truncated by a full disk
    if not path.is_file() or path.stat().st_size != FINGERPRINT_DIGITS:
        images = load_prepared(state, card, SENSITIVE)
        replace_private(path, fingerprint(images, secret_key(state, card.dataset_id)).encode())
    return path.read_text(encoding="utf-8")


def fingerprint(image_set: ImageSet, key: bytes) -> str:
    """Compute HMAC-SHA256 over images, labels and groups, in hexadecimal.

    It reveals nothing without the key.
    """
    mac = hmac.new(key, f"fingerprint {image_set.images.shape} ".encode(), hashlib.sha256)
    arrays = [image_set.images, image_set.labels]
    if image_set.groups is not None:
        arrays.append(image_set.groups)
    for array in arrays:
        for start in range(0, len(array), 4096):
            mac.update(np.ascontiguousarray(array[start : start + 4096]).tobytes())
    return mac.hexdigest()
