"""What `Sharding` changes in forward and backward: activation checkpointing, its offload, prefetching, compilers."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from raysharding.batch import Split, deal
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module, train_step
from raysharding.distributed.fully_shard import activation_checkpointing
from raysharding.distributed.fully_shard.internals import fsdp_groups, own_groups
from raysharding.distributed.fully_shard.layout import named_submodules
from raysharding.distributed.optim.factories import make_optimizer
from raysharding.distributed.training.step import Accumulation, optim_step, zero_grad
from raysharding.errors import PlanError
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import (
    Block,
    assert_same,
    build,
    full,
    gradients,
    mine,
    rows,
    sharded,
)
from tests.distributed.training.test_training import Pair
from tests.distributed.training.training_cases import CASES, VOCAB, llama
from tests.models.architectures import ARCHITECTURES
from tests.spawn import device_type, run_ranks


class Dropped(Block):
    """A block whose forward draws random numbers, so that the second one must draw them again."""

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.dropout(torch.tanh(self.up(x)), 0.5, self.training)
        out: torch.Tensor = x + self.down(hidden) * scale
        return out if mask is None else out * mask


class Deep(nn.Module):
    """Blocks in a stack, and what is done in them written down."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Dropped() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, 0.5, mask=torch.ones(6, device=x.device))
        return self.head(x)


# --- activation checkpointing ---------------------------------------------------------------------------------------


@contextmanager
def saved(module: Any) -> Iterator[list[int]]:
    """Bytes of each activation that is kept for backward, parameters left out."""
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        items = [item for group in fsdp_groups(module) for item in group.fsdp_params]
        full = {item._unsharded_param.data_ptr() for item in items if hasattr(item, "_unsharded_param")}
        if tensor.data_ptr() not in full:
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def step(module: Any, batch: torch.Tensor) -> int:
    """Forward and backward from one random state; bytes of activations that forward left."""
    torch.manual_seed(3)
    with saved(module) as sizes:
        loss = module(batch).square().mean()
    loss.backward()
    return sum(sizes)


@on_ranks(2, 4, sim=(2,))
def test_checkpointing_saves_memory(replicate_size: int) -> None:
    batch = mine(rows(240))
    plain = sharded(build(Deep), wrap=["Dropped"], replicate_size=replicate_size)
    names = list(plain.state_dict())
    kinds = [type(inner).__name__ for inner in plain.modules()]
    full_bytes = step(plain, batch)
    for choice in (True, ["Dropped"], lambda inner: isinstance(inner, Dropped)):
        fields: dict[str, Any] = {"wrap": ["Dropped"], "activation_checkpointing": choice}
        module = sharded(build(Deep), replicate_size=replicate_size, **fields)
        assert list(module.state_dict()) == names
        assert [type(inner).__name__ for inner in module.modules()] == kinds
        assert step(module, batch) < full_bytes / 2
        assert_same(gradients(module), gradients(plain), rtol=0, atol=0)
    one = sharded(build(Deep), wrap=["Dropped"], activation_checkpointing=lambda inner: False)
    assert step(one, batch) == full_bytes


@on_ranks(2, sim=(2,))
def test_offloads_inputs() -> None:
    """What goes to host memory is the input of each block, and nothing else."""
    batch = mine(rows(240))
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor.clone()

    def recording(pin_memory: bool) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    plain = sharded(build(Deep), wrap=["Dropped"])
    step(plain, batch)
    fields: dict[str, Any] = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
    with mock.patch.object(activation_checkpointing, "save_on_cpu", recording):
        module = sharded(build(Deep), wrap=["Dropped"], **fields)
        step(module, batch)
    inputs = len(batch) * 6 * 4
    assert sorted(sizes) == [24] * 3 + [inputs] * 3, "the mask of 6 and the hidden rows, of three blocks"
    assert_same(gradients(module), gradients(plain), rtol=0, atol=0)
    module = sharded(build(Deep), wrap=["Dropped"], **fields)
    step(module, batch)
    assert_same(gradients(module), gradients(plain), rtol=0, atol=0)


