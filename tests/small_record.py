"""A complete record of one charge, as in the odometer and in ledgers."""

from sfumato.privacy.events import ADD_OR_REMOVE_ONE, SECRET, UNITS, Mechanism
from sfumato.settings.data import IMAGE


def small_record(number: int, mechanism: Mechanism, **more) -> dict:
    """Return a record. more: fields to add or replace, such as `stage`."""
    return {
        "id": f"{number:032x}",
        "stage": "count",
        "dataset_id": "digits",
        "data_version": "v",
        "unit": UNITS[IMAGE],
        "adjacency": ADD_OR_REMOVE_ONE,
        "event": mechanism.to_json(),
        "released": "x",
        "sensitivity": "1",
        "noise_source": SECRET,
        "max_norm": 1.0,
        "plan": "p",
        "settings": "s",
        "code": {},
        "again": 0,
        "versions": {},
        "time": 0,
        **more,
    }
