"""Rows dealt out and put together again: sizes, order, dummies, nested values, output types."""

from __future__ import annotations

import pickle
import tracemalloc
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysharding.batch import (
    Out,
    PerRank,
    RankBatch,
    RankOutput,
    Same,
    Split,
    as_tensors,
    by_name,
    check_out,
    deal,
    gather_outputs,
    select_output,
    whole_rows,
)
from raysharding.distributed.training.forward import ambiguous_leaves, follows_rows

ROWS = torch.arange(14).reshape(7, 2)
ONES = torch.ones(7)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Result:
    logits: Any
    loss: Any = None


def outputs_of(batches: list[RankBatch], make: Any) -> list[RankOutput]:
    return [RankOutput(make(batch.args[0])) for batch in batches]


@settings(deadline=None)
@given(
    num_items=st.integers(1, 40), rows_per_item=st.integers(1, 4), world_size=st.integers(1, 9), parts=st.integers(1, 5)
)
def test_items_are_dealt_in_order_and_whole_and_come_back(
    num_items: int, rows_per_item: int, world_size: int, parts: int
) -> None:
    rows = torch.arange(num_items * rows_per_item)
    batches = deal((Split(rows, rows_per_item=rows_per_item),), {}, world_size)
    counts = tuple(batch.num_rows or 0 for batch in batches)
    assert all(batch.rows == counts and batch.is_dummy == (not batch.num_rows) for batch in batches)
    taken = []
    for batch in batches:
        cut = batch.parts(parts)
        for part in [batch, *cut]:
            items = part.args[0].unflatten(0, (-1, rows_per_item))
            assert torch.equal(items, items[:, :1] + torch.arange(rows_per_item)), "an item is not whole"
            assert not (items[:, 0] % rows_per_item).any()
            assert len(items) == max((part.num_rows or 0) // rows_per_item, 1), "a dummy is one item"
            assert part.num_rows or not items[0, 0] or parts > 1, "the first one"
            assert part.rows_per_item == rows_per_item
            assert max(part.rows) - min(part.rows) <= rows_per_item
        for sizes in (counts, [part.num_rows or 0 for part in cut]):
            assert max(sizes) - min(sizes) <= rows_per_item
            assert list(sizes) == sorted(sizes, reverse=True)
        taken += [part.args[0] for part in cut if part.num_rows]
    assert torch.equal(torch.cat(taken), rows)
    assert torch.equal(gather_outputs(outputs_of(batches, lambda x: x * 2), counts), rows * 2)


def test_items_are_dealt_by_name_and_resized_whole() -> None:
    args, kwargs = by_name((Split({"x": ROWS.T[:, :6]}, dim=1, rows_per_item=2),), {})
    batch = deal(args, kwargs, 2)[1]
    for num_rows, columns in ((2, [4, 5]), (4, [4, 5, 4, 5])):
        resized = batch.resized(num_rows)
        assert (resized.kwargs["x"].tolist(), resized.rows) == (ROWS.T[:, columns].tolist(), (num_rows, num_rows))
    batch = deal((Split(ROWS), "same"), {"k": {"x": Split(ROWS.T, dim=1)}}, 3)[1]
    assert torch.equal(batch.resized(1).args[0], ROWS[3:4])
    larger = batch.resized(3)
    assert torch.equal(larger.args[0], ROWS[[3, 3, 3]])
    assert (tuple(larger.kwargs["k"]["x"].shape), larger.args[1]) == ((2, 3), "same")
    array = deal((Split(ROWS[:6].numpy(), rows_per_item=3),), {}, 4)
    assert [one.num_rows for one in array] == [3, 3, 0, 0]
    assert torch.equal(array[3].args[0], ROWS[:3])


def test_replicated_values_are_the_same_object_and_per_rank_ones_are_not() -> None:
    big, nested, same = torch.ones(3), {"list": [1, 2, 3]}, torch.zeros(7, 3)
    batches = deal((big, PerRank(["a", "b"])), {"nested": nested, "inner": {"own": PerRank([1, 2]), "all": big}}, 2)
    assert all(batch.args[0] is big and batch.kwargs["nested"] is nested for batch in batches)
    assert [(batch.args[1], batch.kwargs["inner"]["own"]) for batch in batches] == [("a", 1), ("b", 2)]
    assert all(batch.num_rows is None and batch.rows == () for batch in batches)
    batches = deal((Split(ROWS), Same(same)), {"a": Same({"mask": same}), "b": [Same(same), 1]}, 2)
    assert all(batch.args[1] is same and batch.kwargs["b"] == [same, 1] for batch in batches)
    assert all(batches[0].kwargs[name] is batches[1].kwargs[name] for name in "ab"), "one object, which is sent once"
    assert deal((), {"a": Same(3)}, 2)[1].kwargs == {"a": 3}


def test_pytrees_and_arrays_are_split_and_keep_their_types() -> None:
    tree = OrderedDict(a=ROWS, b=[Point(ROWS[:, 0], ROWS[:, 1].numpy())], c=UserDict(d=ROWS.float()), e=[ROWS, ROWS])
    first, last = deal((), {"tree": Split(tree)}, 2)
    part = last.kwargs["tree"]
    assert (type(part), type(part["b"][0]), type(part["c"]), type(part["e"])) == (OrderedDict, Point, UserDict, list)
    assert isinstance(part["b"][0].y, torch.Tensor)
    assert torch.equal(part["b"][0].y, ROWS[4:, 1])
    assert first.num_rows == 4


def test_rows_may_lie_in_another_dim() -> None:
    batches = deal((Split(ROWS.T, dim=1),), {}, 3)
    assert [tuple(batch.args[0].shape) for batch in batches] == [(2, 3), (2, 2), (2, 2)]
    assert batches[0].dim == 1
    gathered = gather_outputs(outputs_of(batches, lambda x: x + 1), batches[0].rows, batches[0].dim)
    assert torch.equal(gathered, ROWS.T + 1)
    assert deal((Split(ROWS.T, dim=-1),), {}, 3)[0].dim == 1
    assert deal((Split(ROWS.T, dim=1), Split(ROWS)), {}, 3)[0].dim == 0


def test_a_part_costs_its_own_rows_only() -> None:
    rows = torch.zeros(1000, 100)
    (batch, *_) = deal((Split(rows),), {}, 100)
    assert len(pickle.dumps(batch)) < 10 * 100 * 4 + 4000
    copy = pickle.loads(pickle.dumps(batch))
    assert torch.equal(copy.args[0], rows[:10])
    assert copy.rows == batch.rows
    array = np.arange(1_000_000.0).reshape(4, 250_000)
    array.flags.writeable = False
    tracemalloc.start()
    part = Split(array[:, ::-1], dim=-1).rows(10, 5).value
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 100_000
    assert part.tolist() == array[:, ::-1][:, 10:15].tolist()


def dealt(*args: Any, **kwargs: Any) -> list[RankBatch]:
    return deal(args, kwargs, 2)


def by(**columns: Any) -> Any:
    """Collate any examples to these columns."""
    return Split([1, 2], collate_fn=lambda _: columns)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: dealt(Split(ROWS), Split(ROWS[:3])), r"args\[0\] has 7, args\[1\] has 3"),
        (lambda: dealt(a=Split({"x": ROWS, "y": ROWS[:2]})), r"a\['x'\] has 7, a\['y'\] has 2"),
        (lambda: dealt(Split(ROWS[:0])), "0 rows"),
        (lambda: dealt(Split(torch.tensor(1.0))), r"shape \(\) has no dim 0"),
        (lambda: dealt(Split(ROWS, dim=2)), "has no dim 2"),
        (lambda: dealt(Split([ROWS, 3])), r"\]\[1\]: only tensors, numpy arrays and lists of numbers .* not int"),
        (lambda: dealt(Split([ROWS, "x"])), r"args\[0\]\[1\]: .* not str"),
        (lambda: dealt(Split({})), "holds no tensor"),
        (lambda: dealt(Split(np.array(["a", "b"]))), "no tensor dtype"),
        (lambda: dealt(Split(ROWS.float().to_sparse())), "to_dense"),
        (lambda: dealt(PerRank([1, 2, 3])), "3 values, but the group has 2 ranks"),
        (
            lambda: dealt(x=Split(ROWS, rows_per_item=3)),
            "x: 7 rows do not divide by rows_per_item=3: leave out the last 1, or add 2",
        ),
        (
            lambda: dealt(Split(ROWS, rows_per_item=7), labels=Split(ROWS)),
            r"same rows_per_item, but args\[0\] has 7, labels has 1: give each of them rows_per_item=7",
        ),
        *(
            (lambda wrong=wrong: Split(ROWS, rows_per_item=wrong), r"rows_per_item=.*: give a whole number, 1 or more")
            for wrong in (0, -2, True, 2.0, "2")
        ),
        (lambda: dealt(Split({"x": ROWS, "y": Same(ROWS)})), r"args\[0\]\['y'\]: a Same inside a Split"),
        (lambda: dealt(Split([Split(ROWS)])), r"args\[0\]\[0\]: a Split inside a Split"),
        (lambda: dealt(Split(PerRank([ROWS, ROWS]))), r"args\[0\]: a PerRank inside a Split"),
        (lambda: dealt(Same([Split(ROWS)])), r"args\[0\]\[0\]: a Split inside a Same"),
        (lambda: dealt(PerRank([Same(ROWS), ROWS])), r"args\[0\]\[0\]: a Same inside a PerRank"),
        (lambda: Split(ROWS, dim="0"), "give the dim as a whole number"),  # type: ignore[arg-type]
        (lambda: Split(ROWS, dim=None), "give the dim as a whole number"),  # type: ignore[arg-type]
        (lambda: Out.gather(dim=1.0), "give the dim as a whole number"),  # type: ignore[arg-type]
        (lambda: Out("all"), r"give Out\.gather\(\), Out\.rank0\(\)"),  # type: ignore[arg-type]
        (lambda: check_out("gather"), r"give Out\.gather\(\), Out\.rank0\(\)"),  # type: ignore[arg-type]
        (lambda: Split({"input_ids": [[1, 2], [3]]}), r"Split\['input_ids'\]: lists of different .*padding=True"),
        (lambda: by_name((Split({"labels": ROWS}),), {"labels": Split(ROWS)}), "labels: given twice"),
        (
            lambda: deal(*by_name((Split({"x": ROWS, "on": False}),), {}), 2),
            "on: only tensors.* not bool; pass anything else",
        ),
        (lambda: Split(ONES, collate_fn=len), r"Split\(a Tensor, dim=0, collate_fn=.*give a list of examples"),
        (lambda: Split([1, 2], collate_fn="f"), "collate_fn='f'"),  # type: ignore[arg-type]
        (lambda: Split([1, 2], dim=1, collate_fn=len), "and no dim="),
        (lambda: dealt(by(), 3), "the only positional argument of a call"),
        (lambda: dealt(by(), x=Split(ONES)), r"args\[0\], x: a Split with"),
        (lambda: dealt(x=by()), "x: a Split with collate_fn="),
        (lambda: dealt(Split([], collate_fn=len)), "0 rows"),
        (lambda: dealt(Split([1, 2], collate_fn=len))[0].collated(), "returned a int without a tensor"),
        (lambda: dealt(by(x=ONES), x=3)[0].collated(), "x: given twice, by collate"),
    ],
)
def test_what_cannot_be_dealt_is_named(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((), {"ids": Split(ROWS), "bias": ROWS}, "bias"),
        ((Split(ROWS), ROWS.float()), {}, r"args\[1\]"),
        ((Split(ROWS),), {"bias": ROWS.numpy()}, "bias"),
        ((Split(ROWS),), {"more": {"inner": [(3, Point(ROWS, 1))]}}, r"more\['inner'\]\[0\]\[1\]\.x"),
        ((), {"batch": {"input_ids": Split(ROWS), "bias": ROWS}}, r"batch\['bias'\]"),
        ((Split(ROWS.T, dim=1),), {"bias": torch.zeros(3, 7)}, "bias"),
        ((Split(ROWS.T, dim=-1),), {"bias": torch.zeros(3, 2, 7)}, "bias"),
        ((Split(ROWS.T, dim=1), Split(ROWS)), {"bias": torch.zeros(7, 3)}, "bias"),
        ((Split(ROWS),), {"decoder_attention_mask": ONES}, "decoder_attention_mask"),
        ((Split(ROWS),), {"labels": np.zeros(7)}, "labels"),
        ((Split(ROWS.T, dim=1),), {"labels": ONES}, "labels"),
        ((Split(ROWS),), {"more": {"token_type_ids": [ONES]}}, r"more\['token_type_ids'\]\[0\]"),
        ((Split(ROWS),), {"result": Result(ONES, {"start_positions": ONES})}, "start_positions"),
        ((Split(ROWS), 1, ONES), {}, r"args\[2\] \(labels\)"),
    ],
)
def test_a_tensor_that_looks_like_rows_beside_a_split_is_refused(args: Any, kwargs: Any, path: str) -> None:
    with pytest.raises(ValueError, match=rf"{path}.*: shape \(.*Split\(.*Same\("):
        deal(args, kwargs, 2, positions=("x", "weight", "labels"))


