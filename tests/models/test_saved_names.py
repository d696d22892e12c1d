"""What a save holds is what transformers' `save_pretrained` writes: names, shapes and, taken by ranges, values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.models import build_module, saved_layout
from tests.models.architectures import ARCHITECTURES
from tests.models.tiny import tiny_models


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a module's state once."""
    found: dict[torch.Tensor, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(tensor, name)
    return {name: tensor.detach() for tensor, name in found.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_layout_is_what_transformers_writes(name: str, tmp_path: Path) -> None:
    ARCHITECTURES[name].make().save_pretrained(tmp_path)
    model = ARCHITECTURES[name].make().from_pretrained(tmp_path)
    del model._weight_conversions  # what `from_pretrained` leaves; a module of ours is not made by it
    model.save_pretrained(tmp_path / "again")
    opened, tensors = open_checkpoint(tmp_path / "again"), held(model)
    layout = saved_layout(model, tensors)
    assert layout.keys() == opened.tensors.keys()
    with FileReader(opened.files) as reader:
        for key, info in opened.tensors.items():
            saved = layout[key]
            assert (saved.dtype, saved.shape) == (info.dtype, tuple(info.shape)), key
            value = torch.empty(saved.shape, dtype=saved.dtype).reshape(-1)
            for run in saved.runs:
                source = tensors[run.source].reshape(-1)[run.source_start :][: run.num_elements]
                value[run.target_start :][: run.num_elements] = source
            assert torch.equal(value.reshape(saved.shape), reader.read_tensor(info)), key
    # The module on meta, from which the ranks' plan is made, says the same.
    on_meta = build_module(None, open_checkpoint(tmp_path), None)
    assert saved_layout(on_meta, held(on_meta)) == layout


@pytest.mark.parametrize("name", ["XLMRobertaForMaskedLM", "CamembertForCausalLM", "LukeForMaskedLM"])
def test_tied_tensors_have_the_name_that_transformers_keeps(name: str, tmp_path: Path) -> None:
    model = next(iter(tiny_models(name)))
    model.save_pretrained(tmp_path)
    tensors = held(model)
    layout = saved_layout(model, tensors)
    assert layout.keys() == open_checkpoint(tmp_path).tensors.keys()
    assert layout.keys() != tensors.keys(), "the module's first names are others"
    assert sorted(run.source for saved in layout.values() for run in saved.runs) == sorted(tensors)


def test_a_conversion_that_is_no_ranges_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers opens the save, and writes from it what it would have written."""
    model = next(iter(tiny_models("Inkling2ForCausalLM")))
    model.save_pretrained(tmp_path / "theirs")
    theirs = open_checkpoint(tmp_path / "theirs")
    assert saved_layout(model, held(model)).keys() == theirs.tensors.keys()
    for name in ("blocks", "saved_names"):
        monkeypatch.setattr(f"raysharding.models.{name}.MAX_RUNS", 2)
    module = build_module(None, theirs, None)
    with pytest.warns(UserWarning, match=r"Inkling2ForCausalLM: the save has the module's own names.*save_pretrained"):
        layout = saved_layout(module, held(module))
    assert layout.keys() == held(module).keys()
    save_file({key: tensor.contiguous() for key, tensor in held(model).items()}, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    opened = type(model).from_pretrained(tmp_path)
    opened._weight_conversions = None
    opened.save_pretrained(tmp_path / "again")
    with FileReader(theirs.files) as one, FileReader(open_checkpoint(tmp_path / "again").files) as other:
        again = open_checkpoint(tmp_path / "again")
        assert again.tensors.keys() == theirs.tensors.keys()
        for key, info in theirs.tensors.items():
            assert torch.equal(one.read_tensor(info), other.read_tensor(again.tensors[key])), key


def test_what_is_no_transformers_model_keeps_its_names() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout = saved_layout(module, held(module))
    assert layout.keys() == module.state_dict().keys()
    assert all(run.source == key for key, saved in layout.items() for run in saved.runs)
