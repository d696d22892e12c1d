"""Calls that would leave ranks waiting are refused on the driver, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raysharding import PerRank, Same, ShardedModelGroup, Split
from raysharding.batch import deal
from raysharding.group import GroupState
from raysharding.group.calls.input_checks import check_batches, check_no_examples
from raysharding.models import InputBounds
from tests.models.architectures import ARCHITECTURES

IDS = torch.arange(12).reshape(6, 2)


def check(*args: Any, bounds: InputBounds | None = None, world_size: int = 2, **kwargs: Any) -> None:
    check_batches("forward", deal(args, kwargs, world_size), bounds or InputBounds())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((torch.zeros(2, 3), None), r"args\[0\] is None on rank 1, but a float32 tensor of 2 dims on rank 0"),
        ((torch.zeros(2, 3), torch.zeros(2)), "a float32 tensor of 1 dims on rank 1"),
        ((torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)), "a float64 tensor of 2 dims on rank 1"),
        (({"a": 1}, {"a": 1, "b": 2}), r"args\[0\]\['b'\] is of type int on rank 1, but nothing on rank 0"),
    ],
)
def test_ranks_with_arguments_of_different_kinds(values: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(PerRank(values))


def test_examples_may_differ() -> None:
    check(Split([{"images": ["a", "b"]}, {"images": [], "text": "c"}], collate_fn=list))


def test_calls_that_collate_nothing_say_so() -> None:
    (batch,) = deal([Split([1, 2], collate_fn=list)], {}, 1)
    check_no_examples("generate", deal([Split(IDS)], {}, 1)[0], "")
    with pytest.raises(
        ValueError, match=r"generate runs no collate_fn= of a Split: predict\(\) does it, or give Split\(col"
    ):
        check_no_examples("generate", batch, "predict() does it")


def test_sizes_may_differ_and_what_all_ranks_share_is_not_compared() -> None:
    check(PerRank([torch.zeros(2, 3), torch.zeros(5, 7)]), Split(IDS), mask=None)


def test_ids_outside_the_model_are_refused_with_their_row() -> None:
    bounds = InputBounds(("input_ids", "labels"), {"input_ids": 12, "labels": 12})
    check(Split(IDS), bounds=bounds)
    check(Split(IDS), labels=Split(torch.where(IDS > 4, IDS, -100)), bounds=bounds)
    check(Split(IDS), other=Split(IDS + 100), bounds=bounds)
    wrong = IDS.clone()
    wrong[4, 1] = 12
    for args, kwargs in (((Split(wrong),), {}), ((), {"input_ids": Split(wrong)}), ((wrong,), {})):
        with pytest.raises(ValueError, match=r"input_ids holds 12 in row 4, and the model has the ids 0 to 11:"):
            check(*args, bounds=bounds, world_size=4, **kwargs)
    with pytest.raises(ValueError, match=r"labels holds -1 in row 0, .* or -100 for labels that the loss ignores"):
        check(Split(IDS), labels=Split(IDS - 1), bounds=bounds)
    with pytest.raises(ValueError, match="input_ids holds -100"):
        check(Split(torch.full((2, 2), -100)), bounds=bounds)
    along = wrong.T.contiguous()
    with pytest.raises(ValueError, match="in row 4"):
        check(Split(along, dim=1), bounds=bounds)


def test_class_labels_outside_num_labels_are_refused() -> None:
    """On one rank alone, cross_entropy would raise, while the others wait for it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for wrong in (3, -1):
        labels = torch.tensor([0, 1, 2, -100, wrong])
        for kind, given in (("Sequence", labels), ("Token", labels[:, None].expand(5, 2))):
            config = transformers.BertConfig(**sizes, intermediate_size=8, num_labels=3)
            bounds = InputBounds.of(getattr(transformers, f"BertFor{kind}Classification")(config))
            with pytest.raises(ValueError, match=rf"labels holds {wrong} in row 4, .* 0 to 2, or .*num_labels"):
                check(labels=Split(given), bounds=bounds, world_size=3)
            check(labels=Split(given[:4]), bounds=bounds)
            check(labels=Split(torch.rand(5, 3)), bounds=bounds)  # of several labels a row
            check(labels=Split(given), bounds=bounds.for_loss(len))  # which may ignore -1
    config = transformers.BertConfig(**sizes, intermediate_size=8, num_labels=3, problem_type="regression")
    check(labels=Split(labels), bounds=InputBounds.of(transformers.BertForSequenceClassification(config)))


def test_floats_are_no_ids() -> None:
    bounds = InputBounds(("input_ids", "labels"), {"input_ids": 12, "labels": 12})
    wrong: list[dict[str, Any]] = [
        {"input_ids": Split(IDS.float())},
        {"input_ids": Split(IDS), "labels": Split(IDS.double())},
    ]
    for given in wrong:
        with pytest.raises(ValueError, match=r"(input_ids|labels) is of torch.float\d\d, and the model takes ids"):
            check(bounds=bounds, **given)
    check(Split(IDS), pixel_values=Split(IDS.float()), bounds=bounds)