def test_what_is_no_rows_goes_to_all() -> None:
    named = {"weight": ONES, "eos_token_id": ONES}
    for value in (torch.zeros(6, 7), ONES, torch.tensor(7), [0] * 7, [[0, 1]] * 7, named, PerRank([ROWS, ROWS])):
        for batch in dealt(Split(ROWS), value=value):
            assert batch.kwargs["value"] is (value[0] if isinstance(value, PerRank) else value)
    deal((Split(ROWS), ONES), {}, 2, positions=("x", "weight"))
    assert dealt(input_ids=Split(ROWS), labels=[0] * 7)[1].kwargs["labels"] == [0] * 7
    assert len(dealt(input_ids=Split(ROWS[:1]), attention_mask=ROWS[:1])[1].kwargs["attention_mask"]) == 1
    assert dealt(input_ids=ROWS, attention_mask=ROWS)[1].kwargs["attention_mask"] is ROWS, "a call without a Split"


def test_a_sole_split_of_a_mapping_is_dealt_out_by_name() -> None:
    batch = UserDict(input_ids=ROWS, labels=ROWS[:, 0])
    args, kwargs = by_name((Split(batch),), {"use_cache": False})
    first = deal(args, kwargs, 2)[0]
    assert first.args == ()
    assert torch.equal(first.kwargs["input_ids"], ROWS[:4])
    assert torch.equal(first.kwargs["labels"], ROWS[:4, 0])
    assert first.kwargs["use_cache"] is False
    for other in ((Split(ROWS),), (Split({0: ROWS}),), (Split({}),), (Split(batch), 3), (batch,), ()):
        assert by_name(other, {"x": Split(batch)})[0] is other


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: {"logits": x, "other": None},
        lambda x: (x, [x]),
        lambda x: Point(x, x),
        Result,
        lambda x: OrderedDict(logits=x),
        lambda x: {},
    ],
)
def test_an_output_keeps_its_type(wrap: Any) -> None:
    batches = deal((Split(ROWS),), {}, 3)
    gathered, whole = gather_outputs(outputs_of(batches, wrap), batches[0].rows), wrap(ROWS)
    assert (type(gathered), str(gathered)) == (type(whole), str(whole))


