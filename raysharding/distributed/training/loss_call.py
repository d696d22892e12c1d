"""How a model and a caller's loss function are called, and what they may return."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

LossFunction = Callable[..., Any]
"""`loss(output, ...)`: see `call_loss` for the arguments, `loss.loss_share` for what it returns."""

_ANY_NAME = inspect.Parameter.VAR_KEYWORD
_ANY_POSITION = inspect.Parameter.VAR_POSITIONAL
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function, or of a module's forward; `None` for a builtin that does not tell."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(target).parameters.values())
    except ValueError:
        return None


def positions_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that can be passed by position; none for a builtin that does not tell."""
    return [parameter.name for parameter in _parameters(function) or () if parameter.kind in _BY_POSITION]


def position_of(function: Callable[..., Any], name: str) -> int | None:
    """Return the index of a parameter among those that can be passed by position, or `None`."""
    names = positions_of(function)
    return names.index(name) if name in names else None


def _taken(parameters: list[inspect.Parameter] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a function with these parameters takes."""
    if parameters is None or any(parameter.kind is _ANY_NAME for parameter in parameters):
        return dict(kwargs)
    names = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    return {key: value for key, value in kwargs.items() if key in names}


def call_model(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: LossFunction) -> Any:
    """Call the model beside a loss function: keywords that only the loss function names go to that alone."""
    taken = _taken(_parameters(module), kwargs)
    loss_only = {key: value for key, value in kwargs.items() if key not in taken}
    unknown = {key: loss_only[key] for key in loss_only.keys() - _taken(_parameters(loss), loss_only).keys()}
    # What neither of them names goes to the model, which then says so in its own words.
    return module(*args, **taken, **unknown)


def call_loss(
    loss: LossFunction, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, float]:
    """Call `loss(output, *args, **kwargs)` with those of the call's own arguments that it takes.

    Positional arguments are passed all or none: all if it has room for them beside the keywords it names. Keywords are
    passed by name, all of them where it takes `**kwargs`.

    Returns:
        A 0-dim tensor (the mean), or (0-dim tensor, count).

    Raises:
        ValueError: It returned something else.
    """
    parameters = _parameters(loss)
    taken = _taken(parameters, kwargs)
    positional = args if _has_room(parameters, args, taken) else ()
    result = loss(output, *positional, **taken)
    if isinstance(result, tuple) and len(result) == 2:
        return _scalar(result[0], "the sum that the loss function returned"), float(result[1])
    return _scalar(result, "what the loss function returned")


def _has_room(parameters: list[inspect.Parameter] | None, args: tuple[Any, ...], taken: Mapping[str, Any]) -> bool:
    """Whether all of `args` fit behind the output without landing on a parameter that a keyword fills."""
    if parameters is None or any(parameter.kind is _ANY_POSITION for parameter in parameters):
        return True
    places = [parameter for parameter in parameters if parameter.kind in _BY_POSITION][1 : len(args) + 1]
    return len(places) == len(args) and not any(place.name in taken for place in places)


def run_loss(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: LossFunction | None,
    *,
    compiled: bool = True,
) -> tuple[Any, Any]:
    """Run a forward and the loss; return the output and the loss as it came: anything where the model's own is bad.

    Args:
        module: The root.
        args: Of the call.
        kwargs: Of the call.
        loss: The caller's loss function, or `None` for the model's own.
        compiled: Whether a loss function that `torch.compile` made runs compiled. Default yes.
    """
    if loss is None:
        output = module(*args, **kwargs)
        return output, find_loss(output)
    output = call_model(module, args, kwargs, loss)
    with contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        return output, call_loss(loss, output, args, kwargs)


def find_loss(output: Any) -> Any:
    """Return the output's `loss`, attribute or key, or `None`."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's own loss.

    Raises:
        ValueError: The output has none, or it is not a scalar tensor.
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
