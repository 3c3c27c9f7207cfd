"""Run a command on a terminal of 100 columns, and save what it prints as a picture.

    python docs/transcript.py docs/init.svg stage init /data/chest --epsilon 5 --minutes 60 --groups
    '^(.+)_' --yes

Progress bars are left out, and so is the line that warns of other running programs.
"""

import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
PASSING = re.compile(r"━ .*\d%|^other programs are running")


def printed_by(words: list[str]) -> str:
    printed = bytearray()

    def read(descriptor: int) -> bytes:
        content = os.read(descriptor, 4096)
        printed.extend(content)
        return content

    os.environ["COLUMNS"] = str(COLUMNS)
    pty.spawn(words, read)
    lines = (line.split("\r")[-1] for line in printed.decode().replace("\r\n", "\n").split("\n"))
    return "\n".join(
        line for line in lines if not PASSING.search(Text.from_ansi(line).plain)
    ).strip("\n")


def main(file: Path, words: list[str]) -> None:
    text = printed_by(words)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(f"$ {shlex.join(words)}", style="bold", markup=False, highlight=False)
        console.print(Text.from_ansi(text))
        picture = console.export_svg(title=" ".join(words[:2]))
        # Leave out the fonts, which a browser would load from the web
        file.write_text(
            re.sub(r"@font-face {.*?}\s*", "", picture, flags=re.DOTALL), encoding="utf-8"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