def test_model_outputs_are_gathered_field_by_field() -> None:
    cls = pytest.importorskip("transformers.modeling_outputs").CausalLMOutputWithPast
    outputs = [
        RankOutput(cls(loss=torch.tensor(2.0), logits=part, hidden_states=(part, part + 1)), reduced=("['loss']",))
        for part in (ROWS[:4], ROWS[4:])
    ]
    gathered = gather_outputs(outputs, (4, 3))
    assert (type(gathered), list(gathered)) == (cls, ["loss", "logits", "hidden_states"])
    assert gathered.loss == 2.0
    assert torch.equal(gathered.logits, ROWS)
    assert torch.equal(gathered.hidden_states[1], ROWS + 1)
    assert gathered.past_key_values is None


def test_what_is_not_rows_comes_back_per_rank() -> None:
    values = [
        {
            "scalar": torch.tensor(float(rank)),
            "text": text,
            "ragged": torch.zeros(rows, 3 + rank),
            "fixed": ONES,
            "n": n,
        }
        for rank, (rows, text, n) in enumerate(((2, "a", [1]), (2, "b", [1, 2]), (1, "c", [1])))
    ]
    gathered = gather_outputs([RankOutput(value) for value in values], (2, 2, 0))
    assert all(isinstance(value, PerRank) and len(value) == 3 for value in gathered.values())
    assert list(gathered["text"]) == ["a", "b", None]
    assert (gathered["ragged"][1].shape, gathered["n"][1]) == ((2, 4), [1, 2])
    mixed = gather_outputs([RankOutput(torch.zeros(2)), RankOutput(torch.zeros(2, dtype=torch.int64))], (2, 2))
    assert isinstance(mixed, PerRank)
    outputs = [RankOutput({"logits": torch.zeros(2, 2), "square": torch.zeros(2, 2)}, local=("['square']",))] * 2
    gathered = gather_outputs(outputs, (2, 2))
    assert gathered["logits"].shape == (4, 2)
    assert isinstance(gathered["square"], PerRank), "the ranks found that it does not follow the rows"
    assert gather_outputs(outputs, (1, 0)) is gather_outputs(outputs, ()) is outputs[0].value


