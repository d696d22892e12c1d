"""Several dtypes in one module, by mixed precision or kept parameters: as FSDP1 and as one process have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, StateDictType
from torch.distributed.tensor import DTensor

from raysharding import distributed as rs
from raysharding.batch import RankBatch, Split, deal
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding
from raysharding.distributed import init_mesh, merge_fsdp_weights, shard_module, train_step
from raysharding.distributed.fsdp import full_optim_state_dict, state_dict_type, summon_full_params
from raysharding.models import build_module, full_precision_groups, wrap, wrap_groups
from tests.distributed.checks import on_ranks, save_alone
from tests.distributed.fully_shard.sharding_models import (
    Net,
    assert_same,
    build,
    fsdp1,
    fsdp1_gradients,
    full,
    gradients,
    mine,
    rows,
    sharded,
)
from tests.models.architectures import ARCHITECTURES
from tests.models.tiny import tiny_models
from tests.models.tiny_batches import tiny_batches
from tests.spawn import device_type, part_of_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.plain = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.plain(torch.tanh(self.norm(self.line(x))))
        return out + x


class Normed(nn.Module):
    """BatchNorm inside blocks and in the root, and a buffer of its own."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("table", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


def watch(module: nn.Module) -> dict[str, list[torch.dtype]]:
    """Name → dtypes of what goes in, the weight, the statistics, and what comes out, in forward."""
    seen: dict[str, list[torch.dtype]] = {}
    for name, inner in module.named_modules():
        clean = name.replace("_fsdp_wrapped_module.", "").removesuffix("._fsdp_wrapped_module")
        if not isinstance(inner, nn.Linear | nn.BatchNorm1d):
            continue

        def before(inner: Any, args: Any, clean: str = clean) -> None:
            tensors = [args[0], inner.weight, getattr(inner, "running_mean", None)]
            seen[clean] = [tensor.dtype for tensor in tensors if tensor is not None]

        def after(inner: Any, args: Any, output: torch.Tensor, clean: str = clean) -> None:
            seen[clean].append(output.dtype)

        inner.register_forward_pre_hook(before)
        inner.register_forward_hook(after)
    return seen


