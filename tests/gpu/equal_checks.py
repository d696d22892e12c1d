"""Groups through Ray compute what one process does on the CPU: one group of each kind runs many checks.

`python -m tests.gpu.equal_checks cuda|cpu|sim WORLD_SIZE...`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import nn

from raysharding import ShardedModelGroup, Sharding, Split, current_worker
from tests.accelerator.build import load_extension
from tests.gpu.driver import NUM_ROWS, alone, batch, cluster, differ, forward, ids, logits, start
from tests.gpu.rank_checks import contexts
from tests.gpu.record import Record, Skipped

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MAX_NORM = 0.5
"""Below the norms of the steps, so that they are clipped."""
NUM_DATA, BATCH = 36, 8


def train_alone(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> list[float]:
    """Losses of one process, which trains the model."""
    optimizer, losses = ADAMW([one for one in model.parameters() if one.requires_grad]), []
    for rows in batches:
        loss = model.train()(**rows).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def step(group: ShardedModelGroup, seed: int) -> float:
    """The loss of a step."""
    rows: dict[str, Any] = {name: Split(value) for name, value in batch(seed).items()}
    return float(group.train_step(**rows, max_grad_norm=MAX_NORM)["loss"])


def check_training(group: ShardedModelGroup, path: Path) -> str:
    """Steps with clipping: losses, weights, and the forward after them."""
    model = alone(path)
    group.load(path)
    group.set_optimizer(torch.optim.AdamW, lr=1e-2)
    expected = train_alone(model, [batch(seed) for seed in range(4)])
    said = differ("losses", [step(group, seed) for seed in range(4)], expected)
    # AdamW divides small gradients by themselves, and with them what rounding has changed.
    weights = differ("weights", group.state_dict(), dict(model.state_dict()), close=1e-3)
    return f"{said}, {weights}, {forward(group, logits(model), close=1e-3)}"


def check_saving(group: ShardedModelGroup, path: Path, folder: Path) -> str:
    """After a save and a load the next steps have the same bits; transformers opens the save."""
    group.save(folder)
    expected = logits(folder)
    said = forward(group, expected)
    first = [step(group, seed) for seed in (5, 6)]
    group.load(folder)
    again = [step(group, seed) for seed in (5, 6)]
    assert first == again, (first, again)
    return f"the same bits; transformers opens it, {said}"


def check_saving_in_the_background(group: ShardedModelGroup, path: Path, folder: Path) -> str:
    """The files hold the weights of the call, whatever the steps after it do."""
    expected = group.state_dict()
    group.save(folder, async_save=True)
    for seed in (7, 8):
        step(group, seed)
    group.wait_for_save()
    found = {name: tensor for name, tensor in alone(folder).state_dict().items() if name in expected}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return f"{len(expected)} tensors have the bits of the call"


def write_rows(path: Path) -> list[dict[str, torch.Tensor]]:
    """Write rows to train on; returns the batches of an epoch."""
    rows, labels = ids(9, NUM_DATA), ids(9, NUM_DATA)
    labels[::5] = -100
    columns = {"number": pa.array(range(NUM_DATA))}
    columns |= {
        name: pa.array(value.tolist(), pa.list_(pa.int64()))
        for name, value in (("input_ids", rows), ("labels", labels))
    }
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return [
        {"input_ids": rows[first : first + BATCH], "labels": labels[first : first + BATCH]}
        for first in range(0, NUM_DATA, BATCH)
    ]


def check_fit(group: ShardedModelGroup, path: Path) -> str:
    """A fit over Parquet, and an evaluation after it."""
    data, model = path.with_name("rows.parquet"), alone(path)
    batches = write_rows(data)
    group.load(path)
    group.set_optimizer(torch.optim.AdamW, lr=1e-2)
    report = group.fit(data, batch_size=BATCH, epochs=2, max_grad_norm=MAX_NORM, progress=False)
    losses = list(report.history["loss"])
    said = differ(f"{len(losses)} losses", losses, train_alone(model, 2 * batches))
    rows, labels = (torch.cat([one[name] for one in batches]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        loss = F.cross_entropy(model(input_ids=rows).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()
    evaluated = group.evaluate(data, batch_size=BATCH)
    assert evaluated["num_rows"] == NUM_DATA
    return f"{said}; {differ('evaluations', [evaluated['loss']], [loss])}"


def check_predict(group: ShardedModelGroup, path: Path, output: Path) -> str:
    """From Parquet to Parquet: each row once, in order."""
    data = path.with_name("rows.parquet")
    batches = write_rows(data)
    group.load(path)
    columns: dict[str, Any] = {"columns": ["input_ids"], "keys": ["number"]}
    report = group.predict(data, batch_size=BATCH, output=output, progress=False, **columns)
    table = pa.concat_tables([pq.read_table(file) for file in sorted(output.glob("*.parquet"))])
    assert table["number"].to_pylist() == list(range(NUM_DATA))
    with torch.no_grad():
        expected = alone(path)(input_ids=torch.cat([one["input_ids"] for one in batches])).logits[:, -1]
    said = differ("logits", torch.tensor(table["logits"].to_pylist()), expected)
    return f"{str(report).splitlines()[0]}; {said}"


def check_generate(group: ShardedModelGroup, path: Path) -> str:
    """Greedy ids are those of transformers."""
    group.load(path)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    model: Any = alone(path)
    found, expected = group.generate(input_ids=Split(ids()), **options), model.generate(ids(), **options)
    assert torch.equal(found, expected), (found, expected)
    return f"{tuple(found.shape)} ids are equal"


def check_copies(group: ShardedModelGroup, other: ShardedModelGroup, *, staged: bool) -> str:
    """Changed weights go to another group and back, with the bits that they have."""
    group.call(scale, 1.5)
    expected = group.state_dict()
    report = group.copy_to(other, staged=staged)
    copied = other.state_dict()
    assert all(torch.equal(copied[name], tensor) for name, tensor in expected.items())
    group.call(scale, 3.0)
    other.copy_to(group, staged=staged)
    back = group.state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    return str(report)


def scale(factor: float) -> None:
    """Change the weights of a rank."""
    with torch.no_grad():
        for parameter in current_worker().module.parameters():
            parameter.mul_(factor)


def check_adapters(group: ShardedModelGroup, path: Path, folder: Path) -> str:
    """LoRA trains as peft does in one process, which opens what is saved."""
    import peft
    from transformers import AutoModelForCausalLM

    group.save(folder / "begun", optimizer=False)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), folder / "begun", is_trainable=True
    )
    expected = train_alone(model, [batch(seed) for seed in range(3)])
    said = differ("losses", [step(group, seed) for seed in range(3)], expected)
    group.save(folder / "trained", optimizer=False)
    opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), folder / "trained")
    found, theirs = (peft.get_peft_model_state_dict(one) for one in (opened, model))
    said = f"{said}, {differ(f'{len(theirs)} adapters', found, theirs)}"
    return f"{said}, {forward(group, logits(opened.eval()))}"


def check_merged_copy(group: ShardedModelGroup, plain: ShardedModelGroup) -> str:
    """What a group without adapters gets computes what the adapters do."""
    report = group.copy_to(plain, merge=True)
    assert report.is_merged
    return forward(plain, group.forward(input_ids=Split(ids())).logits)


def check_contexts(group: ShardedModelGroup) -> None:
    """Ranks have contexts on their own devices, and the driver has none."""
    kind = group.ranks[0].device.partition(":")[0]
    if kind == "cuda":
        found = contexts({rank.pid for rank in group.ranks})
        assert len(found) == len(group.ranks), found
        assert not torch.cuda.is_initialized()
    elif kind == "sim":
        assert not load_extension().touched()


# --- the order of a run ---------------------------------------------------------------------------------------------


class Run:
    """All checks at one world size: what no GPU had run first, in groups that stand for many checks."""

    def __init__(self, record: Record, root: Path, kind: str, world_size: int) -> None:
        self.record, self.kind, self.world_size = record, kind, world_size
        self.path, self.folder = root / "model", root / f"W{world_size}"
        self.folder.mkdir()

    def check(self, what: str, check: Callable[..., object], *args: Any, **options: Any) -> None:
        """Run a check with a line of its own."""
        self.record.check(f"W={self.world_size} {what}", partial(check, *args, **options))

    def group(self, what: str, checks: Callable[[ShardedModelGroup], None], world_size: int, **options: Any) -> None:
        """Start a group, run checks on it, and end it: a group that does not start costs its checks alone."""
        started: list[ShardedModelGroup] = []

        def start_it() -> str:
            started.append(start(self.path, self.kind, world_size, self.world_size, **options))
            ranks = ", ".join(f"rank {rank.rank} {rank.device}" for rank in started[0].ranks)
            return f"{ranks}; {str(started[0].load_report).splitlines()[0]}"

        self.check(f"{what}: starts", start_it)
        for group in started:
            checks(group)
            self.check(f"{what}: ends", group.shutdown)

    def sharded(self, what: str, **options: Any) -> None:
        """A group with a sharding of its own."""

        def checks(group: ShardedModelGroup) -> None:
            self.check(f"{what}: forward", forward, group, logits(self.path))
            self.check(f"{what}: train", check_training, group, self.path)
            self.check(f"{what}: save, load, step", check_saving, group, self.path, self.folder / what)

        self.group(what, checks, self.world_size, sharding=Sharding(**options))

    def plain(self, group: ShardedModelGroup) -> None:
        """The checks of a group by default, and of a second one beside it."""
        self.check("contexts", check_contexts, group)
        self.check("fit over parquet, evaluate", check_fit, group, self.path)
        self.check("predict, parquet to parquet", check_predict, group, self.path, self.folder / "predicted")
        self.check("forward after load", lambda: (group.load(self.path), forward(group, logits(self.path)))[1])
        self.check("train", check_training, group, self.path)
        self.check("save, load, step", check_saving, group, self.path, self.folder / "saved")
        saved = self.folder / "background"
        self.check("save in the background", check_saving_in_the_background, group, self.path, saved)
        self.check("generate", check_generate, group, self.path)
        self.group("a second group, of one rank", partial(self.beside, group), 1)

    def beside(self, group: ShardedModelGroup, other: ShardedModelGroup) -> None:
        """The checks of two groups, and of a third with adapters."""
        self.check("copy_to it, and back", check_copies, group, other, staged=False)
        self.check("copy_to it, staged, and back", check_copies, group, other, staged=True)
        if importlib.util.find_spec("peft") is None:
            self.check("LoRA", skip, "peft is not installed")
            return
        from peft import LoraConfig

        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])

        def checks(adapted: ShardedModelGroup) -> None:
            self.check("LoRA: train, save as peft", check_adapters, adapted, self.path, self.folder / "adapters")
            self.check("LoRA: copy_to merged", check_merged_copy, adapted, other)

        self.group("LoRA", checks, self.world_size, peft_config=config, optimizer=ADAMW)

    def run(self) -> None:
        """Run all."""
        self.sharded("offload", cpu_offload=True)
        if self.world_size % 2 == 0:
            self.sharded("HSDP, two replicas", replicate_size=2)
        if self.world_size == 4:
            self.sharded("HSDP and offload", replicate_size=2, cpu_offload=True)
        self.group("group", self.plain, self.world_size)


def skip(why: str) -> None:
    """Give the reason a line."""
    raise Skipped(why)


def main(kind: str, *world_sizes: str) -> int:
    """Number of checks that failed."""
    record = Record.of_this_part()
    assert NUM_ROWS % max(map(int, world_sizes)) == 0
    with cluster(kind) as root:
        for world_size in map(int, world_sizes):
            Run(record, root, kind, world_size).run()
    return record.failures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
