"""After an error on some ranks, or all, later calls equal one process, or the group is BROKEN at once."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from raysharding import CallTimeoutError, GroupBrokenError, GroupError, PerRank, ShardedModelGroup, Split, Timeouts
from raysharding.group import GroupState
from tests.clock import now
from tests.distributed.fidelity import CASES, make_checkpoint

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]

IDS = torch.randint(3, 64, (4, 5), generator=torch.Generator().manual_seed(3))
BATCH: dict[str, Any] = {"input_ids": Split(IDS), "labels": Split(IDS)}
PROMPT: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
TIMEOUTS = Timeouts(call_s=15.0, drain_s=1.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("some-ranks") / "llama"
    make_checkpoint(path, CASES["llama"])
    return path


class Pair:
    """A group, and one process that has taken the same steps."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self.group = ShardedModelGroup.from_checkpoint(
            directory, world_size=world_size, device="cpu", timeouts=TIMEOUTS
        )
        self.group.set_optimizer(torch.optim.SGD, lr=0.1)
        self.directory = directory
        self.num_saves = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Steps that rounding has driven apart would hide a wrong one."""
        if self.group.state is GroupState.BROKEN:  # a test before has failed
            self.group.restart()
        self.group.load(self.directory)
        self.twin: Any = transformers.LlamaForCausalLM.from_pretrained(self.directory)
        self.optimizer = torch.optim.SGD(self.twin.parameters(), lr=0.1)

    def forward(self) -> None:
        found = self.group.forward(input_ids=Split(IDS)).logits
        with torch.no_grad():
            torch.testing.assert_close(found, self.twin(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)

    def generate(self) -> None:
        assert torch.equal(self.group.generate(Split(IDS), **PROMPT), self.twin.generate(IDS, **PROMPT))

    def predict(self) -> None:
        rows = [{"input_ids": row.tolist()} for row in IDS] * 3
        found = self.group.predict(rows, batch_size=len(IDS), rows_per_file=len(IDS))
        with torch.no_grad():
            expected = self.twin(input_ids=IDS).logits[:, -1].repeat(3, 1)
        torch.testing.assert_close(torch.tensor(found["logits"].to_pylist()), expected, rtol=1e-4, atol=1e-5)

    def train_step(self) -> None:
        found = self.group.train_step(**BATCH)
        self.optimizer.zero_grad()
        loss = self.twin(input_ids=IDS, labels=IDS).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.twin.parameters(), float("inf"))
        self.optimizer.step()
        assert found == pytest.approx({"loss": loss.item(), "grad_norm": norm.item()}, rel=1e-4)

    def forward_backward(self) -> None:
        self.group.forward_backward(**BATCH)

    def gather_root(self) -> None:
        """A call that leaves the root's parameters full."""
        self.group.call(gather_root(), IDS)

    def optim_step(self) -> None:
        """Gradients of before an error are lost on every rank."""
        with pytest.raises(GroupError, match="no gradients since the last update") as caught:
            self.group.optim_step()
        assert len(caught.value.failures) == self.group.world_size

    def state_dict(self) -> None:
        expected, found = self.twin.state_dict(), self.group.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)

    def save(self, folder: Path) -> None:
        self.num_saves += 1
        self.group.save(folder / f"save-{self.num_saves}")
        saved = transformers.LlamaForCausalLM.from_pretrained(folder / f"save-{self.num_saves}").state_dict()
        for name, value in self.twin.state_dict().items():
            torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5)

    def restart(self) -> None:
        """From the files that `begin_anew` loads."""
        self.group.restart()
        self.begin_anew()
        self.forward()


def gather_root() -> Callable[..., None]:
    """A forward after which the root stays gathered, and an error on the ranks that are told to raise one."""

    def run(ids: torch.Tensor, raises: bool = False) -> None:
        import torch

        from raysharding import current_worker

        with torch.no_grad():
            current_worker().module(input_ids=ids)
        if raises:
            raise LookupError("alone")

    return run


def arm() -> Callable[[bool, bool], None]:
    """Has the next pass raise in the middle of its forward, or of its backward."""

    def run(raises: bool, in_backward: bool) -> None:
        from raysharding import current_worker

        module: Any = current_worker().module

        def fail(*_: Any) -> None:
            raise LookupError("alone")

        def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
            handle.remove()
            if not in_backward:
                fail()
            output.register_hook(fail)

        if raises:
            handle = module.model.layers[0].mlp.register_forward_hook(hook)

    return run


def fail_alone() -> Callable[[bool], None]:
    """The smallest call that can fail."""

    def run(raises: bool) -> None:
        import time

        if raises:
            raise LookupError("alone")
        time.sleep(0.05)  # those that raise are done before the others

    return run


