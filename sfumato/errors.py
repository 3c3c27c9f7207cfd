"""The mistakes a user can make, each with the exit code that `stage` answers with."""


class SfumatoError(Exception):
    """A mistake that a message can explain. Its text names the thing, its value and the fix."""

    exit_code = 1


class ConfigError(SfumatoError):
    """Bad usage or configuration."""

    exit_code = 2


class BudgetError(SfumatoError):
    """Over budget, already spent, or a ledger that does not hold."""

    exit_code = 3


class DataError(SfumatoError):
    """Input images or an artifact that cannot be used."""

    exit_code = 4
