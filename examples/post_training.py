"""Reinforcement learning on a Ray cluster: one group trains, one generates, one is the frozen reference.

A policy of a few thousand random parameters writes eight tokens after a prompt, and a plain Python function rewards
small ones. REINFORCE moves the trainer; `copy_to` moves its weights to the generator after every step, from shard to
shard. The loss has a penalty on the KL divergence from the reference, so that the policy stays near its start. Run

    bash examples/make_venv.sh demo,plot && .venv/bin/python examples/post_training.py

It prints rewards and writes `post_training.png`. Nothing is fetched, and no GPU is needed. For a model of yours change
`make_policy`, `reward` and the prompts: see docs/pages/post-training-loop.md.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raysharding import Placement, ShardedModelGroup, Split, current_worker

STEPS, PROMPTS, LENGTH, VOCABULARY = 20, 64, 8, 32
BETA = 0.02
"""Weight of the KL term; without it the policy forgets all but the reward."""


def reward(answer: list[int]) -> float:
    """Return the share of tokens below 8: a quarter at random."""
    return sum(token < 8 for token in answer) / len(answer)


def make_policy(path: str) -> None:
    """Write a small causal model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(max_position_embeddings=16, **sizes, **tokens)).save_pretrained(path)


def log_probabilities(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token after the first, [rows, length - 1]."""
    return logits[:, :-1].float().log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def score(input_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of this rank's rows; the logits, a vocabulary wide, stay on the rank."""
    with torch.no_grad():
        return log_probabilities(current_worker().module(input_ids=input_ids).logits, input_ids).cpu()


def policy_gradient(
    output: Any, input_ids: torch.Tensor, advantages: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return (sum, count) over this rank's answers: `train_step` divides by the count of all ranks."""
    chosen = log_probabilities(output.logits, input_ids)[:, -LENGTH:]
    ahead = reference[:, -LENGTH:] - chosen
    kl = ahead.exp() - ahead - 1  # Schulman's k3 estimator: never negative, and right on average
    return (BETA * kl - chosen * advantages[:, None]).sum(), chosen.numel()


def main() -> list[float]:
    """Train; return the mean reward of each step."""
    if not ray.is_initialized():
        ray.init(num_cpus=4, log_to_driver=False)  # on a cluster: ray.init()
    rewards, divergences = [], []
    with tempfile.TemporaryDirectory() as path:
        make_policy(path)
        options: dict[str, Any] = {"device": "cpu", "preflight": False, "placement": Placement(cpus_per_rank=0.5)}
        trainer = ShardedModelGroup.from_checkpoint(path, world_size=2, **options)
        generator = ShardedModelGroup.from_checkpoint(path, world_size=2, **options)
        reference = ShardedModelGroup.from_checkpoint(path, world_size=1, **options)
    trainer.set_optimizer(torch.optim.AdamW, lr=1e-2)
    prompts = torch.arange(PROMPTS).reshape(-1, 1) % VOCABULARY
    for step in range(STEPS):
        ids = generator.generate(Split(prompts), max_new_tokens=LENGTH, do_sample=True, top_k=0, seed=step)
        scores = torch.tensor([reward(answer) for answer in ids[:, 1:].tolist()])
        known = torch.cat(reference.call(score, Split(ids)))
        advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
        batch = {"input_ids": ids, "advantages": advantages, "reference": known}
        trainer.train_step(Split(batch), loss=policy_gradient, max_grad_norm=1.0)
        report = trainer.copy_to(generator)
        own = torch.cat(generator.call(score, Split(ids)))
        rewards.append(scores.mean().item())
        divergences.append((own - known)[:, -LENGTH:].sum(-1).mean().item())
        if step % 5 == 4:
            print(f"step {step + 1:>2}: reward {rewards[-1]:.2f}, KL from the reference {divergences[-1]:.2f}")
    print(report)
    for group in (trainer, generator, reference):
        group.shutdown()
    plot(rewards, divergences)
    return rewards


def plot(rewards: list[float], divergences: list[float]) -> None:
    """Draw reward and KL divergence over the steps."""
    from matplotlib import pyplot

    figure, left = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    left.plot(range(1, STEPS + 1), rewards, color="tab:blue")
    left.set(xlabel="step", ylim=(0, 1))
    left.set_ylabel("mean reward", color="tab:blue")
    right = left.twinx()
    right.plot(range(1, STEPS + 1), divergences, color="tab:orange")
    right.set_ylabel("KL from the reference, nats an answer", color="tab:orange")
    figure.savefig("post_training.png", dpi=150)


if __name__ == "__main__":
    main()
