"""LoRA through the whole road: trained as peft trains it in one process, saved as peft saves it, gone on from."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from raysharding import (
    CheckpointError,
    DataError,
    FitStep,
    GroupError,
    PlanError,
    ShardedModelGroup,
    Sharding,
    Split,
)
from tests.models.architectures import ARCHITECTURES

peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
ROWS = [{"input_ids": [(3 * row + at) % 60 for at in range(8)]} for row in range(36)]
BATCH = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    ARCHITECTURES["llama"].make().save_pretrained(path)
    return path


def lora(**fields: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], **fields})


def make_group(path: Path, world_size: int = 2, **options: Any) -> ShardedModelGroup:
    given = {"world_size": world_size, "device": "cpu", "optimizer": ADAMW, "progress": False}
    return ShardedModelGroup.from_checkpoint(path, **{**given, **options})


def collate() -> Callable[..., Any]:
    def make(rows: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    return make


def fit(group: ShardedModelGroup, **options: Any) -> Any:
    return group.fit(ROWS, **{"batch_size": BATCH, "collate_fn": collate(), "progress": False, **options})


class Alone:
    """peft in one process, on what a group has saved."""

    def __init__(self, base: Path, adapters: Path) -> None:
        model: Any = transformers.LlamaForCausalLM.from_pretrained(base)
        self.model = peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
        self.model.train()
        self.optimizer = ADAMW(parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def epoch(self) -> list[float]:
        losses = []
        for start in range(0, len(ROWS), BATCH):
            loss = self.model(**collate()(ROWS[start : start + BATCH])).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize(
    "sharding",
    [Sharding(), pytest.param(Sharding(replicate_size=2, activation_checkpointing=True), marks=pytest.mark.full)],
    ids=["plain", "replicated"],
)
def test_training_equals_peft_in_one_process(base: Path, tmp_path: Path, sharding: Sharding) -> None:
    config = lora(modules_to_save=["lm_head"], bias="none", use_rslora=True)
    with make_group(base, peft_config=config, sharding=sharding) as group:
        before = group.state_dict()
        first = group.save(tmp_path / "begun", optimizer=False)
        alone = Alone(base, tmp_path / "begun")
        losses = fit(group, epochs=2).history["loss"]
        assert losses == pytest.approx(alone.epoch() + alone.epoch(), abs=1e-5)
        after = group.state_dict()
        group.save(tmp_path / "trained")
        logits = group.forward(input_ids=Split(collate()(ROWS)["input_ids"])).logits
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    assert trained == {name for name in before if "lora_" in name or "modules_to_save" in name}
    theirs = peft.get_peft_model_state_dict(alone.model, save_embedding_layers=False)
    ours = load_file(tmp_path / "trained/adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-5)
    assert first is not None
    assert first.num_tensors == len(theirs)
    assert first.num_bytes == sum(tensor.nbytes for tensor in theirs.values())

    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(opened(collate()(ROWS)["input_ids"]).logits, logits, rtol=1e-5, atol=1e-5)

    with make_group(tmp_path / "trained", 3, base=base) as group:
        assert fit(group, epochs=3, resume=True).history["loss"] == pytest.approx(alone.epoch(), abs=1e-5)


def test_new_adapters_leave_the_optimizer_state_of_their_base(base: Path, tmp_path: Path) -> None:
    """Ids that the model has not are refused before a step: a rank that met one alone would leave the other waiting."""
    bad = [*ROWS[:7], {"input_ids": [1, 2, 3, 64, 5, 6, 7, 8]}, *ROWS[8:]]
    with make_group(base) as group:
        fit(group, max_steps=2)
        group.save(tmp_path / "full")
    with make_group(tmp_path / "full", peft_config=lora(target_modules=["q_proj", "embed_tokens"])) as group:
        names = [name for held in group.call(adapted) for name in held]
        assert names
        assert [name for name in names if "lora_" not in name] == []
        before = group.state_dict()
        with pytest.raises(DataError, match=r"step 1 could not be made: ValueError: data: input_ids holds 64 in row 2"):
            group.fit(bad, batch_size=BATCH, collate_fn=collate(), progress=False)
        with pytest.raises(DataError, match=r"input_ids holds 64"):
            group.evaluate(bad, batch_size=BATCH, collate_fn=collate())
        assert any(not torch.equal(before[name], tensor) for name, tensor in group.state_dict().items()), (
            "step 0 was made"
        )
        assert fit(group, max_steps=1).first_step == 0
        assert group.load(tmp_path / "full").kept, "the state of the base's optimizer is not of the adapters"


def adapted() -> list[str]:
    from raysharding import current_worker

    worker = current_worker()
    assert worker.optimizer is not None
    assert not worker.optimizer.state
    held = {id(parameter) for group in worker.optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in worker.module.named_parameters() if id(parameter) in held]


class Killer:
    """A callback that ends a rank's process, once, after a step."""

    def __init__(self, group: ShardedModelGroup) -> None:
        self.group: ShardedModelGroup | None = group

    def __call__(self, step: FitStep) -> None:
        if step.num_steps >= 12 and self.group is not None:
            os.kill(self.group.ranks[1].pid, signal.SIGKILL)
            self.group = None


