"""The page docs/pages/comparison.md: every row has a source or a command, and what can be checked here holds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs/pages/comparison.md"
ASKED = "Source or command"
LINK = re.compile(r"\[([^\]]+)\]\((https://[^)]+)\)")
INSTALLED = {
    "huggingface/accelerate": ("accelerate", "v", "src/accelerate/"),
    "huggingface/transformers": ("transformers", "v", "src/transformers/"),
    "pytorch/pytorch": ("torch", "v", "torch/"),
    "ray-project/ray": ("ray", "ray-", "python/ray/"),
}
"""Repository → the package that is installed of it, what stands before a version in its tags, where its modules are."""


def rows() -> Iterator[list[str]]:
    """The cells of each row that must have a source, by table."""
    asked = False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            asked = False
        elif cells[-1] == ASKED:
            asked = True
        elif asked and set(line) - set("|-"):
            yield cells


def test_every_row_has_a_source_or_a_command_that_exists() -> None:
    for cells in rows():
        source = LINK.fullmatch(cells[-1]) or re.fullmatch(r"`(pytest|python -m) [^`]+`", cells[-1])
        assert source, cells
    commands = re.findall(r"`((?:pytest|python -m) [^`]+)`", PAGE.read_text())
    assert len(commands) > 10
    for command in commands:
        paths = [word for word in command.split() if word.startswith("tests/")]
        assert all((ROOT / path).exists() for path in paths), command
        is_module = command.startswith("python -m ")
        assert importlib.util.find_spec(command.split()[2]) if is_module else paths, command


def test_the_installed_files_hold_the_names_that_are_linked() -> None:
    seen = 0
    for text, url in LINK.findall(PAGE.read_text()):
        repository, found = url.removeprefix("https://github.com/"), re.search(r"/blob/([^/]+)/(.+)$", url)
        package, prefix, folder = INSTALLED.get("/".join(repository.split("/")[:2]), ("", "", ""))
        if not found or not package or not found[1].startswith(prefix):
            continue
        if version(package).partition("+")[0] != found[1].removeprefix(prefix):
            pytest.skip(f"{package} {version(package)} is installed, and the page was written for {found[1]}")
        file = Path(str(distribution(package).locate_file(package))) / found[2].removeprefix(folder)
        name, term = text.split(": ")
        assert file.name == name, text
        assert term in file.read_text(), f"{text}: {file}"
        seen += 1
    assert seen > 15