@on_ranks(2, sim=(2,))
def test_backward_may_run_twice() -> None:
    module, plain = (
        sharded(build(Deep), wrap=["Dropped"], activation_checkpointing=choice, reshard_after_forward=False)
        for choice in (True, False)
    )
    for each in (module, plain):
        torch.manual_seed(3)
        loss = each(mine(rows(24))).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(module), gradients(plain), rtol=0, atol=0)


@on_ranks(2, sim=(2,))
def test_checkpointing_trains_transformers() -> None:
    """Llama makes a key-value cache in every forward, into which a second forward of a layer would write again."""
    case = CASES["llama"]
    metrics = []
    for choice in (True, False):
        module = sharded(build(llama), wrap="auto", activation_checkpointing=choice)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        data = {key: Split(value) for key, value in case.rows().items()}
        batch = deal((), data, dist.get_world_size())[dist.get_rank()]
        metrics.append([train_step(module, optimizer, batch) for _ in range(2)])
        if choice:
            ids = case.rows()["input_ids"]
            with torch.no_grad():
                cache = module.eval()(ids, use_cache=True).past_key_values
            assert cache.get_seq_length() == ids.shape[1], "inference keeps its cache"
            with pytest.raises(ValueError, match=r"past_key_values holds .* positions"):
                module.train()(ids, past_key_values=cache)
    for one, other in zip(*metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@on_ranks(2)
def test_unknown_classes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"names \['Layer'\], but no module has such a class; they have Deep|Dropped"):
        sharded(build(Deep), activation_checkpointing=["Layer"], wrap="none")


# --- prefetching ----------------------------------------------------------------------------------------------------


def trace(module: Any, batch: torch.Tensor) -> tuple[str, str]:
    """What a forward and a backward do, in order: `g0` gathers block 0, `f0` and `b0` compute in it."""
    events: list[str] = []
    removals: list[Any] = []

    def backward(index: int, grad: torch.Tensor) -> None:
        events.append(f"b{index}")

    for index, block in enumerate(module.blocks):
        (group,) = fsdp_groups(block)

        def unshard(*args: Any, group: Any = group, index: int = index, **kwargs: Any) -> None:
            if not group.is_unsharded and group._all_gather_result is None:
                events.append(f"g{index}")
            type(group).unshard(group, *args, **kwargs)

        def forward(inner: Any, args: Any, output: torch.Tensor, index: int = index) -> None:
            events.append(f"f{index}")
            if output.requires_grad:
                output.register_hook(partial(backward, index))

        group.unshard = unshard
        removals.append(block.up.register_forward_hook(forward))
        removals.append(group)
    loss = module(batch).square().mean()
    split = len(events)
    loss.backward()
    for item in removals:
        if hasattr(item, "remove"):
            item.remove()
        else:
            del item.unshard
    return " ".join(events[:split]), " ".join(events[split:])


