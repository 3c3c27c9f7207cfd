"""Write the files of a project, for `stage init` and `stage merge`.

`python -m sfumato.planning.project_files` prints the `dvc.yaml` of this repository.
"""

import importlib.util
import json
import logging
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import yaml

from sfumato.errors import ConfigError, explained, public
from sfumato.runtime.progress import Say
from sfumato.settings.data import IMAGE
from sfumato.settings.recipes import TRACKED_KEYS, Layer, as_yaml, read_layer
from sfumato.settings.stage import ARTIFACTS, CARD_PATH, LEDGER, LOCAL, PLAN, RECIPES
from sfumato.settings.stages import STAGES, dvc_stages
from sfumato.storage.documents import quoted, read_yaml
from sfumato.storage.files import ATTRIBUTES, UNTOUCHED, make_folder, replace_file
from sfumato.storage.state_directory import DVC_INDEX, git, state_dir, would_be_tracked

IGNORED = (
    "/artifacts/\n/data/raw/\n/data/sensitive/\n/data/public/\n/models/\n/evaluation/\n"
    "/dvc_plots/\n/.sfumato/\n/metrics.json\n"
)
# Comments of `dvc.yaml`
DVC_HEADERS: dict[str, str] = dict(read_yaml(Path(__file__).with_name("dvc_headers.yaml")))
# Files that git tracks in a project. `pipelines` exists only if the owner wrote recipes
TRACKED = (
    ".dvc .dvcignore .gitattributes .github .gitignore README.md params.yaml pipelines dvc.yaml "
    "dvc.lock ledger.json"
)

NO_DVC_FOLDER = (
    "the project has no folder .dvc. Restore this folder, or run `dvc init` (without git, add "
    "--no-scm; in a subfolder of a repository, add --subdir). To run the stages without DVC, use "
    "`stage run --no-dvc`"
)


def dvc_text(*, clone: bool = False) -> str:
    return DVC_HEADERS["clone" if clone else "project"] + as_yaml(
        dvc_content(clone=clone), blocks=True
    )


class DvcFile(TypedDict):
    """Content of `dvc.yaml`."""

    stages: dict[str, dict[str, object]]
    plots: list[object]


def dvc_content(*, clone: bool = False, own_files: Sequence[str] | None = None) -> DvcFile:
    """Return the content of `dvc.yaml`.

    clone: True for the `dvc.yaml` of this repository, in which each stage also depends on the code
    and the recipes; False for a project;
    own_files: see `own_recipes`.
    """
    stages: dict[str, dict[str, object]] = {}
    local = ["prepare-sensitive", *(name for name in STAGES if STAGES[name].kind is LOCAL)]
    for name, (commands, reads, writes) in dvc_stages().items():
        entry: dict[str, object] = {"cmd": commands[0] if len(commands) == 1 else commands}
        deps = {path for path in reads if clone or path != str(RECIPES)}
        if name in local:
            entry["params"] = [*TRACKED_KEYS]
            deps |= {*(own_files or ())}
        if name == "prepare-public" and own_files is not None:
            deps.add(str(RECIPES))
        if deps:
            entry["deps"] = sorted(deps)
        if name == "plan" and not clone:
            entry["always_changed"] = True
        outs: list[object] = []
        for path in sorted(writes):
            if path == str(LEDGER):
                entry["metrics"] = [{path: {"cache": False, "persist": True}}]
            elif path in (str(CARD_PATH), str(PLAN)):
                # DVC's run cache must not restore an old card or an old plan.
                outs.append({path: {"persist": True}})
            else:
                outs.append(path)
        if outs:
            entry["outs"] = outs
        stages[name] = entry
    share_plot = {
        "template": "bar_horizontal",
        "x": "share",
        "y": "stage",
        "title": "Share of the privacy budget",
    }
    epsilon_plot = {"x": "step", "y": "epsilon", "title": "Privacy spent by DP-SGD"}
    plots = [{f"{PLAN}/budget.csv": share_plot}, {f"{ARTIFACTS}/finetune/log.csv": epsilon_plot}]
    return {"stages": stages, "plots": [*plots, f"{ARTIFACTS}/synthesize/grid.png"]}