def test_a_run_goes_on_from_its_saved_adapters(base: Path, tmp_path: Path) -> None:
    with make_group(base, peft_config=lora(), max_restarts=1) as group:
        group.save(tmp_path / "begun")
        whole = fit(group, epochs=3).history["loss"]
        group.load(tmp_path / "begun")
        saves = {"save_to": tmp_path / "saves", "save_every": 5, "keep_last": 2, "async_save": True}
        report = fit(group, epochs=3, callbacks=[Killer(group)], **saves)
        assert report.num_restarts == 1
        assert report.history["loss"] == pytest.approx(whole, abs=1e-5)
        group.load(base)
        with pytest.raises(GroupError, match="no run to resume: load a checkpoint that fit saved"):
            fit(group, resume=True)
        assert fit(group, max_steps=1).num_steps == 1  # as much in files as before: a restart would lose nothing
    last = sorted(os.listdir(tmp_path / "saves"))[-1]
    assert not (tmp_path / "saves" / last / "model.safetensors").exists()
    assert json.loads((tmp_path / "saves" / last / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base)


def test_a_model_in_bfloat16_keeps_its_adapters_in_float32(base: Path, tmp_path: Path) -> None:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    with make_group(tmp_path / "half", peft_config=lora()) as group:
        group.save(tmp_path / "begun", optimizer=False)
        losses = fit(group, epochs=2).history["loss"]
        dtypes = {tensor.dtype for name, tensor in group.state_dict().items() if "lora_" in name}
        assert dtypes == {torch.float32}
    alone = Alone(tmp_path / "half", tmp_path / "begun")
    alone.model.to(torch.bfloat16)
    for name, parameter in alone.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    assert losses == pytest.approx(alone.epoch() + alone.epoch(), rel=0.02)
    assert losses[-2] < losses[0]


@pytest.mark.filterwarnings("ignore:.*the adapters were made for the base somebody/llama")
def test_a_restart_goes_back_to_the_base_that_the_group_was_made_of(base: Path, tmp_path: Path) -> None:
    """Adapters name the base that they were made on, by a name of the hub, say; older files lack fields of today."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, lora(init_lora_weights=False)).save_pretrained(tmp_path / "theirs")
    config = tmp_path / "theirs/adapter_config.json"
    kept = {key: value for key, value in json.loads(config.read_text()).items() if "pattern" not in key}
    kept.pop("use_rslora")
    config.write_text(json.dumps(kept | {"base_model_name_or_path": "somebody/llama"}))
    ids = Split(collate()(ROWS)["input_ids"])
    with make_group(base, peft_config=peft.LoraConfig.from_pretrained(tmp_path / "theirs")) as group:
        group.load(tmp_path / "theirs")
        before = group.forward(input_ids=ids).logits
        assert group.restart(world_size=1).checkpoint == str(tmp_path / "theirs")
        torch.testing.assert_close(group.forward(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)


def test_adapters_are_loaded_into_a_group_that_has_such(base: Path, tmp_path: Path) -> None:
    with make_group(base, peft_config=lora(modules_to_save=["lm_head"])) as group:
        group.save(tmp_path / "begun")
        begun = group.state_dict()
        losses = fit(group).history["loss"]
        group.load(tmp_path / "begun")
        for name, tensor in group.state_dict().items():
            assert torch.equal(tensor, begun[name]), name
        assert fit(group).history["loss"] == losses  # the optimizer went back with them
        trained = group.state_dict()
        group.load(base)
        assert all(torch.equal(tensor, trained[name]) for name, tensor in group.state_dict().items())
        differ = "these adapters do not match the model's: "
        for fields, said in (
            ({"r": 2}, f"{differ}r=4 for 2"),
            ({"lora_alpha": 16}, f"{differ}lora_alpha=8 for 16"),
            ({"target_modules": ["k_proj"]}, r"missing from the checkpoint: .*q_proj\.lora_A"),
        ):
            others = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), lora(**fields))
            others.save_pretrained(tmp_path / "others")
            with pytest.raises(PlanError, match=said):
                group.load(tmp_path / "others")
        ids = Split(collate()(ROWS)["input_ids"])
        with pytest.raises(ValueError, match="train_step: the batch has no labels"):
            group.train_step(input_ids=ids)
        assert group.train_step(input_ids=ids, labels=ids)["loss"] > 0
    with (
        make_group(base, optimizer=None) as plain,
        pytest.raises(PlanError, match="holds LoRA adapters, and the model has none"),
    ):
        plain.load(tmp_path / "begun")


def test_what_a_load_leaves_on_and_adapters_of_another_base_are_told(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = ARCHITECTURES["llama"].make()
    other.save_pretrained(tmp_path / "other")
    named = f"adapters were made for the base {os.path.realpath(base)}, and are loaded onto {tmp_path / 'other'}"
    with make_group(base, 1, peft_config=lora(init_lora_weights=False), optimizer=None) as group:
        group.save(tmp_path / "adapters")
        report = group.load(base)
        assert report.kept == tuple(sorted(name for name in group.state_dict() if "lora_" in name))
        assert "tensors stay in effect on this base: " in str(report)
        assert group.load(tmp_path / "adapters").kept == group.load_report.kept == ()
        group.load(tmp_path / "other")
        # The save names the base that its adapters are on now.
        group.save(tmp_path / "moved", overwrite=True)
        with pytest.warns(UserWarning, match=re.escape(named)):
            assert named in str(group.load(tmp_path / "adapters"))
    assert json.loads((tmp_path / "moved/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "other"
    )
    with pytest.warns(UserWarning, match=re.escape(named)):
        make_group(tmp_path / "adapters", 1, base=tmp_path / "other", optimizer=None).shutdown()


def restarted(group: ShardedModelGroup, *ranks: int) -> Any:
    """Kill ranks and restart the group."""
    for rank in ranks:
        os.kill(group.ranks[rank].pid, signal.SIGKILL)
    with pytest.raises(GroupError, match="died"):
        group.call(os.getpid)
    return group.restart()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    model: Any = ARCHITECTURES["llama"].make()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


@pytest.mark.filterwarnings("ignore:.*adapters were made for the base .*, and are loaded onto")
def test_a_restart_keeps_the_base_that_was_loaded_below_the_adapters(base: Path, other: Path, tmp_path: Path) -> None:
    with make_group(base, peft_config=lora(use_dora=True), name="on-other") as group:
        fit(group, max_steps=2)
        group.save(tmp_path / "saved")  # on the earlier base
        group.load(other)
        held = group.state_dict()
        report = restarted(group, 1)
        torch.testing.assert_close(group.state_dict(), held, rtol=0, atol=0)
        assert report.checkpoint == str(tmp_path / "saved")
        assert "new ones" not in report.why
        fit(group, max_steps=2)
        group.load(base)
        group.save(tmp_path / "saved", overwrite=True)  # on this one
        held = group.state_dict()
        again = ShardedModelGroup.attach("on-other")  # another driver
        again.restart(world_size=1)
        torch.testing.assert_close(again.state_dict(), held, rtol=0, atol=0)
        again.shutdown()


def test_trained_adapters_that_no_file_holds_are_not_taken_for_saved(base: Path, other: Path, tmp_path: Path) -> None:
    with make_group(base, peft_config=lora(init_lora_weights=False), max_restarts=1) as group:
        begun = group.state_dict()
        fit(group, max_steps=1)
        group.load(other)
        held = group.state_dict()
        assert not torch.equal(held["lm_head.weight"], begun["lm_head.weight"])
        with pytest.raises(ValueError, match="was trained, or got weights by copy_to"):
            fit(group)  # a restart could not go back to its beginning
        group.save(tmp_path / "saved", optimizer=False, dtype="float32")  # an export, which no restart goes back to
        config = json.loads((tmp_path / "saved/adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(other)
        report = restarted(group, 0, 1)
        assert report.checkpoint == str(other)
        assert report.why.endswith(f"; the adapters are new ones: {other} holds none")
        new = {name: tensor for name, tensor in begun.items() if "lora_" in name}
        torch.testing.assert_close(group.state_dict(), held | new, rtol=0, atol=0)
        # Nor does a base that is given hold them, as `load` would leave them.
        why = group.restart(base).why
        assert why == f"a checkpoint was given; the adapters are new ones: {base} holds none"


@pytest.mark.filterwarnings("ignore:.*the adapters were made for the base .*base0, and are loaded onto .*both")
def test_a_model_and_adapters_in_one_directory_are_told_apart_by_the_caller(base: Path, tmp_path: Path) -> None:
    """transformers applies the adapters: their logits are those of the model with them."""
    both = shutil.copytree(base, tmp_path / "both")
    model: Any = transformers.LlamaForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, lora(init_lora_weights=False)).save_pretrained(both)
    ids = collate()(ROWS)["input_ids"]
    wanted = transformers.AutoModelForCausalLM.from_pretrained(both)(ids).logits
    with pytest.raises(CheckpointError, match="by which transformers adds adapters to the model: give ") as told:
        make_group(both)
    path, adapters = re.findall(r"give (\S+) for the model alone, or (\S+) with base=", str(told.value))[0]
    with make_group(adapters, 1, base=path, optimizer=None) as group:
        logits = group.forward(input_ids=Split(ids)).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
        alone = transformers.LlamaForCausalLM.from_pretrained(base)(ids).logits
        assert (alone - wanted).abs().max() > 0.1
        with pytest.raises(CheckpointError, match="by which transformers adds adapters"):
            group.load(both)


def test_what_cannot_be_is_said_before_anything_is_placed(base: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(base, tmp_path / "moved")
    model: Any = transformers.LlamaForCausalLM.from_pretrained(moved)
    theirs = peft.get_peft_model(model, lora())
    theirs.save_pretrained(tmp_path / "adapters")
    assert "fits" in str(ShardedModelGroup.plan(tmp_path / "adapters", base=moved, world_size=2, device="cpu"))
    with pytest.raises(ValueError, match=r"peft_config differs from the adapters .*: r=8 for 4"):
        make_group(tmp_path / "adapters", peft_config=lora(r=8))
    with pytest.raises(PlanError, match="'nowhere'"):
        make_group(base, peft_config=lora(target_modules=["nowhere"]))
    # Shapes that adapter_config.json does not bear out are seen in the headers.
    fields = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(fields | {"r": 5}))
    with pytest.raises(PlanError, match=r"lora_A.* has shape \(4, 16\), the model's parameter \(5, 16\)"):
        make_group(tmp_path / "adapters", base=moved)
    with pytest.raises(ValueError, match="give a peft"):
        make_group(base, peft_config={"r": 4})
    shutil.rmtree(moved)
    with pytest.raises(CheckpointError, match="moved: no such file"):
        make_group(tmp_path / "adapters", base=moved)
    fields = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="names the base model None"):
        make_group(tmp_path / "adapters")
