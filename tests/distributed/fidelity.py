"""The fidelity grid: every architecture loaded, run, trained and saved on W ranks, against one transformers process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import Split, deal
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding
from raysharding.distributed import (
    gather_state_dict,
    init_mesh,
    load_checkpoint,
    reshard,
    save_checkpoint,
    shard_module,
)
from raysharding.distributed.training.step import train_step
from raysharding.models import build_module
from tests.distributed.checks import outcome_of
from tests.models.architectures import ARCHITECTURES, Architecture
from tests.spawn import device_type

NUM_STEPS = 10


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    architecture: str
    """Name in `ARCHITECTURES`: what the checkpoint holds."""
    model: str | None = None
    """Auto class to load it with; the checkpoint's own class if `None`."""
    num_labels: int | None = None
    """Labels per row for a classifier; token labels if `None`."""
    max_shard_size: str = "20KB"
    """Makes a sharded index."""
    trains_in_eval: bool = False
    """Train in eval mode: BatchNorm's batch statistics differ between one process and several."""
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Loading`."""


CASES = {
    "llama": Case("llama"),
    "llama-tied-broadcast": Case("llama-tied", loading={"transport": "broadcast", "bucket_bytes": 4096}),
    "llama-single-file": Case("llama", max_shard_size="1GB", loading={"shared_memory": False, "bucket_bytes": 5000}),
    "gpt2": Case("gpt2"),
    "bert-new-head": Case("bert", "AutoModelForSequenceClassification", 2, loading={"strict": False}),
    "mixtral": Case("mixtral"),
    "qwen3-moe": Case("qwen3-moe"),
    "t5": Case("t5"),
    "vit": Case("vit", num_labels=3),
    "resnet": Case("resnet", num_labels=3, trains_in_eval=True),
    "gemma": Case("gemma"),
    "bart": Case("bart"),
    "mamba": Case("mamba"),
    "albert": Case("albert"),
}


def without_dropout(config: Any) -> Any:
    """A config.json with every drop-out rate at 0."""
    if isinstance(config, dict):
        return {
            key: 0.0 if "drop" in key and isinstance(value, float) else without_dropout(value)
            for key, value in config.items()
        }
    return config


def make_checkpoint(directory: Path, case: Case) -> None:
    """Write the case's checkpoint."""
    model = ARCHITECTURES[case.architecture].make()
    model.save_pretrained(directory, max_shard_size=case.max_shard_size)
    path = directory / "config.json"
    path.write_text(json.dumps(without_dropout(json.loads(path.read_text()))))


def batch_of(architecture: Architecture, case: Case) -> dict[str, torch.Tensor]:
    """Five rows (images: as many as there are), labels unevenly masked."""
    inputs = architecture.inputs()
    rows = next(iter(inputs.values())).shape[0]
    if case.num_labels is not None:
        return inputs | {"labels": torch.arange(rows) % case.num_labels}
    labels = inputs.pop("decoder_input_ids", inputs["input_ids"]).clone()
    labels[0, : labels.shape[1] - 2] = -100
    labels[-1, 1:] = -100
    return inputs | {"labels": labels}


def run_grid(root: str) -> dict[str, str]:
    """On every rank: all cases; returns case → traceback, empty where all is well."""
    return {name: outcome_of(partial(check_case, Path(root) / name, case)) for name, case in CASES.items()}


def check_case(directory: Path, case: Case) -> None:
    """One cell: bits, forward, loss curve, save and reopen."""
    import transformers

    loading = Loading(**case.loading)
    checkpoint = open_checkpoint(directory)
    module = build_module(case.model, checkpoint, None)
    shard_module(module, init_mesh(device_type()), Sharding())
    report = load_checkpoint(module, checkpoint, loading=loading)
    assert report.read_bytes <= 1.02 * checkpoint.num_bytes
    full = {name: tensor for part in gather_state_dict(module) for name, tensor in part.items()}

    auto = getattr(transformers, case.model or ARCHITECTURES[case.architecture].model)
    reference = auto.from_pretrained(directory)
    if dist.get_rank() == 0:
        expected = reference.state_dict()
        assert set(full) == set(expected)
        for name, tensor in expected.items():
            if name not in report.missing:
                assert torch.equal(full[name], tensor), name
    load_full(reference, full, report.missing)
    batch = batch_of(ARCHITECTURES[case.architecture], case)
    check_forward(module, reference, batch)
    check_training(module, reference, batch, training=not case.trains_in_eval)
    check_save(module, directory.parent / f"{directory.name}-saved", auto, checkpoint)


def load_full(reference: nn.Module, full: dict[str, torch.Tensor], names: tuple[str, ...]) -> None:
    """Give the reference, on every rank, the values that the checkpoint lacked and rank 0 holds in full."""
    tensors = dict(reference.named_parameters())
    for name in names:
        with torch.no_grad():
            if dist.get_rank() == 0:
                tensors[name].copy_(full[name])
            dist.broadcast(tensors[name].data, src=0)


def check_forward(module: nn.Module, reference: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Logits in eval mode equal one process's."""
    with torch.no_grad():
        ours = module.eval()(**batch)
        theirs = reference.eval()(**batch)
    reshard(module)
    torch.testing.assert_close(ours.logits.cpu(), theirs.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.loss.cpu(), theirs.loss, rtol=1e-5, atol=1e-5)


def check_training(module: nn.Module, reference: nn.Module, batch: dict[str, torch.Tensor], *, training: bool) -> None:
    """Ten AdamW steps give the loss curve of one process."""
    dealt = deal((), {name: Split(value) for name, value in batch.items()}, dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    oracle = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    reference.train(training)
    for step in range(NUM_STEPS):
        metrics = train_step(module, optimizer, dealt, training=training)
        oracle.zero_grad()
        loss = reference(**batch).loss
        loss.backward()
        oracle.step()
        assert abs(metrics["loss"] - loss.item()) < 1e-5, f"step {step}: {metrics['loss']} against {loss.item()}"


def check_save(module: nn.Module, path: Path, auto: Any, checkpoint: Any) -> None:
    """Plain transformers opens what we save, manifest and all, and finds what the shards hold."""
    save_checkpoint(module, path, overwrite=True, source=checkpoint)
    assert (path / "raysharding.manifest.json").exists()
    full = {name: tensor for part in gather_state_dict(module) for name, tensor in part.items()}
    if dist.get_rank() == 0:
        reopened, info = auto.from_pretrained(path, output_loading_info=True)
        assert not info["missing_keys"], info["missing_keys"]
        assert not info["unexpected_keys"], info["unexpected_keys"]
        for name, tensor in reopened.state_dict().items():
            assert torch.equal(full[name], tensor), name