def own_recipes(folder: Path) -> list[str] | None:
    """List the files of the project's own recipes and profiles that have a section `data`.

    Returns None if the project has no folder of its own recipes.
    """
    if not (folder / RECIPES).is_dir():
        return None
    files = sorted((folder / RECIPES).rglob("*.yaml"))
    return [file.relative_to(folder).as_posix() for file in files if "data" in read_layer(file)]


def renew(file: Path) -> bool:
    """Rewrite a project's `dvc.yaml` if it does not list exactly the stages of this installation,
    or lists other inputs of a stage.

    Stages that the owner added are kept. If only inputs differ, everything else is kept too. A file
    that `stage init` did not write is left as it is.

    Returns whether the file was rewritten.
    """
    if not file.is_file():
        return False
    causes = (yaml.YAMLError, UnicodeDecodeError, AttributeError, RecursionError)
    with explained(
        ConfigError,
        lambda error: f"{file} cannot be read ({error}): restore it from git",
        causes=causes,
    ):
        text = file.read_text(encoding="utf-8")
        if not text.startswith("# Written by `stage init`"):
            return False
        content = yaml.safe_load(text)
        stages = content.get("stages") or {}
    new_content = dvc_content(own_files=own_recipes(file.parent))
    package_stages = {
        name
        for name, entry in stages.items()
        if str(entry.get("cmd", "")).strip("['").startswith("stage ")
    }
    if package_stages <= {*new_content["stages"]}:
        renewed = {
            name: with_inputs(stages.get(name, entry), entry)
            for name, entry in new_content["stages"].items()
        }
        if stages == stages | renewed:
            return False
        new_content = content | {"stages": renewed}
    new_content["stages"] |= {
        name: entry for name, entry in stages.items() if name not in package_stages
    }
    replace_file(file, (DVC_HEADERS["project"] + as_yaml(new_content, blocks=True)).encode())
    return True


def with_inputs(entry: dict[str, object], template: Mapping[str, object]) -> dict[str, object]:
    """Return a stage of `dvc.yaml` with the inputs that `template` lists."""
    inputs = ("params", "deps")
    base = {key: value for key, value in entry.items() if key not in inputs or key in template}
    return base | {key: template[key] for key in inputs if key in template}


def params_text(content: Mapping[str, object], notes: Mapping[str, str]) -> str:
    """Return the text of `params.yaml`.

    notes: for some sections, the comment above the section; each commented section starts a new
    paragraph.
    """
    lines = [
        "# Written by `stage init`. Missing keys come from the recipe, then from the defaults. The",
        "# keys `profile` and `data` are required. `stage recipe show` prints every parameter, and",
        "# `stage recipe list` lists the recipes.",
    ]
    for key, value in content.items():
        if key in notes:
            lines += ["", *(f"# {line}" for line in notes[key].splitlines())]
        lines.append(as_yaml({key: value}, blocks=True).rstrip())
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class WorkflowPlace:
    """Paths of a project, and of the GitHub workflow that checks its ledger.

    path: path of the workflow, relative to the project's folder; directory: path of the project in
    its repository, or "" for the root.
    """

    path: str = ".github/workflows/ledger.yml"
    directory: str = ""


def workflow_place(out: Path) -> WorkflowPlace:
    """Find the path of the workflow for a project in `out`. GitHub reads workflows only in the
    root of a repository.
    """
    existing_folder = next(folder for folder in (out, *out.parents) if folder.exists())
    code, text = git("-C", str(existing_folder), "rev-parse", "--show-toplevel")
    root = Path(text.rstrip("\n"))
    if code != 0 or not text.strip() or root in (out, out.resolve()):
        return WorkflowPlace()
    directory = out.resolve().relative_to(root).as_posix()
    name = f"ledger-{re.sub('[^A-Za-z0-9._-]+', '-', directory)}.yml"
    return WorkflowPlace(f"{'../' * (1 + directory.count('/'))}.github/workflows/{name}", directory)