def test_ambiguous_leaves_are_found_and_told_apart() -> None:
    value = {"square": torch.zeros(3, 3), "rows": torch.zeros(3, 4), "seq": torch.zeros(3, 5, 3), "off": torch.zeros(4)}
    assert ambiguous_leaves(value, 3, 0) == ["['square']", "['seq']"]
    value = {"square": torch.zeros(3, 3), "rows": torch.zeros(4, 3), "scalar": torch.tensor(1.0)}
    assert ambiguous_leaves(value, 3, -1) == ["['square']"]
    assert follows_rows(torch.zeros(3, 3), torch.zeros(1, 3), 1, 0)
    for after in (torch.zeros(1, 1), torch.zeros(3, 3), None):
        assert not follows_rows(torch.zeros(3, 3), after, 1, 0)


def test_out_chooses_the_result() -> None:
    check_out(None)
    outputs = [RankOutput(torch.zeros(2, 1)), RankOutput(torch.ones(1, 1))]
    assert select_output(None, outputs, (2, 1), 0).shape == (3, 1)
    assert select_output(None, outputs, (), 0) is outputs[0].value
    assert select_output(Out.rank0(), outputs, (2, 1), 0) is outputs[0].value
    assert select_output(Out.none(), outputs, (2, 1), 0) is None
    assert list(select_output(Out.per_rank(), outputs, (2, 1), 0)) == [output.value for output in outputs]
    turned = [RankOutput(output.value.T) for output in outputs]
    assert select_output(Out.gather(dim=1), turned, (2, 1), 0).shape == (1, 3)
    idle = [*outputs, RankOutput(torch.ones(1, 1))]
    assert select_output(Out.per_rank(), idle, (2, 1, 0), 0)[2] is None, "nothing comes of a dummy row"
    assert select_output(Out.per_rank(), idle, (), 0)[2] is not None