@on_ranks(1, 2, full=(4,))
def test_batch_norm_as_fsdp1(replicate_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batch = rows(24, 8)
    for precision in ("bf16", policy):
        module = sharded(build(Normed), wrap=["Layer"], mixed_precision=precision, replicate_size=replicate_size)
        with pytest.warns(UserWarning, match="BatchNorm"):
            oracle = fsdp1(build(Normed), wrap=(Layer,), mixed_precision=theirs)
        seen, expected = watch(module), watch(oracle)
        for step in range(2):
            losses = [each(mine(batch) + step).float().square().mean() for each in (module, oracle)]
            assert torch.allclose(losses[0], losses[1], rtol=1e-3), losses
            for loss in losses:
                loss.backward()
        assert seen == expected, (seen, expected)
        assert seen["layers.0.norm"] == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
        assert seen["layers.0.line"][:2] == [torch.bfloat16] * 2
        assert_same(gradients(module), fsdp1_gradients(oracle), rtol=2e-2, atol=2e-3)
        clean = {name.replace("_fsdp_wrapped_module.", ""): item for name, item in oracle.named_buffers()}
        for name, buffer in module.named_buffers():
            assert buffer.dtype == clean[name].dtype, name
            assert torch.allclose(buffer.float(), clean[name].float(), rtol=1e-3, atol=1e-4), name


@on_ranks(1, 2, full=(4,))
def test_checkpointing_counts_statistics_once() -> None:
    """The second forward of an activation checkpoint leaves the running statistics alone; nested groups or not."""
    batch = mine(rows(24, 8))
    for precision in (None, "bf16"):
        module = sharded(build(Normed), wrap=["Layer"], mixed_precision=precision, activation_checkpointing=True)
        twin = sharded(build(Normed), wrap=["Layer"], mixed_precision=precision)
        for each in (module, twin):
            for _ in range(2):
                each(batch).float().square().mean().backward()
        assert int(module.layers[0].norm.num_batches_tracked) == 2
        assert_same(dict(module.named_buffers()), dict(twin.named_buffers()), rtol=0, atol=0)
        assert_same(gradients(module), gradients(twin), rtol=0, atol=0)


@on_ranks(1, 2, full=(4,))
def test_low_precision_gradients_are_kept(replicate_size: int) -> None:
    """As FSDP1's `keep_low_precision_grads`, from backward to backward; a load on the way changes nothing."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True)
    fields: dict[str, Any] = {"mixed_precision": policy, "keep_low_precision_grads": True}
    module, batch = sharded(build(Net), replicate_size=replicate_size, **fields), mine(rows(24))
    twin = sharded(build(Net), replicate_size=replicate_size, mixed_precision=policy)
    oracle = fsdp1(build(Net), mixed_precision=theirs)
    for _ in range(2):
        for each in (module, twin, oracle):
            each(batch).float().square().mean().backward()
        require_low_precision_gradients(module)
        if dist.get_world_size() > 1:  # with one rank FSDP1 switches to NO_SHARD, which casts them all the same
            assert {item.grad.dtype for item in oracle.parameters() if item.grad is not None} == {torch.bfloat16}
        # FSDP1 cannot summon such gradients, so the values are those without the option.
        assert_same(gradients(module), gradients(twin), rtol=1e-2, atol=1e-3)
    before = float(rs.clip_grad_norm_(module, 0.5))
    assert float(rs.clip_grad_norm_(module, None)) == pytest.approx(min(before, 0.5), rel=1e-2)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module.load_state_dict(dict(module.state_dict()), assign=True)  # new parameters, without gradients
    module(batch).float().square().mean().backward()
    require_low_precision_gradients(module)


def require_low_precision_gradients(module: nn.Module) -> None:
    """In bf16, but for 0-dim parameters, which FSDP does not manage; FSDP1 refuses those."""
    found = {name: item.grad for name, item in module.named_parameters() if item.grad is not None}
    used = {name for name, item in Net().named_parameters() if item.requires_grad and not name.startswith("unused")}
    assert found.keys() == used
    assert all(grad.dtype == (torch.bfloat16 if grad.ndim else torch.float32) for grad in found.values())


@on_ranks(2)
def test_batch_norm_stored_in_low_precision() -> None:
    """Full precision is what the module is stored in."""
    module = sharded(build(Normed).to(torch.bfloat16), wrap=["Layer"], mixed_precision="fp16")
    seen = watch(module)
    module(mine(rows(24, 8))).float().square().mean().backward()
    assert seen["last"] == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16]


def test_batch_norms_are_groups_only_under_mixed_precision() -> None:
    low = wrap_groups(Normed(), Sharding(wrap=["Layer"], mixed_precision="bf16"))
    assert low == (("layers.0.norm",), ("layers.1.norm",), ("layers.0",), ("layers.1",), ("last",))
    for precision in (None, MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        assert wrap_groups(Normed(), Sharding(wrap="none", mixed_precision=precision)) == ()


NUM_ROWS = 6
WHOLE = {"blocks.0.sinks", "blocks.1.sinks", "gate.scale", "tables.0"}


class SinkBlock(nn.Module):
    """Keeps a parameter in another dtype beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(0.5, 1.5, 5, dtype=torch.float64))
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up((x * self.sinks).float())))


