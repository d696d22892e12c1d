"""Row 4: what every rank raises alike leaves the group READY, and what follows equals one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding import GroupError, ShardedModelGroup, Split
from raysharding.group import GroupState
from tests.conftest import make_group

WORLD_SIZE = 3
TOLERANCE = 1e-6
ROWS = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
BAD_FORWARD, BAD_BACKWARD = 777.0, 888.0


def breakable() -> Callable[[], nn.Module]:
    """A model that raises in forward or in the middle of backward when a row holds a mark. Pickles by value."""
    bad_forward, bad_backward = BAD_FORWARD, BAD_BACKWARD

    def build() -> nn.Module:

        import torch
        from torch import nn

        class Raise(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError("raised in backward")

        class Breakable(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                hidden = torch.tanh(self.layers[0](rows))
                if rows.eq(bad_forward).any():
                    raise LookupError("raised in forward")
                if rows.eq(bad_backward).any():
                    hidden = Raise.apply(hidden)  # type: ignore[no-untyped-call]
                hidden = torch.tanh(self.layers[1](hidden))
                output: torch.Tensor = self.layers[2](hidden)
                return output

        return Breakable()

    return build


@pytest.fixture(scope="module")
def pair(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ShardedModelGroup, Any]]:
    """A group, and one process's model and optimizer."""
    torch.manual_seed(0)
    twin = breakable()()
    path = tmp_path_factory.mktemp("breakable") / "model.safetensors"
    save_file(twin.state_dict(), path)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    with make_group(path, world_size=WORLD_SIZE, model=breakable()) as group:
        group.set_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        yield group, (twin, optimizer)


def step_both(group: ShardedModelGroup, twin: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    metrics = group.train_step(Split(ROWS), loss=lambda output, rows: output.square().mean())
    optimizer.zero_grad()
    loss = twin(ROWS).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), float("inf"))
    optimizer.step()
    assert abs(metrics["loss"] - loss.item()) < TOLERANCE
    assert abs(metrics["grad_norm"] - norm.item()) < TOLERANCE


@pytest.mark.parametrize("where", ["forward", "train_step's forward", "loss", "backward"])
def test_what_every_rank_raises_leaves_the_group_right(where: str, pair: tuple[ShardedModelGroup, Any]) -> None:
    group, (twin, optimizer) = pair
    marked = ROWS.clone()
    marked[:, 0] = {"loss": 0.0, "backward": BAD_BACKWARD}.get(where, BAD_FORWARD)

    def fail(output: Any, rows: Any) -> Any:
        if where == "loss":
            raise KeyError("raised in the loss")
        return output.square().mean()

    words = f"raised in {'the loss' if where == 'loss' else where.split()[-1]}"
    with pytest.raises(GroupError, match=words) as caught:
        group.forward(Split(marked)) if where == "forward" else group.train_step(Split(marked), loss=fail)
    error = caught.value
    assert sorted(error.failures) == list(range(WORLD_SIZE))
    assert {failure.kind for failure in error.failures.values()} == {"raised"}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert group.state is GroupState.READY
    assert torch.allclose(group.forward(Split(ROWS)), twin(ROWS), atol=TOLERANCE)
    for _ in range(2):
        step_both(group, twin, optimizer)
    assert torch.allclose(group.forward(Split(ROWS)), twin(ROWS), atol=TOLERANCE)
