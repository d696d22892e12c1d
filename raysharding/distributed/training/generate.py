"""`generate`: the generation loop of transformers on every rank's rows, with the same number of forwards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import all_gather_ints, from_rank_0
from raysharding.distributed.fully_shard import (
    fork_rng_of,
    fsdp_modules,
    init_roots,
    module_mode,
    recovering,
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

    Each rank runs one forward per token until all ranks have finished. FSDP gathers the parameters of each block in
    each forward: the wire carries the model once per token. Each rank samples with a generator of its own, seeded from
    rank 0's.

    Args:
        module: The sharded root module, which has transformers' `generate`.
        batch: From `deal`, on the module's device: the arguments of `generate`.
        training: True for train mode, False for eval mode.
        keep: True if this rank's ids are needed.

    Returns:
        Ids on the CPU, int64: [rows, length], or [rows, sequences, length] for several sequences per row; `length` is
        that of the longest row of all ranks, and shorter rows are padded at the end.

    Raises:
        ValueError: On every rank, if the module cannot generate, or an argument is not supported.
        Exception: Any error of the module; if all ranks raise the same, later calls are correct.
    """
    module = unwrapped(module)
    with recovering(module):
        check_generation(batch.kwargs)
        run = getattr(module, "generate", None)
        if not callable(run):
            raise ValueError(f"a {type(module).__name__} has no generate(): it is for transformers' generative models")
        seed = from_rank_0(lambda: int(torch.randint(0, 1 << 62, ()).item()))
        with torch.no_grad(), module_mode(module, training=training), fork_rng_of(module):
            # All ranks start with the same seed, and would draw the same samples.
            torch.manual_seed(seed + dist.get_rank())
            init_roots(module)
            # An encoder is called on its own, before a forward of the root gathers the root's parameters.
            for root in fsdp_modules(module, root_only=True):
                root.unshard()
            ids = run(*batch.args, **batch.kwargs, synced_gpus=dist.get_world_size() > 1)
        reshard(module)
        ids = _padded(ids, _pad_id(module, batch.kwargs))
    num_rows = len(ids) if batch.num_rows is None else batch.num_rows or batch.rows_per_item
    several = ids.unflatten(0, (num_rows, -1)) if len(ids) != num_rows else ids
    return RankOutput(several.cpu() if keep else None)


def check_generation(kwargs: dict[str, Any]) -> None:
    """Raise on arguments of transformers' `generate` that are not supported.

    Raises:
        ValueError: Names the argument.
    """
    for name, why in _REFUSED.items():
        if kwargs.get(name) not in (None, False):
            raise ValueError(f"generate({name}=...): {why}")


def _padded(ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Pad rows to the length of the longest on any rank; collective."""
    # Every rank calls this, with a dummy row too: the others would wait in the all-reduce.
    longest = max(length for (length,) in all_gather_ints([ids.shape[1]]))
    return nn.functional.pad(ids, (0, longest - ids.shape[1]), value=pad_id)


def without_padding(module: nn.Module, ids: torch.Tensor, kwargs: dict[str, Any]) -> list[Any]:
    """Return the generated ids of each row up to its first end token, without the prompt.

    Args:
        module: The root module.
        ids: Result of `generate`: int64 [rows, length] or [rows, sequences, length].
        kwargs: The arguments of `generate`.

    Returns:
        A list of ids per row, or a list of such lists for several sequences per row; independent of the other rows.
    """
    if ids.ndim == 3:
        return [without_padding(module, own, kwargs) for own in ids]
    is_pair = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
    prompt = next((kwargs[name] for name in ("input_ids", "inputs") if name in kwargs), None)
    # The first id of a decoder starts it; for BART that is an end token.
    start = 1 if is_pair else 0 if prompt is None else prompt.shape[1]
    is_end = torch.isin(ids[:, start:], torch.tensor(_token_ids(module, kwargs, "eos_token_id"), dtype=torch.int64))
    # Up to the first end token, which counts; all ids where there is none.
    kept = (is_end.cumsum(1) - is_end.long() == 0).sum(1).tolist()
    return [row[:length] for row, length in zip(ids[:, start:].tolist(), kept, strict=True)]


def _pad_id(module: nn.Module, kwargs: dict[str, Any]) -> int:
    """Return the token that transformers pads with: the pad token, else the first end token."""
    found = [*_token_ids(module, kwargs, "pad_token_id"), *_token_ids(module, kwargs, "eos_token_id"), 0]
    return found[0]


def _token_ids(module: nn.Module, kwargs: dict[str, Any], name: str) -> list[int]:
    """Return the ids that an argument of `generate`, or the model's generation config, names."""
    config = kwargs.get("generation_config") or getattr(module, "generation_config", None)
    value = kwargs.get(name)
    value = getattr(config, name, None) if value is None else value
    return [] if value is None else [int(one) for one in (value if isinstance(value, list | tuple) else [value])]
