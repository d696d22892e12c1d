"""Makes libraries that stand for CUDA's, so that torch from PyPI for x86-64 imports without NVIDIA's 2 GB of packages.

Each function answers 100, which is CUDA's "no device": all that torch asks on a machine without a GPU. Those that give
the text of an error give one, because torch reads it: transformers asks for the capture state of CUDA's stream.
Usage: python tests/cuda_stubs.py SITE_PACKAGES/torch/lib
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nv)")
CUDA_FUNCTION = re.compile(r"(__)?(cu|nccl|nv)")
TEXT = re.compile(r"(cuda|nccl|nvrtc)GetError(String|Name)")
RUNTIME = "libcudart.so.13"
"""Gets the functions that ask for no library by name: the loader takes them from any."""


def output(*command: object) -> str:
    """Return what a command prints."""
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def wanted(folder: Path) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return (library → its functions, library → the version of its symbols), of what torch's libraries need."""
    functions: defaultdict[str, set[str]] = defaultdict(set)
    versions: dict[str, str] = {}
    for library in folder.glob("lib*.so"):
        needed = set(re.findall(r"NEEDED.*\[(.+)\]", output("readelf", "-d", library)))
        cuda = {name for name in needed if CUDA_LIBRARY.match(name) and not (folder / name).exists()}
        for name in cuda:
            functions[name], versions[name] = functions[name], versions.get(name, name)
        for symbol, version in re.findall(r" [Uw] (\w+)@?(\S*)", output("nm", "-D", "--undefined-only", library)):
            home = next((name for name in cuda if version and version.lower() in name.lower()), None)
            if home:
                functions[home].add(symbol)
                versions[home] = version
            elif not version and CUDA_FUNCTION.match(symbol):
                functions[RUNTIME].add(symbol)
    return functions, versions


def make(library: Path, functions: set[str], version: str) -> None:
    """Link a library whose functions are two: a number's, and a text's."""
    source, script = library.with_suffix(".s"), library.with_suffix(".map")
    names: dict[bool, str] = {True: "", False: ""}
    for name in sorted(functions):
        names[bool(TEXT.fullmatch(name))] += f".globl {name}\n.type {name}, @function\n{name}:\n"
    text = f'{names[True]}lea text(%rip), %rax\nret\ntext: .asciz "no device"\n'
    source.write_text(f".text\n{names[False]}mov $100, %eax\nret\n{text}.section .note.GNU-stack\n")
    script.write_text(f"{version} {{ *; }};\n")
    options = (f"-Wl,-soname,{library.name}", f"-Wl,--version-script={script}")
    output("gcc", "-shared", "-nostdlib", *options, "-o", library, source)
    source.unlink()
    script.unlink()


if __name__ == "__main__":
    lib = Path(sys.argv[1])
    functions, versions = wanted(lib)
    for name in functions:
        make(lib / name, functions[name], versions[name])
