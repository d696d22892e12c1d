"""The torch-level layer under torchrun: distribute rank 0's tensors, train, save with the optimizer, resume. No Ray.

    torchrun --nproc-per-node 2 examples/torchrun_train.py [directory]

Runs on CPUs (gloo) or GPUs (NCCL), and makes its own small checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from raysharding.distributed import (
    DistModule,
    apply_fsdp2,
    clip_grad_norm_,
    init_mesh,
    load_optimizer_state,
    load_state_dict,
    no_sync,
    save_checkpoint,
)


class Net(nn.Module):
    """Embedding, four residual blocks, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 101, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [N, L] to logits [N, L, 101]."""
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        logits: torch.Tensor = self.head(hidden)
        return logits


def build(device: str) -> DistModule:
    """A sharded module on meta: no rank holds it whole."""
    with torch.device("meta"):
        model = DistModule(Net())
    apply_fsdp2(model, init_mesh(device))
    return model


def step(model: DistModule, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[float, float]:
    """One step over two micro-batches, gradients reduced once."""
    optimizer.zero_grad()
    first, second = ids.chunk(2)
    total = torch.zeros(())
    for part, sync in ((first, no_sync(model)), (second, nullcontext())):
        with sync:
            loss = nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten()) / 2
            loss.backward()
            total += loss.detach().cpu()
    norm = clip_grad_norm_(model, 1.0)
    optimizer.step()
    return float(total), float(norm)


def main() -> None:
    """Train, save, resume at once, and show that the next step is the same."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()) / "raysharding-torchrun"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        weights = {name: value for name, value in Net().state_dict().items() if name != "head.weight"}
        save_file(weights, folder / "model.safetensors")
    dist.barrier()

    model = build(device)
    missing = model.load_state_dict(load_state_dict(folder / "model.safetensors"))  # rank 0 alone reads
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 101, (8, 16), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    losses = [step(model, optimizer, ids) for _ in range(5)]
    report = save_checkpoint(model, folder / "step-5", optimizer=optimizer, overwrite=True)
    expected = step(model, optimizer, ids)

    again = build(device)
    again.load_state_dict(load_state_dict(folder / "step-5" / "model.safetensors"))
    resumed = torch.optim.AdamW(again.parameters())
    load_optimizer_state(again, resumed, folder / "step-5")
    found = step(again, resumed, ids)
    if dist.get_rank() == 0:
        print(f"{missing}; {report}")
        print("loss, norm: " + "; ".join(f"{loss:.4f}, {norm:.4f}" for loss, norm in losses))
        print(f"step 6: {expected}; after a resume: {found}; the same: {found == expected}")
        print(f"ray was imported: {'ray' in sys.modules}")
    dist.barrier()
    dist.destroy_process_group()
    if found != expected:
        raise SystemExit("the resumed step differs")


if __name__ == "__main__":
    main()
