"""The code blocks of the pages that users read, and what the comment before a block says about running it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)(`{3,})(\w*)(?: +title=\"([^\"]+)\")?[^`]*$")
MARKER = re.compile(r"^ *<!-- *(not run|run by|output): *(.*?) *-->$|^ *<!-- *(output) *-->$")
SNIPPET = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)


def pages() -> list[str]:
    """Every page with blocks for users, by its path from the repository's root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "cluster").rglob("*.md")]
    found += (ROOT / "docs" / "pages").rglob("*.md")
    return sorted(str(path.relative_to(ROOT)) for path in found)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    """Line of the opening fence, from 1."""
    language: str
    title: str
    """Name of the file that it is, or empty."""
    text: str
    """What is between the fences, without their indentation, files of `--8<--` put in."""
    marker: str
    """`not run`, `run by`, `output`, or empty."""
    reason: str
    """What stands behind the marker."""

    @property
    def is_code(self) -> bool:
        """Whether users are to run it."""
        return self.language in ("python", "bash")

    @property
    def is_run(self) -> bool:
        """Whether the test of its page runs it."""
        return self.is_code and not self.marker

    @property
    def where(self) -> str:
        """Page and line, as editors take them."""
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = (ROOT / page).read_text().splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is not None:
            begun = number
            number += 1
            while lines[number].strip() != opening[2]:
                number += 1
            text = textwrap.dedent("\n".join(lines[begun + 1 : number])) + "\n"
            found = MARKER.match(lines[begun - 1]) if begun else None
            marker, reason = (found[1] or found[3], found[2] or "") if found else ("", "")
            yield Block(page, begun + 1, opening[3], opening[4] or "", SNIPPET.sub(_snippet, text), marker, reason)
        number += 1


def texts_of(page: str, what: str) -> list[str]:
    """The texts of a page's blocks that are run by a test of this name, or that contain this text."""
    blocks = list(blocks_of(page))
    run = [block.text for block in blocks if block.marker == "run by" and block.reason.endswith(f"::{what}")]
    return run or [block.text for block in blocks if what in block.text]


def _snippet(found: re.Match[str]) -> str:
    return (ROOT / found[1]).read_text().rstrip("\n")
