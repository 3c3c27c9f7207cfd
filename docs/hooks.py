"""What the site needs beside the pages of `docs/`: README and changelog as pages, notebooks as pages, files they name.

The links in `docs/` are those of a clone, so that they work there too. On the site, a link to a file of the repository
that is no page leads to a copy of that file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}  # by their paths in the repository and on the site
COPIES = "source"  # folder of the site for files of the repository
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")


def notebook_page(text: str) -> str:
    """A notebook as Markdown: its text, and its code without outputs."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        language, body = ("sh", source.removeprefix("%%bash\n")) if source.startswith("%%bash") else ("python", source)
        parts.append(source if cell["cell_type"] == "markdown" else f"```{language}\n{body}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in `docs/`."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for notebook in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        name = notebook.relative_to(config.docs_dir)
        text = notebook_page(notebook.read_text(encoding="utf-8"))
        link = f"[Download the notebook]({name.name})"
        first, rest = text.split("\n", 1)
        files.append(File.generated(config, name.with_suffix(".md").as_posix(), content=f"{first}\n\n{link}\n{rest}"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    origin = {page: path for path, page in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = Path(page.file.src_uri).parent

    def on_the_site(link: re.Match[str]) -> str:
        path = os.path.normpath(Path(origin).parent / link[1])
        target = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}")
        if target.startswith(f"{COPIES}/") and files.get_file_from_path(target) is None and (ROOT / path).is_file():
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
        return os.path.relpath(target, here)

    return LINK.sub(on_the_site, markdown)
