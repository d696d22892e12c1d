"""`generate`: the generation loop of transformers on every rank's rows, with the same number of forwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from raysharding.arguments import check_int
from raysharding.batch import RankBatch, RankOutput
from raysharding.distributed.comm import (
    agreeing,
    all_gather_ints,
    any_rank,
    current_group,
    from_rank_0,
    get_rank,
    get_world_size,
)
from raysharding.distributed.fully_shard import (
    fork_rng_of,
    fsdp_modules,
    init_roots,
    is_kept_gathered,
    keep_gathered,
    module_mode,
    over_ranks_of,
    recovering,
    reshard,
    unwrapped,
)
from raysharding.distributed.training.forward import OutputFunction, call_on_outputs, to_cpu, without_caches
from raysharding.distributed.training.token_stream import TokenStream
from raysharding.tree import map_leaves

_SEEDS = 1 << 62
_REFUSED = {
    "synced_gpus": "the ranks are kept in step where they have to be",
    "streamer": "it would run on the ranks: stream=True, and Call.stream() on the driver",
    "assistant_model": "every rank would need one; run it in call(fn)",
}


@over_ranks_of("module")
def generate(
    module: nn.Module,
    batch: RankBatch,
    fn: OutputFunction | None = None,
    *,
    training: bool = False,
    keep: bool = True,
    stream: TokenStream | None = None,
) -> RankOutput:
    """Generate token ids for this rank's part of a batch; collective.

    After `keep_gathered` each rank runs until its own rows have ended. Else each runs one forward per token until all
    ranks have finished, and FSDP gathers the parameters of each block in each forward: the wire carries the model once
    per token. A class with a `generate` of its own (Whisper, MusicGen) may run forwards that other ranks do not, and is
    gathered in any case, for this call.

    Args:
        module: The sharded root module, which has transformers' `generate`.
        batch: From `deal`, on the module's device: the arguments of `generate`, and `seed`, 0 or more. Each rank
            samples with numbers of its own, which follow from it. Default: drawn from a generator for this purpose.
        fn: `fn(outputs, batch)`, which gets what transformers returns, on the device, and the arguments; what it
            returns is the output. Not collective.
        training: True for train mode, False for eval mode.
        keep: True if this rank's ids are needed.
        stream: Takes the tokens of each step; then a rank that raises alone leaves the others waiting in a collective.

    Returns:
        Ids on the CPU, int64 [rows * sequences, length]; `length` is that of the longest row of all ranks, and shorter
        rows are padded at the end. With `return_dict_in_generate` transformers' output, where the scores and logits of
        a rank that ended early go on as if the pad token were certain: 0 for it, -inf for the others.

    Raises:
        ValueError: On every rank, if the module cannot generate, an argument is not supported, or some rows of
            `decoder_input_ids` begin with the start token and others do not.
        Exception: Any error of the module; if all ranks raise the same, later calls are correct.
    """
    module = unwrapped(module)
    with recovering(module):
        kwargs = batch.kwargs
        check_generation(kwargs)
        run: Any = getattr(module, "generate", None)
        if not callable(run):
            raise ValueError(f"a {type(module).__name__} has no generate(): it is for transformers' generative models")
        seed = kwargs.pop("seed", None)
        if seed is None:
            seed = from_rank_0(lambda: int(torch.randint(_SEEDS, (), generator=_seeds()).item()))
        _check_starts(module, kwargs)
        is_common = getattr(run, "__module__", "") == "transformers.generation.utils"
        was_kept = is_kept_gathered(module)
        if not is_common:
            keep_gathered(module)
        is_kept = is_kept_gathered(module)
        is_alone = is_kept and batch.is_dummy
        has_scores = kwargs.get("output_scores") or kwargs.get("output_logits")
        if fn is None and has_scores and max(_token_ids(module, kwargs, "num_beams"), default=1) > 1:
            raise ValueError("scores of beams are of a rank's own beams: give fn=, which gets them on the rank")
        pad, called = _pad_token(module, kwargs), run
        if kwargs.get("continuous_batching_config") is not None:
            if not is_kept:
                raise ValueError("continuous_batching_config=: each rank needs all parameters, summon_full_params=True")
            run, is_common = partial(_refilled, module, pad), False
        elif is_common or _takes_synced_gpus(run):  # its default is True for FSDP modules
            kwargs["synced_gpus"] = not is_kept and get_world_size() > 1
        if stream is not None:
            if not is_common:
                raise ValueError("stream=True: only with transformers' own generate(), and one batch at a time")
            stream.end_tokens, kwargs["streamer"] = _token_ids(module, kwargs, "eos_token_id"), stream
        with torch.no_grad(), module_mode(module, training=training), fork_rng_of(module):
            # All ranks start with the same seed, and would draw the same samples.
            torch.manual_seed(seed + get_rank())
            if not is_kept:
                init_roots(module)
                # An encoder is called on its own, before a forward of the root gathers the root's parameters.
                for root in fsdp_modules(module, root_only=True):
                    root.unshard()
            # Ranks that run on their own may raise alone: the others would wait for the lengths below. In a stream they
            # are in step, and the rank that raises must end at once, for the controller to end the others.
            is_apart = is_kept and stream is None
            with agreeing() if is_apart else nullcontext(), _until_all_end(module, stream, is_kept=is_kept) as goes_on:
                # A rank without rows would else go on for as long as its dummy takes.
                found = torch.zeros(batch.num_held or 1, 0).long() if is_alone else run(*batch.args, **kwargs)
                if stream is not None:
                    if is_alone:
                        goes_on(True)
                    stream.exchange(is_done=True)  # what transformers put after its last step
                if not isinstance(getattr(found, "sequences", found), torch.Tensor):
                    raise ValueError(f"generate() returned a {type(found).__name__}, and no ids: run it in call(fn)")
        if not was_kept:
            reshard(module)
        found, ids = _padded(found, pad)
        if fn is not None:
            with agreeing():
                found = None if is_alone else call_on_outputs(fn, found, batch, called)
    if fn is None and isinstance(found, dict) and "beam_indices" in found:
        found["beam_indices"] = None  # they count the beams of this rank
    num_rows = len(ids) if batch.num_held is None else batch.num_held
    value = map_leaves(to_cpu, without_caches(found)) if keep else None
    return RankOutput(value, num_sequences=len(ids) // num_rows)


def _pad_token(module: nn.Module, kwargs: dict[str, Any]) -> int:
    """Return the token with which transformers pads rows that have ended: the pad token, else the first end token."""
    return next(filter(None, (_token_ids(module, kwargs, name) for name in ("pad_token_id", "eos_token_id"))), [0])[0]


def _refilled(
    module: Any, pad: int, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Generate by transformers' continuous batching, where the next row takes the place of one that ended.

    Not collective. Returns ids as `generate` does, padded at the end.
    """
    batching = kwargs.pop("continuous_batching_config")
    config, others = module._prepare_generation_config(kwargs.pop("generation_config", None), **kwargs)
    is_one = (config.num_beams or 1) == (config.num_return_sequences or 1) == 1 and not config.return_dict_in_generate
    if others or not is_one:
        raise ValueError(f"continuous_batching_config=: one sequence a row, of ids alone; given {', '.join(kwargs)}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [row[own.bool()].tolist() for row, own in zip(input_ids, mask, strict=True)]
    # transformers logs an error of its thread, and returns the rows that it has.
    found = list(module.generate_batch(prompts, config, batching, warmup=False).values())
    new = [torch.tensor(one.generated_tokens, dtype=torch.int64) for one in found if one.error is None]
    if len(new) < len(prompts):
        raise RuntimeError(f"generate_batch made {len(new)} of {len(prompts)} rows: {[one.error for one in found]}")
    padded = nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=pad)
    return torch.cat([input_ids, padded.to(input_ids.device)], 1)


