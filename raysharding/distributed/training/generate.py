"""`generate`: transformers' own generation loop on every rank, each with its rows, all of them in step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import from_rank_0, metadata_device
from raysharding.distributed.fully_shard import (
    fsdp_modules,
    generator_devices,
    init_roots,
    mark_recovery,
    module_mode,
    recover_after,
    reshard,
    unwrapped,
)
from raysharding.outputs import RankOutput

_REFUSED = {
    "synced_gpus": "the ranks are kept in step as it is",
    "streamer": "it would print on the ranks; generate fewer tokens a call",
    "assistant_model": "every rank would need one; run it in call(fn)",
    "return_dict_in_generate": "only the token ids come back; run it in call(fn) for the rest",
}


def generate(module: nn.Module, batch: RankBatch, *, training: bool = False, keep: bool = True) -> RankOutput:
    """Generate token ids for this rank's part of a batch; collective.

    Each rank runs a forward for every token until all of them have finished: FSDP gathers each block's parameters in
    each forward, so the wire carries the model once for every token. Samples are drawn from generators of the ranks'
    own, seeded from rank 0's.

    Args:
        module: The sharded root module, which has transformers' `generate`.
        batch: From `deal`, on the module's device: the arguments of `generate`.
        training: Train mode rather than eval mode.
        keep: Whether this rank's ids are wanted.

    Returns:
        Ids on the CPU, int64: [rows, length], or [rows, sequences, length] for several of each row; `length` is that of
        the longest row of all ranks, shorter ones padded at the end.

    Raises:
        ValueError: On every rank: the module cannot generate, or an argument that ranks in step do not have.
        Exception: Whatever the module raised; if all ranks raise it alike, later calls are right.
    """
    module = unwrapped(module)
    try:
        check_generation(batch.kwargs)
        run = getattr(module, "generate", None)
        if not callable(run):
            raise ValueError(f"a {type(module).__name__} has no generate(): it is for transformers' generative models")
        seed = from_rank_0(lambda: int(torch.randint(0, 1 << 62, ()).item()))
        devices = generator_devices(module)
        with torch.no_grad(), module_mode(module, training=training), torch.random.fork_rng(devices=devices):
            # Ranks are started alike: without this all of them would draw the same samples.
            torch.manual_seed(seed + dist.get_rank())
            init_roots(module)
            # An encoder is called by itself, before the root's forward would gather what is the root's.
            for root in fsdp_modules(module, root_only=True):
                root.unshard()
            ids = run(*batch.args, **batch.kwargs, synced_gpus=dist.get_world_size() > 1)
        reshard(module)
        ids = _padded(ids, _pad_id(module, batch.kwargs))
    except BaseException as error:
        mark_recovery(error, recover_after(error, module, in_backward=False), torn=False)
        raise
    num_rows = max(batch.num_rows, 1) if batch.num_rows is not None else len(ids)
    several = ids.unflatten(0, (num_rows, -1)) if len(ids) != num_rows else ids
    return RankOutput(several.cpu() if keep else None)


def check_generation(kwargs: dict[str, Any]) -> None:
    """Refuse arguments of transformers' `generate` that ranks in step do not have.

    Raises:
        ValueError: Names the argument.
    """
    for name, why in _REFUSED.items():
        if kwargs.get(name) not in (None, False):
            raise ValueError(f"generate({name}=...): {why}")


def _padded(ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Make rows as long as the longest of any rank; collective."""
    longest = torch.tensor([ids.shape[1]], dtype=torch.int64, device=metadata_device())
    # Every rank tells its own length, dummies too: the others wait here for it.
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return nn.functional.pad(ids, (0, int(longest.item()) - ids.shape[1]), value=pad_id)


def _pad_id(module: nn.Module, kwargs: dict[str, Any]) -> int:
    """What transformers itself pads with: the pad token, else the first end token."""
    config = kwargs.get("generation_config") or getattr(module, "generation_config", None)
    for name in ("pad_token_id", "eos_token_id"):
        value = kwargs.get(name)
        value = getattr(config, name, None) if value is None else value
        if value is not None:
            return int(value[0] if isinstance(value, list | tuple) else value)
    return 0
