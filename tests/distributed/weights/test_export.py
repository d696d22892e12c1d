"""`WeightStream` on real gloo groups: what transformers and peft write to files comes out of it, bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import save_file

from tests.distributed.checks import run_checks
from tests.distributed.loading.load_checks import ODD
from tests.distributed.models import filled, saved
from tests.distributed.weights.export_checks import ADAPTED, WHOLE
from tests.grid import needs_sim
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

peft = pytest.importorskip("peft")

CHECKS = {
    2: ("check_files", "check_dtype", "check_adapters", "check_memory", "check_arguments", "check_early_stops"),
    3: ("check_files", "check_adapters", "check_memory", "check_early_stops", "check_a_rank_that_never_comes"),
}
SIM_CHECKS = ("check_files", "check_dtype", "check_adapters", "check_early_stops")
"""What also runs on two ranks on the simulated device."""
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "modules_to_save": ["norm"]},
    "mixtral": {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models as transformers saves them, adapters as peft saves them, and both merged as peft merges them."""
    path = tmp_path_factory.mktemp("weights")
    save_file(saved(filled()), path / ODD)
    for name in WHOLE:
        ARCHITECTURES[name].make().save_pretrained(path / name)
    for name, dtype in ADAPTED:
        folder = path / f"adapted-{name}-{dtype}"
        ARCHITECTURES[name].make(dtype).save_pretrained(folder / "base")
        base = getattr(transformers, ARCHITECTURES[name].model).from_pretrained(folder / "base")
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=3, **FIELDS[name]))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_()
        model.save_pretrained(folder / "adapters", save_embedding_layers=False)
        model.merge_and_unload().save_pretrained(folder / "merged")
    return path


@cache
def outcomes(world_size: int, root: Path, device: str = "cpu") -> list[dict[str, str]]:
    """Every rank's check → traceback."""
    names = [f"weights.export_checks.{name}" for name in (SIM_CHECKS if device == "sim" else CHECKS[world_size])]
    return run_ranks(world_size, run_checks, names, root, timeout_s=100, device=device)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(size, name, marks=[pytest.mark.full] * (size != 2))
        for size, names in CHECKS.items()
        for name in names
    ],
)
def test_on_ranks(world_size: int, name: str, root: Path) -> None:
    for rank, outcome in enumerate(outcomes(world_size, root)):
        found = outcome[f"weights.export_checks.{name}"]
        assert not found, f"rank {rank} of {world_size}:\n{found}"


@needs_sim
@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SIM_CHECKS)
def test_on_the_simulated_device(name: str, root: Path) -> None:
    for rank, outcome in enumerate(outcomes(2, root, "sim")):
        found = outcome[f"weights.export_checks.{name}"]
        assert not found, f"rank {rank} of 2:\n{found}"
