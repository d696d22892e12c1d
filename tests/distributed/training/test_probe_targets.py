"""What the probe of a loss gives to a device: no index that the operation reading it does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raysharding.batch import RankBatch, Split, deal
from raysharding.distributed.training.index_checks import IndexChecks
from raysharding.distributed.training.step import train_step
from tests.distributed.training.training_cases import CASES, LENGTH, NUM_ROWS, VOCAB, Scaled, token_mean
from tests.spawn import run_ranks

aten = torch.ops.aten

INDEXING: dict[Any, Callable[..., tuple[torch.Tensor, int, int | None]]] = {
    aten.nll_loss_forward.default: lambda log, target, _w, _r, ignore: (target, log.shape[-1], ignore),
    aten.nll_loss2d_forward.default: lambda log, target, _w, _r, ignore: (target, log.shape[1], ignore),
    aten.gather.default: lambda source, dim, index, **_: (index, source.shape[dim], None),
    aten.embedding.default: lambda weight, index, *_: (index, weight.shape[0], None),
    aten.scatter_.value: lambda target, dim, index, _value: (index, target.shape[dim], None),
}
"""Operation → the index that it is given, the size of what it points into, and what it leaves out."""


class Recorder(TorchDispatchMode):
    """Notes every index that an operation is given, and whether it is one that a GPU would end the process for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_seen = 0
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in INDEXING:
            index, size, ignored = INDEXING[func](*args, **(kwargs or {}))
            self.num_seen += 1
            bad = ((index < 0) | (index >= size)) & (torch.ones_like(index) if ignored is None else index != ignored)
            if bad.any():
                self.wrong.append(f"{func}: {sorted(set(index[bad.bool()].tolist()))} of {size}, ignores {ignored}")
        return func(*args, **(kwargs or {}))


def tagger_ignoring(index: int) -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=index)

    return loss


def gathering(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -output.log_softmax(-1).gather(-1, labels[..., None]).mean()


def one_hot(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -(output.log_softmax(-1) * F.one_hot(labels, VOCAB)).sum(-1).mean()


def segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 8], num_attention_heads=[1, 1], sr_ratios=[1, 1],
        patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[1, 1], decoder_hidden_size=8, num_labels=5,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config)


def mobilevit() -> nn.Module:
    from transformers import MobileViTConfig, MobileViTForSemanticSegmentation

    config = MobileViTConfig(
        image_size=32, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 8], num_attention_heads=1,
        num_labels=5, aspp_out_channels=8, atrous_rates=[1, 1, 1],
    )  # fmt: skip
    return MobileViTForSemanticSegmentation(config)


def images() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (4, 32, 32), generator=numbers)
    labels[0], labels[1, :9] = 255, 255
    return {"pixel_values": torch.rand(4, 3, 32, 32, generator=numbers), "labels": labels}


def tags() -> dict[str, torch.Tensor]:
    return {
        "tokens": CASES["token_mean"].rows()["tokens"],
        "labels": torch.arange(NUM_ROWS * LENGTH).view(-1, LENGTH) % 9,
    }


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]], Any]] = {
    "segformer": (segformer, images, None),
    "mobilevit": (mobilevit, images, None),
    "tagger that ignores 0": (Scaled, tags, tagger_ignoring(0)),
    "tagger that ignores 8": (Scaled, tags, tagger_ignoring(8)),
    "gathers by label": (Scaled, tags, gathering),
    "one-hot labels": (Scaled, tags, one_hot),
    "mean over -100": (Scaled, lambda: CASES["token_mean"].rows(), token_mean),
    **{
        name: (CASES[name].build, CASES[name].rows, CASES[name].loss)
        for name in ("llama", "t5", "bert_mlm", "bert_classifier", "resnet")
    },
}


def batch_of(rows: dict[str, torch.Tensor]) -> RankBatch:
    return deal((), {key: Split(value) for key, value in rows.items()}, dist.get_world_size())[dist.get_rank()]


def first_steps() -> dict[str, list[str]]:
    found = {}
    for name, (build, rows, loss) in LOSSES.items():
        torch.manual_seed(0)
        module = build()
        recorder = Recorder()
        try:
            with recorder:
                train_step(module, torch.optim.SGD(module.parameters(), lr=0.0), batch_of(rows()), loss=loss)
        except ValueError as error:
            if "neither the mean over labels" not in str(error):
                raise
        assert recorder.num_seen > 0, name
        if recorder.wrong:
            found[name] = recorder.wrong
    return found


def compiled_loss() -> None:
    """What a compiled loss does inside its kernels nobody sees: it runs as it was written while it is probed."""
    given: list[torch.Tensor] = []

    def noting(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def run(*inputs: torch.Tensor | int) -> Any:
            given.extend(one for one in inputs if isinstance(one, torch.Tensor) and not one.is_floating_point())
            return graph.forward(*inputs)

        return run

    loss = torch.compile(tagger_ignoring(8), backend=noting)
    module = Scaled()
    rows = tags()
    rows["labels"] %= 8
    train_step(module, torch.optim.SGD(module.parameters(), lr=0.0), batch_of(rows), loss=loss)
    assert given, "it is compiled in the step itself"
    assert all(bool((labels >= 0).all()) for labels in given)


def distributed_indices() -> None:
    """A model may compute with DTensors of its own, of which no rank can say alone what is in them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = distribute_tensor(torch.rand(4, 2), mesh, [Replicate()])
    ids = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    with IndexChecks():  # type: ignore[no-untyped-call]
        assert F.embedding(ids, table).shape == (4, 2)


def first_steps_and_compiled() -> dict[str, list[str]]:
    compiled_loss()
    distributed_indices()
    return first_steps()


@pytest.mark.timeout(120)
def test_the_first_step_gives_no_operation_an_index_that_it_does_not_have() -> None:
    pytest.importorskip("transformers")
    for wrong in run_ranks(2, first_steps_and_compiled, timeout_s=110):
        assert not wrong, "\n".join(map(str, wrong.items()))