class Gate(nn.Module):
    """A leaf with two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight * self.scale).float()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(SinkBlock() for _ in range(2))
        self.gate = Gate()
        self.tables = nn.ParameterList([torch.ones(3, 5, dtype=torch.float64)])  # is not called
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.gate(x) + self.tables[0].sum(0).float())


def five_rows() -> torch.Tensor:
    return torch.randn(NUM_ROWS, 5, generator=torch.Generator().manual_seed(1))


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean(dim=1).mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def sharded_model(group: Any = None) -> Any:
    return shard_module(Model(), init_mesh(device_type(), group=group), Sharding(wrap=["SinkBlock"]))


def batch_of(group: Any = None) -> RankBatch:
    return deal((Split(five_rows()),), {}, dist.get_world_size(group))[dist.get_rank(group)]


def require_same(module: nn.Module, twin: nn.Module) -> None:
    rs.reshard(module)
    expected = dict(twin.named_parameters())
    for name, parameter in module.named_parameters():
        assert parameter.dtype == expected[name].dtype, name
        assert torch.allclose(full(parameter), full(expected[name]), rtol=1e-5, atol=1e-6), name


@pytest.mark.all_ranks
@on_ranks(1, 3, full=(2,))
def test_small_parameters_of_another_dtype_stay_whole(root: Path) -> None:
    """They train as in one process, are in every form of state once, and load on another number of ranks."""
    module, twin = sharded_model(), Model()
    whole = {name for name, one in module.named_parameters() if not isinstance(one, DTensor)}
    assert whole == WHOLE
    optimizer, other = adamw(module), adamw(twin)
    for _ in range(3):
        found = train_step(module, optimizer, batch_of(), loss=square, max_grad_norm=0.5)
        other.zero_grad()
        loss = square(twin(five_rows()))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        other.step()
        assert found == pytest.approx({"loss": float(loss.detach()), "grad_norm": float(norm)}, rel=1e-5)
    require_same(module, twin)
    for name in WHOLE:  # bit for bit the same on every rank, or they drift apart
        values = [torch.empty_like(twin.get_parameter(name)) for _ in range(dist.get_world_size())]
        dist.all_gather(values, module.get_parameter(name).detach())
        assert all(torch.equal(value, values[0]) for value in values), name
    state = full_optim_state_dict(module, optimizer)
    with state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        save({"model": module.state_dict()}, checkpoint_id=root / "kept")
    merge_fsdp_weights(root / "kept", root / "kept")
    if dist.get_rank() == 0:
        with safe_open(root / "kept" / "model.safetensors", "pt") as merged:
            for name in WHOLE:
                value = module.get_parameter(name)
                assert state["state"][name]["exp_avg"].shape == value.shape
                assert torch.equal(merged.get_tensor(name), value), name
    rs.save_checkpoint(module, root / "kept-saved", optimizer=optimizer)
    num_others = 2 if dist.get_world_size() > 2 else 1
    pair = dist.new_group(list(range(num_others)))
    if dist.get_rank() < num_others:
        again = sharded_model(pair)
        other = adamw(again)
        rs.load_checkpoint(again, open_checkpoint(root / "kept-saved"))
        rs.load_optimizer_state(again, other, root / "kept-saved")
        train_step(again, other, batch_of(pair), loss=square)
    train_step(module, optimizer, batch_of(), loss=square)
    held = {name: full(parameter) for name, parameter in module.named_parameters()}
    if dist.get_rank() < num_others:
        loaded = {name: full(parameter) for name, parameter in again.named_parameters()}
        torch.testing.assert_close(loaded, held, rtol=1e-5, atol=1e-6)
    with summon_full_params(module, rank0_only=True, writeback=True):
        if dist.get_rank() == 0:
            with torch.no_grad():
                for name in WHOLE:
                    module.get_parameter(name).mul_(2)
    for name in WHOLE:
        assert torch.equal(module.get_parameter(name), held[name] * 2), name


def bf16_equals_one_process(name: str, path: Path) -> None:
    """Every rank has all rows, so that averages are exact; two steps, clipped, and the save."""
    import transformers

    module: Any = build_module(None, open_checkpoint(path), torch.bfloat16)
    shard_module(module, init_mesh("cpu"))
    rs.load_checkpoint(module, open_checkpoint(path), loading=Loading(dtype="bfloat16"))
    twin = getattr(transformers, name).from_pretrained(path, dtype=torch.bfloat16).eval()
    batch = batch_for(twin)
    optimizer, other = adamw(module), adamw(twin)
    for _ in range(2):
        losses = [loss_of(each, batch) for each in (module.eval(), twin)]
        assert torch.equal(*losses), losses
        for loss in losses:
            loss.backward()
        rs.clip_grad_norm_(module, 1.0)
        grads = [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().float()
        torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))  # torch's own rounds the norm to bf16
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    require_same(module, twin)
    rs.save_checkpoint(module, path / "ours")
    if dist.get_rank() == 0 and part_of_ranks() is None:  # transformers writes on global rank 0 alone
        twin.save_pretrained(path / "theirs")
        ours, theirs = (open_checkpoint(path / folder).tensors for folder in ("ours", "theirs"))
        assert {key: one.dtype for key, one in ours.items()} == {key: one.dtype for key, one in theirs.items()}


def batch_for(model: Any) -> dict[str, Any]:
    batch = next(tiny_batches(model))
    return {key: one.bfloat16() if torch.is_floating_point(one) else one for key, one in batch.items()}


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)  # Wav2Vec2's quantizer draws
    return model(**batch).loss


KINDS: dict[str, dict[str, Any]] = {
    "FlintForCausalLM": {},  # sinks, beside layers
    # A scale in a leaf, and convolutions that are read without a call.
    "InklingForCausalLM": {"swa_head_dim": 8, "sliding_window_size": 8, "rel_extent": 16},
    # A_log, beside a parameter of the same module.
    "OlmoHybridForCausalLM": {"linear_key_head_dim": 8, "linear_value_head_dim": 16},
    # A codebook.
    "Wav2Vec2ForPreTraining": {"conv_dim": [8] * 7, "num_codevectors_per_group": 8, "num_conv_pos_embeddings": 8}
    | dict.fromkeys(("codevector_dim", "proj_codevector_dim"), 16),
}
"""Class → fields that are slow as `tiny_models` leaves them."""


@on_ranks(2)
def test_models_that_keep_parameters_in_float32_train_in_bf16(root: Path) -> None:
    for name, fields in KINDS.items():
        if dist.get_rank() == 0:
            model = next(iter(tiny_models(name)))
            for field, value in fields.items():
                setattr(model.config.get_text_config(), field, value)
            save_alone(type(model)(model.config), root / name)
        dist.barrier()
        bf16_equals_one_process(name, root / name)


def experts_of(model: nn.Module, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the experts that each router chooses, and the logits."""
    found: list[torch.Tensor] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for gate in gates:
        gate.register_forward_hook(lambda _, args, output: found.append(output[-1]))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    assert gates
    assert len(found) == len(gates)
    return found, logits


