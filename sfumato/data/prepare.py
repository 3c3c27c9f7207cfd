"""Take images from their source: sensitive ones into the private state directory, public ones into an artifact.

Layout of the private part: `<state>/keys/<dataset_id>` (the secret key) and
`<state>/data/<dataset_id>/{sensitive,holdout,card.json,origin.json}`. Directories have mode 0700, files mode 0600.
Guarantee: the conversion of an image, and its part, depend only on that image (with groups, on the id of its group),
the key and the section `data`; the card does not depend on the images, except for their shape if `data` names none.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain, compress
from pathlib import Path

import numpy as np
from filelock import FileLock

from sfumato.data.groups import GroupIndex, refuse_crowd
from sfumato.data.images import COMPARED_FILE, GROUPS, IMAGES, ImageSet, ImageWriter, load_array, load_images
from sfumato.data.lineage import digests, lineage, recognised, refuse_overlap
from sfumato.data.listing import listing_of
from sfumato.data.rendered import DRAWN
from sfumato.data.sources import Example, Source, read_public, read_source
from sfumato.data.store import CARD, HOLDOUT, SENSITIVE, Card, PublicCard, dataset_directory, load_prepared, read_card
from sfumato.errors import ConfigError, DataError, explained
from sfumato.settings.data import GROUP, IMAGE, OF_THE_OWNER, SEVERAL, Data, Public
from sfumato.storage.artifacts import Artifact, writing
from sfumato.storage.documents import read_json
from sfumato.storage.files import open_private, replace_file, replace_private, replacing_directory, write_local
from sfumato.storage.journal import REGROUP, Journal
from sfumato.storage.png import save_png, to_grid

KEY_BYTES = 32
FINGERPRINT = "fingerprint"  # of the sensitive images beside it: private
ORIGIN = "origin.json"  # source and path of prepared images: private
LISTING = "listing"  # what the source's files were then: private
LEFT_OUT = "left_out.txt"  # pictures of the source that are not among the images, and why: private
UNNAMED = "unnamed"  # the version that the images have without data.version
RANDOM = re.compile("[0-9a-f]{16}")  # a version that the owner did not name
# of resized copies, at least 97 % are above ALIKE; of other slices of the same scanner, 10 %
ALIKE, COPIED, SAMPLE = 0.995, 1 / 3, 500
MOST_COMPARED = 2**23  # images of a set compared by their bytes, in 64 MiB; of more, a part that follows from them
BLOCK = 4096  # images that are compared by their looks at once
GRID_CLASSES, GRID_COLUMNS = 20, 10  # of the picture of a public set: classes at most, images of each


def prepare_sensitive(data: Data, state: Path, card: Path, raw: Path) -> dict:
    """Store the sensitive and hold-out images of the source that `data` names; write the public card and return it.

    state: where the images go; card: the file of the card. An older set of the same id is replaced as a whole, once the
    new one is complete, unless it was made from the very same files under the same settings. The card holds no number
    of images or groups and no hash, keyed or not. The version is `data.version`, or a random one that stays, and comes
    back if a name is taken away again.
    Raises ConfigError or DataError (see `sources.read_source`; also for images that are counted under another id, or
    that come in other groups after something was spent on them), and then leaves the older set and card as they were;
    BudgetError if the journal was lost or does not hold.
    """
    home = dataset_directory(state, data.name)
    for directory in (state, home.parent, state / "keys"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            directory.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"{directory} may be read by others, and this account cannot change that ({error.strerror}): "
                f"run `chmod 700 {directory}` as its owner, or set SFUMATO_STATE to a folder of your own"
            ) from error
    journal = Journal(state, data.name)
    journal.begin()
    with ExitStack() as stack:
        stack.enter_context(FileLock(home.with_name(f".{home.name}.lock")))
        key = secret_key(state, data.name)
        listing = listing_of(data, key)
        if listing is not None and (known := prepared_from(home, listing, state)) is not None:
            replace_file(card, known)
            return json.loads(known)  # type: ignore[no-any-return]
        unnamed = unnamed_version(home)
        fresh = stack.enter_context(replacing_directory(home, private=True))
        source = read_source(data, raw)
        image_set = split(source, key, data.holdout_fraction, fresh, data.labels == SEVERAL)
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
        text = json.dumps(content := public.content(), indent=2, ensure_ascii=False).encode() + b"\n"
        origin = {"source": data.source, "path": data.path and str(Path(data.path).expanduser().resolve())}
        if not data.different_people:
            refuse_another_id(home, fresh, image_set.shape, origin)
        entries = journal.entries()  # of all charges ever opened
        spent = [e["record"] for e in entries if "record" in e] + [r for e in entries for r in e.get("records", ())]
        if regrouped(home, fresh, spent):
            if not data.other_groups:
                raise ConfigError(
                    f"data.dataset_id={data.name}: some images on which privacy was spent would come in other groups "
                    "than before, or this cannot be told. Prepare them with their old groups. If those were wrong, set "
                    "data.other_groups: true: the journal stays, and ledgers and reports are marked as incomplete"
                )
            journal.append(REGROUP)
        known_files = {LISTING: listing.encode()} if listing is not None else {}
        if unnamed := unnamed or (public.version if data.version is None else None):
            known_files[UNNAMED] = unnamed.encode()
        if left_out := source.left_out.values():
            known_files[LEFT_OUT] = "\n".join(left_out).encode()
            source.converted[f"left out, as {home / LEFT_OUT} lists"] = len(left_out)
        for name, written in {CARD: text, ORIGIN: json.dumps(origin).encode(), **known_files}.items():
            write_local(fresh / name, written)
    kept_fingerprint(state, public)
    replace_file(card, text)
    if source.converted and sys.stderr.isatty():  # numbers of images are private
        print(", ".join(f"{count} {what}" for what, count in source.converted.items()), file=sys.stderr)
    return content


def prepared_from(home: Path, listing: str, state: Path) -> bytes | None:
    """The card of the set in `home` if it is whole and was made from the files of `listing`; else None."""
    try:
        if (home / LISTING).read_text(encoding="utf-8") != listing:
            return None
        for part in (SENSITIVE, HOLDOUT):
            load_prepared(state, read_card(home / CARD), part)
        return (home / CARD).read_bytes()
    except (OSError, DataError):
        return None


def refuse_another_id(home: Path, fresh: Path, shape: tuple[int, int, int], origin: dict) -> None:
    """Raise ConfigError if images of another dataset id, or its source, are among those in `fresh`, which go to `home`.

    Each odometer would count a part. Images of one stored shape, (C, H, W), are compared as they are, and all by their
    small grey versions: copies that were resized before may be stored in the same shape.
    """
    there = {path.parent for path in home.parent.glob("*/*.json") if path.name in (CARD, ORIGIN)}
    for other in sorted(there - {home}):
        file = other / ORIGIN
        with explained(DataError, lambda e: f"{file} cannot be read ({e}): prepare these images again"):  # noqa: B023
            same = file.is_file() and read_json(file) == origin
        if not same and not (other / CARD).is_file():
            continue  # it was forgotten: only its folder is known
        if not same and read_card(other / CARD).shape == shape:
            of_these, of_others = by_content(fresh, other)
            same = len(np.intersect1d(of_these, of_others)) > 0
        if same or resized_copies(fresh, other):
            raise ConfigError(
                f"data.dataset_id={home.name}: some of these images, or their folder, are counted as {other.name!r} "
                "already: under a second name, their costs would not add up. Keep the first name; if these are images "
                "of other people all the same, set data.different_people: true"
            )


def by_content(*homes: Path) -> list[np.ndarray]:
    """Of each set (n,) uint64: images of the same bytes have the same. About MOST_COMPARED images of it at most."""
    images = [[load_array(home / part / IMAGES) for part in (SENSITIVE, HOLDOUT)] for home in homes]
    below = 2**64 * min(1.0, MOST_COMPARED / max(1, *(sum(map(len, parts)) for parts in images)))
    values = [(int.from_bytes(value[:8], "big") for value in chain(*map(digests, parts))) for parts in images]
    return [np.fromiter((value for value in every if value < below), np.uint64) for every in values]


def resized_copies(fresh: Path, other: Path) -> bool:
    """Whether a third of the images, by a sample, look like some of another set, whatever their size and colours."""
    few = np.concatenate([*looks(fresh, SAMPLE)])
    nearest = np.zeros(len(few))
    for block in looks(other):
        nearest = np.maximum(nearest, (few @ block.T).max(axis=1))
    return bool((nearest > ALIKE).mean() > COPIED)


def looks(home: Path, most: int | None = None) -> Iterator[np.ndarray]:
    """Small grey versions of the images of both parts, (N, 64), centred, of norm 1 or 0, BLOCK at a time.

    most: so many of each part at most, always the same.
    """
    from PIL.Image import Resampling, fromarray

    for images in (load_array(home / part / IMAGES) for part in (SENSITIVE, HOLDOUT)):
        rows: Sequence[int] | np.ndarray = range(len(images))
        if most is not None and most < len(images):
            rows = np.sort(np.random.default_rng(most).choice(len(images), most, replace=False))
        for start in range(0, len(rows), BLOCK):
            greys = (fromarray(np.rint(images[i].mean(axis=2)).astype(np.uint8)) for i in rows[start : start + BLOCK])
            few = [np.asarray(grey.resize((8, 8), Resampling.BILINEAR), np.float32).ravel() for grey in greys]
            small = np.array(few) - np.mean(few, axis=1, keepdims=True)
            yield small / np.maximum(np.linalg.norm(small, axis=1, keepdims=True), 1e-9)


def regrouped(before: Path, after: Path, spent: Sequence[dict]) -> bool:
    """Whether images that are in both prepared sets, and were spent on, were of one group and are not now, or now are.

    spent: records. Without groups, each image is a group. It is True if the stored shapes differ or the earlier set is
    gone, so that it cannot be told. An image with copies in several groups does not count.
    """
    homes = [home for home in (before, after) if (home / SENSITIVE / IMAGES).is_file()]
    grouped = any((home / SENSITIVE / GROUPS).exists() for home in homes) or any("group_weight" in r for r in spent)
    if not spent or not grouped:
        return False
    if len(homes) == 1 or len({load_array(home / SENSITIVE / IMAGES).shape[1:] for home in homes}) > 1:
        return True
    old, new = placed_digests(before), placed_digests(after)
    pairs = {(*old[value], *new[value]) for value in old.keys() & new.keys() if len(old[value]) == len(new[value]) == 1}
    return any(len({pair[side] for pair in pairs}) < len(pairs) for side in (0, 1))


def placed_digests(home: Path) -> dict[bytes, set[Hashable]]:
    """The digest of each image, and the groups that it is in; without groups, each image is one."""
    found: dict[bytes, set[Hashable]] = {}
    for part in (SENSITIVE, HOLDOUT):
        images, file = load_array(home / part / IMAGES), home / part / GROUPS
        groups = load_array(file) if file.exists() else np.arange(len(images))
        for value, group in zip(digests(images), groups, strict=True):
            found.setdefault(value, set()).add((part, int(group)))
    return found


def unnamed_version(home: Path) -> str | None:
    """The version that images without `data.version` have had, whatever they were named since; None if never any."""
    if (home / UNNAMED).is_file():
        return (home / UNNAMED).read_text(encoding="utf-8")
    version = kept_version(home)
    return version if version is not None and RANDOM.fullmatch(version) else None


def kept_version(home: Path) -> str | None:
    """The version that an earlier preparation gave these images; None for the first."""
    try:
        return read_card(home / CARD).version
    except DataError:
        return None


def prepare_public(
    public: Public | None,
    shape: tuple[int, int, int],
    out: Path,
    raw: Path,
    seed: int,
    *,
    private: Callable[[], Iterable[ImageSet]] = tuple,
    state: Path | None = None,
) -> dict:
    """Write the public set as the artifact `out`: images, labels, card and picture; returns the content of its card.

    Images get the shape (C, H, W) of the sensitive ones, one by one: memory does not grow with their number.
    public: None if no stage reads any; the artifact is then only its card, always the same bytes.
    private: opens the sensitive and the hold-out images, none of which may be among the public ones; it is not called
    for images that are drawn here. state: remembers releases; a set that was made from one inherits its records.
    Raises ConfigError or DataError, and then leaves `out` unchanged.
    """
    inputs: list[Artifact] = []  # is added to before the block ends
    with writing(out, "public", inputs) as directory:
        card = PublicCard(enabled=False)
        if public is not None:
            source = read_public(public, shape, raw, seed)
            if public.path is not None:
                declared = public.declared_public or public.source not in OF_THE_OWNER
                inputs += lineage(Path(public.path), "public", declared, state)
            images = write_public(source, shape, directory)
            if (filled := len(np.unique(images.labels))) < 2:
                raise DataError(f"public.source={public.source} has images of {filled} class(es): give two or more.")
            if public.source not in DRAWN:
                refuse_overlap(images, private())
                inputs += recognised(state, (value.hex() for value in digests(images.images)))
            card = PublicCard(
                enabled=True, source=public.source, shape=shape, classes=source.classes, images=len(images)
            )
        content = asdict(card)
        (directory / CARD).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return content


def write_public(source: Source, shape: tuple[int, int, int], directory: Path) -> ImageSet:
    """Write images, labels and a picture of the first few into `directory`. Returns the set, memory-mapped."""
    with ImageWriter(directory, shape, source.classes) as writer:
        for image, label in progress(source.train, source.size):
            writer.append(image, label)
    image_set = load_images(directory, source.classes)
    shown = np.full((min(len(source.classes), GRID_CLASSES), GRID_COLUMNS, *image_set.images.shape[1:]), 255, np.uint8)
    for label, row in enumerate(shown):
        first = np.flatnonzero(image_set.labels == label)[:GRID_COLUMNS]
        row[: len(first)] = image_set.images[first]
    grid = to_grid(shown.reshape(-1, *shown.shape[2:]).transpose(0, 3, 1, 2) / 255, GRID_COLUMNS)
    save_png(directory / "grid.png", grid)
    return image_set


def refuse_sensitive_as_public(data: Data, public: Public) -> None:
    """Raise ConfigError if the public set is plainly the sensitive one: what is public has no guarantee."""
    paths = {Path(path).expanduser().resolve() for path in (data.path, public.path) if path is not None}
    same_files = len(paths) == 1 and None not in (data.path, public.path)
    if same_files or (public.source == data.source and data.source not in OF_THE_OWNER):
        names = f"public.source={public.source}, public.path={public.path}"
        raise ConfigError(f"{names} names the sensitive images themselves: choose others.")


def secret_key(state: Path, dataset_id: str) -> bytes:
    """The key of a dataset, drawn from the operating system on the first call, the same ever after."""
    path = state / "keys" / dataset_id
    if not path.exists():
        with open_private(path) as file:
            file.write(os.urandom(KEY_BYTES))
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise DataError(f"{path} holds {len(key)} bytes, expected {KEY_BYTES}: remove it, for another hold-out.")
    return key


def split(source: Source, key: bytes, holdout_fraction: float, directory: Path, several: bool = False) -> ImageSet:
    """Write the source's images into `directory/sensitive` and `directory/holdout`; returns the sensitive part.

    The hold-out is an official test split, or by hashes of images or groups, so that copies stay together.
    """
    writers: dict[str, ImageWriter] = {}
    parts: list[bool] = []  # of each image: held out?
    grouped, numbers = source.groups is not None, dict[bytes, int]()
    with ExitStack() as stack:
        for held_out, group, (image, label) in progress(assigned(source, key, holdout_fraction), source.size):
            if not writers:
                height, width, channels = image.shape
                for part in (SENSITIVE, HOLDOUT):
                    (directory / part).mkdir(mode=0o700)
                    writer = ImageWriter(directory / part, (channels, height, width), source.classes, grouped, several)
                    writers[part] = stack.enter_context(writer)
            number = None if group is None else numbers.setdefault(group, len(numbers))
            writers[HOLDOUT if held_out else SENSITIVE].append(image, label, number)
            parts.append(held_out)
    wanted = (SENSITIVE, HOLDOUT) if holdout_fraction else (SENSITIVE,)
    if empty := [part for part in wanted if not writers or not writers[part].count]:
        raise DataError(
            f"the split leaves no {empty[0]} image: equal images (of groups, all of a person) stay together. Give more "
            "that differ, or a hold-out of your own in test/."
        )
    if source.compared:
        cells = (cell for i, cell in enumerate(source.compared) if i not in source.left_out)
        with open_private(directory / HOLDOUT / COMPARED_FILE) as file:
            np.save(file, np.array([*compress(cells, parts)], dtype=np.str_))
    return load_images(directory / SENSITIVE, source.classes, grouped=grouped)


def assigned(source: Source, key: bytes, fraction: float) -> Iterator[tuple[bool, bytes | None, Example]]:
    """Whether each image is held out, the keyed hash of its group if there are groups, and the image."""
    if source.groups is not None:
        names = (name for i, name in enumerate(source.groups) if i not in source.left_out)  # known by then
        for example, name in zip(source.train, names, strict=False):
            group = group_hash(name, example[0], key)
            yield source.test is None and int.from_bytes(group[:8], "big") < fraction * 2**64, group, example
        for example, name in zip(source.test or (), names, strict=True):
            yield True, group_hash(name, example[0], key), example
        return
    for example in source.train:
        yield source.test is None and is_held_out(example[0], key, fraction), None, example
    for example in source.test or ():
        yield True, None, example


def group_hash(name: str | None, image: np.ndarray, key: bytes) -> bytes:
    """HMAC of the id of a group; without an id, of the image, which is then a group with its copies."""
    if name is None:
        return hmac.digest(key, f"alone {image.shape} ".encode() + image.tobytes(), "sha256")
    return hmac.digest(key, f"group {name}".encode(), "sha256")


def is_held_out(image: np.ndarray, key: bytes, fraction: float) -> bool:
    """Whether HMAC(key, image) as a number in [0, 1) is below `fraction`.

    image: (H, W, C) uint8, as it will be stored. Guarantee: depends on no other image, nor on its own label.
    """
    digest = hmac.digest(key, f"holdout {image.shape} ".encode() + image.tobytes(), "sha256")
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def kept_fingerprint(state: Path, card: Card) -> str:
    """The fingerprint of the images that charges draw: computed once for each preparation, and kept beside them."""
    kept = dataset_directory(state, card.dataset_id) / FINGERPRINT
    if not kept.is_file():
        found = fingerprint(load_prepared(state, card, SENSITIVE), secret_key(state, card.dataset_id))
        replace_private(kept, found.encode())
    return kept.read_text(encoding="utf-8")


def fingerprint(image_set: ImageSet, key: bytes) -> str:
    """HMAC-SHA256 over the images, labels and groups, in hexadecimal. Without the key it reveals nothing of one."""
    mac = hmac.new(key, f"fingerprint {image_set.images.shape} ".encode(), hashlib.sha256)
    for array in (image_set.images, image_set.labels, *([] if image_set.groups is None else [image_set.groups])):
        for start in range(0, len(array), 4096):
            mac.update(np.ascontiguousarray(array[start : start + 4096]).tobytes())
    return mac.hexdigest()


def progress(items: Iterable, total: int, what: str = "preparing") -> Iterator:
    """The same items, with a bar on a terminal only: a log would show how many there are, and whether they are read."""
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, total, console=Console(stderr=True), disable=not sys.stderr.isatty())
