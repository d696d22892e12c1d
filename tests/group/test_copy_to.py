"""`copy_to`: the weights that a save and a load would move, by one plan; deaths, queues, adapters."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding import (
    CallCancelledError,
    CopyReport,
    FitStep,
    GroupBrokenError,
    GroupError,
    Loading,
    Placement,
    PlanError,
    ShardedModelGroup,
    Sharding,
    Timeouts,
)
from raysharding.group import GroupState
from tests.clock import now
from tests.controllers import await_state
from tests.models.architectures import ARCHITECTURES

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

WIDTH = 48
TIMEOUTS = Timeouts(call_s=20, drain_s=3, rendezvous_s=20)


def make_net(width: int = WIDTH) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        class Net(nn.Module):
            """Uneven shards, a 0-dim parameter, a tie, and buffers of every kind."""

            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(7, width, bias=False)
                self.norm = nn.BatchNorm1d(width)
                self.last = nn.Linear(7, width)
                self.last.weight = self.first.weight
                self.scale = nn.Parameter(torch.tensor(1.0))
                self.register_buffer("count", torch.tensor([3, 5]))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(self.first(x)) * self.scale @ self.last.weight

        return Net()

    return make


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("net") / "model.safetensors"
    module = make_net()()
    save_file({name: tensor for name, tensor in module.state_dict().items() if name != "last.weight"}, path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    ARCHITECTURES["llama"].make().save_pretrained(path)
    return path


def start(path: Path, world_size: int, **options: Any) -> ShardedModelGroup:
    few = Placement(cpus_per_rank=0.25)
    given: dict[str, Any] = {
        "device": "cpu",
        "preflight": False,
        "progress": False,
        "timeouts": TIMEOUTS,
        "placement": few,
    }
    return ShardedModelGroup.from_checkpoint(path, world_size=world_size, **{**given, **options})


@pytest.fixture
def groups() -> Iterator[Callable[..., ShardedModelGroup]]:
    """Starts groups that are shut down after the test."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(start(*args, **options))


@pytest.fixture(scope="module")
def pair(llama: Path) -> Iterator[tuple[ShardedModelGroup, ShardedModelGroup]]:
    """Two healthy groups of two and three ranks, for tests that leave both READY."""
    with start(llama, 2) as source, start(llama, 3, loading=Loading(dtype=torch.bfloat16)) as target:
        yield source, target


@pytest.fixture(scope="module")
def ones(llama: Path) -> Iterator[tuple[ShardedModelGroup, ShardedModelGroup]]:
    """Two groups of one rank, for tests that leave both READY."""
    with start(llama, 1) as source, start(llama, 1) as target:
        yield source, target


def change(step: float) -> None:
    """Change every parameter and buffer of a module, alike at every world size."""
    from raysharding import current_worker

    with torch.no_grad():
        for tensor in (*current_worker().module.parameters(), *current_worker().module.buffers()):
            tensor.add_(step if tensor.is_floating_point() else int(step))


def slow_down(seconds: float) -> None:
    """Make every bucket that a rank receives take its time."""
    from raysharding.distributed.weights import links

    take = links.SharedLink.take

    def slow(self: Any, index: int, num_bytes: int) -> torch.Tensor:
        time.sleep(seconds)
        return take(self, index, num_bytes)

    links.SharedLink.take = slow  # type: ignore[method-assign]


