"""One rank's calls without Ray: forward, gathered outputs, train_step, call, state_dict, save, status."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.batch import Out, PerRank, RankBatch, RankOutput, Split, deal, select_output
from raysharding.checkpoint import open_checkpoint
from raysharding.worker import Worker, current_worker
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

WORLD_SIZE = 3
SIZES = (9, 3, 7, 2)
VOCAB = 31
TURNED_ROWS = torch.arange(36.0).reshape(12, 3) / 36
MODES: list[Literal["train", "eval"]] = ["train", "eval", "eval"]


def tokens(num_rows: int, length: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def masked_labels() -> torch.Tensor:
    labels = tokens(7, seed=1)
    labels[5:] = -100
    labels[0, 3:] = -100
    return labels


def worker_of(path: str, model: Any = None) -> Worker:
    worker = Worker(dist.get_rank(), dist.get_world_size(), dist.get_rank(), "cpu")
    worker.build(model, open_checkpoint(path))
    worker.load()
    return worker


def batch_of(**kwargs: Any) -> RankBatch:
    return deal((), kwargs, dist.get_world_size())[dist.get_rank()]


def run_llama(folder: str) -> dict[str, Any]:
    worker = worker_of(f"{folder}/llama")
    assert worker.status.phase == "ready"
    assert not worker.module.training
    results: dict[str, Any] = {}
    batch = batch_of(input_ids=Split(tokens(7)), labels=Split(masked_labels()))
    results["seven"] = worker.forward(batch)
    results["two"] = worker.forward(batch_of(input_ids=Split(tokens(2))))
    results["one"] = worker.forward(batch_of(input_ids=Split(tokens(1))))
    results["replicated"] = worker.forward(batch_of(input_ids=tokens(2)))
    results["rank0"] = worker.forward(batch, out=Out.rank0())
    with pytest.raises(ValueError, match="mode='test'"):
        worker.forward(batch, mode="test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set_optimizer"):
        worker.trainer.train_step(batch)
    worker.trainer.set_optimizer(torch.optim.SGD, {"lr": 0.1})
    results["metrics"] = [worker.trainer.train_step(batch, max_grad_norm=0.5) for _ in range(2)]
    assert not worker.module.training
    results["state"] = {name: value for part in worker.state_dict() for name, value in part.items()}
    results["report"] = worker.save(f"{folder}/saved")
    status = worker.status()
    assert status["pid"] == os.getpid()
    assert (status["rank"], status["phase"], status["last_call"]) == (dist.get_rank(), "ready", "save")
    assert status["host_bytes"] > 2**20
    assert status["bytes_done"] == status["bytes_total"] > 0
    worker.close()
    assert worker.status()["phase"] == "closed"
    with pytest.raises(RuntimeError, match="no module"):
        _ = worker.module
    return results


def run_square(folder: str) -> dict[str, Any]:
    """Outputs whose shape does not tell rows from rows × rows."""
    results: dict[str, Any] = {}
    worker = worker_of(f"{folder}/bert-classifier")
    for num_rows in SIZES:
        batch = batch_of(input_ids=Split(tokens(num_rows, 3)), output_hidden_states=True, return_dict=True)
        results[f"bert {num_rows}"] = worker.forward(batch)
    worker = worker_of(f"{folder}/clip")
    for num_rows in SIZES:
        output = worker.forward(batch_of(input_ids=Split(tokens(num_rows, 5)), pixel_values=Split(pixels(num_rows))))
        wanted = ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds")
        value = None if output.value is None else {key: output.value[key] for key in wanted}
        results[f"clip {num_rows}"] = RankOutput(value, local=output.local)
    return results


def pixels(num_rows: int) -> torch.Tensor:
    return torch.rand(num_rows, 3, 16, 16, generator=torch.Generator().manual_seed(3))


class Reporter(nn.Module):
    """Says in what mode it runs; its buffer is the state that a forward must not change by default."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        full = torch.zeros(10, 4)
        y = self.norm(self.linear(x))
        return {"y": y, "turned": y.T, "training": self.training, "view": full[: x.shape[0]]}