def routes_as_one_process(path: Path, max_whole_bytes: int) -> None:
    from transformers import AutoModelForCausalLM

    sharding, opened = Sharding(mixed_precision="bf16"), open_checkpoint(path)
    module: Any = build_module(None, opened, None)
    groups = wrap_groups(module, sharding)
    assert any(full_precision_groups(module, sharding, groups)) == (max_whole_bytes == 0)
    shard_module(module, init_mesh("cpu"), sharding)
    rs.load_checkpoint(module, opened)
    one = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ids = torch.randint(3, 60, (64, 24), generator=torch.Generator().manual_seed(3))
    (found, logits), (expected, others) = (experts_of(model.eval(), ids) for model in (module, one))
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(logits, others)
    module.train()(input_ids=ids, labels=ids).loss.backward()
    rs.reshard(module)
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert {grad.dtype for grad in grads} == {torch.float32}


@on_ranks(2)
def test_mixed_precision_keeps_what_transformers_keeps_in_float32(root: Path) -> None:
    """Parameters that stay whole, or are groups of their own."""
    if dist.get_rank() == 0:
        model = next(iter(tiny_models("Ernie4_5_MoeForCausalLM")))
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                nn.init.normal_(parameter, std=0.3)
        save_alone(model, root / "ernie")
    dist.barrier()
    for max_whole_bytes in (1 << 20, 0):
        with mock.patch.object(wrap, "MAX_WHOLE_BYTES", max_whole_bytes):
            routes_as_one_process(root / "ernie", max_whole_bytes)


class Tower(nn.Module):
    """A part that is often frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(5, 5)
        self.adapter = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tower(x.to(self.tower.weight.dtype)).float() + self.adapter(x.float()))


@on_ranks(2)
def test_training_in_float16_is_refused() -> None:

    def step(module: Any, **fields: Any) -> dict[str, float]:
        shard_module(module, init_mesh(device_type()), Sharding(**fields))
        optimizer = adamw(module)
        with torch.no_grad():
            module(five_rows())  # inference is allowed
        return train_step(module, optimizer, batch_of(), loss=square)

    half, frozen, apart = nn.Sequential(nn.Linear(5, 1).half()), Tower(), Tower()
    for one in (frozen, apart):
        one.tower.half().requires_grad_(False)
    half.register_forward_pre_hook(lambda _, args: (args[0].half(),))
    cases: list[Any] = [(nn.Linear(5, 1), {"mixed_precision": "fp16"}), (half, {}), (frozen, {"wrap": "none"})]
    for module, fields in cases:
        with pytest.raises(ValueError, match=r"loss scaling.*Sharding\(mixed_precision=\"bf16\"\)"):
            step(module, **fields)
    step(apart, wrap=["Linear"])  # no gradient goes through it


@on_ranks(2)
def test_mixed_precision_takes_hidden_states_in_float32() -> None:
    """Hidden states that are float32 between the blocks: a Llama's cosines follow them."""
    ids = torch.arange(10).view(2, 5)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for fields in ({"mixed_precision": policy}, {"mixed_precision": "bf16", "ignored_modules": ["model.embed_tokens"]}):
        model = ARCHITECTURES["llama"].make()
        expected = model(input_ids=ids, labels=ids).loss.item()
        shard_module(model, init_mesh(device_type()), Sharding(**fields))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=0.02)
