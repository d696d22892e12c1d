"""Runs that save into an object store: gone on from after a death, with older saves removed, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import CheckpointError, ShardedModelGroup, Split
from raysharding.checkpoint import open_checkpoint
from raysharding.checkpoint.storage.remote import remote_storage
from raysharding.checkpoint.storage.requests import RemoteOptions
from raysharding.group import GroupState
from tests.conftest import make_group
from tests.faulty_proxy import Fault
from tests.group.fit.runs import ADAMW, Killer, fit
from tests.models.architectures import ARCHITECTURES
from tests.s3 import CREDENTIALS, S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

STORAGE = remote_storage(RemoteOptions())


def placed() -> Any:
    """Ranks are given the credentials, as on a cluster."""
    from raysharding import Placement

    return Placement(runtime_env={"env_vars": CREDENTIALS})


def test_a_run_goes_on_from_its_saves_in_a_store(
    checkpoint: Path, parquet: Path, undisturbed: list[float], s3: S3Server
) -> None:
    whole = undisturbed[:16]
    saves = {"save_to": s3.uri("fit"), "save_every": 3, "keep_last": 2}
    killer = Killer(10, 1)
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1, placement=placed()) as group:
        killer.group = group
        report = fit(group, parquet, epochs=2, callbacks=[killer], **saves)
        assert report.num_restarts == 1
        assert report.history["loss"] == pytest.approx(whole, abs=1e-5)
        assert report.saved == s3.uri("fit/step-16")
        assert STORAGE.list_names(s3.uri("fit")) == ["step-15", "step-16"]
        with pytest.raises(CheckpointError, match="holds step-15 of another run"):
            fit(group, parquet, **saves)
    with make_group(s3.uri("fit/step-15"), optimizer=ADAMW, placement=placed()) as group:  # type: ignore[arg-type]
        report = fit(group, parquet, epochs=2, resume=True)
        assert report.history["loss"] == pytest.approx(whole[15:], abs=1e-5)


@pytest.mark.full
def test_a_store_that_refuses_leaves_the_group_as_it_was(checkpoint: Path, s3: S3Server) -> None:
    with make_group(checkpoint, optimizer=ADAMW, placement=placed()) as group:
        s3.proxy.faults.append(Fault("status", method="PUT", path="denied", status=403, code="AccessDenied"))
        with pytest.raises(CheckpointError, match=r"denied.*(access was refused|cannot be written)"):
            group.save(s3.uri("denied"))
        assert group.state is GroupState.READY
        with pytest.raises(CheckpointError, match="denied-2"):
            group.save(s3.uri("denied-2"), async_save=True)
        s3.proxy.reset()
        assert all(STORAGE.find(s3.uri(name)).kind == "missing" for name in ("denied", "denied-2"))
        group.save(s3.uri("allowed"))
        assert len(open_checkpoint(s3.uri("allowed")).tensors) == len(group.state_dict())


@pytest.mark.full
def test_adapters_lie_in_a_store(tmp_path: Path, s3: S3Server) -> None:
    peft = pytest.importorskip("peft")
    ARCHITECTURES["llama"].make().save_pretrained(tmp_path / "base")
    base = s3.upload(tmp_path / "base", "base")
    ids = torch.arange(32).reshape(4, 8)
    options: dict[str, Any] = {"world_size": 2, "device": "cpu", "optimizer": ADAMW, "placement": placed()}
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with ShardedModelGroup.from_checkpoint(base, peft_config=lora, **options) as group:
        group.train_step(input_ids=Split(ids), labels=Split(ids))
        group.save(s3.uri("adapters"))
        after = group.train_step(input_ids=Split(ids), labels=Split(ids))
    with ShardedModelGroup.from_checkpoint(s3.uri("adapters"), base=base, **options) as group:
        assert group.train_step(input_ids=Split(ids), labels=Split(ids)) == pytest.approx(after, abs=1e-6)


def test_a_save_needs_no_origin(tmp_path: Path, s3: S3Server) -> None:
    """Tokenizer and README are those of the load, though the store, or the directory, is gone since."""
    ARCHITECTURES["llama"].make().save_pretrained(tmp_path / "llama")
    others = {"tokenizer.json": "{}", "README.md": "read me", "1_Pooling/config.json": "{}"}
    for name, text in others.items():
        (tmp_path / "llama" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "llama" / name).write_text(text)
    origins = {"store": s3.upload(tmp_path / "llama", "llama"), "local": str(tmp_path / "llama")}
    for name, origin in origins.items():
        placement = placed() if name == "store" else None
        with ShardedModelGroup.from_checkpoint(origin, world_size=2, device="cpu", placement=placement) as group:
            s3.proxy.faults.append(Fault("status", path="llama", status=403, code="AccessDenied"))
            (tmp_path / "llama").rename(tmp_path / f"gone-{name}")
            group.save(tmp_path / name)
            group.save(tmp_path / f"{name}-2", async_save=True)
        for save in (tmp_path / name, tmp_path / f"{name}-2"):
            assert {one: (save / one).read_text() for one in others} == others
        (tmp_path / f"gone-{name}").rename(tmp_path / "llama")
        s3.proxy.reset()
