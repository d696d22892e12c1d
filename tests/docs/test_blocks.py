"""The code on the pages runs, or the page says why it does not.

The blocks of a page run in order, `python` in one namespace, `bash` by `bash -e`, in a folder that holds what
`page_files` says, on the session's cluster. A block with `title="train.py"` becomes that file there.

A comment on the line before a fence changes that:

    <!-- not run: REASON -->               it cannot be run here
    <!-- run by: tests/x.py::test_y -->    that test runs it
    <!-- output -->                        before a block of output: the page's blocks have printed these lines in
                                           this order; `...` stands for anything

`pytest tests/docs/test_blocks.py -k fine-tune -rP` runs one page and shows what it prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raysharding import ShardedModelGroup
from tests.docs.blocks import ROOT, Block, blocks_of, pages

BASH_S = 240


def _parameters() -> list[Any]:
    run = [page for page in pages() if any(block.is_run for block in blocks_of(page))]
    return [pytest.param(page, marks=[pytest.mark.full] * (page != "README.md")) for page in run]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.* initialised, and of no use before a training")  # classify.md trains a new head
@pytest.mark.parametrize("page", _parameters())
def test_blocks_of_a_page_run(
    page: str, page_folder: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    blocks = list(blocks_of(page))
    if any("s3://" in block.text for block in blocks if block.is_run):
        request.getfixturevalue("page_store")
    # Ray sends what is defined in `__main__` by value, and the rest of a page's names with it.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    try:
        for block in blocks:
            if block.is_run:
                _run(block, namespace)
                printed += capfd.readouterr().out
            elif block.marker == "output":
                pattern = ".*".join(map(re.escape, block.text.strip().split("...")))
                assert re.search(pattern, printed, re.DOTALL), f"{block.where}: the blocks printed\n{printed}"
    finally:
        print(printed)  # `pytest -rP` shows what a page prints
        for value in namespace.values():
            if isinstance(value, ShardedModelGroup):
                value.shutdown()


def _run(block: Block, namespace: dict[str, Any]) -> None:
    if block.title:
        Path(block.title).write_text(block.text)
        return
    if block.language == "python":
        # Empty lines in front: a traceback shows the line of the page.
        exec(compile("\n" * block.line + block.text, str(ROOT / block.page), "exec"), namespace)
        return
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path}
    command = ["bash", "-e", "-c", block.text]
    done = subprocess.run(command, env=environment, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
                          timeout=BASH_S)  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"{block.where}: status {done.returncode}\n{done.stdout}"


@pytest.mark.parametrize("page", pages())
def test_a_block_that_is_not_run_says_why(page: str) -> None:
    for block in blocks_of(page):
        languages = ("python", "bash", "text", "yaml", "json", "toml", "dockerfile", "ini", "promql")
        assert block.language in languages, f"{block.where}: a block of {block.language or 'no language'}"
        if block.marker == "not run":
            assert len(block.reason) > 10, f"{block.where}: no reason"
            named = re.findall(r"tests/[\w/.]*\w", block.reason)
            assert [path for path in named if not (ROOT / path).exists()] == [], block.where
        if block.marker == "run by":
            path, _, test = block.reason.partition("::")
            there = (ROOT / path).is_file() and re.search(rf"^def {re.escape(test)}\(", (ROOT / path).read_text(), re.M)
            assert there, f"{block.where}: there is no test {block.reason}"