def own_statistics() -> None:
    """Let a buffer differ between the ranks, as the statistics of a BatchNorm in training do."""
    from raysharding import current_worker

    worker = current_worker()
    worker.module.get_buffer("norm.running_var").fill_(17 + worker.rank)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a copy of the small model take many rounds."""
    monkeypatch.setattr("raysharding.group.launch.copy_weights._BUCKET_BYTES", 256)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key].to(right[key].dtype), right[key]) for key in left)


REPLICAS = {"sharding": Sharding(replicate_size=2)}
BFLOAT16 = {"loading": Loading(dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("sources", "of_source", "targets", "of_target"),
    [
        pytest.param(1, {}, 3, {}, id="1 to 3", marks=pytest.mark.full),
        pytest.param(3, {}, 2, {}, id="3 to 2", marks=pytest.mark.full),
        pytest.param(4, REPLICAS, 3, {}, id="replicas to 3", marks=pytest.mark.full),
        pytest.param(2, {}, 4, REPLICAS, id="2 to replicas"),
        pytest.param(2, {}, 3, BFLOAT16, id="float32 to bfloat16"),
        pytest.param(3, BFLOAT16, 2, {}, id="bfloat16 to float32", marks=pytest.mark.full),
    ],
)
def test_the_weights_are_those_of_a_save_and_a_load(
    sources: int,
    of_source: dict[str, Any],
    targets: int,
    of_target: dict[str, Any],
    net: Path,
    groups: Callable[..., ShardedModelGroup],
    tmp_path: Path,
) -> None:
    source = groups(net, sources, model=make_net(), **of_source)
    target = groups(net, targets, model=make_net(), **of_target)
    source.call(change, 0.37)
    source.call(own_statistics)
    report = source.copy_to(target)
    copied = target.state_dict()
    source.save(tmp_path / "save")
    target.call(change, 5.0)
    target.load(tmp_path / "save")
    assert same(copied, target.state_dict())
    assert copied["norm.running_var"].unique().tolist() == [17.0], "rank 0's"
    assert report.wire_bytes == 0
    # Integers among floats are aligned.
    assert report.num_bytes <= report.shared_bytes <= 1.02 * report.num_bytes


def test_every_byte_moves_once_and_memory_is_two_buckets(pair: tuple[ShardedModelGroup, ShardedModelGroup]) -> None:
    source, target = pair
    source.call(change, 0.01)
    first, second = source.copy_to(target), source.copy_to(target)
    num_bytes = sum(tensor.numel() * 2 for tensor in source.state_dict().values())
    for report in (first, second):
        assert num_bytes <= report.shared_bytes <= 1.02 * num_bytes
        assert report.wire_bytes == 0
        assert report.num_tensors == len(source.state_dict())
    assert first.is_planned, "it was the first"
    assert not second.is_planned
    assert max(*second.source_extra_bytes, *second.target_extra_bytes) <= 2 * 16 << 20
    assert same(source.state_dict(), target.state_dict())
    assert "plan kept" in str(second)
    assert isinstance(second, CopyReport)


def test_results_say_with_which_weights(pair: tuple[ShardedModelGroup, ShardedModelGroup]) -> None:
    """The version grows with each change, and goes with the weights to the other group, whatever that one had."""
    source, target = pair
    ids: dict[str, Any] = {"input_ids": torch.ones(4, 3, dtype=torch.long)}

    def versions(group: ShardedModelGroup) -> set[int | None]:
        calls = [group.forward.remote(**ids), group.generate.remote(ids["input_ids"], max_new_tokens=1)]
        calls.append(group.predict.remote(ids, batch_size=4, progress=False))
        for call in calls:
            call.result(60)
        return {call.weights_version for call in calls}

    (before,) = versions(source)
    assert before is not None
    source.call(change, 1e-3)
    source.set_optimizer(torch.optim.SGD, lr=1e-3)
    stepped = source.train_step.remote(**ids, labels=ids["input_ids"])
    stepped.result(60)
    assert versions(source) == {stepped.weights_version} == {before + 2}
    assert source.copy_to(target).weights_version == before + 2
    assert versions(target) == {before + 2}
    target.call(change, 1e-3)
    assert versions(target) == {before + 3}


def test_calls_before_and_after_it_are_in_order_in_both_queues(
    pair: tuple[ShardedModelGroup, ShardedModelGroup],
) -> None:
    source, target = pair
    ids = torch.arange(8).reshape(1, 8)
    before = target.forward(input_ids=ids).logits
    earlier = target.forward.remote(input_ids=ids)
    source.call.remote(change, 0.02)
    copy = source.copy_to.remote(target)
    later = target.forward.remote(input_ids=ids)
    source.call.remote(change, 1.0)
    assert torch.equal(earlier.result().logits, before)
    assert not torch.equal(later.result().logits, before)
    assert copy.result().num_bytes
    source.call(change, -1.0)


def test_copies_both_ways_at_once_end(pair: tuple[ShardedModelGroup, ShardedModelGroup]) -> None:
    source, target = pair
    calls: list[Any] = []
    threads = [
        threading.Thread(target=lambda a=a, b=b: calls.extend(a.copy_to.remote(b) for _ in range(5)))
        for a, b in ((source, target), (target, source))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len([call.result(60) for call in calls]) == 10
    assert same(source.state_dict(), target.state_dict())


def test_a_copy_waits_for_a_busy_target_without_a_deadline_of_its_own(
    pair: tuple[ShardedModelGroup, ShardedModelGroup],
) -> None:
    source, target = pair
    busy = target.call.remote(time.sleep, 1.0)
    begun = now()
    report = source.copy_to(target)
    assert busy.done()
    assert now() - begun > 0.5
    assert report.seconds < 0.5, "the ranks of the source did not wait in the copy"


def test_an_interrupt_cancels_it_in_both_queues(pair: tuple[ShardedModelGroup, ShardedModelGroup]) -> None:
    source, target = pair
    busy = target.call.remote(time.sleep, 1.5)
    copy = source.copy_to.remote(target)
    source.interrupt()
    with pytest.raises(CallCancelledError):
        copy.result(10)
    busy.result()
    assert source.copy_to(target).num_bytes, "both queues go on"


def test_a_copy_that_is_refused_in_one_queue_holds_up_neither(
    pair: tuple[ShardedModelGroup, ShardedModelGroup],
) -> None:
    """Whichever of the two controllers queues the copy; the lock is another driver's."""
    for source, target in (pair, pair[::-1]):
        connection = target._client.connection
        target._client.take_lock("predict", "its run")
        with pytest.raises(GroupError, match="copy_to is refused while predict runs"):
            source.copy_to(target)
        assert source.call(int) == [0] * source.world_size
        assert target.call(int) == [0] * target.world_size
        connection.ask("release_lock", "its run")
        assert source.copy_to(target).num_bytes


