"""Full state dicts from rank 0's memory into sharded modules and tensors, by the stream of checkpoint loads.

Extra state of modules (`get_extra_state`) is broadcast from rank 0 as JSON and tensors, never as pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raysharding.checkpoint.format import EXTRA_STATE_NAME
from raysharding.config import Loading
from raysharding.distributed.comm import agree, agreeing, broadcast_tensor, from_rank_0, get_rank
from raysharding.distributed.fully_shard import (
    TensorTable,
    is_fsdp_hook,
    meta_like,
    named_submodules,
    over_ranks_of,
    parameter_groups,
    reshard,
    tell_fsdp,
    tensor_slots,
)
from raysharding.distributed.loading.load import load_from
from raysharding.distributed.loading.plan import silent
from raysharding.distributed.loading.state_dict_source import Rank0StateDict, is_extra_state, why_refused
from raysharding.distributed.optim import decode, encode
from raysharding.errors import PlanError
from raysharding.models import category, clean_name
from raysharding.torch_internals import IncompatibleKeys


@over_ranks_of("module")
def load_full_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    assign: bool = False,
    timeout_s: float = 120.0,
) -> IncompatibleKeys:
    """Distribute rank 0's full state dict into a module; collective over the ranks of the module's mesh.

    Each rank receives the bytes of its own shards, in buckets, in the narrower of the two dtypes.

    Args:
        module: Sharded over all ranks (1-D or HSDP), or not sharded; real, or wholly or partly on meta.
        state_dict: On rank 0 FQN → full tensor on any device, possibly a mapping whose items load on access, which can
            be larger than memory. Ignored on the other ranks. Extra state (`set_extra_state`) is set on every rank:
            tensors, numbers, text, and lists, tuples and dicts of these.
        strict: True if missing and unexpected keys are errors. If False, missing tensors stay as they are, on meta too.
        assign: True for new tensors with the dtypes of the state dict; if False, the module's tensors keep theirs.
            Tensors on meta get memory on the device of the mesh in both cases, unlike in torch's `load_state_dict`.
        timeout_s: Longest wait for one item or bucket, in seconds.

    Returns:
        `missing_keys` and `unexpected_keys`, the same on every rank. Wire: each shard once to each rank that holds it
        (on CPUs by shared memory inside rank 0's host). Memory above the shards: two buckets of 32 MiB, and on rank 0
        one item where items load on access.

    Raises:
        PlanError: On every rank, before data moves, with all mismatches of keys, shapes and kinds of dtype, or for
            extra state of other types. The module is unchanged.
        RayshardingError: On the other ranks, if an item failed to load on rank 0, which raises the original error. A
            module that was on meta is on meta again; a real one has some of the new values.
        RuntimeError: From the process group, if a rank times out.
    """
    keys, extra = load_full_tensors(module, state_dict, strict=strict, assign=assign, timeout_s=timeout_s)
    extra.apply(module)
    for _, submodule in named_submodules(module):
        for hook in submodule._load_state_dict_post_hooks.values():
            if not is_fsdp_hook(hook):  # FSDP2's hook ran after allocation, before the values
                hook(submodule, keys)
    return keys


@over_ranks_of("module")
def load_full_tensors(
    module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool, assign: bool, timeout_s: float = 120.0
) -> tuple[IncompatibleKeys, ExtraState]:
    """Load as `load_full_state_dict`, but return extra state for the caller to set, and call no hooks."""
    if len(set(agree(None, assign))) > 1:  # ranks would run different collectives, and hang
        raise PlanError("assign is True on some ranks and False on others: pass the same on all")
    values = state_dict if get_rank() == 0 else {}
    extra = distribute_extra_state(module, values)
    origin = Rank0StateDict(values, extra.mismatches)
    with ExitStack() as undo:
        if assign:
            reshard(module)
            # Rank 0 alone knows them, and every rank must plan with the same.
            incoming = {name: getattr(torch, dtype) for name, dtype in from_rank_0(origin.dtypes).items()}
            undo.callback(_replace(module, incoming))
            _require_sound_groups(module)  # the result is the same on every rank: no exchange is needed
        report = load_from(module, origin, Loading(transport="scatter", strict=strict), silent, timeout_s)
        undo.pop_all()
    missing, unexpected = [*report.missing, *extra.missing], [*report.unexpected, *extra.unexpected]
    return IncompatibleKeys(missing, unexpected), extra


@over_ranks_of("tensors", "like")
def distribute_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    *,
    like: nn.Module | None = None,
    timeout_s: float = 120.0,
) -> dict[str, torch.Tensor]:
    """Load as `load_full_state_dict`, into a dict of tensors instead of a module; collective.

    Args:
        state_dict: On rank 0 name → full tensor, with exactly the names of `tensors`; ignored on the other ranks.
        tensors: On every rank name → DTensor or replicated tensor; real tensors are overwritten.
        like: Sharded root module; new tensors are in the memory of its shards. Default: that of the mesh's device.
        timeout_s: Longest wait for one item or bucket, in seconds.

    Returns:
        Name → tensor with its values: the tensors of `tensors`, and new ones in place of those on meta.

    Raises:
        PlanError: On every rank, before data moves, with all mismatches.
    """
    table = TensorTable(tensors, like=like)
    load_full_state_dict(table, state_dict, timeout_s=timeout_s)
    found = table.tensors
    return {name: found[name] for name in tensors}


def _require_sound_groups(module: nn.Module) -> None:
    """Raise for dtypes that FSDP2 would fail on in the next forward.

    Raises:
        PlanError: A group would mix trainable dtypes, or has buffers in the dtype of its first forward.
    """
    cure = "pass assign=False, which keeps the module's dtypes"
    for name, submodule in named_submodules(module):
        group_name = name.removesuffix(".") or "the root"
        for group in parameter_groups(submodule):
            dtypes = sorted({str(item.shard.dtype) for item in group if item.shard.requires_grad})
            if len(dtypes) > 1:
                what = f"assign=True would give the FSDP group of {group_name} parameters of {' and '.join(dtypes)}"
                raise PlanError(f"{what}, and a group must have one dtype: {cure}")
            for item in group:
                # FSDP2 allocates its buffers in the first forward, and keeps them.
                if item.full is not None and item.stored_dtype != item.shard.dtype:
                    what = f"assign=True would turn parameters of {group_name} from {item.stored_dtype} into "
                    raise PlanError(
                        f"{what}{item.shard.dtype}, but it ran already: do so before the first forward, or {cure}"
                    )


def _replace(module: nn.Module, incoming: Mapping[str, torch.dtype]) -> Callable[[], None]:
    """Replace tensors by tensors on meta; a tied tensor under all its names, in the dtype of its incoming name.

    Returns:
        A function that puts the old ones back.
    """
    new: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, submodule in named_submodules(module, aliases=True):
        for _, name, tensor in tensor_slots([submodule]):
            dtype = incoming.get(clean_name(prefix) + name)
            # The plan reports another kind of dtype as a mismatch.
            if dtype is not None and category(dtype) == category(tensor.dtype) and tensor not in new:
                new[tensor] = meta_like(tensor, dtype)
                new[tensor].__dict__.update(tensor.__dict__)
    slots = [slot for slot in tensor_slots(one for _, one in named_submodules(module)) if slot[2] in new]
    for table, name, tensor in slots:
        table[name] = new[tensor]
    tell_fsdp(module)

    def restore() -> None:
        for table, name, tensor in slots:
            table[name] = tensor
        tell_fsdp(module)

    return restore


def extra_state_owners(module: nn.Module, clean: bool = True) -> dict[str, nn.Module]:
    """Return key in a state dict → module whose `set_extra_state` takes the value.

    Args:
        module: The root module.
        clean: True to remove the names of wrappers from keys.
    """
    return {
        (clean_name(prefix) if clean else prefix) + EXTRA_STATE_NAME: submodule
        for prefix, submodule in named_submodules(module, aliases=True)
        if type(submodule).set_extra_state is not nn.Module.set_extra_state
    }


@dataclass(frozen=True)
class ExtraState:
    """Extra state of rank 0, the same on every rank."""

    values: Mapping[str, Any]
    """Key → value, for `set_extra_state`."""
    missing: tuple[str, ...]
    """Keys that the module takes and rank 0's state dict lacks."""
    unexpected: tuple[str, ...]
    """Keys that no module takes."""

    @property
    def mismatches(self) -> tuple[str, ...]:
        """Return a line for each missing or unexpected key."""
        missing = (f"missing from the state dict: {key}" for key in self.missing)
        return (*missing, *(f"unexpected in the state dict: {key}" for key in self.unexpected))

    def apply(self, module: nn.Module) -> None:
        """Call `set_extra_state` on each module with a value; collective, if there are any.

        Raises:
            Exception: On a rank whose module raised: that error. On the other ranks: as from `agree`.
        """
        if not self.values:
            return
        with agreeing():
            owners = extra_state_owners(module)
            for key, value in self.values.items():
                owners[key].set_extra_state(value)


def distribute_extra_state(module: nn.Module, state_dict: Mapping[str, Any]) -> ExtraState:
    """Broadcast the extra state of rank 0; collective.

    Args:
        module: Module that takes the state; it is not changed.
        state_dict: State dict of rank 0, whose other items are not accessed; ignored on the other ranks.

    Returns:
        The values; tensors have memory of their own, on their type of device.

    Raises:
        PlanError: On every rank, if a value does not consist of tensors and JSON values.
    """
    tensors: list[torch.Tensor] = []

    def outline() -> dict[str, Any]:
        owners = extra_state_owners(module)
        keys = list(filter(is_extra_state, state_dict))
        values, problems = {}, []
        for key in keys:
            if key in owners:
                before = len(tensors)
                try:
                    values[key] = encode(state_dict[key], key, tensors)
                except ValueError as error:
                    problems.append(str(error))
                problems += [f"{key}: {problem}" for problem in map(why_refused, tensors[before:]) if problem]
        if problems:
            cure = "leave its keys out, pass strict=False, and call set_extra_state of those modules on every rank"
            raise PlanError(
                f"the state dict holds extra state that cannot be sent to other ranks: {cure}:", problems=problems
            )
        return {
            "values": values,
            "missing": [key for key in owners if key not in values],
            "unexpected": [key for key in keys if key not in owners],
            "tensors": [
                [str(item.dtype).removeprefix("torch."), list(item.shape), item.device.type] for item in tensors
            ],
        }

    known = from_rank_0(outline)
    left = iter(tensors)
    received = [broadcast_tensor(next(left, None), *one).to(device) for *one, device in known["tensors"]]
    values = {key: decode(value, received) for key, value in known["values"].items()}
    return ExtraState(values, tuple(known["missing"]), tuple(known["unexpected"]))
