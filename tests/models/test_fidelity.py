"""Every architecture, beside transformers: what is loaded and saved, tied names, and the moves of blocks between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.distributed.transfer.sources import CheckpointSource, Request, as_memory, extents_of
from raysharding.models import KeyMap, build_module, differing_ties, map_keys, saved_layout
from raysharding.models import key_mapping as ties
from raysharding.models.block_tensor import BlockTensor, UnsupportedOperationError
from tests.models.architectures import ARCHITECTURES
from tests.models.filling import everything, load_values, rewrite
from tests.models.tiny import tiny_models

FORMATS = {"fp32": (torch.float32, True), "bf16": (torch.bfloat16, True), "names-as-in-memory": (torch.float32, False)}


@pytest.mark.parametrize(("dtype", "original_format"), FORMATS.values(), ids=FORMATS)
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
    for name in ("block_tensor", "saved_names"):
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
        rewritten(tmp_path, {HEAD: embedding.to(dtype or embedding.dtype)})
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


@pytest.mark.parametrize(("size", "dtype", "part"), [(5, torch.float32, "(5, 16)"), (64, torch.int64, "torch.int64")])
def test_a_second_name_that_does_not_fit_is_a_problem(size: int, dtype: Any, part: str, tmp_path: Path) -> None:
    rewritten(tmp_path, {HEAD: torch.ones(size, 16, dtype=dtype)})
    keys, problems = compared(tmp_path)
    (problem,) = keys.problems
    assert problem.startswith(HEAD)
    assert part in problem
    assert (keys.doubled, keys.missing, problems) == ((), (), ())


def rebuilt(result: BlockTensor, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the runs of `result` say, read from the sources."""
    flat = torch.full((result.numel(),), -1, dtype=torch.int64)
    runs: Any = result.runs(10**6)
    assert [run.target_start for run in runs] == sorted(run.target_start for run in runs)
    for run in runs:
        stop = run.target_start + run.num_elements
        assert bool((flat[run.target_start : stop] == -1).all()), "ranges overlap"
        flat[run.target_start : stop] = sources[run.source].flatten()[run.source_start :][: run.num_elements]
    return flat.reshape(tuple(result.shape))


def numbered(count: int, shape: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[Any]]:
    size = torch.Size(shape).numel()
    tensors = [torch.arange(index * size, (index + 1) * size).reshape(shape) for index in range(count)]
    sources = {str(index): tensor for index, tensor in enumerate(tensors)}
    blocks = [BlockTensor.of_source(name, tensor.shape, tensor.dtype) for name, tensor in sources.items()]
    return sources, tensors, blocks


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_chain_of_moves_equals_torchs(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    sources, tensors, blocks = numbered(data.draw(st.integers(1, 4)), shape)
    many: Any = tensors
    boxes: Any = blocks
    for _ in range(data.draw(st.integers(1, 4))):
        dims = many[0].dim()
        dim = data.draw(st.integers(-dims, dims - 1)) if dims else 0
        move = data.draw(st.sampled_from(["cat", "stack", "chunk", "unbind", "split", "unsqueeze", "squeeze", "turn"]))
        if move in ("cat", "stack") and (dims or move == "stack"):
            function = torch.cat if move == "cat" else torch.stack
            many, boxes = [function(many, dim=dim)], [function(boxes, dim=dim)]
        elif move == "turn" and dims:
            many, boxes = ([item.transpose(0, dim).reshape(-1) for item in items] for items in (many, boxes))
            size = many[0].numel()
            if shapes := [(part, size // part) for part in (2, 3) if size % part == 0]:
                shape = data.draw(st.sampled_from(shapes))
                many, boxes = ([item.reshape(shape) for item in items] for items in (many, boxes))
        elif move == "squeeze":
            many, boxes = [item.squeeze() for item in many], [item.squeeze() for item in boxes]
        elif move == "unsqueeze":
            many, boxes = [item.unsqueeze(dim) for item in many], [item.unsqueeze(dim) for item in boxes]
        elif dims:
            argument = {"chunk": (2,), "split": (1,), "unbind": ()}[move if move != "cat" else "unbind"]
            function = getattr(torch, move if move != "cat" else "unbind")
            many = [part for item in many for part in function(item, *argument, dim=dim)]
            boxes = [part for item in boxes for part in function(item, *argument, dim=dim)]
            uniform = {tuple(item.shape) for item in many}
            if len(uniform) > 1:
                many, boxes = many[:1], boxes[:1]
    assert [tuple(item.shape) for item in many] == [tuple(item.shape) for item in boxes]
    for item, box in zip(many, boxes, strict=True):
        assert torch.equal(rebuilt(box, sources), item)


def test_neighbouring_ranges_are_joined() -> None:
    _, _, (whole,) = numbered(1, (6, 4))
    joined: Any = torch.cat(list(torch.chunk(whole, 3, dim=0)), dim=0)
    runs = joined.runs(10)
    assert [(run.source_start, run.target_start, run.num_elements) for run in runs or ()] == [(0, 0, 24)]


def test_too_many_ranges_are_not_listed() -> None:
    _, _, (whole,) = numbered(1, (6, 4))
    halves: Any = torch.chunk(whole, 2, dim=1)
    assert len(halves[0].runs(6) or ()) == 6
    assert halves[0].runs(5) is None


def test_a_reshape_of_one_range_keeps_it() -> None:
    sources, tensors, (whole,) = numbered(1, (4, 2, 3))
    part = whole.narrow(0, 1, 2).reshape(2, -1)
    assert torch.equal(rebuilt(part, sources), tensors[0][1:3].reshape(2, 6))
    assert len(part.blocks) == 1


def test_a_reshape_of_too_many_ranges_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, (whole,) = numbered(1, (4, 2, 3))
    monkeypatch.setattr("raysharding.models.block_tensor.MAX_RUNS", 3)
    with pytest.raises(UnsupportedOperationError, match="more than 3 contiguous ranges"):
        whole.narrow(1, 0, 1).reshape(-1)


@pytest.mark.parametrize(("function", "argument"), [(torch.flip, (0,)), (torch.add, 1)], ids=["flip", "add"])
def test_other_operations_are_refused(function: Any, argument: Any) -> None:
    _, _, (whole,) = numbered(1, (2, 2))
    with pytest.raises(UnsupportedOperationError):
        function(whole, argument)


def test_mixed_dtypes_and_shapes_are_refused() -> None:
    one: Any = BlockTensor.of_source("a", (2, 2), torch.float32)
    half: Any = BlockTensor.of_source("b", (2, 2), torch.float16)
    wide: Any = BlockTensor.of_source("b", (2, 3), torch.float32)
    with pytest.raises(UnsupportedOperationError):
        torch.cat([one, half])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([one, wide])
