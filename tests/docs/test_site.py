"""The site builds strictly and asks no other host; pages and pictures show what runs here, and name their sources."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
import torch

from raysharding.cli import main
from tests.docs.blocks import ROOT
from tests.test_public_api import PUBLIC

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""Elements whose target a browser fetches by itself."""


class Fetched(HTMLParser):
    """Collects what a browser fetches for a page, and components of the theme that ask other hosts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in LOADED:
            self.targets.append(values.get(LOADED[tag], ""))
        if values.get("data-md-component") == "source" or "mermaid" in values.get("class", "").split():
            self.targets.append(f"https://{tag} {values}")  # GitHub's stars, and a script of unpkg.com


@pytest.mark.full
@pytest.mark.timeout(360)
def test_the_site_builds_strictly_and_stands_alone(tmp_path: Path) -> None:
    pytest.importorskip("material")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix}
    command = ["bash", "docs/build.sh", "build", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

    inventory = zlib.decompress((tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    described = {line.partition(" ")[0] for line in inventory.splitlines()}
    # The command line is not for import, and `group.callbacks` is an old name.
    modules = PUBLIC - {"raysharding.cli", "raysharding.group.callbacks"}
    assert {path.parent.name for path in (tmp_path / "reference").glob("*/index.html")} == modules
    faces = {module: getattr(import_module(module), "__all__", ()) for module in modules}
    names = {f"{module}.{name}" for module, face in faces.items() for name in face if name != "__version__"}
    assert names - described == set()

    foreign = re.compile(r"^(https?:)?//")
    for page in tmp_path.rglob("*.html"):
        assert [target for target in Fetched(page.read_text()).targets if foreign.match(target)] == [], page
    for sheet in tmp_path.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//|@import", sheet.read_text()) == [], sheet


SCRIPT = Path(__file__).parents[2] / "docs" / "pictures.py"


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["load", "--out", str(tmp_path), "--width", "64"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(drawn) == {"load.png"}
    assert drawn["load.png"].startswith(b"\x89PNG")


MEMORY_PAGE = (Path(__file__).parents[2] / "docs/pages/memory-and-speed.md").read_text()
COMMAND, OUTPUT = re.findall(r"test_plan -->\n```bash\n(.*?)\n```\n\n```text\n(.*?)```", MEMORY_PAGE, re.DOTALL)[0]
MEMORY_ROWS = re.findall(r"^\| (?:`(--.*?)`|no optimizer.*?) \| (\S+ \S+) \| (\S+ \S+) \|$", MEMORY_PAGE, re.MULTILINE)


def write_headers(path: Path) -> None:
    """A Llama of 8 billion parameters in a file with holes for its values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(
        **sizes, num_key_value_heads=8, vocab_size=128256, dtype="bfloat16", architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(path)
    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)


def test_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("path/to/llama-8b")
    write_headers(path)
    capsys.readouterr()
    assert main(COMMAND.split()[1:]) == 0
    assert capsys.readouterr().out == OUTPUT
    base = COMMAND.split(" --optimizer")[0].split()[1:]
    assert len(MEMORY_ROWS) == 4
    for options, gpu, host in MEMORY_ROWS:
        assert main([*base, *options.split()]) == 0
        last = next(line for line in reversed(capsys.readouterr().out.splitlines()) if re.match(r"\d-", line))
        shown = re.split(r"  +", last)[-2:]
        assert [shown[1], shown[0].replace(".00 MiB", " MiB")] == [gpu, host], options


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
