"""The mistakes a user can make, each with the exit code that `stage` answers with."""

import difflib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# exceptions raised when a file is missing, damaged or of the wrong kind
UNREADABLE: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, TypeError, AttributeError)
# what an OSError with one of these states about a path or a request; with any other, the machine failed
ABOUT_A_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EINVAL, errno.EILSEQ, errno.ENXIO, errno.ENOEXEC),
    *(errno.EADDRINUSE, errno.EADDRNOTAVAIL),
}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# PyTorch, Pillow and pydicom have no type of their own for a lack of memory
NO_MEMORY = ("not enough memory", "can't allocate", "out of memory", "Cannot allocate", "Unable to allocate")


Spelling = Callable[[str], str]  # how a front end writes the name of an option


class SfumatoError(Exception):
    """A mistake that a message can explain. Its text names the thing, its value and the fix.

    option: the option of a command, or the parameter of a function, that the mistake is about. The text of such an
    error is a template of `values`, and names options as in {option.size_hint}: each front end spells them its own way.
    proposed: a value for the option.
    """

    exit_code = 1
    public = False  # whether it follows from public facts alone: a log may show it after sensitive files were opened
    undecided = False  # whether only the owner of the images can decide the option: a front end may ask for it

    def __init__(
        self, text: object = "", *, option: str | None = None, proposed: str | None = None, **values: object
    ) -> None:
        super().__init__(text)
        self.option = option
        self.proposed = proposed
        self.values = values

    def __str__(self) -> str:
        return self.spelled(str)

    def spelled(self, spelling: Spelling) -> str:
        """Return the text for a front end.

        Args:
            spelling: Writes the name of an option, such as `--size-hint`. `str` writes it as in Python.
        """
        text = super().__str__()
        if self.option is None:
            return text
        return text.format(option=OptionNames(spelling), **self.values)


class OptionNames:
    """The names of options by attribute, for templates."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling

    def __getattr__(self, name: str) -> str:
        return self.spelling(name)


class ConfigError(SfumatoError):
    """Bad usage or configuration."""

    exit_code = 2


class BudgetError(SfumatoError):
    """Over budget, already spent, or an invalid ledger."""

    exit_code = 3
    public = True  # by journal, ledgers, card and settings


class DataError(SfumatoError):
    """Input images or an artifact that cannot be used."""

    exit_code = 4


LAST_ERROR = "SFUMATO_LAST_ERROR"  # names the file in which a stage that fails leaves its error, for who started it


def error_from(content: Mapping[str, Any]) -> SfumatoError:
    """The error that a stage left. content: its `exit_code` and `message`."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, BudgetError, DataError)}
    return kinds.get(content["exit_code"], SfumatoError)(content["message"])


def public(error: SfumatoError) -> SfumatoError:
    error.public = True
    return error


watchers: list[Callable[[], None]] = []  # what a program does then: `stage` logs only what is public by name


def reading_sensitive() -> None:
    """Whoever opens files of sensitive images, the owner's or the private copy, calls this first."""
    for watch in watchers:
        watch()


def lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def is_failure(error: BaseException) -> bool:
    """Whether the machine failed (a disk, a mount, memory, the limit of open files): no file is damaged or missing.

    An OSError without a number comes from a library, about what it has read.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in ABOUT_A_PATH
    return lacks_memory(error)


def reason_of(error: BaseException) -> str:
    """The text of an error on one line, or the name of its kind where it has none."""
    if not str(error) and isinstance(error, EOFError):
        return "it ends too early"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def passing_over(*causes: type[Exception]) -> Iterator[None]:
    """Suppress any of `causes`, but not a failure of the machine, which must not become an answer."""
    try:
        yield
    except causes as error:
        if is_failure(error):
            raise


@contextmanager
def explained(
    kind: type[SfumatoError],
    why: Callable[[Exception], str],
    *,
    missing: str | None = None,
    causes: tuple[type[Exception], ...] = UNREADABLE,
) -> Iterator[None]:
    """Raise `kind` in place of any of `causes`. why: the text, by what was raised; missing: where there is no file.

    A failure of the machine is raised as it is.
    """
    try:
        yield
    except causes as error:
        if is_failure(error):
            raise
        if not str(error):
            error.args = (reason_of(error),)
        absent = missing is not None and isinstance(error, FileNotFoundError)
        raise kind(missing if absent else why(error)) from error


PACKAGES = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}  # whose modules have other names


@contextmanager
def requiring(what: str) -> Iterator[None]:
    """Raise ConfigError, which names the package to install, if one that `what` imports is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = str(error.name).split(".")[0]
        package = PACKAGES.get(module, module)
        raise ConfigError(f"{what} needs {package}, which is not installed: pip install {package}") from error


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Suggest a known name for an unknown one: the closest match, else `otherwise`, else all known names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"known are {', '.join(known)}"
