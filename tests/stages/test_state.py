"""The state directory is private under any umask, and an older copy of it is detected."""

import json
import os
import shutil
from pathlib import Path

from small_record import small_record

from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import Odometer

FIRST, SECOND = (
    small_record(int(digit * 32, 16), Mechanism(noise_multiplier=2.0)) for digit in "ab"
)


def test_the_history_reports_an_older_copy_of_the_state(desk):
    desk.params(recipe="dpdm")
    desk.run_all("prepare sensitive", "plan")
    state = Path("state").absolute()
    odometer = Odometer(state, "digits")
    odometer.append("open", record=FIRST, plan="p", work="w")
    shutil.copytree(state, "older")
    odometer.append("open", record=SECOND, plan="p", work="w")
    Path("ledger.json").write_text(json.dumps({"records": [FIRST, SECOND]}))
    assert "incomplete" not in desk.run("ledger history")
    shutil.rmtree(state)
    shutil.copytree("older", state)
    desk.run(
        "ledger history",
        "incomplete",
        "lacks the entry bbbbbbbb",
        "an older copy or a different journal",
    )


def test_what_is_private_is_its_owner_s_alone_whatever_the_umask(desk):
    before = os.umask(0)
    try:
        desk.params(recipe="dpdm")
        desk.run_all("prepare sensitive", "plan")
        Odometer(Path("state").absolute(), "digits").append(
            "open", record=FIRST, plan="p", work="w"
        )
    finally:
        os.umask(before)
    assert Path("state").stat().st_mode & 0o777 == 0o700  # no one else can open anything below
    for path in Path("state").rglob("*"):
        private = path.is_dir() or path.suffix != ".lock"
        assert not private or path.stat().st_mode & 0o077 == 0, path