class Stack(nn.Module):
    """Two linear layers, each its own FSDP group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


STACK_ROWS = torch.arange(18.0).reshape(6, 3) / 18


def square(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.square().mean()


def cut_short(x: torch.Tensor) -> None:
    """A user's own training code that fails in the middle of backward."""

    def refuse(_: torch.Tensor) -> None:
        raise KeyError("in backward")

    def watch(_: nn.Module, given: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    module = current_worker().module
    # When the first layer's output has its gradient, the second layer's are reduced and the first one's are not.
    handle = module.get_submodule("layers.0").register_forward_hook(watch)
    try:
        torch.autograd.backward(square(module(x)))
    finally:
        handle.remove()


def run_aborted_backward(path: str) -> dict[str, Any]:
    worker = worker_of(path, Stack)
    worker.trainer.set_optimizer(torch.optim.SGD, {"lr": 0.5})
    batch = batch_of(x=Split(STACK_ROWS))
    with pytest.raises(KeyError, match="in backward"):
        worker.call(cut_short, batch.args, batch.kwargs)
    assert worker.status.usable
    assert all(parameter.grad is None for parameter in worker.module.parameters())
    empty = worker.forward(batch_of(x=Split(STACK_ROWS[:1])))
    assert (empty.value is None) == (worker.rank > 0), "nothing comes of a dummy row"
    return {"after abort": [worker.trainer.train_step(batch, loss=square) for _ in range(3)]}


def run_calls(path: str) -> dict[str, Any]:
    worker = worker_of(path, Reporter)
    # Four features of four rows: which dim holds rows, only the dim asked for tells.
    turned = worker.forward(batch_of(x=Split(TURNED_ROWS)), out=Out.gather(dim=-1))
    worker.module.get_submodule("linear").train()
    with pytest.raises(RuntimeError, match="call"):
        current_worker()
    batch = batch_of(x=Split(torch.ones(3, 3)))
    default, trained = worker.forward(batch), worker.forward(batch_of(x=Split(torch.ones(6, 3))), mode="train")
    assert (default.value["training"], trained.value["training"]) == (False, True)
    assert not default.value["y"].requires_grad
    assert default.value["view"].untyped_storage().nbytes() == default.value["view"].numel() * 4
    modes = [worker.module.get_submodule(name).training for name in ("", "linear", "norm")]
    assert modes == [False, True, False], "each submodule keeps its own mode"
    # The forward left the root's full parameters registered; the optimizer must get the shards all the same.
    worker.trainer.set_optimizer(torch.optim.SGD, {"lr": 0.5})
    assert worker.optimizer is not None
    assert all(isinstance(parameter, DTensor) for parameter in worker.optimizer.param_groups[0]["params"])
    step = batch_of(x=Split(torch.ones(6, 3)))
    step_in = partial(worker.trainer.train_step, step, lambda output: output["y"].square().mean(), None)
    losses = [step_in(mode)["loss"] for mode in MODES]
    assert losses[0] != losses[1], "batch statistics in train mode, running ones in eval mode"
    assert losses[2] < losses[1], "the step moved the parameters"
    seen = worker.call(lambda shift: current_worker().rank + shift, (10,))
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0)
    assert worker.status.phase == "call", "the phase of a failed call stays for the report"
    assert worker.status.usable
    with pytest.raises(RuntimeError, match="call"):
        current_worker()
    with pytest.raises(ValueError, match="returned a dict"):
        worker.trainer.set_optimizer(lambda parameters: {})  # type: ignore[arg-type, return-value]
    return {"seen": seen, "turned": turned}


