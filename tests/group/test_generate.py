"""`generate`: the ids that transformers gives in one process, whatever ranks finish first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transformers

from raysharding import (
    CallCancelledError,
    DataError,
    GroupError,
    Out,
    PerRank,
    ShardedModelGroup,
    Sharding,
    Split,
    current_worker,
)
from raysharding.group import GroupState
from tests.conftest import make_group
from tests.distributed.fidelity import CASES, make_checkpoint
from tests.models.architectures import ARCHITECTURES

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]

VOCAB = 64
NO_STEP = partial(torch.optim.SGD, lr=0.0)
PROMPTS = torch.randint(3, VOCAB, (5, 4), generator=torch.Generator().manual_seed(3))


def reference_of(name: str, directory: Path) -> Any:
    model = getattr(transformers, ARCHITECTURES[CASES[name].architecture].model).from_pretrained(directory)
    return model.eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "llama"
    make_checkpoint(path, CASES["llama"])
    return path


@pytest.fixture(scope="module")
def llama(cluster: None, directory: Path) -> Iterator[ShardedModelGroup]:
    with ShardedModelGroup.from_checkpoint(directory, world_size=3, device="cpu") as group:
        yield group


def ended_early(reference: Any) -> int:
    """A token with which, as the end of a text, some rows end early and others do not."""
    ids = reference.generate(PROMPTS, max_new_tokens=12, do_sample=False)[:, 4:]
    for token in ids.unique().tolist():
        ends = [row.tolist().index(token) if token in row else 12 for row in ids]
        if len(set(ends)) > 2 and min(ends) < 6:
            return int(token)
    raise AssertionError("no token ends some rows early")


def test_greedy_and_beams_equal_one_process(llama: ShardedModelGroup, directory: Path) -> None:
    reference = reference_of("llama", directory)
    end = ended_early(reference)
    for options in (
        {"max_new_tokens": 6, "do_sample": False},
        {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": 1},
        {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [end, 2]},
        {"max_new_tokens": 5, "num_beams": 3, "do_sample": False},
        {"max_new_tokens": 5, "num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    ):
        for rows in (5, 2):
            expected = reference.generate(PROMPTS[:rows], **options)
            for gathers in (None, False):
                found = llama.generate(Split(PROMPTS[:rows]), summon_full_params=gathers, **options)
                assert torch.equal(found, expected), (options, rows, gathers, found, expected)


def test_prompts_that_are_padded_on_the_left(llama: ShardedModelGroup, directory: Path) -> None:
    mask = torch.ones_like(PROMPTS)
    mask[1, :2] = mask[4, :3] = 0
    batch = transformers.BatchEncoding({"input_ids": PROMPTS, "attention_mask": mask})
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = reference_of("llama", directory).generate(**batch, **options)
    assert torch.equal(llama.generate(input_ids=Split(PROMPTS), attention_mask=Split(mask), **options), expected)
    assert torch.equal(llama.generate(Split(batch), **options), expected)
    with pytest.raises(ValueError, match=r"attention_mask: shape \(5, 4\) has size 5 in dim 0"):
        llama.generate(Split(PROMPTS), attention_mask=mask, **options)


def test_what_comes_back_is_as_for_forward(llama: ShardedModelGroup) -> None:
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    whole = llama.generate(Split(PROMPTS), **options)
    parts = llama.generate(Split(PROMPTS), out=Out.per_rank(), **options)
    assert isinstance(parts, PerRank)
    assert torch.equal(torch.cat(list(parts)), whole)
    refs = llama.generate(Split(PROMPTS), out=Out.refs(), **options)
    assert torch.equal(torch.cat(ray.get(list(refs))), whole)
    assert llama.generate(Split(PROMPTS), out=Out.none(), **options) is None
    assert torch.equal(llama.generate(PROMPTS, **options), whole), "rank 0 answers, without a Split"
    streamed = dict(llama.generate.remote(Split(PROMPTS), **options).stream())
    assert torch.equal(torch.cat([streamed[rank] for rank in range(3)]), whole)
    several = options | {"num_beams": 2, "num_return_sequences": 2}
    whole = llama.generate(Split(PROMPTS), **several)
    assert len(whole) == 2 * len(PROMPTS)
    refs = llama.generate(Split(PROMPTS), out=Out.refs(), **several)
    assert torch.equal(torch.cat(ray.get(list(refs))), whole)
    assert torch.equal(llama.generate(PROMPTS, **several), whole)


def new_ids(row: torch.Tensor, end: int) -> list[int]:
    """The new ids of a row, up to and with its end token."""
    ids: list[int] = row[PROMPTS.shape[1] :].tolist()
    return ids[: ids.index(end) + 1] if end in ids else ids


@pytest.mark.parametrize("gathers", [None, False])
def test_tokens_come_as_they_are_generated(llama: ShardedModelGroup, directory: Path, gathers: bool | None) -> None:
    """Each row's in order, a token of all rows a step; rows that end early have no padding, and the result is whole."""
    end = ended_early(reference_of("llama", directory))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": 1}
    for rows in (5, 2):
        expected = llama.generate(Split(PROMPTS[:rows]), **options)
        call = llama.generate.remote(Split(PROMPTS[:rows]), stream=True, summon_full_params=gathers, **options)
        came = list(call.stream(60))
        steps = [sum(one == row for one, _ in came[:index]) for index, (row, _) in enumerate(came)]
        assert steps == sorted(steps), "no row is ahead of another"
        by_row = [[token for one, token in came if one == row] for row in range(rows)]
        assert by_row == [new_ids(row, end) for row in expected]
        assert torch.equal(call.result(), expected)
        assert list(call.stream(60)) == [], "each token comes once"
    several = options | {"do_sample": True, "num_return_sequences": 2, "seed": 3, "stream": True}
    call = llama.generate.remote(PROMPTS[:1], **several)
    assert {row for row, _ in call.stream(60)} == {0, 1}


