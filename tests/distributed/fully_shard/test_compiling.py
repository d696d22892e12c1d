"""`Sharding(compile=)`: blocks are compiled, and what they compute stays what it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module, train_step
from tests.distributed.training.test_training import Pair
from tests.distributed.training.training_cases import CASES
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

_graphs: list[torch.fx.GraphModule] = []


def note_graph(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    _graphs.append(graph)
    return graph.forward


def train_compiled(backend: str, sharding: Sharding) -> None:
    """Steps of a compiled module equal those of one process that compiles nothing."""
    if backend == "noting":
        torch._dynamo.register_backend(note_graph, name="noting")
    case = CASES["llama"]
    pair = Pair(case.build, "adamw", sharding)
    for _ in range(3):
        pair.step(case, case.rows(), 0.5)
    pair.compare()
    assert backend != "noting" or _graphs, "nothing was compiled"
    assert "forward" in vars(pair.module.get_submodule("model.layers.0")), "the blocks are compiled"
    assert "forward" not in vars(pair.module.get_submodule("model.embed_tokens"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("noting", {}),
        pytest.param("aot_eager", {"activation_checkpointing": True}, marks=pytest.mark.full),
        pytest.param("inductor", {}, marks=pytest.mark.full),
    ],
)
def test_compiled_blocks_train_as_one_process_does(backend: str, options: dict[str, bool]) -> None:
    pytest.importorskip("transformers")
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on CPUs")
    # Every rank compiles for itself, and a compiler takes long.
    world_size = 1 if backend == "inductor" else 2
    sharding = Sharding(compile=backend, **options)  # type: ignore[arg-type]
    run_ranks(world_size, train_compiled, backend, sharding, timeout_s=150)


DEEP = 10
"""Number of layers: more than dynamo compiles one function for, whose `recompile_limit` is 8."""
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers")


def deepened(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the fields of a configuration, and of those inside it, with another number of layers."""
    return {
        key: deepened(one, num_layers) if isinstance(one, dict) else num_layers if key in _DEPTHS else one
        for key, one in fields.items()
    }


def graphs_of(name: str, num_layers: int) -> tuple[int, int]:
    """Return the numbers of graphs and of graph breaks of two training steps; the config asks for a KV cache."""
    import transformers

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.config)(**deepened(architecture.fields, num_layers))
    module = getattr(transformers, architecture.model)(config)
    shard_module(module, init_mesh("cpu"), Sharding(compile="eager"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(2):
        train_step(module, optimizer, architecture.inputs(), loss=lambda output: output.logits.square().mean())
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def compare_depths(names: Sequence[str]) -> list[str]:
    found = {name: (graphs_of(name, 2), graphs_of(name, DEEP)) for name in names}
    told = {name: f"{name}: {few} of 2 layers, {many} of {DEEP}" for name, (few, many) in found.items()}
    return [told[name] for name, (few, many) in found.items() if few != many or many[1]]


OTHERS = sorted(ARCHITECTURES.keys() - {"llama", "t5", "clip"})  # CLIP's texts and images are no rows of one batch


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "names", [("llama", "t5"), *(pytest.param(OTHERS[part::2], marks=pytest.mark.full) for part in range(2))]
)
def test_layers_of_one_kind_share_their_graphs(names: Sequence[str]) -> None:
    """Nor does a graph break. With the KV caches that transformers makes, the last layers ran eagerly."""
    pytest.importorskip("transformers")
    (told,) = run_ranks(1, compare_depths, names, timeout_s=170)
    assert not told, told


def test_what_is_no_backend_is_refused() -> None:
    for bad in ("", 1, None):
        with pytest.raises(ValueError, match="compile"):
            Sharding(compile=bad)  # type: ignore[arg-type]
