"""`split_by_dtype`: no FSDP group mixes the dtypes of trainable parameters, because FSDP2 reduces a group as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from raysharding.errors import PlanError


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 cuts this parameter. Those of 0 dims or without elements stay whole on every rank."""
    return parameter.ndim > 0 and parameter.numel() > 0


def split_by_dtype(
    root: nn.Module, groups: Sequence[tuple[str, ...]], ignored: AbstractSet[nn.Parameter] = frozenset()
) -> list[tuple[str, ...]]:
    """Give modules whose parameters are kept in another dtype than their group's a group of their own.

    Args:
        root: The root module.
        groups: Groups without shared parameters between them; the root's own is implied.
        ignored: Parameters that no group takes.

    Returns:
        The groups, and new ones for the modules split off: T5 in fp16 keeps every `wo` in fp32, for example.

    Raises:
        PlanError: One module holds trainable parameters of two dtypes itself.
    """
    members = {name for names in groups for name in names}
    result = [part for names in groups for part in _parted(root, names, members, ignored)]
    for names in [*result, ("",)]:
        result += [(split,) for split in _split(root, names, members, ignored)]
    return result


def _parted(
    root: nn.Module, names: tuple[str, ...], members: set[str], ignored: AbstractSet[nn.Parameter]
) -> list[tuple[str, ...]]:
    """A group of several modules that are uniform each, by dtype; any other group as it is."""
    parts: dict[torch.dtype, list[str]] = {}
    for name in names:
        owned = _own_parameters(root, name, members, ignored)
        dtypes = {parameter.dtype for _, parameters in owned for parameter in parameters.values()}
        if len(dtypes) != 1:
            return [names]
        parts.setdefault(dtypes.pop(), []).append(name)
    return [tuple(part) for part in parts.values()]


def _split(
    root: nn.Module, names: tuple[str, ...], members: set[str], ignored: AbstractSet[nn.Parameter]
) -> Iterator[str]:
    """Modules of one group that must leave it."""
    held: dict[str, dict[str, nn.Parameter]] = {}
    for name in names:
        held |= dict(_own_parameters(root, name, members, ignored))
    num_elements: Counter[torch.dtype] = Counter()
    for parameters in held.values():
        for parameter in parameters.values():
            num_elements[parameter.dtype] += parameter.numel()
    if len(num_elements) < 2:
        return
    main = max(num_elements, key=lambda dtype: (num_elements[dtype], -dtype.itemsize))
    for name, parameters in held.items():
        others = [fqn for fqn, parameter in parameters.items() if parameter.dtype != main]
        if not others:
            continue
        if name in names or len(others) < len(parameters) or _holds(held, name, main):
            raise _mixed(held, name, others[0], main)
        yield name


def _own_parameters(
    root: nn.Module, name: str, members: set[str], ignored: AbstractSet[nn.Parameter]
) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """(module name, FQN → trainable parameter it holds directly), inner groups left out."""
    module = root.get_submodule(name)
    dot = f"{name}." if name else ""
    parameters = {
        dot + key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None and is_cut(parameter) and parameter.requires_grad and parameter not in ignored
    }
    if parameters:
        yield name, parameters
    for child, _ in module.named_children():
        if dot + child not in members:
            yield from _own_parameters(root, dot + child, members, ignored)


def _holds(held: Mapping[str, Mapping[str, nn.Parameter]], name: str, dtype: torch.dtype) -> bool:
    """Whether modules inside `name` hold parameters of `dtype`, which would leave with it."""
    return any(
        parameter.dtype == dtype
        for inner, parameters in held.items()
        if inner.startswith(name + ".")
        for parameter in parameters.values()
    )


def _mixed(held: Mapping[str, Mapping[str, nn.Parameter]], name: str, fqn: str, main: torch.dtype) -> PlanError:
    everything = {key: parameter for parameters in held.values() for key, parameter in parameters.items()}
    near = [key for key in everything if key.startswith(name + ".")] or list(everything)
    other = next((key for key in near if everything[key].dtype == main), None)
    other = other or next(key for key, parameter in everything.items() if parameter.dtype == main)
    return PlanError(
        f"{fqn} is {everything[fqn].dtype} and {other} is {main}, but both would be in one FSDP group, which must "
        "have one dtype: load with dtype=torch.float32 (or another that the model keeps throughout), or freeze one"
    )
