"""Run a model and a loss function so that the loss can be read, with or without a backward.

Without a backward, only what is outside the FSDP blocks gets a graph, and the graph keeps no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed.comm import collective_counters, current_group
from raysharding.distributed.fully_shard import fsdp_modules
from raysharding.distributed.training.losses.calls import (
    LossFunction,
    Pair,
    call_loss,
    call_model,
    find_loss,
    is_compiled,
)
from raysharding.distributed.training.losses.reductions import Recorder, has_gradient, with_gradient
from raysharding.models import is_transformers_model
from raysharding.torch_internals import current_function_mode
from raysharding.tree import leaves, map_leaves


@dataclass(frozen=True)
class Recorded:
    """A forward and its loss."""

    recorder: Recorder
    """What was noted."""
    output: Any
    """The model's output."""
    result: torch.Tensor | list[Pair] | None
    """The loss of this rank's rows; `None` if the model returned none."""
    with_backward: bool
    """True if a backward follows."""
    has_collectives: bool = False
    """True if the loss function ran a collective of the default group, or of the module's."""

    def outputs(self) -> list[torch.Tensor]:
        """Return the model's outputs that have a gradient, without the loss."""
        loss = find_loss(self.output)
        return [leaf for _, leaf in leaves(self.output) if has_gradient(leaf) and leaf is not loss]


def run_recorded(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: LossFunction | None,
    *,
    with_backward: bool,
    follows_data: bool = True,
) -> Recorded:
    """Run a forward and the loss; the forward is collective.

    Args:
        module: The root module, in its mode.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        loss: The caller's loss function, or `None` for the model's own.
        with_backward: False where no backward follows: activations are not kept.
        follows_data: True to follow what is made of the arguments, which have their rows in dim 0.
    """
    recorder = Recorder(
        _tensors((args, dict(kwargs))) if follows_data else (), in_model=not is_transformers_model(module)
    )
    recorder.keeps_nothing = not with_backward
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if not with_backward:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_shape_alone, lambda kept: kept))
        with nullcontext() if is_compiled(module) else _outside_blocks(module, recorder, with_backward):
            output = call_model(module, args, kwargs, loss)
        if loss is None:
            own = find_loss(output)
            is_scalar = isinstance(own, torch.Tensor) and own.numel() == 1
            return Recorded(recorder, output, own if is_scalar else None, with_backward)
        recorder.gave_gradient |= not any(has_gradient(leaf) for _, leaf in leaves(output))
        if recorder.gave_gradient or not with_backward:
            output = _give_gradient(module, args, output)
        recorder.in_model = False
        recorder.add_data(_tensors(output) if follows_data else ())
        stack.enter_context(recorder)
        groups = {dist.group.WORLD, current_group()}
        counters = [counter for group in groups if group is not None for counter in collective_counters(group)]
        before = [counter() for counter in counters]
        result = call_loss(loss, output, args, kwargs)
        return Recorded(recorder, output, result, with_backward, before != [counter() for counter in counters])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def _shape_alone(tensor: torch.Tensor) -> torch.Tensor:
    """Keep of a tensor what reading a loss needs: a number, an index, or a shape."""
    is_needed = tensor.numel() == 1 or not tensor.is_floating_point()
    return tensor.detach() if is_needed else tensor.detach().to("meta")


@contextmanager
def _outside_blocks(module: nn.Module, recorder: Recorder, with_backward: bool) -> Iterator[None]:
    """Record what runs outside the FSDP blocks: inside there is no loss, but there are thousands of operations.

    Compiled blocks would be compiled anew in a function mode. Without a backward, blocks run without a graph.
    """
    gate = _Gate(recorder, with_backward)
    blocks = [block for block in cast(list[nn.Module], fsdp_modules(module)) if block is not module]
    handles = [block.register_forward_pre_hook(gate.enter_block, prepend=True) for block in blocks]
    handles += [block.register_forward_hook(gate.leave_block) for block in blocks]
    if not with_backward and not any(parameter.requires_grad for parameter in module.parameters()):
        # A loss without a graph cannot be read.
        layers = [layer for layer in module.modules() if layer._parameters and layer not in blocks]
        handles += [layer.register_forward_hook(_give_gradient) for layer in layers]
    recorder.__enter__()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if current_function_mode() is recorder:  # else a block has raised
            recorder.__exit__(None, None, None)
        for handle in handles:
            handle.remove()


class _Gate:
    """Hooks of FSDP blocks, which may contain each other."""

    def __init__(self, recorder: Recorder, with_backward: bool) -> None:
        self._recorder = recorder
        self._with_backward = with_backward
        self._depth = 0
        self._had_grad = True

    def enter_block(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1 and current_function_mode() is self._recorder:
            self._recorder.__exit__(None, None, None)
            self._had_grad = torch.is_grad_enabled()  # a model may run blocks without: HRM's first cycles
            torch.set_grad_enabled(self._had_grad and self._with_backward)

    def leave_block(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth or current_function_mode() is self._recorder:
            return output
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        torch.set_grad_enabled(self._had_grad)
        output = output if self._with_backward else _give_gradient(_module, _inputs, output)
        found = [leaf.grad_fn for _, leaf in leaves(output) if has_gradient(leaf)]
        self._recorder.layers |= dict.fromkeys(node for node in found if node is not None)
        self._recorder.has_graph |= bool(found)
        return output


def _give_gradient(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return map_leaves(lambda _, leaf: with_gradient(leaf), output)
