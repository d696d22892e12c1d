"""The architecture, enforced: what each floor and each room is for, and who may import whom.

`FLOORS` are the packages and modules of `raysharding`: one imports only from lower floors. `ROOMS` are the packages
inside the three large floors, in the order in which they are built: one imports only from rooms before it, and nothing
from those beside it. What a room has for others, its `__init__` names; its modules are imported by itself alone.
Files of one room may import each other, but not in a circle.
The imports are read from the source, those inside functions and under `TYPE_CHECKING` too.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "raysharding"


class Floor(NamedTuple):
    """One row of the table."""

    number: int
    third_party: frozenset[str]
    purpose: str


def _floor(number: int, third_party: str, purpose: str) -> Floor:
    return Floor(number, frozenset(third_party.split()), purpose)


FLOORS = {
    "errors": _floor(0, "", "the error tree; every class survives pickling"),
    "torch_internals": _floor(0, "torch", "torch's private names that several rooms use"),
    "imports": _floor(0, "", "names that are imported on first use; the garbage collector paused meanwhile"),
    "arguments": _floor(0, "", "errors for a caller's arguments: unknown keywords, integers"),
    "units": _floor(0, "", "binary units of bytes, and amounts of bytes as text"),
    "report": _floor(0, "", "reports for people: as text, and in notebooks as HTML"),
    "tree": _floor(0, "torch", "walks over nested dicts, lists, tuples and dataclasses, with the path of each leaf"),
    "config": _floor(1, "torch", "frozen dataclasses: Sharding, Loading, Placement, Timeouts"),
    "batch": _floor(1, "torch numpy", "Split, PerRank, Out; rows dealt out over the ranks, their outputs joined"),
    "checkpoint": _floor(
        1, "torch safetensors pyarrow huggingface_hub", "what is in the files; byte readers; the safetensors writer"
    ),
    "data": _floor(2, "torch pyarrow numpy datasets", "rows: where they are, their order, who takes which"),
    "models": _floor(2, "torch transformers peft", "config.json or a callable → module on meta; keys, wrap plan"),
    "distributed": _floor(
        3, "torch accelerate numpy", "the SPMD layer: mesh, FSDP2, plan, transports, loading, saving, training"
    ),
    "worker": _floor(4, "torch", "everything that one rank does"),
    "group": _floor(
        5,
        "torch ray numpy tqdm typing_extensions matplotlib mlflow wandb IPython",
        "placement, a controller, calls; the only user of ray",
    ),
    "__main__": _floor(7, "", "`python -m raysharding`"),
    "callbacks": _floor(6, "", "public: what a fit tells its metrics to"),
    "cli": _floor(6, "torch ray tqdm", "the command line"),
    "__init__": _floor(6, "", "the public names, imported when first used"),
}

ROOMS = {
    "checkpoint": ("storage", "format", "writing torch_formats"),
    "distributed": (
        "comm",
        "fully_shard",
        "transfer optim",
        "loading training",
        "saving fsdp accelerate_compat",
        "weights",
        "sharding footprint",
    ),
    "group": (
        "ranks",
        "cluster messages",
        "calls",
        "controller rank",
        "launch",
        "fit",
        "group callbacks",
    ),
}
"""Floor → its rooms, and modules of its own; those of one entry know nothing of each other. Who is in a room:

checkpoint
    storage        where bytes live: files of this machine, object stores
    format         what the files say: names, headers, the index, checksums
    writing        saves, whole or not at all
    torch_formats  torch's own files: .bin, and those of torch.distributed.checkpoint
distributed
    comm               ranks meet, exchange JSON, agree on failure
    fully_shard        a module is cut with FSDP2; the only room that touches its private state
    transfer           tensor bytes in buckets
    optim              optimizers by the names of parameters
    loading            files, a state dict or a replica → module
    training           steps equal to one process's
    saving             module, optimizer, run → files
    fsdp               public: FSDP1's abilities
    accelerate_compat  public: accelerate's FSDP utilities
    weights            module → other models and engines
    sharding           public: what people with their own launcher need
group
    cluster     what Ray and its nodes give
    messages    what crosses between driver, controller and rank
    calls       what the caller holds
    controller  the actor that owns the ranks: state machine, queue, judgement, restart
    rank        a rank's actor and its commands
    launch      spec → loaded ranks
    fit         the driver's part of a run over data: fit, predict