def project_files(
    content: Layer, notes: Mapping[str, str], minutes: float, workflow: WorkflowPlace
) -> dict[str, str]:
    from sfumato.privacy.accountant import default_delta

    privacy = {
        "unit": IMAGE,
        "delta": default_delta(content["privacy"]["size_hint"]),
        **content["privacy"],
    }
    facts = {
        **content,
        **content["data"],
        **privacy,
        "minutes": minutes,
        "version": version("sfumato"),
    }
    tracked = TRACKED.replace(" pipelines", "")
    if workflow.directory:
        tracked = tracked.replace(".github", workflow.path)
    facts |= {"tracked": tracked, "workflow": workflow.path}
    return {
        "params.yaml": params_text(content, notes),
        "dvc.yaml": dvc_text(),
        ".gitignore": IGNORED,
        ATTRIBUTES: UNTOUCHED,
        "README.md": (
            Path(__file__).with_name("project_readme.md").read_text("utf-8").format(**facts)
        ),
        workflow.path: workflow_text(
            privacy["epsilon"], privacy["delta"], privacy["unit"], workflow.directory
        ),
    }


def write_project(out: Path, files: Mapping[str, str], say: Say, *, force: bool = False) -> None:
    """Write the files of a project.

    Existing `params.yaml` and `dvc.yaml` are replaced. Missing lines are added to an existing
    `.gitignore` and `.gitattributes`. Other existing files are replaced only if `force` is True.
    """
    make_folder(out)
    begin_repository(out, say)  # comes first, so that the command can be repeated if it fails
    for name, text in files.items():
        path = out / name
        content = text.encode()
        if name in (".gitignore", ATTRIBUTES) and path.exists():
            old_lines = path.read_bytes().splitlines()  # as bytes, because the encoding is unknown
            missing_lines = [line for line in content.splitlines() if line not in old_lines]
            content = b"".join(line + b"\n" for line in old_lines + missing_lines)
        elif path.exists() and name not in ("params.yaml", "dvc.yaml") and not force:
            say(f"{name} already exists, and is not changed")
            check = text.splitlines()[-1].partition("run: ")[2]
            if path.suffix == ".yml" and check.encode() not in path.read_bytes():
                say(f"{name} checks another limit. Change its command to `{check}`")
            continue
        replace_file(path, content)
        if name.startswith("../"):
            say(
                f"{name} was written outside the project, because GitHub reads workflows only in "
                "the repository's root. Commit this file too"
            )
    renew(out / "dvc.yaml")  # adds the project's own recipes to the inputs


def check_dvc(folder: Path) -> None:
    """Raise ConfigError if a project lacks what `dvc repro` requires: DVC, its folder, or git."""
    if importlib.util.find_spec("dvc") is None:
        raise ConfigError(
            "DVC is not installed: run `pip install dvc`. To run the stages without DVC, use "
            f"`stage run` in {folder}"
        )
    root = dvc_root(folder)
    if root is None:
        raise ConfigError(NO_DVC_FOLDER)
    if any((parent / ".git").exists() for parent in (root, *root.resolve().parents)):
        return
    from dvc.config import Config
    from dvc.exceptions import DvcException

    with suppress(DvcException):  # `dvc repro` reports damaged settings itself
        if not Config(str(root / ".dvc"))["core"].get("no_scm"):
            raise ConfigError(
                f"{root} is not in a git repository, which DVC requires: restore the folder .git, "
                "or run `git init`. To use DVC without git, run `dvc config core.no_scm true`"
            )


def dvc_root(folder: Path) -> Path | None:
    """Return `folder` or the closest folder above it that contains `.dvc`, or None."""
    candidates = (folder, *folder.resolve().parents)
    return next((candidate for candidate in candidates if (candidate / ".dvc").is_dir()), None)


def make_index(index: Path) -> None:
    """Create the folder of DVC's index. Every account can write into a folder that DVC creates."""
    for private in (index.parent, index):
        make_folder(private, 0o700)


def check_state(out: Path, state: Path) -> None:
    """Raise ConfigError if git would track the state directory once `begin_repository` has created
    a repository in the project folder `out`.
    """
    existing_folder = next(folder for folder in (out, *out.parents) if folder.exists())
    code, _ = git("-C", str(existing_folder), "rev-parse", "--git-dir")
    if code in (0, 127) or not state.resolve().is_relative_to(out.resolve()):
        return  # no repository will be created, or it will not contain the state directory
    ignored = IGNORED
    if (out / ".gitignore").is_file():
        ignored += (out / ".gitignore").read_text("utf-8", errors="replace")
    relative_state = state.resolve().relative_to(out.resolve())
    names = {line.strip().strip("/") for line in ignored.splitlines()}
    if names.isdisjoint(map(str, (relative_state, *relative_state.parents))):
        raise would_be_tracked(state)


