"""`missing_rules` says of every tensor what `Initialiser` would, without computing what a dry run proves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from raysharding.checkpoint import open_checkpoint
from raysharding.errors import PlanError
from raysharding.models import Initialiser, build_module, missing_rules
from tests.models.architectures import ARCHITECTURES
from tests.models.filling import everything


class Rules(nn.Module):
    """Rules that set, rules that only seem to, and none."""

    scaled: nn.Parameter
    itself: nn.Parameter
    begun: nn.Parameter
    filled: nn.Parameter
    by_parts: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        for name in ("scaled", "itself", "unset", "begun", "filled", "by_parts"):
            self.register_parameter(name, nn.Parameter(torch.empty(4, 4)))
        self.register_buffer("replaced", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("kept", torch.zeros(3, dtype=torch.int32))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scaled.mul_(2)
            self.itself.copy_(self.itself.t())
            self.begun[:2].fill_(1)
            self.filled.fill_(1)
            self.by_parts[:2].fill_(1)
            self.by_parts[2:].fill_(2)
        self.replaced = torch.arange(3, dtype=torch.int32)


class FromAnother(nn.Module):
    """A rule that needs another tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.one.fill_(1)
            self.two.fill_(1)
            self.two.mul_(self.one)


def refused(module: nn.Module, names: list[str]) -> tuple[str, ...]:
    """What `Initialiser` itself refuses."""
    problems = []
    initialiser = Initialiser(module, 0)
    for name in names:
        try:
            initialiser.value(name)
        except PlanError as error:
            problems.append(str(error))
    return tuple(problems)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_models(name: str, tmp_path: Path) -> None:
    ARCHITECTURES[name].make().save_pretrained(tmp_path)
    module = build_module(None, open_checkpoint(tmp_path), None)
    names = list(everything(module))
    found = missing_rules(module, names, 0)
    assert found == refused(module, names)
    assert [line.partition(":")[0] for line in found] == [fqn for fqn in names if fqn == "logit_scale"]


def test_rules_of_a_plain_module() -> None:
    with torch.device("meta"):
        module = nn.Sequential(Rules(), FromAnother(), nn.Linear(3, 2), nn.LSTM(2, 2), nn.BatchNorm1d(2))
    names = list(everything(module))
    found = missing_rules(module, names, 0)
    assert found == refused(module, names)
    wrong = ["0.scaled", "0.itself", "0.unset", "0.begun", "0.kept", "1.two"]
    assert sorted(line.partition(":")[0] for line in found) == sorted(wrong)


def test_what_a_dry_run_proves_is_not_computed(
    tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ARCHITECTURES["bert-classifier"].make().save_pretrained(tmp_path)
    module = build_module(None, open_checkpoint(tmp_path), None)
    for child in [*module.children(), module]:
        fully_shard(child, mesh=mesh)
    computed: list[str] = []

    value = Initialiser.value

    def noted(initialiser: Initialiser, fqn: str) -> torch.Tensor:
        computed.append(fqn)
        return value(initialiser, fqn)

    monkeypatch.setattr(Initialiser, "value", noted)
    before = torch.random.get_rng_state()
    assert missing_rules(module, list(everything(module)), 0) == ()
    assert not [fqn for fqn in computed if fqn.endswith("weight")], computed
    assert torch.equal(torch.random.get_rng_state(), before)
    assert missing_rules(module, (), 0) == ()
