"""Tied names that are both in the checkpoint: they must fit, and hold the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.distributed.transfer.sources import CheckpointSource, Request, as_memory, extents_of
from raysharding.models import KeyMap, build_module, differing_ties, map_keys
from raysharding.models import key_mapping as ties
from tests.models.architectures import ARCHITECTURES
from tests.models.filling import rewrite

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def rewritten(folder: Path, change: dict[str, torch.Tensor]) -> torch.Tensor:
    """Save a tied model with some tensors added; its embedding."""
    ARCHITECTURES["llama-tied"].make().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, tensors | change)
    return tensors[EMBEDDING]


def compared(folder: Path, dtype: torch.dtype | None = None) -> tuple[KeyMap, tuple[str, ...]]:
    """(key map, what `differing_ties` says), read as a load reads."""
    checkpoint = open_checkpoint(folder)
    keys = map_keys(build_module(None, checkpoint, dtype), checkpoint.tensors, None)
    with FileReader(checkpoint.files) as reader:
        targets = dict(keys.targets) | {second.fqn: second for second in keys.doubled}
        extents = {fqn: extents_of(checkpoint, target) for fqn, target in targets.items()}
        source = CheckpointSource(checkpoint.tensors, extents, targets, reader)

        def read(fqn: str, start: int, stop: int, out: torch.Tensor) -> None:
            source.read([Request(fqn, start, stop, out.dtype, as_memory(out))])

        return keys, differing_ties(keys, read)


def test_equal_values_are_a_tie_whatever_their_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "COMPARE_BYTES", 100)
    embedding = rewritten(tmp_path, {})
    for dtype in (None, torch.bfloat16):
        head = embedding if dtype is None else embedding.to(dtype)
        rewritten(tmp_path, {HEAD: head})
        keys, problems = compared(tmp_path, dtype)
        assert [second.sources for second in keys.doubled] == [(HEAD,)]
        assert (keys.problems, keys.ignored, problems) == ((), (HEAD,), ())


def test_nan_equals_itself_and_zero_has_no_sign(tmp_path: Path) -> None:
    embedding = rewritten(tmp_path, {}).clone()
    embedding[3] = 0.0
    head = embedding.clone()
    head[3] = -0.0
    rewritten(tmp_path, {HEAD: head, EMBEDDING: embedding})
    assert compared(tmp_path)[1] == ()
    head[5, 2] = embedding[5, 2] = float("nan")
    head[3] = 0.0
    rewritten(tmp_path, {HEAD: head, EMBEDDING: embedding})
    assert compared(tmp_path)[1] == ()


@pytest.mark.parametrize("chunk_bytes", [100, 1 << 20])
def test_another_value_is_a_problem_that_names_the_cure(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ties, "COMPARE_BYTES", chunk_bytes)
    head = rewritten(tmp_path, {}).clone()
    head[-1, -1] += 1.0
    rewritten(tmp_path, {HEAD: head})
    (problem,) = compared(tmp_path)[1]
    assert all(part in problem for part in (HEAD, EMBEDDING, "tie_word_embeddings"))


@pytest.mark.parametrize(
    ("head", "part"), [(torch.ones(5, 16), "(5, 16)"), (torch.ones(64, 16, dtype=torch.int64), "torch.int64")]
)
def test_a_second_name_that_does_not_fit_is_a_problem(head: torch.Tensor, part: str, tmp_path: Path) -> None:
    rewritten(tmp_path, {HEAD: head})
    keys, problems = compared(tmp_path)
    (problem,) = keys.problems
    assert problem.startswith(HEAD)
    assert part in problem
    assert (keys.doubled, keys.missing, problems) == ((), (), ())
