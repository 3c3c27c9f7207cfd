"""An owner's prepared set in a private state directory, and charges on it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import Card, read_card
from sfumato.privacy.authorize import ChargeRequest, open_charge
from sfumato.privacy.charge import Charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.policy import SpendingPolicy
from sfumato.settings.data import Data


@dataclass
class Owner:
    """A data owner's machine: state directory and card."""

    state: Path
    card: Card

    @property
    def odometer(self) -> Odometer:
        return Odometer(self.state, self.card.dataset_id)

    def open(
        self,
        mechanism: Mechanism = Mechanism(noise_multiplier=2.0),
        plan: str = "plan",
        permission: SpendingPolicy = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited"),
        **more,
    ) -> Charge:
        noise = more.pop("noise", None)
        words = {
            "stage": "count",
            "released": "counts",
            "sensitivity": "1",
            "settings": plan,
            "max_norm": 1.0,
        } | more
        return open_charge(
            self.state,
            self.card,
            ChargeRequest(plan=plan, mechanism=mechanism, **words),
            permission,
            noise,
        )


@pytest.fixture
def owner(tmp_path, tmp_path_factory) -> Owner:
    """Return an owner of the digits, in a new folder. The digits are prepared only once."""
    return owner_of(Data(), tmp_path_factory.getbasetemp() / "prepared-digits", tmp_path)


def owner_of(data: Data, prepared: Path, folder: Path) -> Owner:
    """Return an owner in a new folder. The images are prepared once, in the folder `prepared`."""
    if not (prepared / "card.json").exists():
        prepare_sensitive(data, prepared / "state", prepared / "card.json", prepared / "raw")
    shutil.copytree(prepared / "state", folder / "state")
    shutil.copy(prepared / "card.json", folder)
    return Owner(folder / "state", read_card(folder / "card.json"))
