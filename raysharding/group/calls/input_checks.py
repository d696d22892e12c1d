"""Checks of a call's arguments on the driver, before it starts.

A rank that raises, or runs other code than its peers, leaves the peers in a collective that never ends. Arguments that
would cause this are refused here, while the group is READY and nothing has been sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from raysharding.batch import RankBatch, as_tensors, by_name, deal, whole_rows
from raysharding.checkpoint.storage import normal_path
from raysharding.group.cluster import is_in_session, warn
from raysharding.models import InputBounds
from raysharding.tree import leaves


def model_batches(
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    bounds: InputBounds,
    world_size: int,
    *,
    needs_loss: bool = False,
    warned: set[str],
) -> list[RankBatch]:
    """Distribute the arguments of a model, and refuse those that some ranks could not compute while others wait.

    Args:
        method: Name of the call, for errors.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        bounds: Input bounds of the group's model.
        world_size: Number of ranks.
        needs_loss: True if the model itself must compute a loss.
        warned: Warnings that the group has given, each of which it gives once.

    Raises:
        ValueError: The batch is not valid.
    """
    args, kwargs = by_name(args, kwargs)
    names = (*bounds.positions, *[""] * len(args))
    args = [as_tensors(name, value) for name, value in zip(names, args, strict=False)]
    kwargs = {name: as_tensors(name, value) for name, value in kwargs.items()}
    batches = deal(args, kwargs, world_size, positions=bounds.positions)
    if method == "generate":
        check_no_examples(method, batches[0], "predict(rows, collate_fn=, generate_kwargs=) does it")
    # transformers checks the arguments of `generate` itself; a `loss` may take arguments that the model does not.
    if method == "forward" or needs_loss:
        bounds.check_names(batches[0], method, needs_loss)
    else:
        bounds = replace(bounds, num_classes=None)  # labels of a loss function, or of nothing
    check_batches(method, batches, bounds)
    is_whole = batches[0].num_rows is None and "whole" not in warned
    whole = whole_rows(args, kwargs, world_size, bounds.positions) if is_whole else None
    if whole is not None:
        warned.add("whole")
        warn(
            f"{method}: every rank computes all of {whole}, because no argument is a Split: {method}(Split(batch)) "
            f"divides the rows among the {world_size} ranks, and Same(...) marks a value that is not to be divided"
        )
    return batches


def output_path(name: str, path: str | os.PathLike[str]) -> str:
    """Return the normal path of an output.

    Args:
        name: Name of the argument, for errors.
        path: The user's path; a relative one is of the driver's current directory.

    Raises:
        ValueError: The path is relative, and the current directory is a copy that Ray removes when the job ends.
    """
    given = os.fspath(path)
    if "://" not in given and not os.path.isabs(given) and is_in_session(given):
        raise ValueError(
            f"{name}={given!r} is relative to {os.getcwd()}, Ray's own copy of a directory, which Ray removes with all "
            "that was written there: give an absolute path on a disk that all nodes share, or a URI"
        )
    return normal_path(given)


def check_no_examples(method: str, batch: RankBatch, instead: str) -> None:
    """Raise ValueError if a call has a `Split` with `collate_fn`, which it does not run."""
    if batch.examples is not None:
        raise ValueError(f"{method} runs no collate_fn= of a Split: {instead}, or give Split(collate(examples))")


def check_batches(method: str, batches: Sequence[RankBatch], bounds: InputBounds) -> None:
    """Refuse a batch that some ranks can compute and others cannot. Reads ids on the CPU once, and moves no tensor.

    Args:
        method: Name of the call, for errors.
        batches: Batches by rank, from `deal`.
        bounds: Input bounds of the group's model.

    Raises:
        ValueError: Ranks would get arguments of different kinds, or an id that the model does not have.
    """
    _check_alike(method, batches)
    seen: set[int] = set()
    for rank, batch in enumerate(batches):
        bounds.check(batch, rank, method, seen)


def _check_alike(method: str, batches: Sequence[RankBatch]) -> None:
    """Compare the ranks' `PerRank` values by kind, dtype and number of dims; sizes, such as rows, may differ."""
    first = _kinds(batches[0])
    for rank, batch in enumerate(batches):
        kinds = _kinds(batch)
        if kinds == first:
            continue
        path = next(path for path in (*first, *kinds) if first.get(path) != kinds.get(path))
        there, here = first.get(path, "nothing"), kinds.get(path, "nothing")
        raise ValueError(
            f"{method}: {path} is {here} on rank {rank}, but {there} on rank 0. Ranks that do not run the same code "
            "wait for each other forever: give every rank a value of the same kind, dtype and number of dims"
        )


def _kinds(batch: RankBatch) -> dict[str, str]:
    args = batch.args if batch.examples is None else ()  # examples differ, and ranks compare what they collate
    values = {f"args[{index}]": value for index, value in enumerate(args)} | batch.kwargs
    return {path: _kind(leaf) for name, value in values.items() for path, leaf in leaves(value, name)}


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a {str(leaf.dtype).removeprefix('torch.')} tensor of {leaf.ndim} dims"
    return "None" if leaf is None else f"of type {type(leaf).__name__}"