def test_a_negative_dim_counts_from_the_end_of_each_leaf() -> None:
    values = [
        {"a": torch.ones(2, rows), "b": torch.ones(rows), "scalar": torch.tensor(1.0), "other": torch.ones(4)}
        for rows in (3, 1)
    ]
    gathered = select_output(Out.gather(dim=-1), [RankOutput(value) for value in values], (3, 1), 0)
    assert (gathered["a"].shape, gathered["b"].shape) == ((2, 4), (4,))
    assert isinstance(gathered["scalar"], PerRank)
    assert isinstance(gathered["other"], PerRank)
    assert isinstance(select_output(Out.gather(dim=-2), [RankOutput(values[0]["b"])] * 2, (3, 1), 0), PerRank)
    uneven = [RankOutput(torch.ones(2, 3)), RankOutput(torch.ones(3, 1))]
    assert isinstance(select_output(Out.gather(dim=-1), uneven, (3, 1), 0), PerRank)


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4], [5, 6]], [1, 2, 3], [0.5, 1.5], [True, False], [[[1]], [[2]]]])
def test_lists_of_numbers_are_split_as_torch_reads_them(rows: list[Any]) -> None:
    parts = [batch.args[0]["x"] for batch in dealt(Split(UserDict(x=rows)))]
    torch.testing.assert_close(torch.cat(parts), torch.tensor(rows), rtol=0, atol=0)
    assert parts[0].dtype == torch.tensor(rows).dtype


