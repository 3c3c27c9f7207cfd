"""The files of a project of its own."""

import yaml

from sfumato.planning.project_files import dvc_text, renew
from sfumato.settings.stages import STAGES


def test_a_pipeline_of_an_older_version_is_renewed_and_keeps_the_owner_s_stages(tmp_path):
    """Version 0.2 had a stage `denoiser`, whose command is gone."""
    file, content = tmp_path / "dvc.yaml", yaml.safe_load(dvc_text())
    file.write_text(dvc_text())
    assert not renew(file) and not renew(tmp_path / "none.yaml")
    older = {"denoiser": {"cmd": "stage denoiser"}, "mine": {"cmd": "python mine.py"}}
    file.write_text(
        "# Written by `stage init`. Older.\n" + yaml.safe_dump({**content, "stages": content["stages"] | older})
    )
    assert renew(file) and not renew(file)
    renewed = yaml.safe_load(file.read_text())["stages"]
    assert renewed == content["stages"] | {"mine": older["mine"]} and set(STAGES) <= set(renewed)
    file.write_text("stages:\n  denoiser:\n    cmd: stage denoiser\n")
    assert not renew(file), "stage init did not write it"