@pytest.mark.parametrize("name", ["llama", "t5", "bert", "clip"])
def test_a_transformers_model_says_which_ids_it_has(name: str) -> None:
    model = ARCHITECTURES[name].make()
    bounds = InputBounds.of(model)
    config = getattr(model.config, "text_config", model.config)
    if name != "clip":  # two towers: the model itself has no input embeddings
        assert bounds.num_ids["input_ids"] == config.vocab_size
    assert ("decoder_input_ids" in bounds.num_ids) == (name == "t5")
    if name == "bert":
        assert bounds.num_ids["token_type_ids"] == config.type_vocab_size
    assert set(bounds.num_ids) <= {*bounds.positions, "labels"}


SMALL = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
BART = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 1,
    "decoder_attention_heads": 1,
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Bert", SMALL),
        ("Roberta", {**SMALL, "max_position_embeddings": 14, "pad_token_id": 1}),
        ("GPT2", {"vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "bos_token_id": 0, "eos_token_id": 0}),
        ("Bart", {**BART, "vocab_size": 64, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "forced_eos_token_id": None}),
        ("OPT", {**SMALL, "ffn_dim": 8, "word_embed_proj_dim": 8}),
        ("Llama", {**SMALL, "num_key_value_heads": 1}),
    ],
)
def test_a_text_longer_than_the_positions_is_refused(name: str, options: dict[str, Any]) -> None:
    """Else a rank that has one would raise in the forward, while the others wait. The oracle is the model."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**{"max_position_embeddings": 12, **options})
    model = getattr(transformers, f"{name}Model")(config).eval()
    bounds = InputBounds.of(model)
    longest = torch.full((1, 12), 5)
    longer = torch.full((1, 13), 5)
    check(input_ids=Split(longest), bounds=bounds, world_size=1)
    model(input_ids=longest)
    if name == "Llama":  # rotary: any length
        check(input_ids=Split(longer), bounds=bounds, world_size=1)
        return
    check(input_ids=Split(longer), position_ids=Split(longer * 0), bounds=bounds, world_size=1)  # rows that are packed
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|must match"):
        model(input_ids=longer)
    with pytest.raises(
        ValueError, match=r"input_ids has 13 columns, and the model has 12 positions: .*max_length=12\)"
    ):
        check(input_ids=Split(longer), bounds=bounds, world_size=1)


def test_any_other_module_takes_anything() -> None:
    assert InputBounds.of(nn.Embedding(3, 4)) == InputBounds(("input",), keywords=frozenset({"input"}))


def test_a_refused_call_leaves_the_group_ready(group: ShardedModelGroup) -> None:
    with pytest.raises(ValueError, match="wait for each other forever"):
        group.forward(PerRank([torch.zeros(2, 8), None]))
    assert group.state is GroupState.READY
    shapes = [torch.zeros(1, 8), torch.zeros(3, 8)]
    assert [tuple(part.shape) for part in group.forward.remote(PerRank(shapes)).per_rank()] == [(1, 4), (3, 4)]


def names_checked(bounds: InputBounds, *args: Any, needs_loss: bool = True, **kwargs: Any) -> None:
    bounds.check_names(deal(args, kwargs, 2)[0], "train_step", needs_loss)


def test_labels_that_a_transformers_models_loss_needs_are_missed() -> None:
    from transformers import BertConfig, BertForPreTraining

    with torch.device("meta"):
        config = BertConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
        bounds = InputBounds.of(BertForPreTraining(config))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for given in ({}, {"labels": None}, {"position_ids": Same(ids)}):
        with pytest.raises(ValueError, match=r"train_step: the batch has no labels, .* add labels= to the batch"):
            names_checked(bounds, input_ids=Split(ids), **given)
    with pytest.raises(ValueError, match=r"no labels|lables=: is it labels=\?"):
        names_checked(bounds, input_ids=Split(ids), lables=Split(ids))
    names_checked(bounds, input_ids=Split(ids), labels=Split(ids))
    names_checked(bounds, input_ids=Split(ids), next_sentence_label=Split(ids))
    names_checked(bounds, *[Split(ids)] * len(bounds.positions))
    names_checked(bounds, input_ids=Split(ids), needs_loss=False)


def test_a_forward_with_any_keywords_takes_them_and_a_loss_of_another_model_is_its_own_affair() -> None:
    class Open(nn.Module):
        def forward(self, x: Any, labels: Any = None, **kwargs: Any) -> Any:
            return x

    class Fixed(nn.Module):
        def forward(self, x: Any, /, *, scale: Any = None) -> Any:
            return x

    names_checked(InputBounds.of(Open()), 1, other=2)
    names_checked(InputBounds.of(Fixed()), 1, scale=2)
    for name in ("x", "scales"):
        with pytest.raises(ValueError, match=f"no argument {name}=: (it takes scale|is it scale=)"):
            names_checked(InputBounds.of(Fixed()), needs_loss=False, **{name: 1})