def test_a_models_arrays_become_tensors_and_only_lists_of_columns_do() -> None:
    assert torch.equal(as_tensors("input_ids", [[1, 2]]), torch.tensor([[1, 2]]))
    assert as_tensors("sizes", [1, 2]) == [1, 2]
    assert as_tensors("bad_words_ids", [[1, 2]]) == [[1, 2]]
    assert isinstance(as_tensors("temperature", np.float64(0.7)), float)
    own = as_tensors("x", PerRank([np.ones(2), {"y": np.arange(3)}]))
    assert torch.equal(own[0], torch.ones(2, dtype=torch.float64))
    assert torch.equal(own[1]["y"], torch.arange(3))
    assert torch.equal(as_tensors("x", Same(np.ones(2))).value, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((ROWS,), {}, "args[0] of shape (7, 2)"),
        ((), {"labels": torch.arange(2)}, "labels of shape (2,)"),
        ((), {"scale": torch.arange(9)}, None),
        ((ROWS[:1],), {}, None),
        ((Same(ROWS),), {}, None),
        ((Split(ROWS), torch.ones(9, 9)), {}, None),
        ((PerRank([ROWS, ROWS]),), {}, None),
    ],
)
def test_rows_that_every_rank_gets_are_noticed(args: Any, kwargs: Any, found: str | None) -> None:
    assert whole_rows(args, kwargs, 2, ()) == found
    assert whole_rows(args, kwargs, 1, ()) is None


def first_and_number(examples: list[Any]) -> dict[str, Any]:
    numbers = np.array([one["number"] for one in examples])
    return {"first": torch.tensor(numbers[0]), "all": numbers, "text": "x"}


def test_examples_are_dealt_and_collated_by_part() -> None:
    """Rows of any kind; what collate returns has no rows, and a rank without examples gets the first as a dummy."""
    examples = [{"number": number, "label": "text"} for number in range(5)]
    for world_size, num_parts in ((1, 1), (2, 1), (2, 2), (3, 2), (6, 1)):
        found: list[int] = []
        for batch in deal([Split(examples, collate_fn=first_and_number)], {"flag": True}, world_size):
            for part in map(RankBatch.collated, batch.parts(num_parts)):
                kwargs = part.kwargs
                assert (kwargs["flag"], kwargs["text"], part.num_held) == (True, "x", len(kwargs["all"]))
                assert kwargs["first"].item() == kwargs["all"][0].item()
                found += kwargs["all"].tolist() if part.num_rows else []
                assert part.num_rows or kwargs["all"].tolist() == [0] or num_parts > 1
        assert found == list(range(5))
    pairs = deal([Split(examples[:4], collate_fn=first_and_number, rows_per_item=2)], {}, 3)
    assert [batch.collated().kwargs["all"].tolist() for batch in pairs] == [[0, 1], [2, 3], [0, 1]]
    assert pairs[0].resized(4).collated().kwargs["all"].tolist() == [0, 1, 0, 1]
