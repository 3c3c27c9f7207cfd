"""Errors that a user can fix, and the exit code of `stage` for each."""

import difflib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Exceptions raised when a file is missing, damaged or of the wrong kind
UNREADABLE: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, TypeError, AttributeError)
# Values of `errno` that concern a path or a request. Any other value is a fault of the machine
ABOUT_A_PATH = {
    *(
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    ),
    *(errno.EACCES, errno.EPERM, errno.EINVAL, errno.EILSEQ, errno.ENXIO, errno.ENOEXEC),
    *(errno.EADDRINUSE, errno.EADDRNOTAVAIL),
}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Parts of error messages about too little memory. PyTorch, Pillow and pydicom raise no specific
# exception type for it
NO_MEMORY = (
    "not enough memory",
    "can't allocate",
    "out of memory",
    "Cannot allocate",
    "Unable to allocate",
)


Spelling = Callable[[str], str]  # maps the name of an option to its form in a front end


class SfumatoError(Exception):
    """An error that the user can fix. Its text states what is wrong and how to fix it.

    Args:
        text: Message. If `option` is set, the text is a template. In names such as
            {option.size_hint}, each front end inserts its own form of the name.
        option: Option of a command, or parameter of a function, that is wrong.
        proposed: Suggested value for the option.
        undecided: Whether only the owner can choose the option's value, so that a front end may
            prompt for it.
        values: Further values to insert into the template.
    """

    exit_code = 1
    # Whether the text depends only on public facts, so that a log may show it even after sensitive
    # files were opened
    public = False
    undecided = False

    def __init__(
        self,
        text: object = "",
        *,
        option: str | None = None,
        proposed: str | None = None,
        undecided: bool = False,
        **values: object,
    ) -> None:
        super().__init__(text)
        self.option = option
        self.proposed = proposed
        self.undecided |= undecided
        self.values = values

    def __str__(self) -> str:
        return self.spelled(str)

    def spelled(self, spelling: Spelling) -> str:
        """Return the text for a front end.

        Args:
            spelling: Function from the name of an option to its form, such as `--size-hint`; `str`
                keeps the name.
        """
        text = super().__str__()
        if self.option is None:
            return text
        return text.format(option=OptionNames(spelling), **self.values)


class OptionNames:
    """Names of options in a template: {option.size_hint} becomes, for example, --size-hint."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling

    def __getattr__(self, name: str) -> str:
        return self.spelling(name)


class ConfigError(SfumatoError):
    """A command or a setting is wrong."""

    exit_code = 2


class BudgetError(SfumatoError):
    """A budget would be exceeded or was already spent, or a ledger or journal is invalid."""

    exit_code = 3
    public = True  # the text depends only on journal, ledgers, card and settings


class DataError(SfumatoError):
    """Input images or an artifact cannot be used."""

    exit_code = 4


# Environment variable with the path of a file. A stage that fails writes its error there, for the
# program that started the stage
LAST_ERROR = "SFUMATO_LAST_ERROR"


def error_from(content: Mapping[str, Any]) -> SfumatoError:
    """Rebuild the error that a stage wrote. content: mapping with `exit_code` and `message`."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, BudgetError, DataError)}
    return kinds.get(content["exit_code"], SfumatoError)(content["message"])


def public(error: SfumatoError) -> SfumatoError:
    error.public = True
    return error


# Functions that `reading_sensitive` calls. `stage` adds two: after they are called, output is
# withheld, and the operating system writes no core dumps
watchers: list[Callable[[], None]] = []


def reading_sensitive() -> None:
    """Call all functions in `watchers`, because sensitive files will be read next.

    Call this function before opening the owner's files or the private copy.
    """
    for watch in watchers:
        watch()


def lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def is_failure(error: BaseException) -> bool:
    """Return whether an error means that the machine failed (disk, mount, memory, limit of open
    files), rather than that a file is damaged.

    An OSError without `errno` is raised by a library. It concerns the content of a file, unless its
    text is about memory (`lacks_memory`).
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in ABOUT_A_PATH
    return lacks_memory(error)


def reason_of(error: BaseException) -> str:
    """Return the text of an error on one line.

    If the error has no text, return the name of its type or, for an EOFError, an explanation.
    """
    if not str(error) and isinstance(error, EOFError):
        return "it ends too early"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def passing_over(*causes: type[Exception]) -> Iterator[None]:
    """Suppress any of `causes`, except a failure of the machine (`is_failure`).

    Such a failure does not mean that a file is damaged.
    """
    try:
        yield
    except causes as error:
        if is_failure(error):
            raise


@contextmanager
def explained(
    kind: Callable[[str], SfumatoError],
    message: str | Callable[[Exception], str],
    *,
    missing: str | None = None,
    causes: tuple[type[Exception], ...] = UNREADABLE,
) -> Iterator[None]:
    """Raise `kind` in place of any of `causes`. A failure of the machine is raised unchanged.

    message: the text, or a function from the exception to the text;
    missing: text to use if a file does not exist.
    """
    try:
        yield
    except causes as error:
        if is_failure(error):
            raise
        if not str(error):
            error.args = (reason_of(error),)
        if missing is not None and isinstance(error, FileNotFoundError):
            raise kind(missing) from error
        raise kind(message if isinstance(message, str) else message(error)) from error


# module -> package
PACKAGES = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn", "c2pa": "c2pa-python"}


@contextmanager
def requiring(feature: str) -> Iterator[None]:
    """Return a context that raises ConfigError if an import fails because a package is missing.

    The message contains the command that installs the package. feature: what requires the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = str(error.name).split(".")[0]
        package = PACKAGES.get(module, module)
        raise ConfigError(
            f"{feature} requires {package}, which is not installed: run `pip install {package}`"
        ) from error


def nearest(
    name: str, known_names: Iterable[str], otherwise: str | None = None, cutoff: float = 0.6
) -> str:
    """Return a hint for an unknown name: the closest known name, if one is similar.

    If no name is similar, return `otherwise` or, without `otherwise`, a list of all known names.
    cutoff: minimum similarity, as in `difflib.get_close_matches`.
    """
    known_names = list(known_names)
    matches = difflib.get_close_matches(name, known_names, 1, cutoff)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return otherwise or f"expected one of {', '.join(known_names)}"
