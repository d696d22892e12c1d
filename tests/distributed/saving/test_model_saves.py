"""Saves beside transformers' own, a class of each kind; `python -m tests.distributed.saving.model_saves` does all."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.distributed.saving.model_saves import EQUAL, examine
from tests.distributed.training.model_losses import examine_all

transformers = pytest.importorskip("transformers")

KINDS = (
    "FlavaForPreTraining",  # a bias with two names
    "InklingForConditionalGeneration",  # interleaved rows
    "KimiK25ForConditionalGeneration",  # permuted rows of queries and keys, and their biases
    "MarianMTModel",  # tables that are in no save
    "MixtralForCausalLM",  # packed experts
    "MusicFlamingoForConditionalGeneration",  # a buffer that is computed from another one
    "ResNetForImageClassification",  # statistics
    "XLMRobertaForMaskedLM",  # a tied table whose last name is the one that stays
)
HALF = ("MusicFlamingoForConditionalGeneration", "Step3p7ForConditionalGeneration")


@pytest.mark.all_ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("names", "dtype"), [(KINDS, "float32"), (HALF, "bfloat16")], ids=["float32", "bfloat16"])
def test_a_class_of_each_kind(names: tuple[str, ...], dtype: str, tmp_path: Path) -> None:
    there = [name for name in names if hasattr(transformers, name)]
    found = examine_all(there, partial(examine, folder=str(tmp_path), dtype=dtype))
    assert [(one.case, one.result, one.told) for one in found] == [(name, EQUAL, "") for name in there]
