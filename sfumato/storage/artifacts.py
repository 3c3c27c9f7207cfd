"""Artifact directories: plain files, and `privacy.json` with the files' sha256 and the charges."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sfumato.errors import UNREADABLE, ConfigError, DataError, explained, passing_over
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json, validated
from sfumato.storage.files import ATTRIBUTES, entries_below, json_text, replacing_directory
from sfumato.storage.records import Record, Records, widest_declaration

PRIVACY = "privacy.json"
OPENED = ("*.json", "*.safetensors", "own-network*")  # Names of files that loaders open


@dataclass(frozen=True)
class Artifact:
    """An artifact directory that was read and found complete."""

    path: Path
    stage: str
    records: Records = field(default_factory=Records)  # all charges that it depends on
    local: bool = False  # computed outside the guarantee, never to be released
    enabled: bool = True  # False for the empty artifact of a stage that is not in `run`


@dataclass(frozen=True, kw_only=True)
class PrivacyFile:
    """Form of `privacy.json`.

    files: sha256 of each file, by its name; records: records by id; apart: ids of merged data sets
    whose owners declared that no person is in two of them (see `Records.owners`).
    """

    schema: int
    stage: str
    enabled: bool
    local: bool
    files: dict[str, str]
    records: dict[str, Record]
    apart: tuple[str, ...] = ()


def read_artifact(
    path: Path, stage: str | None = None, *, allow_local: bool = False, received: bool = False
) -> Artifact:
    """Read an artifact, and check each file by its sha256.

    received: True if the artifact is a recipient's copy (see `changed_files`).

    Raises DataError if the artifact is invalid, or if it is local and `allow_local` is false.
    """
    file = path / PRIVACY
    if not file.is_file():
        command = {"public": "prepare public"}.get(stage or path.name, stage or path.name)
        raise DataError(
            f"{path} is not an artifact: {PRIVACY} is missing. Run `stage {command}` first, or "
            "give the path of another directory"
        )
    with explained(
        DataError, lambda error: f"{file} cannot be read ({error}). {how_to_repair(path.name)}"
    ):
        content = validated(PrivacyFile, read_json(file))
        if bad_keys := [key for key, record in content.records.items() if record.get("id") != key]:
            raise ValueError(f"the record under the key {bad_keys[0][:32]!r} states a different id")
    records = Records(content.records, content.apart)
    artifact = Artifact(path, content.stage, records, content.local, content.enabled)
    if stage is not None and artifact.stage != stage:
        raise DataError(
            f"{path} was written by `{artifact.stage}`, not by `{stage}`: give the path of another "
            "directory"
        )
    if problems := changed_files(path, content.files, received=received):
        raise DataError(f"{path}: {problems[0]}. {how_to_repair(artifact.stage)}")
    if artifact.local and not allow_local:
        raise DataError(
            f"{path} is local: it contains numbers from real images without noise, so no release "
            "may use it"
        )
    return artifact


def read_kept(path: Path, stage: str, digest: str | None, pay: str) -> str:
    """Check a run's copy of a release, and return the sha256 of its `privacy.json`.

    digest: expected sha256 of `privacy.json`, None if it is unknown;
    pay: setting that allows the stage to spend again. The error message names it.

    Raises DataError if the copy contains a link or differs from what was released.
    """
    cure = (
        "restore this copy from a backup, restore the artifact by `dvc checkout`, or set "
        f"{pay} to pay for the release again"
    )
    copy_name = f"the kept copy of {stage}"
    causes = (DataError, OSError)
    with explained(DataError, lambda error: f"{copy_name}: {error}. You can {cure}", causes=causes):
        refuse_links(path.parent, path)
        read_artifact(path, stage, allow_local=True)
        if digest not in (None, actual_digest := digest_of_file(path / PRIVACY)):
            raise DataError(f"{path / PRIVACY} differs from the file that was released")
        return actual_digest


def refuse_links(*folders: Path) -> None:
    """Raise DataError if one of `folders`, or anything inside the last one, is a link or device."""
    for path in (*folders, *folders[-1].rglob("*")):
        if path.is_symlink() or (path.exists() and not path.is_dir() and not path.is_file()):
            raise DataError(f"{path} is a link or a device: replace it with a copy of the file")


def how_to_repair(stage: str) -> str:
    """Describe how to replace an invalid artifact.

    The text contains a `chmod` command that makes DVC's cache writable, because DVC does not verify
    read-only files.
    """
    return (
        "If you received this folder, fetch it again. In the project that made it, run "
        f"`chmod -R u+w .dvc/cache` and `dvc repro` or, without DVC, `stage {stage}`. Damaged "
        "files are then replaced, and a query restores its kept release at no cost"
    )


def holds_release(path: Path, stage: str, record_id: str, digest: str | None) -> bool:
    """Return whether the complete release of a charge is at `path`.

    digest: digest of its `privacy.json`, if the journal records it.
    """
    with suppress(DataError):
        depends = record_id in read_artifact(path, stage, allow_local=True).records
        return depends and digest in (None, digest_of_file(path / PRIVACY))
    return False


def depends_on_charge(path: Path, record_id: str) -> bool:
    """Return whether an artifact at `path` depends on the charge `record_id`."""
    with passing_over(*UNREADABLE):
        return record_id in read_json(path / PRIVACY)["records"]
    return False


def changed_files(path: Path, files: Mapping[str, str], *, received: bool = False) -> list[str]:
    """List the differences between a directory and the sha256 of its files, one sentence each.

    received: True if the directory is a recipient's copy. Git, a hub or a file browser may have
    changed it. In this case, .gitattributes and added files that no loader opens are ignored.
    """
    paths = map(Path, entries_below(path))
    present = {p.relative_to(path).as_posix() for p in paths if p.is_file()} - {PRIVACY}
    if received:
        files = {name: files[name] for name in files if Path(name).name != ATTRIBUTES}
        present = {name for name in present if name in files or may_be_opened(name)}
    problems = [f"{name} is missing" for name in sorted(files.keys() - present)]
    problems += [
        f"{name} is not among the files that {PRIVACY} lists"
        for name in sorted(present - files.keys())
    ]
    changed = [
        name
        for name in sorted(files.keys() & present)
        if digest_of_file(path / name) != files[name]
    ]
    return problems + [f"{name} no longer has the bytes that {PRIVACY} lists" for name in changed]


def may_be_opened(name: str) -> bool:
    """Return whether a loader may open the file with this name inside an artifact."""
    path = Path(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and any(map(path.match, OPENED))


def merge_records(inputs: Sequence[Artifact], own: Sequence[dict] = ()) -> Records:
    """Merge the records of a stage's own charges and the records of every input, by id.

    A record that several inputs contain counts once.
    """
    merged = {record["id"]: record for record in own}
    for artifact in inputs:
        for key, record in artifact.records.items():
            if merged.setdefault(key, record) != record:
                raise DataError(
                    f"record {key} of {artifact.path} differs from the same record in another "
                    "artifact, so one of the two artifacts was edited: restore the edited one"
                )
    return Records(merged, widest_declaration(artifact.records for artifact in inputs))


@contextmanager
def writing(
    out: Path,
    stage: str,
    inputs: Sequence[Artifact] = (),
    records: Sequence[dict] = (),
    *,
    local: bool = False,
) -> Iterator[Path]:
    """Yield a new directory, which becomes the artifact `out` if the block succeeds.

    Before the directory replaces `out`, `privacy.json` is added to it. If the block fails, the new
    directory is removed. Raises ConfigError if `out` contains anything but an artifact of `stage`.
    """
    check_out(out, stage)
    with replacing_directory(out) as directory:
        yield directory
        files = sorted(file for file in directory.rglob("*") if file.is_file())
        merged = merge_records(inputs, records)
        content = empty_content(stage) | {
            "enabled": True,
            "local": local or any(artifact.local for artifact in inputs),
            "files": {
                file.relative_to(directory).as_posix(): digest_of_file(file) for file in files
            },
            "records": merged,
            **merged.declaration(),
        }
        (directory / PRIVACY).write_text(as_text(content), encoding="utf-8")


def write_empty(out: Path, stage: str) -> None:
    """Write the empty artifact of a stage that is not in `run`. Its bytes are always the same."""
    check_out(out, stage)
    with replacing_directory(out) as directory:
        (directory / PRIVACY).write_text(as_text(empty_content(stage)), encoding="utf-8")


def empty_content(stage: str) -> dict:
    return {
        "schema": 1,
        "stage": stage,
        "enabled": False,
        "local": False,
        "files": {},
        "records": {},
    }


def as_text(content: dict) -> str:
    return json_text(content, sort_keys=True, allow_nan=False)


def check_out(out: Path, stage: str) -> None:
    """Raise ConfigError if `out` contains anything but an artifact of `stage`.

    This protects the user's files. A link is refused too, because a directory cannot replace it.
    """
    if out.is_symlink():
        raise ConfigError(f"--out {out} is a link: remove it, or give another path")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    writer = None
    with passing_over(*UNREADABLE):
        writer = read_json(out / PRIVACY).get("stage")
    if writer != stage:
        raise ConfigError(
            f"--out {out} is not an artifact of `{stage}`: move it elsewhere, or give another path"
        )
