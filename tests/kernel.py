"""Runs a notebook from a kernel, as a person does: with an interrupt, and a restart in the middle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

CELL_S = 120
"""Longest time of one cell, in seconds."""


class Notebook(NotebookClient):
    """A notebook with a kernel.

    Args:
        path: The notebook.
        folder: Where its kernel runs.
        replace: (old, new): text of the notebook that is replaced, once.
        interrupt: (id of a cell, text): the kernel is interrupted in that cell, once an output that comes during it has
            the text.
        restart: Id of the cell before which the kernel is restarted, which kills its process.
    """

    def __init__(
        self, path: Path, folder: Path, *, replace: tuple[str, str], interrupt: tuple[str, str], restart: str
    ) -> None:
        text = path.read_text()
        assert text.count(replace[0]) == 1, replace
        nodes = nbformat.reads(text.replace(*replace), as_version=4)
        resources = {"metadata": {"path": str(folder)}}
        super().__init__(nodes, timeout=CELL_S, kernel_name="python3", allow_errors=True, resources=resources)
        self._interrupt = interrupt
        self._restart = restart
        self._interrupting: asyncio.Future[Any] | None = None

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        """Take an output, and interrupt the kernel if this is the moment."""
        done: NotebookNode | None = super().process_message(msg, cell, cell_index)
        where, what = self._interrupt
        if self._interrupting is None and cell.id == where and what in str(msg["content"].get("data", "")):
            self._interrupting = asyncio.ensure_future(self.km.interrupt_kernel())
        return done

    async def run(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Run all cells; return by the id of a code cell its outputs, joined: text, html, and `<png>` for a picture."""
        async with self.async_setup_kernel(env={**os.environ, **environment}):
            for index, cell in enumerate(self.nb.cells):
                if cell.id == self._restart:
                    await self.km.restart_kernel(now=True)
                    await self.kc.wait_for_ready(timeout=CELL_S)
                await self.async_execute_cell(cell, index)
        return {cell.id: "\n".join(map(_text, cell.outputs)) for cell in self.nb.cells if cell.cell_type == "code"}


def _text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    data = {**output.data, **({"image/png": "<png>"} if "image/png" in output.data else {})}
    return "\n".join(data[kind] for kind in ("text/html", "text/plain", "image/png") if kind in data)
