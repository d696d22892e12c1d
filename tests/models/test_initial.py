"""`Initialiser`: by the module's own rule, the same for the same seed; `missing_rules`: what has none, said before."""

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


def built(name: str, folder: Path) -> nn.Module:
    ARCHITECTURES[name].make().save_pretrained(folder)
    return build_module(None, open_checkpoint(folder), None)


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
def test_constants_are_those_of_transformers_and_noise_has_their_spread(name: str, tmp_path: Path) -> None:
    import transformers

    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.config)(**architecture.fields)
    first, second = (everything(getattr(transformers, architecture.model)(config)) for _ in range(2))
    module = built(name, tmp_path)
    initialiser = Initialiser(module, 0)
    missing = missing_rules(module, list(first), 0)
    # Set in CLIPModel.__init__ only: `from_pretrained` leaves memory as it found it here.
    assert missing == refused(module, [fqn for fqn in first if fqn == "logit_scale"])
    for fqn, tensor in first.items():
        if fqn == "logit_scale":
            continue
        value = initialiser.value(fqn)
        if fqn.endswith("weight"):
            assert torch.equal(value, Initialiser(module, 0).value(fqn)), f"{fqn}: depends on what was asked before"
        assert (value.shape, value.dtype, value.device.type) == (tensor.shape, tensor.dtype, "cpu"), fqn
        if torch.equal(tensor, second[fqn]):
            assert torch.equal(value, tensor), fqn
        elif tensor.numel() >= 100:
            assert value.std().item() == pytest.approx(tensor.std().item(), rel=0.3), fqn


def test_the_value_depends_on_seed_and_name_only(tmp_path: Path) -> None:
    module = built("bert-classifier", tmp_path)
    before = torch.random.get_rng_state()
    value = Initialiser(module, 5).value("classifier.weight")
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(Initialiser(module, 5).value("classifier.weight"), value)
    assert not torch.equal(Initialiser(module, 6).value("classifier.weight"), value)
    queries = [f"bert.encoder.layer.{layer}.attention.self.query.weight" for layer in range(2)]
    assert not torch.equal(*(Initialiser(module, 5).value(fqn) for fqn in queries))