@pytest.fixture(scope="module")
def standing(cluster: None, directory: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(directory, request.param)
    with pair.group:
        yield pair


@pytest.fixture
def pair(standing: Pair) -> Pair:
    standing.begin_anew()
    return standing


RAISING = {2: [False, True], 3: [True, True, False]}
"""Ranks of the group → who raises: one rank, of which the other waits; all but one, which waits for more than one."""

ON_TWO_RANKS = pytest.mark.parametrize("standing", [2], indirect=True)


def raising(pair: Pair) -> PerRank:
    return PerRank(RAISING[pair.group.world_size])


def cells(*names: str, quick: tuple[str, ...]) -> list[Any]:
    """Values for `parametrize` of (standing, name); the quick ones are of one rank that raises."""
    return [
        pytest.param(size, name, marks=() if name in quick and size == 2 else pytest.mark.full)
        for size, name in itertools.product(RAISING, names)
    ]


@pytest.mark.parametrize(
    ("standing", "before"),
    cells("forward", "generate", "train_step", "forward_backward", "gather_root", quick=("forward", "gather_root")),
    indirect=["standing"],
    scope="module",
)
def test_a_call_that_fails_on_some_ranks_leaves_later_calls_right(pair: Pair, before: str, tmp_path: Path) -> None:
    for after in ("forward", "train_step", "save", "state_dict", "restart", "optim_step"):
        if before == "gather_root":  # by the call itself
            args: tuple[Any, ...] = gather_root(), IDS, raising(pair)
        else:
            getattr(pair, before)()
            args = fail_alone(), raising(pair)
        with pytest.raises(GroupError, match="LookupError: alone") as caught:
            pair.group.call(*args)
        assert len(caught.value.failures) < pair.group.world_size
        assert pair.group.state is GroupState.READY
        if after == "save":
            pair.save(tmp_path)
        elif after == "restart":
            with pytest.raises(ValueError, match="there is nothing to restart"):
                pair.restart()
        else:
            getattr(pair, after)()


@pytest.mark.parametrize(
    ("standing", "fails"),
    cells("forward", "train_step", "forward_backward", "gather_root", quick=("train_step",)),
    indirect=["standing"],
    scope="module",
)
def test_a_pass_that_fails_on_some_ranks_breaks_the_group_at_once(pair: Pair, fails: str, tmp_path: Path) -> None:
    """The others wait for them in a collective."""
    in_backward = fails in ("train_step", "forward_backward")
    if in_backward:
        pair.train_step()  # the first one also runs without gradients, to find out what the loss does
    pair.group.call(arm(), raising(pair), in_backward)
    begun = now()
    with pytest.raises(GroupError, match="LookupError: alone") as caught:
        getattr(pair, fails)()
    assert now() - begun < TIMEOUTS.call_s / 2
    assert not isinstance(caught.value, CallTimeoutError)
    for call in (pair.forward, pair.train_step, lambda: pair.save(tmp_path), pair.state_dict):
        with pytest.raises(GroupBrokenError, match="refuses calls"):
            call()
    pair.restart()
    pair.state_dict()
    pair.optim_step()
    pair.train_step()
    pair.save(tmp_path)


@pytest.mark.parametrize(
    ("standing", "fails"), cells("generate", "predict", quick=("generate", "predict")), indirect=["standing"]
)
def test_a_pass_with_gathered_parameters_that_fails_on_some_ranks_leaves_the_group_right(
    pair: Pair, fails: str
) -> None:
    """No rank waits for another in it, and all agree at its end."""
    for _ in range(3):  # who is heard first is chance
        pair.group.call(arm(), raising(pair), False)
        with pytest.raises(GroupError, match="LookupError: alone") as caught:
            getattr(pair, fails)()
        failures = caught.value.failures
        kinds = ["raised" if raises else "collateral" for raises in RAISING[pair.group.world_size]]
        assert [failures[rank].kind for rank in range(pair.group.world_size)] == kinds
        assert caught.value.primary is not None
        assert caught.value.primary.error_type == "LookupError"
        assert pair.group.state is GroupState.READY
    getattr(pair, fails)()
    pair.forward()
    pair.train_step()


@ON_TWO_RANKS
@pytest.mark.parametrize("where", ["forward", "train_step", "loss", "backward"])
def test_what_every_rank_raises_leaves_the_group_right(pair: Pair, where: str) -> None:
    """And at once: in the forward of either call, in the loss, in the middle of the backward."""

    def fail(*_: Any, **__: Any) -> Any:
        raise LookupError("alone")

    pair.train_step()  # the first one also runs without gradients, to find out what the loss does
    if where != "loss":
        pair.group.call(arm(), True, where == "backward")
    options: dict[str, Any] = BATCH | ({"loss": fail} if where == "loss" else {})
    run = pair.group.forward if where == "forward" else pair.group.train_step
    with pytest.raises(GroupError, match="LookupError: alone") as caught:
        run(**options)
    error = caught.value
    assert sorted(error.failures) == list(range(pair.group.world_size))
    assert {failure.kind for failure in error.failures.values()} == {"raised"}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert pair.group.state is GroupState.READY
    pair.forward()
    pair.train_step()
    pair.train_step()
    pair.forward()


@ON_TWO_RANKS
def test_a_collective_that_some_ranks_have_begun_breaks_the_group_at_once(pair: Pair) -> None:
    """Nobody waits for it, but it would pair with the others' next one."""

    def begin(raises: bool) -> None:
        import torch
        import torch.distributed as dist

        if raises:
            raise LookupError("alone")
        dist.all_reduce(torch.ones(3), async_op=True)

    with pytest.raises(GroupError, match="LookupError: alone"):
        pair.group.call(begin, raising(pair))
    assert pair.group.state is GroupState.BROKEN
    pair.restart()
    pair.train_step()


@ON_TWO_RANKS
@pytest.mark.parametrize("differs", ["collectives", pytest.param("weights", marks=pytest.mark.full)])
def test_an_error_of_all_ranks_that_did_different_things_breaks_the_group_at_once(pair: Pair, differs: str) -> None:
    def run(differs: str, is_first: bool) -> None:
        import torch
        import torch.distributed as dist

        from raysharding import current_worker

        if is_first and differs == "collectives":
            dist.all_reduce(torch.ones(3), async_op=True)
        elif is_first:
            module: Any = current_worker().module
            with torch.no_grad():
                module.model.norm.weight.mul_(1.0)
        raise LookupError("alike")

    with pytest.raises(GroupError, match="LookupError: alike"):
        pair.group.call(run, differs, raising(pair))
    assert pair.group.state is GroupState.BROKEN
    pair.group.restart()
    pair.train_step()


@ON_TWO_RANKS
def test_a_result_that_does_not_pickle_beside_an_error_of_its_type(pair: Pair) -> None:
    """The ranks with a result have gathered the root, those that raised have been reset."""

    def run(ids: torch.Tensor, raises: bool) -> Any:
        import threading

        import torch

        from raysharding import current_worker

        with torch.no_grad():
            current_worker().module(input_ids=ids)
        if raises:
            raise TypeError("alone")
        return threading.Lock()

    with pytest.raises(GroupError, match="TypeError") as caught:
        pair.group.call(run, IDS, raising(pair))
    assert len(caught.value.failures) == pair.group.world_size
    pair.forward()


@ON_TWO_RANKS
def test_gradients_are_reduced_again(pair: Pair) -> None:
    """Where `fn` had put that off on some ranks when it raised, and where it did so on all of them."""

    def put_off(put_off: bool, raises: bool) -> None:
        from raysharding import current_worker

        if put_off:
            module: Any = current_worker().module
            module.set_requires_gradient_sync(False)
        if raises:
            raise LookupError("alone")

    some = raising(pair)
    with pytest.raises(GroupError, match="LookupError: alone"):
        pair.group.call(put_off, some, some)
    pair.train_step()
    pair.group.call(put_off, True, False)
    pair.train_step()
    pair.state_dict()


@ON_TWO_RANKS
@pytest.mark.parametrize("raises", [False, True])
def test_a_destroyed_process_group_is_made_anew_by_restart(pair: Pair, raises: bool) -> None:
    def destroy(raises: bool) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
        if raises:
            raise LookupError("after it")

    with pytest.raises(GroupError, match=r"call\(.*destroy\) has destroyed a process group of the ranks"):
        pair.group.call(destroy, raises)
    assert pair.group.state is GroupState.BROKEN
    with pytest.raises(GroupBrokenError, match="refuses calls"):
        pair.forward()
    pair.restart()
    pair.train_step()


@ON_TWO_RANKS
def test_an_error_of_a_device_breaks_the_group(pair: Pair) -> None:
    """Also where every rank raises it alike: no later call works in a CUDA context that a device-side assert ended."""

    def fail() -> None:
        import torch

        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with pytest.raises(GroupError, match="device-side assert"):
        pair.group.call(fail)
    assert pair.group.state is GroupState.BROKEN
    pair.restart()
