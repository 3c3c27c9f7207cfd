"""Prepare a set in shards, in several processes.

A shard is a tar file, a Parquet file, or a block: up to BLOCK_SIZE pictures of a large folder. Each
shard is converted on its own. Finished shards are kept in the folder
`<state>/data/.<dataset_id>.shards`, mode 0700, until the set is complete, so that a killed command
resumes with the next shard.

Guarantee: the set is the same, byte for byte, as if one process had read the whole source at once.
"""

import hmac
import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data import decoding
from sfumato.data.groups import ids_of_persons
from sfumato.data.images import COMPARED_FILE, IMAGES, LABELS, ImageWriter, load_array
from sfumato.data.left_out import file_at, place_of
from sfumato.data.sources import read_source, refuse_shared_persons
from sfumato.data.sources.imagefolder import shape_text
from sfumato.data.sources.packed import in_archives, naming_archives, tables_at, unpacking
from sfumato.data.sources.remote import local_copy, remote_files
from sfumato.data.sources.source import Example, LeftOut, ListedBlock, Shard, Source
from sfumato.data.sources.splits import folders_in, is_test, split_of, visible_names
from sfumato.data.sources.tabled import shards_of
from sfumato.data.tables import check_parquet
from sfumato.errors import UNREADABLE, ConfigError, DataError, reading_sensitive
from sfumato.settings.data import SEVERAL, Data, is_url
from sfumato.storage.digest import canonical, digest_of_file
from sfumato.storage.documents import read_json, validated
from sfumato.storage.files import open_private, replacing_directory, write_local

BLOCK_SIZE = 2**20  # maximum number of pictures in a block
FRESH = 2.0  # seconds; two changes within this time may leave the same time stamp
CONVERTED = "converted.json"  # file with the fields of `Converted`
PERSONS_FILE = "persons.npy"  # file with the result of `groups.persons_of`, one text per picture

