"""`WeightStream` on real gloo groups: what transformers and peft write to files comes out of it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import save_file

from tests.distributed.checks import checks_of, run_checks
from tests.distributed.loading.load_checks import ODD
from tests.distributed.models import filled, saved
from tests.distributed.weights.export_checks import ADAPTED, WHOLE
from tests.grid import needs_sim
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

peft = pytest.importorskip("peft")

CHECKS = {
    ("cpu", 2): "files dtype adapters memory arguments early_stops",
    ("cpu", 3): "files adapters memory early_stops a_rank_that_never_comes",
    ("sim", 2): "files dtype adapters early_stops",
}
"""(device, number of ranks) → checks; all but the first are of the whole grid."""
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
def outcomes(device: str, world_size: int, root: Path) -> list[dict[str, str]]:
    """Every rank's check → traceback."""
    names = checks_of("weights.export_checks")(CHECKS[device, world_size])
    return run_ranks(world_size, run_checks, names, root, timeout_s=100, device=device)


def cases() -> Iterator[Any]:
    for (device, size), words in CHECKS.items():
        marks = [pytest.mark.full] * ((device, size) != ("cpu", 2)) + [needs_sim] * (device == "sim")
        yield from (pytest.param(device, size, name, marks=marks) for name in checks_of("weights.export_checks")(words))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("device", "world_size", "name"), cases())
def test_on_ranks(device: str, world_size: int, name: str, root: Path) -> None:
    for rank, outcome in enumerate(outcomes(device, world_size, root)):
        assert not outcome[name], f"rank {rank} of {world_size}:\n{outcome[name]}"