def begin_repository(out: Path, say: Say) -> None:
    """Create a git repository and DVC's folder, unless they exist already."""
    index = state_dir() / DVC_INDEX
    has_git = shutil.which("git") is not None
    if not has_git:
        say(
            "git is not installed, so the project has no history, and no one else can check how "
            "its ledger changed. Install git, then run `git init` and `dvc config core.no_scm "
            "false` in the project's folder"
        )
    elif git("-C", str(out), "rev-parse", "--git-dir")[0] != 0:
        git("init", "-q", "--", str(out))
    if (out / ".dvc").is_dir():
        return
    if importlib.util.find_spec("dvc") is None:
        say(
            "DVC is not installed, so `stage run` runs the stages itself, and keeps no cache. To "
            f"use DVC later, install it, and run `{dvc_init(out, has_git)}` in the project's folder"
        )
        return
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.WARNING)  # Hide DVC's greeting
    inside = has_git and not (out / ".git").exists()  # a subfolder of a repository
    failed = explained(
        lambda text: public(ConfigError(text)),  # the reason contains nothing about images
        partial(why_init_failed, out),
        causes=(Exception,),
    )
    try:
        with failed, Repo.init(str(out), no_scm=not has_git, subdir=inside) as repo:
            with repo.config.edit("repo") as config:
                # If either setting were true, DVC would contact its vendor
                config["core"] |= {"analytics": False, "check_update": False}
            # By default, any account may write into DVC's index, and `dvc checkout` runs code that
            # is pickled there.
            if not fits_dvc_config(index):
                say(
                    f"DVC cannot store the path {index} in its configuration. Before you use `dvc` "
                    f"in a shell, run `{use_index(index)}`, so that no other account can write "
                    "into DVC's index"
                )
                return
            make_index(index)
            with repo.config.edit("local") as config:
                config["core"]["site_cache_dir"] = str(index)
    except BaseException:
        shutil.rmtree(out / ".dvc", ignore_errors=True)  # incomplete; the next call would use it
        raise


def why_init_failed(out: Path, error: Exception) -> str:
    # DVC asks for the name of the account. These are the errors before Python 3.13, and since then
    if any(text in str(error) for text in ("uid not found", "No username set")):
        return (
            f"`dvc init` failed in {out}, because this account has no name: set LOGNAME to a name"
        )
    return f"`dvc init` failed in {out}: {error}"


def dvc_init(out: Path, has_git: bool) -> str:
    """Return the command that creates DVC's folder in a project."""
    if not has_git:
        return "dvc init --no-scm"
    if not (out / ".git").exists():  # a subfolder of a repository
        return "dvc init --subdir"
    return "dvc init"


def fits_dvc_config(path: Path) -> bool:
    """Return whether DVC can store a path: it stores only ASCII, and replaces `%(name)s`."""
    return str(path).isascii() and "%(" not in str(path)


def use_index(index: Path) -> str:
    """Return the command after which `dvc` keeps its index in a folder."""
    if fits_dvc_config(index):
        return shlex.join(["dvc", "config", "--local", "core.site_cache_dir", str(index)])
    return f"export DVC_SITE_CACHE_DIR={quoted(index)}"


def workflow_text(epsilon: float, delta: float, unit: str, directory: str = "") -> str:
    """Return the GitHub workflow that checks the ledger on every push.

    epsilon, delta, unit: largest ε to accept, at this δ and for this unit of privacy;
    directory: path of the project in its repository, or "" for the root.
    """
    from sfumato.privacy.profile import bound_text

    text = Path(__file__).with_name("project_workflow.yaml").read_text("utf-8")
    defaults = ""
    if directory:
        defaults = f"defaults:\n  run:\n    working-directory: {json.dumps(directory)}\n"
    return text.format(
        epsilon=epsilon, delta=delta, unit=unit, shown=bound_text(delta, 3), place=defaults
    )


if __name__ == "__main__":
    print(dvc_text(clone=True), end="")