def _padded(found: Any, pad: int) -> tuple[Any, torch.Tensor]:
    """Return what `generate` has returned, as long as that of the rank that ran longest, and its ids; collective."""
    ids = getattr(found, "sequences", found)
    steps = {name: getattr(found, name, None) or () for name in ("scores", "logits")}
    # Every rank calls this, with a dummy row too: the others would wait in the all-gather.
    lengths = all_gather_ints([ids.shape[1], *map(len, steps.values())])
    longest, *num_steps = map(max, zip(*lengths, strict=True))
    ids = nn.functional.pad(ids, (0, longest - ids.shape[1]), value=pad)
    if isinstance(found, torch.Tensor):
        return ids, ids
    found.sequences = ids
    for (name, own), number in zip(steps.items(), num_steps, strict=True):
        if own:
            certain = torch.full_like(own[0], -torch.inf).index_fill_(1, torch.tensor(pad, device=ids.device), 0.0)
            found[name] = (*own, *[certain] * (number - len(own)))
    return found, ids


@contextmanager
def _until_all_end(module: nn.Module, stream: TokenStream | None, *, is_kept: bool) -> Iterator[Callable[..., bool]]:
    """Let transformers' loop run until the ranks of the current group end; it asks those of the default group.

    With a stream, a rank whose rows have ended takes part in its steps; with gathered parameters without a forward.
    """

    def goes_on(is_done: bool, *_: Any, **__: Any) -> bool:
        if stream is None:
            return any_rank(not is_done)
        while stream.exchange(is_done=is_done):
            if not (is_kept and is_done):
                return True
        return False

    if stream is not None or (current_group() is not None and not is_kept):
        module.__dict__["_has_unfinished_sequences"] = goes_on
    try:
        yield goes_on
    finally:
        module.__dict__.pop("_has_unfinished_sequences", None)