def controller_of(group: ShardedModelGroup) -> int:
    """The process of a group's controller."""
    return int(group._client.connection.where.rpartition(" ")[2])


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_controller_that_is_killed_leaves_the_other_group_ready(
    side: str, is_queued: bool, ones: tuple[ShardedModelGroup, ShardedModelGroup]
) -> None:
    """With the copy in both queues, and while the copy is on its way there."""
    source, target = ones
    lost, other = (source, target) if side == "source" else (target, source)
    source.copy_to(target)
    if is_queued:
        busy = other.call.remote(time.sleep, 2.0)
        copy = source.copy_to.remote(target)
        os.kill(controller_of(lost), signal.SIGKILL)
    else:
        busy = other.call.remote(int)
        os.kill(controller_of(lost), signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (controller_of(lost), signal.SIGKILL)).start()
        copy = source.copy_to.remote(target)
    with pytest.raises(GroupError):
        copy.result(30)
    busy.result(30)
    assert other.call(int) == [0]
    assert other.state is GroupState.READY
    await_state(lost, GroupState.BROKEN, 15)
    lost.restart()
    assert source.copy_to(target).num_bytes


def test_groups_that_do_not_fit_are_told_apart(
    pair: tuple[ShardedModelGroup, ShardedModelGroup], net: Path, groups: Callable[..., ShardedModelGroup]
) -> None:
    source, target = pair
    with pytest.raises(ValueError, match="not this one"):
        source.copy_to(source)
    with pytest.raises(ValueError, match="copy_to\\(str\\)"):
        source.copy_to("other")
    other = groups(net, 1, model=make_net())
    with pytest.raises(PlanError, match=r"first\.weight: the target has it") as caught:
        source.copy_to(other)
    assert "the source has it" in str(caught.value)
    assert (source.state, other.state) == (GroupState.READY, GroupState.READY)
    assert source.copy_to(target).num_bytes
    with pytest.raises(PlanError, match="merge=True, but the source has no adapters"):
        source.copy_to(target, merge=True)
    assert source.copy_to(target).num_bytes