def count_forwards() -> None:
    module: Any = current_worker().module

    def count(*_: Any) -> None:
        module.forwards += 1

    if not hasattr(module, "forwards"):
        module.register_forward_pre_hook(count)
    module.forwards = 0


@pytest.mark.parametrize("gathers", [None, False])
def test_a_stream_that_is_left_ends_within_two_tokens(llama: ShardedModelGroup, gathers: bool | None) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "min_new_tokens": 30, "summon_full_params": gathers}
    expected = llama.generate(Split(PROMPTS), do_sample=False, **options)
    llama.call(count_forwards)
    call = llama.generate.remote(Split(PROMPTS), stream=True, do_sample=False, **options)
    waiting = llama.generate.remote(Split(PROMPTS), stream=True, do_sample=False, **options)
    waiting.cancel()
    for number, _ in enumerate(call.stream(60)):
        if number == 3 * len(PROMPTS):
            break
    with pytest.raises(CallCancelledError, match="was cancelled between two of its steps"):
        call.result(60)
    with pytest.raises(CallCancelledError, match="before any rank began it"):
        waiting.result(60)
    forwards = llama.call(lambda: current_worker().module.forwards)
    assert max(forwards) <= 4 + 2, "four tokens were asked for"
    assert torch.equal(llama.generate(Split(PROMPTS), do_sample=False, **options), expected)
    done = llama.generate.remote(Split(PROMPTS), do_sample=False, **options)
    done.result()
    done.cancel()
    assert torch.equal(done.result(), expected)


class Fails(transformers.LogitsProcessor):
    """Raises for the third token, on every rank."""

    number = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.number += 1
        if self.number == 3:
            raise KeyError("third")
        return scores


@pytest.mark.parametrize("gathers", [None, False])
def test_a_stream_that_fails_or_is_interrupted_leaves_the_group_ready(
    llama: ShardedModelGroup, gathers: bool | None
) -> None:
    options: dict[str, Any] = {"min_new_tokens": 40, "max_new_tokens": 40, "summon_full_params": gathers}
    expected = llama.generate(Split(PROMPTS), do_sample=False, **options)
    for _ in range(3):
        call = llama.generate.remote(Split(PROMPTS), stream=True, logits_processor=[Fails()], **options)
        with pytest.raises(KeyError, match="third"):
            list(call.stream(60))
        assert llama.state is GroupState.READY
    tokens = llama.generate.remote(Split(PROMPTS), stream=True, **options).stream(60)
    next(tokens)
    llama.interrupt(60)
    with pytest.raises(CallCancelledError, match="between two of its steps"):
        list(tokens)
    with pytest.raises(ValueError, match="not with assisted decoding"):
        list(llama.generate.remote(Split(PROMPTS[:3]), stream=True, prompt_lookup_num_tokens=2, **options).stream(60))
    assert torch.equal(llama.generate(Split(PROMPTS), do_sample=False, **options), expected)


