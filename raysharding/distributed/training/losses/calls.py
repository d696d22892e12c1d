"""Calls of a model and a caller's loss function, and what is noted meanwhile so that the loss can be read.

Without a backward, only what is outside the FSDP blocks gets a graph, and the graph keeps no tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed.comm import collective_counters, current_group
from raysharding.distributed.fully_shard import fsdp_modules
from raysharding.distributed.training.losses.reductions import Recorder, has_gradient, with_gradient
from raysharding.models import is_transformers_model
from raysharding.torch_internals import current_function_mode
from raysharding.tree import leaves, map_leaves

LossFunction = Callable[..., Any]
"""`loss(output, ...)`: takes the arguments of the call that it names; for its results see `loss_of_batch`."""
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor | float | None]
"""A sum over this rank's rows, and what the sum over all ranks is divided by; `None` for a sum."""

_PAIRS = "return a scalar, (sum, count), a list of such pairs, or (sum, None) for a sum"

_CACHES = frozenset({"use_cache", "past_key_values"})
"""Arguments by which a caller says what becomes of the KV cache."""
_ANY_NAME = inspect.Parameter.VAR_KEYWORD
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_UNKNOWN = inspect.signature(lambda *_args, **_kwargs: None)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of a module's forward; that of any arguments for a builtin without one."""
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:
        return _UNKNOWN


def positions_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters; none for a builtin without a signature."""
    return [one.name for one in _signature(function).parameters.values() if one.kind in _BY_POSITION]


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has a parameter of that name, or is a model of transformers with `**kwargs`."""
    passes_on = isinstance(function, nn.Module) and is_transformers_model(function)
    parameters = _signature(function).parameters
    return name in parameters or (passes_on and _ANY_NAME in [one.kind for one in parameters.values()])


def known_arguments(module: nn.Module, functions: Iterable[Callable[..., Any]]) -> frozenset[str] | None:
    """Return the names of the arguments that a model, or one of the functions of its output, takes.

    Models of transformers take `**kwargs`, too, for options of their attention: as for transformers' Trainer, only the
    names in their signatures count.

    Args:
        module: The root module.
        functions: Loss and metrics.

    Returns:
        The names; `None` if any name is taken.
    """
    names: set[str] = set()
    all_functions: list[Callable[..., Any]] = [module, *functions]
    for function in all_functions:
        parameters = list(_signature(function).parameters.values())
        is_named = isinstance(function, nn.Module) and is_transformers_model(function)
        if not is_named and any(one.kind is _ANY_NAME for one in parameters):
            return None
        own = parameters if function is module else parameters[1:]  # the first is the output
        names |= {one.name for one in own if one.kind not in (_ANY_NAME, inspect.Parameter.VAR_POSITIONAL)}
    return frozenset(names)


def _taken(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a function accepts."""
    parameters = signature.parameters.values()
    takes_any = any(one.kind is _ANY_NAME for one in parameters)
    names = {one.name for one in parameters if one.kind in _BY_NAME}
    return {key: value for key, value in kwargs.items() if takes_any or key in names}


def call_model(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: LossFunction | None = None
) -> Any:
    """Call the model, without the keyword arguments that only the loss function accepts, and without a KV cache.

    transformers makes a cache of every batch by default, which nobody reads: it copies each layer's keys and values,
    and under `torch.compile` each layer's cache is a graph of its own.
    """
    signature = _signature(module)
    if loss is not None:
        # Arguments that neither accepts go to the model, which raises.
        loss_only = _taken(_signature(loss), kwargs).keys() - _taken(signature, kwargs).keys()
        kwargs = {key: value for key, value in kwargs.items() if key not in loss_only}
    model: Any = module
    own = list(signature.parameters.values())
    passes_on = is_transformers_model(module) and model.can_generate() and _ANY_NAME in [one.kind for one in own]
    takes_cache = passes_on or "use_cache" in [one.name for one in own[len(args) :]]
    # T5Gemma's decoder masks padding only where it has no cache, and has none in training.
    is_other = not module.training and getattr(getattr(module, "config", None), "model_type", "") == "t5gemma"
    if takes_cache and not is_other and not _CACHES & kwargs.keys():
        kwargs = {**kwargs, "use_cache": False}
    return module(*args, **kwargs)


def call_on_output(function: Callable[..., Any], output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `function(output, *args, **kwargs)` with the arguments of the call that it accepts.

    Positional arguments are all passed if they fit beside the keyword arguments, else none. Keyword arguments are
    passed by name, all of them if the function takes `**kwargs`.
    """
    signature = _signature(function)
    taken = _taken(signature, kwargs)
    try:
        signature.bind_partial(output, *args, **taken)
    except TypeError:
        args = ()
    return function(output, *args, **taken)


def call_loss(
    loss: LossFunction, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | list[Pair]:
    """Call a loss function by `call_on_output`, and check its result.

    Returns:
        A 0-dim tensor, or pairs of a 0-dim sum and a count; `None` for a sum's count.

    Raises:
        ValueError: The loss returned anything else.
    """
    result = call_on_output(loss, output, args, kwargs)
    if not isinstance(result, list | tuple):
        return _scalar(result, "what the loss function returned")
    pairs = [result] if len(result) == 2 and not isinstance(result[0], list | tuple) else list(result)
    if not pairs:
        raise ValueError(f"the loss function returned nothing: {_PAIRS}")
    return [_pair(pair) for pair in pairs]


def _pair(pair: Any) -> Pair:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ValueError(f"the loss function returned {_shown(pair)}: {_PAIRS}")
    total = _scalar(pair[0], "a sum that the loss function returned")
    if pair[1] is None:
        return total, None
    if isinstance(pair[1], torch.Tensor):
        return total, _scalar(pair[1], "a count that the loss function returned").detach()
    if isinstance(pair[1], bool) or not isinstance(pair[1], Real):
        raise ValueError(f"the loss function returned the count {_shown(pair[1])}: {_PAIRS}")
    return total, float(pair[1])


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"


def is_compiled(module: nn.Module) -> bool:
    """Return True after `module.compile()`, `torch.compile(module)` or `module.forward = torch.compile(...)`."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or hasattr(module, "_orig_mod") or hasattr(module.forward, "_torchdynamo_orig_callable")


def find_loss(output: Any) -> Any:
    """Return the `loss` of an output, an attribute or key, or `None`."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's own loss.

    Raises:
        ValueError: The output has no loss, or its loss is not a scalar tensor.
    """
    loss = find_loss(output)
    if loss is None:
        kind = type(output).__name__
        raise ValueError(f"the model's output ({kind}) has no loss: pass labels= to the model, or loss= a function")
    return _scalar(loss, "the output's loss")


def _scalar(value: Any, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} is a {type(value).__name__}; a 0-dim tensor, or (0-dim tensor, count), is needed")
    if value.numel() != 1:
        raise ValueError(f"{what} has shape {tuple(value.shape)}; reduce it to a scalar: a mean, or (sum, count)")
    return value.reshape(())


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