def break_in_a_copy(
    source: ShardedModelGroup, target: ShardedModelGroup, lost: ShardedModelGroup, rank: int, **options: Any
) -> GroupError:
    """Kill a rank in the middle of a copy, and return the copy's error."""
    target.call(slow_down, 0.1)
    copy = source.copy_to.remote(target, **options)
    time.sleep(1.0)
    assert not copy.done()
    begun = now()
    os.kill(lost.ranks[rank].pid, signal.SIGKILL)
    with pytest.raises(GroupError, match=f"rank {rank} died") as caught:
        copy.result(30)
    assert now() - begun < 8
    assert lost.state is GroupState.BROKEN
    return caught.value


@pytest.mark.usefixtures("small_buckets")
def test_ranks_that_die_in_a_copy(llama: Path, groups: Callable[..., ShardedModelGroup]) -> None:
    """A source leaves mixed weights, unless the copy is staged; a target leaves the source READY."""
    source, target = groups(llama, 2), groups(llama, 2)
    old = target.state_dict()
    source.call(change, 1.0)
    break_in_a_copy(source, target, source, 1, staged=True)
    await_state(target, GroupState.READY, 15)
    assert same(old, target.state_dict())
    source.restart()
    source.call(change, 1.0)
    error = break_in_a_copy(source, target, source, 1)
    assert target.state is GroupState.BROKEN
    assert any("mixed weights" in note for note in error.__notes__)
    with pytest.raises(GroupBrokenError):
        target.state_dict()
    target.restart()
    assert same(old, target.state_dict())
    source.restart()
    source.call(change, 2.0)
    break_in_a_copy(source, target, target, 0)
    assert source.state is GroupState.READY
    target.restart()
    assert source.copy_to(target).is_planned
    assert same(source.state_dict(), target.state_dict())


@pytest.mark.full
def test_a_target_that_hangs_leaves_the_source_ready(llama: Path, groups: Callable[..., ShardedModelGroup]) -> None:
    source = groups(llama, 2)
    target = groups(llama, 2, timeouts=Timeouts(call_s=4, drain_s=1))
    source.copy_to(target)
    os.kill(target.ranks[1].pid, signal.SIGSTOP)
    with pytest.raises(GroupError, match="rank 1 hung"):
        source.copy_to(target)
    assert target.state is GroupState.BROKEN
    assert source.state is GroupState.READY
    assert source.state_dict()


def fail_on_rank(rank: int) -> None:
    """Make a rank of a source run out of memory in a copy."""
    from raysharding import current_worker
    from raysharding.distributed.weights import plan_shards

    def values(self: Any, segment: Any) -> torch.Tensor:
        raise MemoryError("no memory for this segment")

    if current_worker().rank == rank:
        plan_shards.PlanShards.values = values  # type: ignore[method-assign]


def test_a_source_whose_rank_raises_stays_ready(llama: Path, groups: Callable[..., ShardedModelGroup]) -> None:
    source, target = groups(llama, 2), groups(llama, 1)
    source.call(fail_on_rank, 1)
    first, second = source.copy_to.remote(target), source.copy_to.remote(target)
    with pytest.raises(GroupError, match="rank 1: MemoryError: no memory for this segment") as caught:
        first.result(15)
    with pytest.raises(GroupError):  # also where the target has mixed weights, and begins nothing
        second.result(15)
    assert source.state is GroupState.READY
    assert any(note.startswith("the source") for note in caught.value.__notes__)
    assert source.state_dict()


