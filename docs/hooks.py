"""For mkdocs: links to files of the repository, and a page of the API reference for each public module."""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/raysharding/raysharding"
LINK = re.compile(r"(?<=\]\()\.\./[^)#\s]+")
"""The target of a Markdown link that begins by going up."""
FACADE = "raysharding.group.ShardedModelGroup"
"""The class whose sections (`# Section: NAME` in its source) have a page each."""

log = logging.getLogger("mkdocs.hooks.raysharding")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Turn a link to a file outside docs/pages into one to the repository; a file that is not there is a warning."""
    folder = posixpath.dirname(f"docs/pages/{page.file.src_uri}")

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[0]))
        if path.startswith("docs/pages/"):
            return link[0]
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not in the repository", page.file.src_uri, path)
        return f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"

    return LINK.sub(absolute, markdown)


def on_files(files: Files, config: Any) -> Files:
    """Write the reference pages that the navigation names.

    A name that several modules export has one entry, on the page of the innermost of them; the others link to it.
    """
    package = griffe.load("raysharding", search_paths=[str(ROOT)], resolve_aliases=True)
    paths = re.findall(r"reference/([\w.]+)\.md", repr(config.nav))
    modules = {path: package[path.partition(".")[2]] if "." in path else package for path in paths}
    homes: dict[str, str] = {}
    for path, module in sorted(modules.items(), key=lambda item: -item[0].count(".")):
        for name in _exports(module):
            homes.setdefault(module[name].canonical_path, path)
    for path, module in modules.items():
        content = "\n".join(_reference(path, module, homes))
        files.append(File.generated(config, f"reference/{path}.md", content=content))
    for path, content in _sections(package[FACADE.partition(".")[2]]):
        files.append(File.generated(config, f"reference/group/{path}.md", content=content))
    return files


def _sections(facade: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of a page for each section of the facade."""
    source = Path(facade.final_target.filepath).read_text().splitlines()
    begins = [(number, line.partition(": ")[2]) for number, line in enumerate(source, 1) if "    # Section: " in line]
    members = [one for one in facade.final_target.members.values() if one.is_public and not one.is_alias]
    for index, (first, title) in enumerate(begins):
        last = begins[index + 1][0] if index + 1 < len(begins) else len(source)
        names = [one.name for one in sorted(members, key=lambda one: one.lineno) if first < one.lineno < last]
        entries = [f"::: {FACADE}.{name}" for name in names]
        yield title.replace(" ", "-"), "\n\n".join([f"# {title.capitalize()}", *entries, ""])


def _exports(module: Any) -> list[str]:
    """`__all__`, or what a module without one defines in public."""
    if module.exports is not None:
        return [str(name) for name in module.exports]
    return [name for name, one in module.members.items() if one.is_public and not (one.is_alias or one.is_module)]


def _reference(path: str, module: Any, homes: dict[str, str]) -> Iterator[str]:
    yield from (f"# {path}", "", module.docstring.value, "")
    elsewhere = [name for name in _exports(module) if homes[module[name].canonical_path] != path]
    if elsewhere:
        yield from ("| Described on the page of its own module | |", "|---|---|")
    for name in elsewhere:
        summary = module[name].docstring.value.partition("\n")[0].replace("|", "\\|")
        yield f"| [`{name}`][{homes[module[name].canonical_path]}.{name}] | {summary} |"
    yield ""
    for name in _exports(module):
        if name not in elsewhere:
            is_facade = f"{path}.{name}" == FACADE
            yield from (f"::: {path}.{name}", *(["    options: {members: false}"] if is_facade else []), "")
