"""Every error is the same error after a trip between processes, and says what it must."""

from __future__ import annotations

import builtins
import copy
import inspect
import json
import pickle
from collections.abc import Callable

import pytest
from ray import cloudpickle

from raysharding import errors
from raysharding.errors import (
    CallCancelledError,
    CallTimeoutError,
    CheckpointError,
    DataError,
    EmptyBatchError,
    GroupBrokenError,
    GroupError,
    OutputTooLargeError,
    PlacementError,
    PlanError,
    PreflightError,
    RankFailure,
    RayshardingError,
    RendezvousError,
    UnreadableLossError,
    caught_as,
    shown,
)

WEIGHT = "model.layers.0.mlp.up_proj.weight"
DIED = RankFailure(1, "10.0.0.2", 4321, "died", "stream", "", "killed by signal 9", "", WEIGHT)
TEXT = "index out of range in self"
TRACEBACK = f"Traceback (most recent call last):\n  File ...\nIndexError: {TEXT}\n"
RAISED = RankFailure(0, "10.0.0.1", 4320, "raised", "forward", "builtins.IndexError", TEXT, TRACEBACK)
COLLATERAL = RankFailure(2, "10.0.0.3", 4322, "collateral", "forward")

EXAMPLES: tuple[RayshardingError, ...] = (
    RayshardingError("something is wrong"),
    CheckpointError("truncated", path="/models/llama/model.safetensors", tensor="lm_head.weight"),
    PlanError("2 problems", problems=("missing a.weight", "unexpected b.weight")),
    PlacementError("too few CPUs", need={"CPU": 2.0}, have={"10.0.0.1": {"CPU": 1.0, "GPU": 0.0}}),
    RendezvousError("2 of 4 ranks arrived", missing_ranks=(2, 3)),
    OutputTooLargeError("3 GiB is over the cap", num_bytes=3 << 30, max_output_bytes=2 << 30),
    GroupError("forward failed", primary=RAISED, failures={0: RAISED, 2: COLLATERAL}),
    CallTimeoutError("train_step took over 5 s", primary=DIED, failures={1: DIED}),
    GroupBrokenError("the group failed earlier", primary=DIED, failures={1: DIED}),
    CallCancelledError("forward was cancelled by Ctrl-C before any rank began it"),
    PreflightError("1 error", problems=("error: interface: node 10.0.0.2: ...",)),
    DataError("has no rows", path="/data/rows.parquet"),
    EmptyBatchError("nothing counts"),
    UnreadableLossError("SumBackward0 is a sum"),
)


def test_every_class_has_an_example() -> None:
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value) and name[0] != "_"}
    assert {type(error) for error in EXAMPLES} == {one for one in classes.values() if issubclass(one, RayshardingError)}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_pickle_round_trip(error: RayshardingError, dumps: Callable[[RayshardingError], bytes]) -> None:
    again = pickle.loads(dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert list(vars(error)) == list(inspect.signature(type(error)).parameters)


@pytest.mark.parametrize(
    ("error_type", "builtin"),
    [
        (CheckpointError, ValueError),
        (DataError, ValueError),
        (EmptyBatchError, ValueError),
        (UnreadableLossError, ValueError),
        (PlanError, ValueError),
        (PlacementError, TimeoutError),
        (PreflightError, RuntimeError),
        (RendezvousError, TimeoutError),
        (OutputTooLargeError, ValueError),
        (GroupError, RuntimeError),
        (CallTimeoutError, TimeoutError),
        (CallTimeoutError, GroupError),
        (GroupBrokenError, GroupError),
        (CallCancelledError, GroupError),
    ],
)
def test_is_caught_by_its_builtin_type(error_type: type[RayshardingError], builtin: type[Exception]) -> None:
    assert issubclass(error_type, builtin)
    assert issubclass(error_type, RayshardingError)


def test_what_the_texts_say() -> None:
    assert str(EXAMPLES[1]) == "/models/llama/model.safetensors: tensor 'lm_head.weight': truncated"
    assert str(CheckpointError("truncated", path="a.safetensors")) == "a.safetensors: truncated"
    assert str(CheckpointError("truncated")) == "truncated"
    assert str(EXAMPLES[2]) == "2 problems\n  missing a.weight\n  unexpected b.weight"
    lines = str(EXAMPLES[6]).splitlines()
    head = "primary: rank 0 (node 10.0.0.1, pid 4320) raised in forward: "
    assert lines[:2] == ["forward failed", f"{head}builtins.IndexError: index out of range in self"]
    assert lines[2] == "  Traceback (most recent call last):"
    assert lines[-1] == "also: rank 2 (node 10.0.0.3, pid 4322) collateral in forward"
    where = f"rank 1 (node 10.0.0.2, pid 4321) died in stream at tensor '{WEIGHT}'"
    assert str(DIED) == f"{where}: killed by signal 9"


@pytest.mark.parametrize(
    "value", ["9" * 10_000, 10**3000, json.loads("[" * 500 + "]" * 500), {"k" * 999: ["v" * 999] * 99}]
)
def test_a_hostile_value_is_shown_in_short(value: object) -> None:
    assert 0 < len(shown(value)) < 2000
    assert len(str(CheckpointError("bad", path="/a", tensor=str(shown(value))))) < 300


def test_a_long_name_is_whole_in_the_error_and_short_in_its_text() -> None:
    error = CheckpointError("is truncated", path="/models/a", tensor="a." * 3000 + "weight")
    assert error.tensor == "a." * 3000 + "weight"
    assert len(str(error)) < 300
    assert str(error).startswith("/models/a: tensor 'a.a.")
    assert str(error).endswith("weight': is truncated")
    usual = "model.language_model.layers.17.block_sparse_moe.experts.63.down_proj.weight_scale_inv"
    assert usual in str(CheckpointError("bad", tensor=usual))


BUILTINS = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(GroupError, kind)
]


@pytest.mark.parametrize("kind", BUILTINS)
def test_an_error_that_is_also_a_builtin_is_the_same_after_a_trip(kind: type[Exception]) -> None:
    error = caught_as(GroupError("forward failed", primary=RAISED, failures={0: RAISED}), kind)
    if issubclass(kind, (StopIteration, StopAsyncIteration, ExceptionGroup)):
        assert type(error) is GroupError
        return
    assert type(error).__mro__[1:3] == (GroupError, RayshardingError)
    assert type(error).__name__ == f"GroupError({kind.__name__})"
    with pytest.raises(kind):
        raise error
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), other.primary, other.failures) == (str(error), RAISED, {0: RAISED})
    assert pickle.loads(cloudpickle.dumps(error)).primary == RAISED


def test_only_builtin_exceptions_are_added_to_a_plain_group_error() -> None:
    class Own(ValueError):
        pass

    error, late = GroupError("failed"), CallTimeoutError("late")
    for kind in (Own, SystemExit, KeyboardInterrupt, RuntimeError, Exception):
        assert caught_as(error, kind) is error
    assert caught_as(late, ValueError) is late
