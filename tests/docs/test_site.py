"""The site builds strictly, describes each public name, and asks no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

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
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
    }
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
    for path in tmp_path.rglob("*.html"):
        assert [target for target in Fetched(path.read_text()).targets if foreign.match(target)] == [], path
    for path in tmp_path.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//|@import", path.read_text()) == [], path