def run_worker(folder: str) -> dict[str, Any]:
    return {
        **run_llama(folder),
        **run_square(folder),
        **run_calls(f"{folder}/reporter.safetensors"),
        **run_aborted_backward(f"{folder}/stack.safetensors"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("worker")
    for name in ("llama", "bert-classifier", "clip"):
        ARCHITECTURES[name].make().save_pretrained(path / name)
    torch.manual_seed(0)
    for model in (Reporter, Stack):
        save_file(model().state_dict(), path / f"{model.__name__.lower()}.safetensors")
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(WORLD_SIZE, run_worker, str(folder), timeout_s=100)


def gathered(ranks: list[dict[str, Any]], name: str, num_rows: int) -> Any:
    batch = deal((Split(torch.zeros(num_rows)),), {}, WORLD_SIZE)[0]
    return select_output(None, [result[name] for result in ranks], batch.rows, batch.dim)


def reference(folder: Path, name: str) -> Any:
    return type(ARCHITECTURES[name].make()).from_pretrained(folder / name)


def plain(folder: Path, model: Any) -> Any:
    module = model()
    module.load_state_dict(load_file(folder / f"{model.__name__.lower()}.safetensors"))
    return module


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-5, rtol=0)


@pytest.mark.timeout(120)
def test_forward_equals_one_process(ranks: list[dict[str, Any]], folder: Path) -> None:
    one_process = reference(folder, "llama")
    with torch.no_grad():
        expected = one_process(input_ids=tokens(7), labels=masked_labels())
        fewer = {num_rows: one_process(input_ids=tokens(num_rows)).logits for num_rows in (1, 2)}
    output = gathered(ranks, "seven", 7)
    assert type(output) is type(expected)
    assert close(output.logits, expected.logits)
    assert close(output.loss, expected.loss)
    assert output.past_key_values is None
    assert close(gathered(ranks, "two", 2).logits, fewer[2])
    assert close(gathered(ranks, "one", 1).logits, fewer[1])
    assert close(select_output(None, [result["replicated"] for result in ranks], (), 0).logits, fewer[2])
    assert [result["rank0"].value is None for result in ranks] == [False, True, True]
    assert [result["seen"] for result in ranks] == [10, 11, 12], "call runs inside the rank"


def test_training_and_saving_equal_one_process(ranks: list[dict[str, Any]], folder: Path) -> None:
    one_process = reference(folder, "llama")
    optimizer = torch.optim.SGD(one_process.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = one_process(input_ids=tokens(7), labels=masked_labels()).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(one_process.parameters(), 0.5)
        optimizer.step()
        for result in ranks:
            assert result["metrics"][step] == pytest.approx({"loss": loss.item(), "grad_norm": norm.item()}, abs=1e-5)
    assert [len(result["state"]) > 0 for result in ranks] == [True, False, False]
    expected = one_process.state_dict()
    assert set(ranks[0]["state"]) == set(expected)
    saved = type(one_process).from_pretrained(folder / "saved").state_dict()
    for name, value in expected.items():
        assert close(ranks[0]["state"][name], value), name
        assert torch.equal(saved[name], ranks[0]["state"][name]), name


@pytest.mark.parametrize("num_rows", SIZES)
def test_labels_by_rows_are_rows_and_rows_by_rows_are_not(
    ranks: list[dict[str, Any]], folder: Path, num_rows: int
) -> None:
    """Three labels for three rows are as square as CLIP's logits, and three positions as square again."""
    with torch.no_grad():
        expected = reference(folder, "bert-classifier")(input_ids=tokens(num_rows, 3), output_hidden_states=True)
        other = reference(folder, "clip")(input_ids=tokens(num_rows, 5), pixel_values=pixels(num_rows))
    output = gathered(ranks, f"bert {num_rows}", num_rows)
    assert close(output.logits, expected.logits)
    assert close(output.hidden_states[1], expected.hidden_states[1])
    output = gathered(ranks, f"clip {num_rows}", num_rows)
    assert close(output["text_embeds"], other.text_embeds)
    assert close(output["image_embeds"], other.image_embeds)
    rows = deal((Split(torch.zeros(num_rows)),), {}, WORLD_SIZE)[0].rows
    for name in ("logits_per_image", "logits_per_text"):
        shapes = [None if part is None else tuple(part.shape) for part in output[name]]
        assert isinstance(output[name], PerRank), name
        assert shapes == [(count, count) if count else None for count in rows]


def test_training_is_right_after_a_backward_that_raised_inside_a_call(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    one_process = plain(folder, Stack)
    optimizer = torch.optim.SGD(one_process.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss = square(one_process(STACK_ROWS))
        loss.backward()
        norm = nn.utils.get_total_norm(
            [parameter.grad for parameter in one_process.parameters() if parameter.grad is not None]
        )
        optimizer.step()
        for result in ranks:
            found = result["after abort"][step]
            assert found == pytest.approx({"loss": loss.item(), "grad_norm": norm.item()}, rel=1e-5)


def test_outputs_are_gathered_in_the_dim_asked_for(ranks: list[dict[str, Any]], folder: Path) -> None:
    one_process = plain(folder, Reporter).eval()
    output = select_output(Out.gather(dim=-1), [result["turned"] for result in ranks], (4, 4, 4), 0)
    with torch.no_grad():
        assert close(output["turned"], one_process(TURNED_ROWS)["turned"])
    assert isinstance(output["y"], PerRank), "its rows are in another dim"
