"""`Sharding(compile=)`: blocks are compiled, and what they compute stays what it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raysharding.config import Sharding
from tests.distributed.training.test_training import Pair
from tests.distributed.training.training_cases import CASES
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


def test_what_is_no_backend_is_refused() -> None:
    for bad in ("", 1, None):
        with pytest.raises(ValueError, match="compile"):
            Sharding(compile=bad)  # type: ignore[arg-type]