def log_probabilities(outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
    assert len(batch["inputs"]) == len(outputs.sequences)
    module = current_worker().module
    return {
        "ids": outputs.sequences,
        "log_probabilities": module.compute_transition_scores(  # type: ignore[operator]
            outputs.sequences, outputs.scores, normalize_logits=True
        ),
    }


def test_log_probabilities_of_the_chosen_tokens_are_those_of_one_process(
    llama: ShardedModelGroup, directory: Path
) -> None:
    """`fn` has transformers' scores on the rank; ranks that end at different times have results of one length."""
    reference = reference_of("llama", directory)
    end = ended_early(reference)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": 1}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    whole = reference.generate(PROMPTS, **options)
    expected = reference.compute_transition_scores(whole.sequences, whole.scores, normalize_logits=True)
    until = [len(new_ids(row, end)) for row in whole.sequences]
    for gathers in (None, False):
        found = llama.generate(Split(PROMPTS), fn=log_probabilities, summon_full_params=gathers, **options)
        assert torch.equal(found["ids"], whole.sequences)
        for row, number in enumerate(until):
            torch.testing.assert_close(found["log_probabilities"][row, :number], expected[row, :number])
        # All of it travels where it is asked for.
        given = llama.generate(input_ids=Split(PROMPTS), summon_full_params=gathers, output_logits=True, **options)
        assert type(given) is type(whole)
        assert given.past_key_values is None
        for row, number in enumerate(until):
            for step in range(number):
                torch.testing.assert_close(given.scores[step][row], whole.scores[step][row])
        assert len(given.logits) == len(whole.scores)
    several: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 5}
    several |= {"return_dict_in_generate": True}
    beams = llama.generate(Split(PROMPTS), **several)
    assert beams.beam_indices is None
    with pytest.raises(ValueError, match="scores of beams are of a rank's own beams: give fn="):
        llama.generate(Split(PROMPTS), output_scores=True, **several)
    assert torch.equal(beams.sequences, reference.generate(PROMPTS, **several).sequences)


def test_rows_that_end_give_their_place_to_others(llama: ShardedModelGroup, directory: Path) -> None:
    """transformers' continuous batching on each rank's rows, in one call and over data."""
    reference = reference_of("llama", directory)
    end = ended_early(reference)
    batching = transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=8, page_size=16)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": 1}
    refilled = options | {"continuous_batching_config": batching}
    expected = reference.generate(PROMPTS, **options)
    assert torch.equal(llama.generate(Split(PROMPTS), **refilled), expected)
    table = llama.predict({"input_ids": PROMPTS}, batch_size=5, generate_kwargs=refilled, progress=False)
    assert table["generated"].to_pylist() == [new_ids(row, end) for row in expected]
    assert torch.equal(llama.generate(Split(PROMPTS), **options), expected)
    for wrong, message in (
        ({"summon_full_params": False}, "each rank needs all parameters, summon_full_params=True"),
        ({"num_beams": 2}, "one sequence a row"),
        ({"stream": True}, "stream=True: only with transformers' own"),
    ):
        with pytest.raises(GroupError, match=message):
            llama.generate(Split(PROMPTS), **refilled | wrong)
        assert llama.state is GroupState.READY


def test_only_what_fn_returns_travels(llama: ShardedModelGroup, directory: Path) -> None:
    """Rows in order, also of a square result, and what one rank raises leaves the group READY."""
    logits = reference_of("llama", directory)(input_ids=PROMPTS).logits.detach()

    def last(outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"last": outputs.logits[:, -1], "ids": batch["input_ids"]}

    found = llama.forward(Split(PROMPTS), use_cache=False, fn=last)
    torch.testing.assert_close(found["last"], logits[:, -1])
    assert torch.equal(found["ids"], PROMPTS)
    six = PROMPTS.repeat(2, 1)[:6]
    square = llama.forward(input_ids=Split(six), fn=lambda outputs, batch: outputs.logits[:, :2, 0])
    torch.testing.assert_close(square, logits.repeat(2, 1, 1)[:6, :2, 0])
    products = llama.forward(input_ids=Split(six), fn=lambda outputs, _: outputs.logits[:, 0] @ outputs.logits[:, 0].T)
    assert isinstance(products, PerRank), "rows by rows of each rank"

    def fail(outputs: Any, batch: Any) -> None:
        if current_worker().rank == 1:
            raise KeyError("only here")

    for call in (partial(llama.forward, input_ids=Split(PROMPTS)), partial(llama.generate, PROMPTS, max_new_tokens=2)):
        with pytest.raises(DataError, match=r"fn=.*fail raised KeyError: 'only here'"):
            call(fn=fail)
        assert llama.state is GroupState.READY


