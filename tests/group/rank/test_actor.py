"""The actor of a rank, driven as the controller drives it: commands on one thread, answers meanwhile, all as data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from raysharding.batch import Out, RankBatch
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding
from raysharding.group.messages import (
    COMMAND_BYTES,
    RESULT_BYTES,
    Command,
    Packed,
    Response,
    decoded,
    encoded,
    pack,
    pack_same,
)
from raysharding.group.rank import CONCURRENCY_GROUPS, Assignment, RankActor, Title
from raysharding.group.ranks import RankInfo
from tests.conftest import make_mlp

RANK: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankActor)
_numbers = count(1)


def call(fn: Callable[..., Any], *args: Any) -> Command:
    """The command of `group.call(fn, *args)`, with all arguments inside."""
    return Command("call", next(_numbers), pack_same("call", RankBatch(args), fn, Out.per_rank()))


def run(actor: Any, command: Command) -> tuple[Response, Any]:
    response, stored = actor.run.remote(encoded(command, has_refs=False))
    return decoded(ray.get(response, timeout=30.0)), stored


def value(answer: tuple[Response, Any]) -> Any:
    """The result, which is inside the response."""
    response, _ = answer
    assert response.error is None, response.error
    assert response.value is not None
    return response.value.unpack()


@pytest.fixture(scope="module")
def actor(cluster: None, checkpoint: Path) -> Iterator[Any]:
    """A group of one rank that has joined, and built its module."""
    made = RANK.options(num_cpus=0).remote(Title("model", "group a", 0), 600.0)
    ip = ray.util.get_node_ip_address()
    address = value(run(made, Command("serve_store", next(_numbers), pack_same("serve_store", ip, 30.0, None))))
    place = Assignment(RankInfo(0, "node", ip, 0, 0, "cpu"), 1, "", False, 1, 30.0, 30.0, 30.0, 0)
    assert run(made, Command("join", next(_numbers), pack_same("join", place, address)))[0].error is None
    build = pack_same("build", make_mlp(), open_checkpoint(checkpoint).to_json(), Sharding(), Loading())
    assert run(made, Command("build", next(_numbers), build))[0].error is None
    yield made
    ray.kill(made, no_restart=True)


def test_a_small_result_is_inside_the_response_and_a_large_one_stays_in_the_object_store(actor: Any) -> None:
    small, nothing = run(actor, call(bytes, 10))
    assert not small.is_stored
    assert small.value is not None
    assert small.value.unpack() == bytes(10)
    assert ray.get(nothing) is None
    large, stored = run(actor, call(torch.zeros, RESULT_BYTES))
    assert large.is_stored
    assert large.value is None
    found = ray.get(stored)
    assert isinstance(found, Packed)
    assert found.unpack().shape == (RESULT_BYTES,)


def test_a_result_that_is_wanted_as_a_reference_is_stored_as_the_value_itself(actor: Any) -> None:
    args = pack_same("call", RankBatch((3,)), torch.ones, Out.per_rank())
    response, stored = run(actor, Command("call", next(_numbers), args, output="ref"))
    assert response.is_stored
    assert ray.get(stored).tolist() == [1.0] * 3


def test_a_result_that_holds_a_reference_is_stored_since_only_ray_can_carry_references(actor: Any) -> None:
    def put() -> Any:
        return ray.put(7)

    response, stored = run(actor, call(put))
    assert response.is_stored
    assert ray.get(ray.get(stored).unpack()) == 7


@pytest.mark.parametrize("field", ["args", "shared"])
def test_large_arguments_are_fetched_before_their_command(actor: Any, field: Any) -> None:
    from raysharding.group.messages import Shared

    rows = np.arange(COMMAND_BYTES, dtype=np.uint8)
    if field == "args":
        parts = {"args": pack_same("call", RankBatch((rows,)), np.sum, Out.per_rank())}
        command = Command("call", next(_numbers), None, is_fetched=True)
    else:
        parts = {"shared": pack((rows,), "shared")}
        args = pack_same("call", RankBatch((Shared(0),)), np.sum, Out.per_rank())
        command = Command("call", next(_numbers), args, is_fetched=True)
    ray.get(actor.fetch.remote(command.number, **{field: ray.put(parts[field])}), timeout=30.0)
    assert value(run(actor, command)) == rows.sum()


def test_a_command_whose_arguments_were_not_fetched_fails_instead_of_taking_others(actor: Any) -> None:
    dropped, command = next(_numbers), Command("call", next(_numbers), None, is_fetched=True)
    ray.get(actor.fetch.remote(dropped, args=pack_same("call", RankBatch(), int, Out.per_rank())), timeout=30.0)
    error = run(actor, command)[0].error
    assert error is not None
    assert "awaits fetch before run" in error.message
    late = run(actor, Command("call", dropped, None, is_fetched=True))[0].error
    assert late is not None, "a later command has run: the arguments are dropped"


class Unpicklable(BaseException):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, Unpicklable])
def test_whatever_a_command_raises_is_data_and_the_rank_goes_on(actor: Any, kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("because")

    response, stored = run(actor, call(fail))
    assert response.error is not None
    assert (response.error.message, response.error.stage) == ("because", "run")
    assert ray.get(stored) is None
    assert value(run(actor, call(abs, -1))) == 1


def test_a_result_that_cannot_be_packed_is_an_error_of_its_stage(actor: Any) -> None:
    def lock() -> Any:
        import threading

        return threading.Lock()

    error = run(actor, call(lock))[0].error
    assert error is not None
    assert error.stage == "output"


def test_commands_run_on_one_thread_and_in_order(actor: Any) -> None:
    def note(number: int) -> tuple[int, int]:
        import threading

        return threading.get_ident(), number

    refs = [actor.run.remote(call(note, number))[0] for number in range(50)]
    found = [decoded(sent).value.unpack() for sent in ray.get(refs, timeout=30.0)]
    assert [number for _, number in found] == list(range(50))
    assert len({thread for thread, _ in found}) == 1


def test_control_answers_while_a_command_runs_and_shows_its_stack(actor: Any) -> None:
    running, _ = actor.run.remote(call(time.sleep, 1.0))
    time.sleep(0.3)
    assert ray.get(actor.progress.remote(), timeout=0.6)[0] == "call"
    stacks = ray.get(actor.stacks.remote(), timeout=0.6)
    assert ray.wait([running], timeout=0)[0] == []
    assert stacks.text.startswith("work thread:")
    assert not stacks.in_collective
    assert decoded(ray.get(running, timeout=30.0)).error is None


def test_the_stores_address_travels_packed(actor: Any) -> None:
    """The controller hands it on without torch, which its class would import."""
    packed = ray.get(actor.store_address.remote(), timeout=30.0)
    assert isinstance(packed, Packed)
    assert packed.unpack().port


@pytest.mark.usefixtures("cluster")
def test_a_rank_whose_lease_is_not_renewed_ends_and_its_lifetime_says_so() -> None:
    actor = RANK.options(num_cpus=0).remote(Title("model", "group a", 0), 2.0)
    ray.get(actor.renew.remote(), timeout=60.0)
    begun = time.monotonic()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.lifetime.remote(), timeout=30.0)
    assert time.monotonic() - begun > 1.0