@on_ranks(2, sim=(2,))
def test_prefetching() -> None:
    batch = mine(rows(24))
    expected = gradients_of(sharded(build(Deep), wrap=["Dropped"]), batch)
    forwards = {False: "g0 f0 g1 f1 g2 f2", True: "g0 g1 f0 g2 f1 f2", 2: "g0 g1 g2 f0 f1 f2"}
    backwards: dict[Any, str] = dict.fromkeys(("backward_pre", BackwardPrefetch.BACKWARD_PRE), "g2 g1 b2 g0 b1 b0")
    backwards |= dict.fromkeys((None, "backward_post"), "g2 b2 g1 b1 g0 b0")
    for ahead, when in [(ahead, "backward_pre") for ahead in forwards] + [(False, when) for when in backwards]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            module = sharded(build(Deep), wrap=["Dropped"], forward_prefetch=ahead, backward_prefetch=when).eval()
        told = [str(item.message) for item in caught if "backward_post" in str(item.message)]
        assert len(told) == (when == "backward_post")
        first, _ = trace(module, batch)
        # The root gathers for its own forward ahead of the first group: it is the one that prefetches it.
        assert first == forwards[False], "the order is not known yet"
        module.zero_grad()
        second, backward = trace(module, batch)
        assert second.replace("g0 ", "", 1) == forwards[ahead].replace("g0 ", "", 1), (ahead, second)
        assert backward == backwards[when], (when, backward)
        assert_same(gradients(module), expected, rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        sharded(build(Deep), wrap=["Dropped"], backward_prefetch=BackwardPrefetch.BACKWARD_POST)


@on_ranks(2, sim=(2,))
def test_keeps_what_backward_begins_with() -> None:
    """Under transformers' plan, and counted: a step gathers final norm and head once."""
    ids = mine(torch.randint(0, VOCAB, (6, 5), generator=torch.Generator().manual_seed(0)))
    for reshard, kept, gathers in ((None, {"model.norm"}, 1), (True, set(), 2)):
        module: Any = sharded(build(llama), wrap="auto", reshard_after_forward=reshard)
        (head,), seen = own_groups(module.lm_head), list[bool]()

        def unshard(*args: Any, head: Any = head, seen: list[bool] = seen, **kwargs: Any) -> None:
            if not head.is_unsharded and head._all_gather_result is None:
                seen.append(True)
            type(head).unshard(head, *args, **kwargs)

        with mock.patch.object(head, "unshard", unshard):
            loss = module(ids, labels=ids).loss
            full = {
                name for name, part in named_submodules(module) if any(group.is_unsharded for group in own_groups(part))
            }
            loss.backward()
        assert {name.strip(".") for name in full} - {""} == kept | ({"lm_head"} if kept else set())
        assert len(seen) == gathers, "one for forward, and one for backward where it was freed"
        assert not any(group.is_unsharded for group in fsdp_groups(module))


@on_ranks(2, sim=(2,))
def test_a_forward_in_part_leaves_nothing_behind() -> None:
    """The final norm runs without the head, which is in its group: FSDP2 waits for that one, until it is told."""
    ids = mine(torch.randint(0, VOCAB, (6, 5), generator=torch.Generator().manual_seed(0))).to(device_type())
    losses = []
    for in_part in (False, True):
        module: Any = sharded(build(llama), wrap="auto")
        module(ids)  # FSDP2 finds its root by the first forward
        optimizer = None
        for _ in range(3):
            if in_part:
                with torch.no_grad():
                    module.model(ids)
            if optimizer is None:
                optimizer = make_optimizer(module, torch.optim.SGD, {"lr": 0.5})
            zero_grad(module, optimizer)
            loss = module(ids, labels=ids).loss
            loss.backward()
            if in_part:
                with torch.no_grad():
                    module.model(ids)
            losses.append((float(loss.detach()), optim_step(module, optimizer, Accumulation())["grad_norm"]))
    for one, other in zip(losses[:3], losses[3:], strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert losses[2][0] < losses[0][0] - 0.1, "it learns"


def gradients_of(module: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    module.eval()(batch).square().mean().backward()
    return {name: full(item.grad) for name, item in module.named_parameters() if item.grad is not None}


def test_offload_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="activation_checkpointing_offload=True: moves the inputs"):
        Sharding(activation_checkpointing_offload=True)


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
    "backend", ["noting", *(pytest.param(one, marks=pytest.mark.full) for one in ("aot_eager", "inductor"))]
)
def test_compiled_blocks_train_as_one_process_does(backend: str) -> None:
    pytest.importorskip("transformers")
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on CPUs")
    # Every rank compiles for itself, and a compiler takes long.
    world_size = 1 if backend == "inductor" else 2
    sharding = Sharding(compile=backend, activation_checkpointing=backend == "aot_eager")
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


_REST = sorted(ARCHITECTURES.keys() - {"llama", "t5", "clip"})  # CLIP's texts and images are no rows of one batch
OTHERS = (_REST[::2], _REST[1::2])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("names", [("llama", "t5"), *(pytest.param(part, marks=pytest.mark.full) for part in OTHERS)])
def test_layers_of_one_kind_share_their_graphs(names: Sequence[str]) -> None:
    """Nor does a graph break. With the KV caches that transformers makes, the last layers ran eagerly."""
    pytest.importorskip("transformers")
    (told,) = run_ranks(1, compare_depths, names, timeout_s=170)
    assert not told, told


def test_what_is_no_backend_is_refused() -> None:
    for bad in ("", 1, None):
        with pytest.raises(ValueError, match="compile"):
            Sharding(compile=bad)  # type: ignore[arg-type]