@pytest.mark.parametrize("name", ["bert-classifier", "llama", "resnet", "mamba"])
def test_a_sharded_module_has_the_same_values_and_proofs(
    name: str, tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, sharded = built(name, tmp_path), built(name, tmp_path)
    names, computed, value = list(everything(plain)), list[str](), Initialiser.value
    for child in [*sharded.children(), sharded]:
        fully_shard(child, mesh=mesh)
    values = {fqn: Initialiser(sharded, 0).value(fqn) for fqn in names}
    assert all(torch.equal(values[fqn], Initialiser(plain, 0).value(fqn)) for fqn in names)

    def noted(initialiser: Initialiser, fqn: str) -> torch.Tensor:
        computed.append(fqn)
        return value(initialiser, fqn)

    monkeypatch.setattr(Initialiser, "value", noted)
    before = torch.random.get_rng_state()
    assert missing_rules(sharded, names, 0) == missing_rules(sharded, (), 0) == ()
    assert len(computed) < len(names) / 4, "what a dry run proves is not computed"
    if name == "bert-classifier":
        assert not [fqn for fqn in computed if fqn.endswith("weight")], computed
    assert torch.equal(torch.random.get_rng_state(), before)


class Bank(nn.Module):
    """A rule of its own for parameters and buffers of every kind."""

    mask: torch.Tensor
    index: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.empty(3, 2))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("index", torch.zeros(4, dtype=torch.int32))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.slots.copy_(torch.arange(6.0).reshape(3, 2))
        self.mask.copy_(torch.tensor([True, False, True, False]))
        self.index = torch.arange(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("module", "fqn", "constant"),
    [
        (nn.Linear(8, 4), "0.weight", None),
        (nn.Linear(8, 4), "0.bias", None),
        (nn.BatchNorm1d(4), "0.weight", 1.0),
        (nn.BatchNorm1d(4), "0.running_var", 1.0),
        (nn.BatchNorm1d(4), "0.num_batches_tracked", 0),
        (nn.LayerNorm(4), "0.bias", 0.0),
        (nn.Embedding(5, 3, padding_idx=0), "0.weight", None),
        (nn.MultiheadAttention(4, 2), "0.in_proj_weight", None),
        (nn.LSTM(4, 3), "0.weight_hh_l0", None),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_torch_modules_by_reset_parameters(module: nn.Module, fqn: str, constant: float | None) -> None:
    root = nn.Sequential(module).to("meta").to(torch.bfloat16)
    value = Initialiser(root, 3).value(fqn)
    target = everything(root)[fqn]
    assert (value.shape, value.dtype) == (target.shape, target.dtype)
    assert torch.equal(value, Initialiser(root, 3).value(fqn))
    if constant is not None:
        assert bool((value == constant).all())
    else:
        assert value.float().std() > 0
    assert everything(root)[fqn] is target


def test_a_rule_of_the_users_own() -> None:
    with torch.device("meta"):
        bank = Bank()
    assert torch.equal(Initialiser(bank, 0).value("slots"), torch.arange(6.0).reshape(3, 2))
    assert Initialiser(bank, 0).value("mask").tolist() == [True, False, True, False]
    assert Initialiser(bank, 0).value("index").tolist() == [0, 1, 2, 3]


class Scaled(nn.Module):
    """No rule at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class HalfSet(Scaled):
    """A rule that forgets the last element."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale[:2])


@pytest.mark.parametrize("module", [Scaled(), HalfSet()])
def test_without_a_whole_rule_the_tensor_is_named(module: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"1\.scale: .*reset_parameters"):
        Initialiser(nn.Sequential(nn.Identity(), module), 0).value("1.scale")


class Once(nn.Module):
    """Initialises itself the first time only."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(2))
        self.ready = False

    def reset_parameters(self) -> None:
        if not self.ready:
            nn.init.ones_(self.w)
        self.ready = True


class Around(nn.Module):
    """Whose rule runs that of the module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(2))
        self.inner = Once()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.w)
        self.inner.reset_parameters()


def test_a_value_does_not_depend_on_what_was_asked_before() -> None:
    initialiser = Initialiser(Around(), 0)
    assert initialiser.value("w").tolist() == [0, 0]
    assert initialiser.value("inner.w").tolist() == [1, 1]
    assert initialiser.value("w").tolist() == [0, 0]


class Angles(nn.Module):
    """A rule that sets a buffer and computes another one from it, as MusicFlamingo's does."""

    inv_freq: torch.Tensor
    angles: torch.Tensor

    def __init__(self, persistent: bool = False, draws: bool = False) -> None:
        super().__init__()
        self.draws = draws
        self.register_buffer("inv_freq", torch.empty(3), persistent=persistent)
        self.register_buffer("angles", torch.empty(3), persistent=False)

    def reset_parameters(self) -> None:
        self.inv_freq.copy_(torch.rand(3) if self.draws else torch.arange(3.0))
        self.angles.copy_(torch.as_tensor((self.inv_freq * 2).tolist()))


def test_a_buffer_may_be_computed_from_one_that_no_checkpoint_has() -> None:
    with torch.device("meta"):
        modules = Angles(), Angles(persistent=True), Angles(draws=True)
    assert Initialiser(modules[0], 0).value("angles").tolist() == [0.0, 2.0, 4.0]
    for module in modules[1:]:
        with pytest.raises(PlanError, match="reads no other tensor's values"):
            Initialiser(module, 0).value("angles")


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


def test_rules_of_a_plain_module() -> None:
    with torch.device("meta"):
        module = nn.Sequential(Rules(), FromAnother(), nn.Linear(3, 2), nn.LSTM(2, 2), nn.BatchNorm1d(2))
    names = list(everything(module))
    found = missing_rules(module, names, 0)
    assert found == refused(module, names)
    wrong = ["0.scaled", "0.itself", "0.unset", "0.begun", "0.kept", "1.two"]
    assert sorted(line.partition(":")[0] for line in found) == sorted(wrong)
