"""What peft's `LoraConfig` asks for beyond plain layers: trained as peft does in one process, saved as peft saves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from raysharding.batch import Split, deal
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.loading import finish
from raysharding.distributed.training.step import train_step
from raysharding.errors import RayshardingError
from raysharding.models import Adapted, build_module
from tests.distributed.checks import on_ranks, save_alone
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")

SGD = partial(torch.optim.SGD, lr=0.5)
IDS = torch.randint(0, 60, (4, 8), generator=torch.Generator().manual_seed(3))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
QUERY: dict[str, Any] = {"target_modules": ["q_proj"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("llama", QUERY | {"trainable_token_indices": [1, 5, 40]}),
    "rows-by-layer": ("llama", QUERY | {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [2, 9]}}),
    "rows-tied": ("llama-tied", QUERY | {"trainable_token_indices": [1, 5, 40]}),
    "rows-kept-tied": ("llama-tied", QUERY | {"trainable_token_indices": [1, 5], "ensure_weight_tying": True}),
    "copy-kept-tied": ("llama-tied", QUERY | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "experts": ("mixtral", QUERY | {"target_parameters": EXPERTS}),
    "experts-alone": ("mixtral", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
    "dora": ("llama", {"target_modules": ["q_proj", "up_proj", "lm_head"], "use_dora": True}),
    "all-linear": ("mixtral", {"target_modules": "all-linear"}),
}


def config(case: str, **fields: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "lora_alpha": 3, **CASES[case][1], **fields})


def loaded(root: Path, adapted: Adapted, sharding: Sharding | None = None) -> Any:
    opened = open_checkpoint(root / "base")
    module = shard_module(build_module(adapted, opened, None), init_mesh("cpu"), sharding)
    load_checkpoint(module, opened)
    return module


def train(root: Path) -> dict[str, list[float]]:
    """Train each case from peft's files, and save it; save adapters that are made here, too."""
    losses = {}
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for case in CASES:
        adapters = open_checkpoint(root / case / "theirs")
        sharding = Sharding(activation_checkpointing=world_size == 2 and case in ("rows", "experts"))
        module = loaded(root / case, Adapted.of_files(None, adapters), sharding)
        load_checkpoint(module, adapters)
        optimizer = SGD([one for one in module.parameters() if one.requires_grad])
        batch = deal((), {"input_ids": Split(IDS), "labels": Split(IDS)}, world_size)[rank]
        losses[case] = [train_step(module, optimizer, batch)["loss"] for _ in range(3)]
        save_checkpoint(module, root / case / f"ours-{world_size}")
        save_checkpoint(loaded(root / case, Adapted.of(None, config(case))), root / case / f"fresh-{world_size}")
    return losses


class Alone:
    """peft in one process."""

    def __init__(self, root: Path, case: str) -> None:
        torch.manual_seed(0)
        ARCHITECTURES[CASES[case][0]].make().save_pretrained(root / "base")
        self.base = partial(transformers.AutoModelForCausalLM.from_pretrained, root / "base")
        model: Any = peft.get_peft_model(self.base(), config(case, init_lora_weights=False))
        model.save_pretrained(root / "theirs", save_embedding_layers=False)
        optimizer, self.losses = SGD([one for one in model.parameters() if one.requires_grad]), []
        for _ in range(3):
            loss = model(input_ids=IDS, labels=IDS).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())
        model.save_pretrained(root / "trained", save_embedding_layers=False)
        self.logits = model(IDS).logits


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Alone]]:
    root = tmp_path_factory.mktemp("kinds")
    return root, {case: Alone(root / case, case) for case in CASES}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_kind_trains_and_saves_as_in_one_process(world_size: int, alone: tuple[Path, dict[str, Alone]]) -> None:
    root, theirs = alone
    losses = run_ranks(world_size, train, root, timeout_s=150.0)[0]
    for case, one in theirs.items():
        assert losses[case] == pytest.approx(one.losses, abs=1e-5), case
        assert one.losses[2] < one.losses[0], case
        folder = root / case / f"ours-{world_size}"
        ours, wanted = (load_file(path / "adapter_model.safetensors") for path in (folder, root / case / "trained"))
        assert ours.keys() == wanted.keys(), case
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
        again = peft.PeftModel.from_pretrained(one.base(), folder)
        torch.testing.assert_close(again(IDS).logits, one.logits, rtol=1e-4, atol=1e-5)
        # New adapters change nothing at first: B is zeros, rows and copies are the base's.
        fresh = peft.PeftModel.from_pretrained(one.base(), root / case / f"fresh-{world_size}")
        torch.testing.assert_close(fresh(IDS).logits, one.base()(IDS).logits)
        made = load_file(root / case / f"fresh-{world_size}/adapter_model.safetensors")
        assert {key: value.shape for key, value in made.items()} == {key: value.shape for key, value in wanted.items()}
        assert all(value.any() for key, value in made.items() if "lora_A" in key), case


def with_dora(base: Path, fields: dict[str, Any]) -> tuple[Any, Any]:
    opened = open_checkpoint(base)
    return shard_module(
        build_module(Adapted.of(None, peft.LoraConfig(**fields)), opened, None), init_mesh("cpu")
    ), opened


def make_magnitudes(root: Path, dtypes: list[str], fields: dict[str, Any]) -> None:
    for dtype in dtypes:
        module, opened = with_dora(root / dtype / "base", fields)
        load_checkpoint(module, opened)
        save_checkpoint(module, root / dtype / "ours")


@on_ranks(2)
def test_a_rank_without_memory_for_a_layer_of_dora_is_every_ranks_error(root: Path) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    if dist.get_rank() == 0:
        save_alone(ARCHITECTURES["llama"].make(), root / "dora")
    dist.barrier()
    module, opened = with_dora(root / "dora", {"r": 2, "use_dora": True, "target_modules": ["q_proj"]})
    with pytest.MonkeyPatch.context() as changed:
        if dist.get_rank() == 1:
            changed.setattr(finish, "full_memory", fails)
        with pytest.raises((RuntimeError, RayshardingError), match="can't allocate memory"):
            load_checkpoint(module, opened)
    load_checkpoint(module, opened)


@pytest.mark.timeout(120)
def test_first_magnitudes_of_dora_are_pefts(tmp_path: Path) -> None:
    """Norms of rows; of columns for an embedding. peft rounds them to the base's dtype."""
    fields = {"r": 2, "use_dora": True, "target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]}
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    theirs = {}
    for name, dtype in dtypes.items():
        model: Any = ARCHITECTURES["llama"].make().to(dtype)
        model.save_pretrained(tmp_path / name / "base")
        model = peft.get_peft_model(model, peft.LoraConfig(**fields))
        theirs[name] = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    run_ranks(2, make_magnitudes, tmp_path, list(dtypes), fields, timeout_s=100.0)
    for name in dtypes:
        ours = load_file(tmp_path / name / "ours/adapter_model.safetensors")
        assert ours.keys() == theirs[name].keys()
        keys = [key for key in ours if key.endswith("lora_magnitude_vector")]
        assert len(keys) == 6
        for key in keys:
            torch.testing.assert_close(ours[key], theirs[name][key], rtol=0, atol=0)
