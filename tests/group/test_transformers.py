"""transformers models through the whole road, Ray included: weights, forward, ten steps, save, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from raysharding import Loading, Out, PerRank, ShardedModelGroup, Split
from raysharding.errors import PlanError
from tests.distributed.fidelity import CASES, NUM_STEPS, Case, batch_of, make_checkpoint
from tests.models.architectures import ARCHITECTURES

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]


def split(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: Split(value) for name, value in batch.items()}


def reference_of(name: str, directory: Path) -> Any:
    return getattr(transformers, ARCHITECTURES[CASES[name].architecture].model).from_pretrained(directory)


def train_one_process(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    model.train()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("llama", 2), *(pytest.param(*one, marks=pytest.mark.full) for one in (("t5", 3), ("mixtral", 2)))],
)
def test_a_model_equals_one_process(name: str, world_size: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", CASES[name])
    reference = reference_of(name, tmp_path / "model").eval()
    batch = batch_of(ARCHITECTURES[CASES[name].architecture], CASES[name])
    with ShardedModelGroup.from_checkpoint(tmp_path / "model", world_size=world_size) as group:
        state = group.state_dict()
        for key, tensor in reference.state_dict().items():
            assert torch.equal(state[key], tensor), key
        output = group.forward(**split(batch))
        expected = reference(**batch)
        assert type(output) is type(expected)
        assert output.past_key_values is None
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)

        # One bad row would raise on its rank alone, while the others wait.
        spoilt = {**batch, "input_ids": batch["input_ids"].clone()}
        spoilt["input_ids"][-1, 0] = reference.config.vocab_size
        last = len(batch["input_ids"]) - 1
        with pytest.raises(ValueError, match=f"forward: input_ids holds {reference.config.vocab_size} in row {last}"):
            group.forward(**split(spoilt))

        group.set_optimizer(torch.optim.AdamW, lr=1e-3)
        calls = [group.train_step.remote(**split(batch)) for _ in range(NUM_STEPS)]
        losses = [call.result()["loss"] for call in calls]
        assert losses == pytest.approx(train_one_process(reference, batch), abs=1e-5)
        group.save(tmp_path / "trained")
        trained = group.forward(**split(batch)).logits
    with torch.no_grad():
        reopened = reference_of(name, tmp_path / "trained").eval()(**batch).logits
    torch.testing.assert_close(trained, reopened, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral"])
def test_a_tokenizers_batch_with_padding_equals_one_process(name: str, world_size: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", Case(name))
    reference = getattr(transformers, ARCHITECTURES[name].model).from_pretrained(tmp_path / "model").eval()
    ids = torch.randint(3, 60, (5, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(5):
        mask[row, :row] = 0
    batch = transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})
    labels = ids.masked_fill(mask == 0, -100)
    with ShardedModelGroup.from_checkpoint(tmp_path / "model", world_size=world_size) as group:
        found, expected = group.forward(Split(batch)).logits, reference(**batch).logits
        # What stands at padding sees nothing: its outputs mean nothing.
        torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-5, atol=1e-5)
        for kept in ("input_ids", "attention_mask"):
            split: dict[str, Any] = {one: value if one == kept else Split(value) for one, value in batch.items()}
            with pytest.raises(ValueError, match=rf"{kept}: shape \(5, 7\) has size 5 in dim 0"):
                group.forward(**split)
        with pytest.raises(ValueError, match=r"labels: shape \(5, 7\) has size 5 in dim 0"):
            group.forward_backward(Split(batch), labels=labels)
        group.set_optimizer(torch.optim.AdamW, lr=1e-3)
        whole = {**batch, "labels": labels}
        losses = [group.train_step(Split(whole))["loss"] for _ in range(NUM_STEPS)]
        if name != "bert":
            options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
            generated = group.generate(Split(batch), **options)
    assert losses == pytest.approx(train_one_process(reference, whole), abs=1e-5)
    if name != "bert":
        assert torch.equal(generated, reference.generate(**batch, **options))


def test_rows_times_rows_outputs_are_not_concatenated(tmp_path: Path) -> None:
    model = ARCHITECTURES["clip"].make()
    model.save_pretrained(tmp_path)
    images = torch.linspace(-1, 1, 4 * 3 * 16 * 16).reshape(4, 3, 16, 16)
    batch: dict[str, Any] = {"input_ids": torch.arange(28).reshape(4, 7) + 3, "pixel_values": images}
    with ShardedModelGroup.from_checkpoint(tmp_path, world_size=2) as group:
        output = group.forward(**split(batch))
        whole = group.forward(**batch)
        parts = group.forward(**split(batch), out=Out.per_rank())
    with torch.no_grad():
        expected = model(**batch)
    torch.testing.assert_close(output.text_embeds, expected.text_embeds, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.logits_per_text, expected.logits_per_text, rtol=1e-5, atol=1e-5)
    assert isinstance(output.logits_per_text, PerRank)
    for rank, block in enumerate(output.logits_per_text):
        rows = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(block, expected.logits_per_text[rows, rows], rtol=1e-5, atol=1e-5)
    assert len(parts) == 2


@pytest.mark.filterwarnings("ignore:.* initialised, and of no use before a training")
def test_a_new_head_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CASES["bert-new-head"])
    with ShardedModelGroup.from_checkpoint(
        tmp_path,
        model="AutoModelForSequenceClassification",
        world_size=1,
        config_overrides={"id2label": dict(enumerate("abc")), "problem_type": "multi_label_classification"},
        loading=Loading(seed=3),
    ) as group:
        new = {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"}
        assert {*group.load_report.missing} == new <= {*group.load_report.initialised}
        assert all(name in group.load_report.warnings[0] for name in new)
        assert "cls.predictions.bias" in group.load_report.unexpected
        head = group.state_dict("classifier.weight")["classifier.weight"]
        assert head.shape[0] == 3
        assert head.std() == pytest.approx(0.02, rel=0.5)
        with pytest.raises(PlanError, match=r"keeps .* classifier\.weight, .*trained of it; nothing is changed"):
            group.load(tmp_path)  # what is there is no new head: it may be trained
        group.restart(world_size=2)
        assert torch.equal(group.state_dict("classifier.weight")["classifier.weight"], head)
        group.save(tmp_path / "saved")
        ids = torch.arange(28).reshape(4, 7) + 3
        logits = group.forward(input_ids=Split(ids)).logits
        group.restart(tmp_path / "saved")
        assert not group.load_report.missing
        assert torch.equal(group.forward(input_ids=Split(ids)).logits, logits)
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert opened.config.id2label == dict(enumerate("abc"))
    assert opened.config.problem_type == "multi_label_classification"
    torch.testing.assert_close(opened(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-5)