def lora(**fields: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], **fields})


def test_adapters_go_alone_or_merged(llama: Path, groups: Callable[..., ShardedModelGroup], tmp_path: Path) -> None:
    source = groups(llama, 2, peft_config=lora())
    target, plain = groups(llama, 3, peft_config=lora()), groups(llama, 3)
    source.call(change, 0.3)
    of_target = target.state_dict()
    report = source.copy_to(target)
    adapters = {name for name in of_target if "lora_" in name}
    copied, mine = target.state_dict(), source.state_dict()
    assert report.num_tensors == len(adapters)
    assert same({name: mine[name] for name in adapters}, {name: copied[name] for name in adapters})
    assert all(torch.equal(copied[name], of_target[name]) for name in of_target.keys() - adapters)

    with pytest.raises(PlanError, match="give merge=True"):
        source.copy_to(plain)
    with pytest.raises(PlanError, match="copy adapters into adapters"):
        plain.copy_to(target)
    merged = source.copy_to(plain, merge=True)
    assert merged.is_merged
    assert same(alone(llama, mine), plain.state_dict())
    assert same(mine, source.state_dict()), "the source keeps its adapters"


def alone(llama: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the merged weights of one process."""
    import peft
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model = peft.get_peft_model(model, lora())
    model.base_model.model.load_state_dict(state)
    return dict(model.merge_and_unload().state_dict())


@pytest.mark.full
def test_adapters_of_another_scale_are_refused(llama: Path, groups: Callable[..., ShardedModelGroup]) -> None:
    source, target = groups(llama, 1, peft_config=lora()), groups(llama, 1, peft_config=lora(lora_alpha=32))
    with pytest.raises(PlanError, match="another scale"):
        source.copy_to(target)


def test_a_fit_can_copy_between_its_steps_and_not_be_copied_into(
    pair: tuple[ShardedModelGroup, ShardedModelGroup],
) -> None:
    source, target = pair
    source.set_optimizer(torch.optim.SGD, lr=0.1)
    seen: list[int] = []

    class Copies:
        every = 2

        def __call__(self, step: FitStep) -> None:
            with pytest.raises(GroupError, match="fit"):
                target.copy_to(source)
            assert source.copy_to(target).num_bytes
            assert same(source.state_dict(), target.state_dict())
            seen.append(step.num_steps)

    ids = [{"input_ids": list(range(row, row + 8)), "labels": list(range(row, row + 8))} for row in range(16)]
    source.fit(ids, batch_size=4, callbacks=[Copies()], progress=False)
    assert seen == [2, 4]


@pytest.mark.full
@pytest.mark.parametrize("side", ["source", "staged", "target", "merged"])
def test_a_kill_at_any_moment_leaves_the_other_group_ready(
    side: str, llama: Path, groups: Callable[..., ShardedModelGroup]
) -> None:
    moments = random.Random(7)
    survivor = groups(llama, 2, **({"peft_config": lora()} if side == "merged" else {}))
    survivor.call(change, 1.0)
    options = {"staged": side == "staged", "merge": side == "merged"}
    for number in range(4):
        with start(llama, 2) as victim:
            source, target = (survivor, victim) if side in ("target", "merged") else (victim, survivor)
            if number % 2:
                source.copy_to(target, **options)  # connects
            old = survivor.state_dict()
            victim.call(change, 1.0 + number)
            new = victim.state_dict()
            copy = source.copy_to.remote(target, **options)
            time.sleep(moments.uniform(0, 0.02 if number % 2 else 0.4))
            begun = now()
            os.kill(victim.ranks[moments.randrange(2)].pid, signal.SIGKILL)
            try:
                copy.result(30)
            except GroupError:
                assert now() - begun < 18
            if side == "source" and survivor.state is GroupState.BROKEN:
                assert "mixed weights" in survivor.status()["cause"]
                survivor.restart()
                continue
            found = survivor.state_dict()
            assert same(old, found) or (source is victim and same(new, found))
