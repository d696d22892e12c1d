"""Every architecture: built, mapped and filled as transformers' `from_pretrained` does it, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raysharding.checkpoint import open_checkpoint
from raysharding.models import build_module
from tests.models.architectures import ARCHITECTURES
from tests.models.filling import everything, load_values


@pytest.mark.parametrize(
    ("dtype", "original_format"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)],
    ids=["fp32", "bf16", "names-as-in-memory"],
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_those_of_from_pretrained(
    name: str, dtype: torch.dtype, original_format: bool, tmp_path: Path
) -> None:
    model = ARCHITECTURES[name].make(dtype)
    model.save_pretrained(tmp_path, save_original_format=original_format)
    reference, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    checkpoint = open_checkpoint(tmp_path)

    ours = build_module(None, checkpoint, None)
    keys, values = load_values(ours, checkpoint)

    assert type(ours) is type(model)
    assert keys.problems == ()
    assert set(keys.missing) == set(info["missing_keys"]) == set()
    assert set(keys.unexpected) == set(info["unexpected_keys"]) == set()
    found, expected = everything(ours), everything(reference)
    assert list(found) == list(expected)
    for fqn, tensor in expected.items():
        assert found[fqn].is_meta, fqn
        assert (values[fqn].shape, values[fqn].dtype) == (tensor.shape, tensor.dtype), fqn
        assert torch.equal(values[fqn], tensor), fqn
    assert ours.dtype == dtype
    assert ours.training is False