def test_samples_differ_over_ranks_and_repeat_with_the_seed(llama: ShardedModelGroup) -> None:
    same = PROMPTS[:1].repeat(6, 1)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "temperature": 5.0}

    first = llama.generate(Split(same), seed=5, **options)
    second = llama.generate(Split(same), seed=6, **options)
    assert len({tuple(row.tolist()) for row in first}) == 6, "every row is a sample of its own"
    assert not torch.equal(first, second)
    assert torch.equal(llama.generate(Split(same), seed=5, **options), first)
    drawn = [llama.generate(Split(same), **options) for _ in range(2)]
    assert not torch.equal(*drawn), "without a seed, each call draws one"
    with pytest.raises(ValueError, match=r"seed=.*give a number below 2\*\*62"):
        llama.generate(Split(same), seed=1 << 62, **options)


def test_a_train_step_after_it_is_right(llama: ShardedModelGroup, directory: Path) -> None:
    """Nothing of generating stays: no cache, no mode, no gathered parameters."""
    llama.set_optimizer(torch.optim.SGD, lr=0.0)
    reference = reference_of("llama", directory)
    llama.generate(Split(PROMPTS), max_new_tokens=4, do_sample=False)
    step = llama.train_step(input_ids=Split(PROMPTS), labels=Split(PROMPTS), mode="eval")
    assert step["loss"] == pytest.approx(reference(input_ids=PROMPTS, labels=PROMPTS).loss.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assistant_model": "small"}, "every rank would need one"),
        ({"synced_gpus": True}, "kept in step where they have to be"),
        ({"mode": "fast"}, "mode='fast'"),
    ],
)
def test_what_ranks_in_step_do_not_have_is_refused(
    llama: ShardedModelGroup, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llama.generate(Split(PROMPTS), **options)
    assert llama.state is GroupState.READY


def test_ids_that_the_model_does_not_have_are_refused(llama: ShardedModelGroup) -> None:
    with pytest.raises(ValueError, match=r"generate: input_ids holds .* the model has the ids"):
        llama.generate(input_ids=Split(PROMPTS + 100_000))


def test_a_model_that_cannot_generate_says_so(checkpoint: Path) -> None:
    with make_group(checkpoint) as group:
        with pytest.raises(GroupError, match=r"has no generate\(\): it is for transformers' generative models"):
            group.generate(Split(torch.zeros(2, 8)))
        assert group.state is GroupState.READY


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("t5", "auto"),
        pytest.param("t5", "none", marks=pytest.mark.full),
        pytest.param("bart", "auto", marks=pytest.mark.full),
    ],
)
def test_an_encoder_decoder_too(tmp_path: Path, name: str, wrap: str) -> None:
    """Its encoder is called by itself, outside the root's forward, and here before any forward of the root."""
    make_checkpoint(tmp_path / "model", CASES[name])
    reference = reference_of(name, tmp_path / "model")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = reference.generate(PROMPTS, **options)
    labels = {"input_ids": PROMPTS, "labels": PROMPTS}
    split: dict[str, Any] = {key: Split(value) for key, value in labels.items()}
    make: dict[str, Any] = {"world_size": 2, "device": "cpu", "sharding": Sharding(wrap=wrap), "optimizer": NO_STEP}
    with ShardedModelGroup.from_checkpoint(tmp_path / "model", **make) as group:
        assert torch.equal(group.generate(Split(PROMPTS), summon_full_params=False, **options), expected)
        loss = pytest.approx(reference(**labels).loss.item(), abs=1e-5)
        assert group.forward(**split).loss.item() == loss
        assert group.train_step(**split, mode="eval")["loss"] == loss
        assert torch.equal(group.generate(Split(PROMPTS), **options), expected)


def test_predict_generates_what_one_process_does(llama: ShardedModelGroup, directory: Path) -> None:
    """New ids only, up to the first end token, whatever the other rows of the batch take."""
    reference = reference_of("llama", directory)
    end = ended_early(reference)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": 1}
    whole = reference.generate(PROMPTS, **options)[:, PROMPTS.shape[1] :].tolist()
    expected = [row[: row.index(end) + 1] if end in row else row for row in whole]
    for batch_size in (2, 8):
        table = llama.predict({"input_ids": PROMPTS}, batch_size=batch_size, generate_kwargs=options, progress=False)
        assert table["generated"].to_pylist() == expected
    several = options | {"num_beams": 3, "num_return_sequences": 2}
    table = llama.predict({"input_ids": PROMPTS}, batch_size=3, generate_kwargs=several, progress=False)
    found = [[len(one) for one in row] for row in table["generated"].to_pylist()]
    assert [len(row) for row in found] == [2] * len(PROMPTS)