Task = tuple[Shard, Path]  # a shard, and the folder for its converted images


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Facts about a converted shard, stored beside its arrays.

    size: number of pictures in the shard, including the ones left out;
    conversions: number of pictures by kind of conversion;
    left_out: one entry for each picture or other file that was left out. An entry contains the
    number of the picture in the shard (-1 for another file), its place as encoded by
    `left_out.place_of`, and the reason;
    sha256: digest of the shard's file, empty for a block.
    """

    classes: tuple[str, ...]
    size: int
    conversions: dict[str, int]
    left_out: list[tuple[int, list[Any], str]]
    sha256: str


def shards_folder(home: Path) -> Path:
    return home.with_name(f".{home.name}.shards")


def shards_in(data: Data) -> list[Shard]:
    """Return the shards of the source, in the order of its images.

    Shards are tar files, Parquet files, or blocks of a large folder of class folders. Any other
    source must be read as a whole, so the list is empty. It is also empty for a single local file,
    if `data.volume` is set, if pictures have several labels, if one table lists all pictures, or if
    `data.groups` finds persons in other ways than by `pattern`, `column` or `dicom`.
    """
    single = data.labels != SEVERAL and data.volume is None
    ways = set[str]()
    if data.groups is not None:
        ways = {*data.groups.model_dump(exclude_defaults=True)}
    if (
        data.path is None
        or not single
        or not ways <= {"pattern", "column", "dicom", "largest", "alone"}
    ):
        return []
    if is_url(data.path):
        return shards_of_files({file.url: file.state for file in remote_files(data.path)}, data)
    reading_sensitive()
    path = Path(data.path).expanduser()
    files: list[Path] = []
    if data.source == "webdataset" and path.is_dir() and not tables_at(path):
        files = shards_of(path)
    elif data.source == "imagefolder" and data.label_column is not None:
        files = tables_at(path)
    elif data.source == "imagefolder" and path.is_dir():
        return picture_blocks(path)
    if len(files) < 2:
        return []
    return shards_of_files({str(file): state_of(file) for file in files}, data)


def shards_of_files(files: dict[str, tuple[str | int, ...] | None], data: Data) -> list[Shard]:
    """Return one shard per file, with the files of the hold-out last.

    files: state of each file (see `Shard`), by path. A single file is never a hold-out.
    """
    tested = {file for file in files if len(files) > 1 and is_test(file.rpartition("/")[2])}
    if data.source == "imagefolder" and len(tested) == len(files):
        tested = set()  # if there are only test files, they are used for training
    ordered = sorted(files, key=tested.__contains__)
    return [Shard(path=file, held_out=file in tested, state=files[file]) for file in ordered]


def state_of(file: Path) -> tuple[str | int, ...] | None:
    """Return values that change with the content of a file.

    Returns None if the file was changed less than FRESH seconds ago.
    """
    status = file.stat()
    if max(status.st_ctime, status.st_mtime) > time.time() - FRESH:
        return None
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def picture_blocks(path: Path) -> list[Shard]:
    """Divide the pictures of a folder of class folders into blocks of at most BLOCK_SIZE pictures.

    Returns an empty list if the folder has at most BLOCK_SIZE pictures in total.
    """
    train, test = split_of(path)
    folders = [(folder, part in test) for part in train + test for folder in folders_in(part)]
    counts = [len(visible_names(folder)) for folder, _ in folders]
    if sum(counts) <= BLOCK_SIZE:
        return []
    return [
        Shard(
            path=str(path),
            held_out=held_out,
            block=ListedBlock(str(folder), first, first + BLOCK_SIZE),
            state=(),
        )
        for (folder, held_out), count in zip(folders, counts, strict=True)
        for first in range(0, count, BLOCK_SIZE)
    ]


def place_shards(
    shards: Sequence[Shard],
    folder: Path,
    key: bytes,
    decides: dict[str, object],
    listing: str | None,
) -> list[Task]:
    """Return each shard with the folder for its images, and delete everything else in `folder`.

    The name of a shard's folder is a keyed digest of everything that determines the images in it. A
    later process computes the same name, and so finds the folder. If a change of the shard could
    not be detected, the name is random instead, so that a later process converts the shard again.

    decides: settings that decide how images are stored; listing: digest of all files, None if it is
    unknown.
    """
    folders = []
    for shard in shards:
        identity = decides | {"shard": asdict(shard), "listing": shard.block and listing}
        cacheable = shard.state is not None and (shard.block is None or listing is not None)
        name = secrets.token_hex(32)
        if cacheable:
            name = hmac.digest(key, canonical(identity), "sha256").hex()
        folders.append(folder / name)
    # Other folders may include images of a person who has withdrawn
    for stale_folder in {*folder.iterdir()} - {*folders}:
        shutil.rmtree(stale_folder, ignore_errors=True)
    return [*zip(shards, folders, strict=True)]


def read_shards(data: Data, tasks: Sequence[Task], workers: int | None) -> Source:
    """Convert the shards that no earlier process has converted, and return all as one source.

    workers: maximum number of processes to start; each decodes in one thread. None means to decode
    in this process, in several threads. If `torchrun` started several processes, these are used
    instead. Raises DataError with the faults of all shards.
    """
    pending_tasks = [(shard, folder) for shard, folder in tasks if not folder.is_dir()]
    errors = [error for error in run_tasks(data, pending_tasks, workers) if error is not None]
    for error in errors:
        if not isinstance(error, DataError):
            raise error
    if errors:
        raise DataError("\n".join(dict.fromkeys(map(str, errors))))
    return one_source(data, tasks)


def run_tasks(data: Data, tasks: list[Task], workers: int | None) -> list[Exception | None]:
    """Call `convert` for each task, in the processes that `read_shards` describes.

    Returns the error of each task, or None for a task without error.
    """
    from sfumato.runtime.distributed import broadcast_object, map_sharded, world_size

    work = partial(convert, data)
    if world_size() > 1:
        return map_sharded(broadcast_object(tasks), work)
    if workers is None or not tasks:
        return [*decoding.with_progress(map(work, tasks), len(tasks), "converting shards")]
    earlier_children = {*active_children()}
    count = min(workers, len(tasks))
    context: Any = get_context("spawn")
    if os.name != "nt":
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])  # import once for all workers
    with ProcessPoolExecutor(count, context, begin_worker, (dict(os.environ),)) as pool:
        try:
            return [*decoding.with_progress(pool.map(work, tasks), len(tasks), "converting shards")]
        except BrokenProcessPool:
            raise ConfigError(
                "a process that converted shards was killed, perhaps because memory ran out "
                f"(number of workers: {count}): run the command again with fewer workers. Finished "
                "shards are kept"
            ) from None
        except BaseException:
            for process in {*active_children()} - earlier_children:
                process.terminate()
            raise


def begin_worker(environment: dict[str, str]) -> None:
    """Set up a worker process of the pool.

    The worker decodes in one thread, and ends when the program that started it ends.

    environment: variables of the program, which may have changed since the fork server started.
    """
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    decoding.DECODERS = 1
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=end_after, args=(parent,), daemon=True).start()


def end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def help_first(data: Data) -> None:
    """Convert shards for the first process of `torchrun`, until no shards are left."""
    from sfumato.runtime.distributed import broadcast_object, map_sharded

    tasks: list[Task] | None = []
    while (tasks := broadcast_object(tasks)) is not None:
        map_sharded(tasks, partial(convert, data))


def convert(data: Data, task: Task) -> Exception | None:
    """Write the pictures of a shard to a folder.

    Returns an error instead of raising it, so that other shards are still converted.
    """
    shard, folder = task
    try:
        with naming_archives(), unpacking(), local_copy(shard.path) as path:
            # One shard may have a larger share of broken pictures than `skip` allows for all shards
            # together, so the share is checked at the end.
            part = data.model_copy(update={"path": str(path), "skip": float(data.skip > 0)})
            source = Source(classes=data.classes or (), train=(), test=None, size=0)
            if has_rows(path):
                source = read_source(part, path, shard)
            digest = ""
            if shard.block is None:
                digest = digest_of_file(path)
            with replacing_directory(folder, private=True) as temporary:
                write_shard(source, temporary, data.labels == SEVERAL, digest)
    except Exception as error:
        return error
    return None


def has_rows(path: Path) -> bool:
    """Return whether a file may contain pictures. A Parquet file without rows has none."""
    if path.suffix.lower() != ".parquet":
        return True
    check_parquet()
    from pyarrow.parquet import read_metadata

    with suppress(*UNREADABLE):  # an unreadable file is refused later
        return bool(read_metadata(path).num_rows)
    return True


def write_shard(source: Source, folder: Path, several: bool, sha256: str) -> None:
    """Write the pictures of one shard in their order, and the facts about them."""
    with ExitStack() as stack:
        writer: ImageWriter | None = None
        for image, label in chain(source.train, source.test or ()):
            if writer is None:
                height, width, channels = image.shape
                writer = ImageWriter(
                    folder, (channels, height, width), source.classes, several=several
                )
                stack.enter_context(writer)
            writer.append(image, label)
    for name, texts in {PERSONS_FILE: source.groups or (), COMPARED_FILE: source.compared}.items():
        with open_private(folder / name) as file:
            np.save(file, np.array([*texts], dtype=np.str_))
    left_out = []
    for key, entry in source.left_out.items():
        number = -1
        if isinstance(key, int):
            number = key
        left_out.append((number, place_of(entry.file), in_archives(entry.reason)))
    facts = Converted(
        classes=source.classes,
        size=source.size,
        conversions=dict(source.converted),
        left_out=left_out,
        sha256=sha256,
    )
    write_local(folder / CONVERTED, json.dumps(asdict(facts)).encode())


def one_source(data: Data, tasks: Sequence[Task]) -> Source:
    """Return converted shards as one source.

    Raises DataError if two shards are equal, if their images differ in size or channels, if a
    person is in training and hold-out, or if too many pictures are left out.
    """
    shards, folders = zip(*tasks, strict=True)
    results = [validated(Converted, read_json(folder / CONVERTED)) for folder in folders]
    refuse_equal_shards(zip(shards, results, strict=True))
    refuse_other_shapes(tasks)
    left_out = left_out_of(results)
    size = sum(result.size for result in results)
    if left_out and len(left_out) > data.skip * (
        size + sum(isinstance(key, Path) for key in left_out)
    ):
        raise DataError(
            f"more pictures are broken than data.skip={data.skip} allows: repair or remove "
            "them, or raise data.skip:\n"
            + "\n".join(entry.reason for entry in [*left_out.values()][:200])
        )
    test_folders = [folder for shard, folder in tasks if shard.held_out]
    held_out = sum(
        result.size for shard, result in zip(shards, results, strict=True) if shard.held_out
    )
    ids = None
    if data.groups is not None:
        ids = ids_of_persons(data.groups, texts_of(folders, PERSONS_FILE))
    test = None
    if held_out:
        test = converted_images(test_folders)
    source = Source(
        classes=results[0].classes,
        train=converted_images(folders[: len(folders) - len(test_folders)]),
        test=test,
        size=size,
        groups=ids,
        compared=texts_of(folders, COMPARED_FILE),
        held_out=held_out,
        converted=sum((Counter(result.conversions) for result in results), Counter[str]()),
        left_out=left_out,
    )
    refuse_shared_persons(source, data.path)
    return source


def left_out_of(results: Iterable[Converted]) -> dict[object, LeftOut]:
    """Collect the pictures and other files that were left out of all shards.

    The key of a picture is its number in the whole source. The key of another file is its path.
    """
    left_out: dict[object, LeftOut] = {}
    offset = 0
    for result in results:
        for number, place, reason in result.left_out:
            file = file_at(*place)
            key: object = file
            if number >= 0:
                key = offset + number
            left_out[key] = LeftOut(file, reason)
        offset += result.size
    return left_out


def converted_images(folders: Iterable[Path]) -> Iterator[Example]:
    """Yield each converted image of the shards with its label. Reads 1024 images at a time."""
    for folder in folders:
        if not (folder / IMAGES).exists():  # the shard has no pictures
            continue
        images, labels = (load_array(folder / name) for name in (IMAGES, LABELS))
        for start in range(0, len(images), 1024):
            yield from zip(
                np.array(images[start : start + 1024]),
                np.array(labels[start : start + 1024]),
                strict=True,
            )


def texts_of(folders: Iterable[Path], name: str) -> list[str]:
    return [sys.intern(str(text)) for folder in folders for text in load_array(folder / name)]


def refuse_equal_shards(results: Iterable[tuple[Shard, Converted]]) -> None:
    """Raise DataError if two shards are equal, because each person's images would count twice."""
    first_paths: dict[str, str] = {}
    for shard, result in results:
        path = shard.path
        if (
            result.size
            and result.sha256
            and (first_path := first_paths.setdefault(result.sha256, path)) != path
        ):
            raise DataError(
                f"{path} has the same content as {first_path}, so its images would count twice: "
                "remove one"
            )


def refuse_other_shapes(tasks: Iterable[Task]) -> None:
    """Raise DataError if images of two converted shards differ in size or channels."""
    shapes = {
        shard.path: load_array(folder / IMAGES).shape[1:]
        for shard, folder in tasks
        if (folder / IMAGES).exists()
    }
    first = next(iter(shapes), "")
    for path, shape in shapes.items():
        if shape != shapes[first]:
            raise DataError(
                f"{path} has pictures of {shape_text(shape)}, but {first} has pictures of "
                f"{shape_text(shapes[first])}: set data.size and "
                "data.channels to give all pictures the same size and number of channels"
            )
