"""Training over data: a small language model learns Python's own documentation strings, stops, and goes on.

The Parquet file is made of the standard library's docstrings, the model from nothing: nothing is fetched, and no GPU is
needed. A rank for each GPU, or two on CPUs, train and save; another group, of one rank, goes on from there; a PNG shows
the curve of both. Run

    bash examples/finetune.sh [--steps 300] [--out DIRECTORY] [--device cpu]
"""

from __future__ import annotations

import argparse
import ast
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raysharding import FitReport, Scheduled, ShardedModelGroup

LENGTH = 128
"""Bytes of a row; every byte is a token."""
BATCH = 16


def docstrings() -> Iterator[str]:
    """The documentation strings of the standard library, module by module."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def write_rows(path: Path) -> int:
    """Cut the text into rows of `LENGTH` tokens; return how many."""
    text = "\n\n".join(docstrings()).encode("utf-8")
    rows = [list(text[start : start + LENGTH]) for start in range(0, len(text) - LENGTH, LENGTH)]
    # A causal model shifts the labels itself.
    columns = {"input_ids": pa.array(rows, pa.list_(pa.int32())), "labels": pa.array(rows, pa.list_(pa.int32()))}
    pq.write_table(pa.table(columns), path, row_group_size=512)
    return len(rows)


def write_model(path: Path) -> None:
    """A Llama of 0.5 million parameters, with random weights, over bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)


def optimizer(num_steps: int) -> Scheduled:
    """AdamW with a learning rate that rises for a tenth of the steps, then falls."""
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=3e-3, total_steps=num_steps, pct_start=0.1)
    return Scheduled(torch.optim.AdamW, schedule, lr=3e-3)


def say(group: ShardedModelGroup, start: str) -> str:
    """What the model goes on with after `start`."""
    ids = torch.tensor([list(start.encode())])
    made = group.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False,
                          pad_token_id=0)  # fmt: skip
    return bytes(made[0].tolist()).decode("utf-8", "replace")


def train(group: ShardedModelGroup, directory: Path, *, last_step: int, save_every: int, resume: bool) -> FitReport:
    """Fit the group to the rows, up to a step; the same call begins a run and goes on with it."""
    report: FitReport = group.fit(
        directory / "docstrings.parquet",
        batch_size=BATCH,
        epochs=100,
        max_steps=last_step,
        shuffle=True,
        max_grad_norm=1.0,
        save_to=directory / "saves",
        save_every=save_every,
        keep_last=2,
        resume=resume,
    )
    print(f"{group.world_size} rank(s): {report}")
    return report


def run(directory: Path, num_steps: int, device: str | None) -> None:
    """Train half of the steps, save, and go on in another group."""
    num_rows = write_rows(directory / "docstrings.parquet")
    write_model(directory / "model")
    print(f"{num_rows} rows of {LENGTH} bytes in {directory / 'docstrings.parquet'}")
    every = max(1, num_steps // 6)
    load = partial(ShardedModelGroup.from_checkpoint, optimizer=optimizer(num_steps), device=device)
    with load(directory / "model") as group:  # a rank for each GPU, or two on CPUs
        first = train(group, directory, last_step=num_steps // 2, save_every=every, resume=False)
    assert first.saved is not None
    # Weights, optimizer, learning rate and the place in the data come back; the number of ranks may be another.
    with load(first.saved, world_size=1) as group:
        second = train(group, directory, last_step=num_steps, save_every=every, resume=True)
        print(f"It says: {say(group, 'Return the ')!r}")
    whole = first.then(second)
    whole.plot(directory / "curve.png")
    print(f"Loss {whole.history['loss'][0]:.3f} to {whole.loss:.3f}; the curve: {directory / 'curve.png'}")
    reopened = LlamaForCausalLM.from_pretrained(str(second.saved))
    print(f"transformers opens {second.saved}: {sum(p.numel() for p in reopened.parameters()):,} parameters")


def main() -> None:
    """Parse the command line, start Ray, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps in all (default 300)")
    parser.add_argument("--out", type=Path, help="where files go (default: a temporary directory)")
    parser.add_argument("--device", help="type of the ranks' devices; default: cuda if the cluster has GPUs, else cpu")
    arguments = parser.parse_args()
    directory = arguments.out or Path(tempfile.mkdtemp(prefix="raysharding-finetune-"))
    directory.mkdir(parents=True, exist_ok=True)
    ray.init()
    run(directory, arguments.steps, arguments.device)


if __name__ == "__main__":
    main()
