"""The blocks of code in a page of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line of code in the page
    code: str


def blocks(text: str) -> list[Block]:
    code_blocks, opened = [], None
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.fullmatch(r"(\s*)```(.*)", line)
        if fence and opened is None:
            indent, opened, lines = len(fence[1]), (fence[2].strip(), number + 1), []
        elif fence:
            code_blocks.append(Block(*opened, "\n".join(lines) + "\n"))
            opened = None
        elif opened:
            lines.append(line[indent:])
    assert opened is None, f"the block of line {opened[1]} has no end"
    return code_blocks