"""
APART = {
    ("distributed.training", "distributed.transfer"): "steps know nothing of how weights came",
    ("group.controller", "group.calls"): "other processes than the caller's: messages alone cross",
    ("group.rank", "group.calls"): "other processes than the caller's: messages alone cross",
}
"""(importer, imported): pairs that the order would allow."""

OPEN = {"distributed.fsdp", "distributed.accelerate_compat"}
"""Rooms whose `__init__` is public: what others of this package need beside, they take from its modules."""


def floor_of(module: str) -> str:
    """Row of FLOORS that a dotted module name belongs to: its first part below the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def room_of(module: str) -> str:
    """The room that a module is in, as `floor.room`; the floor alone where it has no rooms, or for its own file."""
    parts = module.split(".")
    return ".".join(parts[1:3]) if len(parts) > 2 and parts[1] in ROOMS else floor_of(module)


def imported(tree: ast.AST, module: str, is_package: bool, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import anywhere in `tree`, relative ones resolved; a submodule counts as itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join((*above, base) if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in modules else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every broken rule in a package, given as module name → source; a package's own file ends in `.__init__`."""
    # Where a package has a name like one of its modules (`launch`), `from` gives the name.
    faces = {name.removesuffix(".__init__"): text for name, text in sources.items() if name.endswith(".__init__")}
    named = {f"{package}.{one}" for package, text in faces.items() for one in _exported(text)}
    modules = {name.removesuffix(".__init__") for name in sources} - named
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        module, is_package = name.removesuffix(".__init__"), name.endswith(".__init__")
        if floor_of(module) not in FLOORS:
            found.append(f"{name}: not in the floor table of tests/test_layering.py")
            continue
        graph[module] = set()
        for line, target in imported(ast.parse(source), module, is_package, modules):
            where = f"{name}:{line} imports {target}"
            if target.split(".")[0] == PACKAGE:
                found.extend(_wrong_floor(where, module, target))
                found.extend(_wrong_room(where, module, target))
                graph[module].add(target)
            elif target.split(".")[0] not in sys.stdlib_module_names | FLOORS[floor_of(module)].third_party:
                allowed = ", ".join(sorted(FLOORS[floor_of(module)].third_party)) or "the standard library only"
                found.append(f"{where}: {floor_of(module)} may use {allowed}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("imports in a circle: " + " → ".join(error.args[1]))
    return found


def _exported(source: str) -> Iterator[str]:
    """Names that a package's `__init__` imports, or lists in `__all__`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)


def _wrong_floor(where: str, module: str, target: str) -> Iterator[str]:
    own, other = floor_of(module), floor_of(target)
    if other not in FLOORS:
        yield f"{where}: {other} is not in the floor table"
    elif own != other and FLOORS[other].number >= FLOORS[own].number:
        numbers = FLOORS[own].number, FLOORS[other].number
        yield f"{where}: floor {numbers[0]} may import only from lower floors, {other} is on {numbers[1]}"


def _wrong_room(where: str, module: str, target: str) -> Iterator[str]:
    own, other = room_of(module), room_of(target)
    is_floor = module == f"{PACKAGE}.{floor_of(module)}"
    if own == other or (other in ("__init__", floor_of(target)) and target.count(".") < 2):
        return
    if target != f"{PACKAGE}.{other}" and other not in OPEN:
        yield f"{where}: a module of another room; import the name from {PACKAGE}.{other}"
    if floor_of(module) == floor_of(target) and not is_floor:
        order = {room: number for number, row in enumerate(ROOMS[floor_of(module)]) for room in row.split()}
        for one in (own, other):
            if one.partition(".")[2] not in order:
                yield f"{where}: {one} is not in the table of rooms"
                return
        if order[other.partition(".")[2]] >= order[own.partition(".")[2]]:
            yield f"{where}: {other} does not stand before {own} in the table of rooms"
    if (own, other) in APART:
        yield f"{where}: {APART[own, other]}"


def package_sources() -> dict[str, str]:
    """The package as it lies in the checkout."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text() for file in files}


def test_package_keeps_its_floors() -> None:
    assert violations(package_sources()) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("config", "import raysharding.group", "floor 1 may import only from lower floors"),
        ("config", "def f():\n    from raysharding.worker import Worker", "floor 1 may import only from lower floors"),
        ("config", "from raysharding.batch import Split", "batch is on 1"),
        ("distributed.sharding", "from ..group import Call", "floor 3 may import only from lower floors"),
        ("distributed.sharding", "from raysharding import Split", "__init__ is on 6"),
        ("distributed.sharding", "import ray", "distributed may use accelerate, numpy, torch"),
        ("worker", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray.util", "worker may use torch"),
        (
            "distributed.fsdp",
            "import importlib\nimportlib.import_module('transformers')",
            "distributed may use accelerate, numpy, torch",
        ),
        ("errors", "import torch", "the standard library only"),
        ("distributed.comm.mesh", "from raysharding.distributed.loading import load", "does not stand before"),
        ("distributed.fsdp.a", "from raysharding.distributed.saving import save", "does not stand before"),
        ("distributed.training.step", "import raysharding.distributed.transfer", "nothing of how weights came"),
        ("group.controller.a", "from raysharding.group.calls import Call", "messages alone cross"),
        ("group.controller.a", "from raysharding.group.rank import RankActor", "does not stand before"),
        ("group.calls.a", "from raysharding.group.rank import RankActor", "does not stand before"),
        ("worker.a", "import raysharding.distributed.comm.mesh", "import the name from raysharding.distributed.comm"),
        ("group.helpers", "from raysharding.group.messages import pack", "not in the table of rooms"),
        ("helpers", "", "not in the floor table"),
    ],
)
def test_broken_rule_is_found(module: str, source: str, message: str) -> None:
    assert any(message in found for found in violations({f"{PACKAGE}.{module}": source}))


def test_circle_is_found() -> None:
    circle = {"raysharding.data.a": "from . import b", "raysharding.data.b": "from raysharding.data.a import x"}
    assert [found.split(":")[0] for found in violations(circle)] == ["imports in a circle"]


def test_own_package_is_no_violation() -> None:
    fine = {"raysharding.group.__init__": "from .a import x", "raysharding.group.a": "import os, ray, torch.nn"}
    assert violations(fine) == []


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""


def run_python(code: str) -> None:
    """Run `code` in a fresh interpreter in which raysharding is importable; show its errors if it fails."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


PRIVATE = {
    # What FSDP2 keeps to itself: its states, their groups, and what those hold of a parameter.
    "raysharding.distributed.fully_shard.internals": re.compile(
        r"\b(_get_fsdp_state|_fsdp_param_groups?|fsdp_params|sharded_param|_unsharded_param|unsharded_accumulated_grad"
        r"|_lazy_init|_is_root|_training_state|_state_ctx|_modules_to_run_forward|reduce_grads|all_reduce_grads"
        r"|mesh_info|post_forward_mesh_info|_orig_dtype|_init_mp_dtypes|_sharded_post_forward_param)\b"
    ),
    "raysharding.distributed.fully_shard.layout": re.compile(r"\b_local_tensor\b"),
    "raysharding.tree": re.compile(r"\b_pytree\b"),
    "raysharding.torch_internals": re.compile(
        r"\b(_current_graph_task_id|_checkpoint\.checkpoint_wrapper|modules\.batchnorm|_python_dispatch|_IncompatibleKeys)\b"
    ),
    "raysharding.group.cluster.ray_internals": re.compile(r"\bray\._(private|raylet)\b|\b_actor_id\b"),
}
"""Module → names of others that it alone touches: where one is renamed, one file is mended."""


def test_what_others_keep_private_is_touched_in_one_place() -> None:
    written = {name: "\n".join(_names(source)) for name, source in package_sources().items()}
    found = [
        f"{name}: {match[0]}"
        for name, text in written.items()
        for home, names in PRIVATE.items()
        if name != home
        for match in names.finditer(text)
    ]
    assert found == []
    assert all(names.search(written[home]) for home, names in PRIVATE.items())


def _names(source: str) -> Iterator[str]:
    """Yield the names, attributes and imports of a module, without its prose."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            before = {ast.Name: "id", ast.Attribute: "attr"}.get(type(node.value))
            yield f"{getattr(node.value, before)}.{node.attr}" if before else node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield ast.unparse(node)


def test_group_is_missing_only_when_used_and_transformers_never() -> None:
    code = """
import raysharding, raysharding.distributed, raysharding.models, raysharding.worker
with_ray = {"Call", "EarlyStop", "FitReport", "FitStep", "PredictReport", "ShardedModelGroup"}
for name in {*raysharding.__all__} - with_ray:
    getattr(raysharding, name)
try:
    raysharding.ShardedModelGroup
except ModuleNotFoundError as error:
    assert error.name == "ray", error
else:
    raise SystemExit("the group came without ray")
"""
    run_python(BLOCK.format(blocked=("ray", "transformers")) + code)


def test_import_is_lazy() -> None:
    heavy = ("torch", "ray", "transformers", "pyarrow")
    run_python(f"import sys, raysharding\nassert not {{*{heavy!r}}} & {{*sys.modules}}, sorted(sys.modules)")