def check_generation(kwargs: dict[str, Any]) -> None:
    """Raise on arguments of transformers' `generate` that are not supported.

    Raises:
        ValueError: Names the argument.
    """
    if kwargs.get("seed") is not None:
        check_int("seed", kwargs["seed"], least=0)
        if kwargs["seed"] >= _SEEDS:
            raise ValueError(f"generate(seed={kwargs['seed']}): give a number below 2**62")
    for name, why in _REFUSED.items():
        if kwargs.get(name) not in (None, False):
            raise ValueError(f"generate({name}=...): {why}")


def _takes_synced_gpus(run: Callable[..., Any]) -> bool:
    """Return True if a `generate` passes `synced_gpus` on."""
    parameters = inspect.signature(run).parameters.values()
    return any(one.name == "synced_gpus" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


@cache
def _seeds() -> torch.Generator:
    """Return the generator of seeds: to draw them from that of the models would change later drop-out."""
    return torch.Generator().manual_seed(torch.initial_seed())


def _check_starts(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Check that all rows of `decoder_input_ids` begin with the start token, or none; collective if there are any.

    transformers prepends the token to all rows if none begins with it, and sees the rows of a rank.
    """
    ids = kwargs.get("decoder_input_ids")
    starts = [_token_ids(module, kwargs, name) for name in ("decoder_start_token_id", "bos_token_id")]
    if not isinstance(ids, torch.Tensor) or not any(starts):
        return
    has_start = bool((ids[:, 0] == next(filter(None, starts))[0]).any())
    # Every rank calls this: arguments have the same names on all.
    if len({one for (one,) in all_gather_ints([has_start])}) > 1:
        raise ValueError(
            "decoder_input_ids: rows of some ranks begin with decoder_start_token_id, those of others do not: let all "
            "rows begin with it, or none"
        )


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


def _token_ids(module: nn.Module, kwargs: dict[str, Any], name: str) -> list[int]:
    """Return the ids that an argument of `generate`, or the model's generation config, names."""
    config = kwargs.get("generation_config") or getattr(module, "generation_config", None)
    value = kwargs.get(name)
    value = getattr(config, name, None) if value is None else value
    return [] if value is None else [int(one) for one in (value if isinstance(value, list | tuple) else [value])]
