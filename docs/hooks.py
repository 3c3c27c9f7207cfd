"""Add to the site the root pages, the notes of the benchmarks, the notebooks, and the files that
these pages link to.

The links in `docs/` are written for the files of a clone, so that they work there too. On the site,
a link to another file of the repository leads to a copy of that file, and a link to a folder
becomes plain text.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = (
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "SECURITY.md",
)
NOTES = "benchmarks/notes"
PAGES = {  # paths in the repository -> paths on the site
    "README.md": "index.md",
    f"{NOTES}/README.md": "notes/index.md",
    **{name: name.lower() for name in ROOT_PAGES},
    **{
        f"{NOTES}/{path.name}": f"notes/{path.name}"
        for path in sorted((ROOT / NOTES).glob("[!R]*.md"))
    },
}
COPIES = "source"  # folder of the site for files of the repository
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")
FOLDER_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#|/)([^)#\s]+)\)")


def notebook_page(text: str) -> str:
    """Return a notebook as Markdown: text and code, without the outputs of the code."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        language, body = (
            ("sh", source.removeprefix("%%bash\n"))
            if source.startswith("%%bash")
            else ("python", source)
        )
        parts.append(source if cell["cell_type"] == "markdown" else f"```{language}\n{body}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside `docs/`, and a page for each notebook."""
    for path, page in PAGES.items():
        files.append(
            File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8"))
        )
    for notebook in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        name = notebook.relative_to(config.docs_dir)
        text = notebook_page(notebook.read_text(encoding="utf-8"))
        link = f"[Download the notebook]({name.name})"
        first, rest = text.split("\n", 1)
        files.append(
            File.generated(
                config, name.with_suffix(".md").as_posix(), content=f"{first}\n\n{link}\n{rest}"
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links between files of the repository by links between pages of the site."""
    origin = {page: path for path, page in PAGES.items()}.get(
        page.file.src_uri, f"docs/{page.file.src_uri}"
    )
    here = Path(page.file.src_uri).parent

    def in_the_repository(link: str) -> str:
        return os.path.normpath(Path(origin).parent / link)

    def without_folder(link: re.Match[str]) -> str:
        return link[1] if (ROOT / in_the_repository(link[2])).is_dir() else link[0]

    def on_the_site(link: re.Match[str]) -> str:
        path = in_the_repository(link[1])
        target = PAGES.get(path) or (
            path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}"
        )
        if (
            target.startswith(f"{COPIES}/")
            and files.get_file_from_path(target) is None
            and (ROOT / path).is_file()
        ):
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
        return os.path.relpath(target, here)

    return LINK.sub(on_the_site, FOLDER_LINK.sub(without_folder, markdown))
