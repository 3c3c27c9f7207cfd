"""Resume a charge from its last durable state, and make a state durable.

The state of a query is durable once its checkpoint is on disk and in the journal.
"""

from collections.abc import Callable

from torch import Tensor

from sfumato.privacy.charge import Charge
from sfumato.privacy.checkpoint import drop_checkpoints, load_checkpoint, save_checkpoint
from sfumato.runtime import distributed


def resume(
    open_charge: Callable[[], Charge], stage: str, say: Callable[[str], None], unit: str = "step"
) -> tuple[Charge, dict[str, Tensor] | None, list[dict]]:
    """Open a charge, and load its last durable state and public log, if there are any.

    If a run has lost its checkpoint, its charge stays spent and a new charge is opened.

    unit: word for a use in messages. Returns (charge, state or None, log).
    """
    while (charge := open_charge()).used > 0:
        short = charge.run.name[:8]
        saved = (
            load_checkpoint(charge.run, charge.used, charge.checkpoint)
            if distributed.is_main()
            else None
        )
        if saved := distributed.broadcast_object(saved):
            say(f"{stage}: resuming run {short} after {unit} {charge.used}, at no further cost")
            return charge, *saved
        say(
            f"{stage}: the checkpoint of run {short} after {unit} {charge.used} is lost. The "
            "charge of this run stays spent, and a new charge is opened"
        )
        charge.abandon()
    return charge, None, []


def make_durable(charge: Charge, state: dict[str, Tensor], log: list[dict]) -> None:
    """Write the state, then the journal, then remove the previous checkpoint.

    Processes other than the first do nothing.
    """
    if not distributed.is_main():
        return
    digest = save_checkpoint(charge.run, charge.used, state, log)
    charge.durable(digest)
    drop_checkpoints(charge.run, keep=charge.used)
