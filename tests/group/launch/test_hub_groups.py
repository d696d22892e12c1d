"""Groups of models of the hub: bytes, tokens, commits, adapters, and what costs no cluster."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding import CheckpointError, Loading, Placement, ShardedModelGroup, Split
from raysharding.group.cluster import read_record
from raysharding.group.launch.spec import GroupSpec
from tests import programs
from tests.hub import TOKEN, HubServer, hub, read_environment
from tests.models.architectures import ARCHITECTURES

__all__ = ["hub"]

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

ID = "org/llama"
IDS = torch.arange(32).reshape(4, 8)


@pytest.fixture
def private(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gated model on the hub, and this process logged in; gives the model."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = ARCHITECTURES["llama"].make().eval()
    model.save_pretrained(tmp_path / "llama")
    hub.push(ID, tmp_path / "llama")
    hub.repos[ID].is_gated = True
    return model


def group_of(given: Any, home: Path, **options: Any) -> ShardedModelGroup:
    """Make a group on ranks that have a cache of their own, and nobody logged in."""
    variables = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
    placement = Placement(runtime_env={"env_vars": variables})
    options = {"world_size": 2, "device": "cpu", "placement": placement, **options}
    return ShardedModelGroup.from_checkpoint(given, **options)


def test_a_gated_model_is_loaded_once_over_with_the_drivers_token(
    hub: HubServer, private: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (commit,) = hub.repos[ID].commits
    with group_of(ID, tmp_path / "ranks", name="of-the-hub") as made:
        group = made
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, private(IDS).logits)
        needed = (tmp_path / "llama" / "model.safetensors").stat().st_size
        assert hub.num_bytes(".safetensors") <= 1.1 * needed
        assert group.load_report.checkpoint == f"hf://{ID}@{commit}"

        # The branch moves; a reload stays at the commit, also by a driver that has only the record.
        (tmp_path / "llama" / "model.safetensors").write_bytes(b"nothing")
        hub.push(ID, tmp_path / "llama")
        _, spec, _ = record = read_record("of-the-hub")
        group = ShardedModelGroup.attach("of-the-hub")
        report = group.restart(world_size=1)
        assert report.checkpoint == f"hf://{ID}@{commit}"
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, private(IDS).logits)

        told = [caplog.text, repr(group), str(group.load_report), str(report), str(group.status())]
        assert not any(TOKEN in text for text in told)
        assert TOKEN.encode() not in pickle.dumps(record) + pickle.dumps(spec.unpack())
        logs = Path(ray._private.worker._global_node.get_logs_dir_path())
        assert not [path for path in logs.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
        group.shutdown()


def changed(model: Any, directory: Path) -> Any:
    """Write the model with other weights, as a second commit would."""
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.save_pretrained(directory)
    return model


def test_load_takes_an_id_with_the_drivers_token_and_keeps_its_commit(
    hub: HubServer, private: Any, tmp_path: Path
) -> None:
    with group_of(tmp_path / "llama", tmp_path / "ranks") as group:
        other = changed(private, tmp_path / "other")
        commit = hub.push(ID, tmp_path / "other", "v2")
        assert group.load(ID, revision="v2").checkpoint == f"hf://{ID}@{commit}"
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, other(IDS).logits)
        assert hub.num_bytes(".safetensors") <= 1.1 * (tmp_path / "other" / "model.safetensors").stat().st_size

        hub.repos[ID].refs["v2"] = hub.repos[ID].refs["main"]
        assert group.restart(world_size=1).checkpoint == f"hf://{ID}@{commit}"
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, other(IDS).logits)
        with pytest.raises(CheckpointError, match="no such model"):
            group.load("org/lama")
        with pytest.raises(ValueError, match="leave the revision out"):
            group.load(tmp_path / "other", revision="v2")
        assert group.state.value == "ready"


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Hugging Face home at a path that means nothing in other processes, as that of another machine."""
    opened = os.open(tmp_path, os.O_RDONLY)
    number = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 900)
    home = Path(f"/proc/self/fd/{number}/hf-home")
    monkeypatch.setenv("HF_HOME", str(home))
    read_environment()
    yield home
    os.close(number)
    os.close(opened)


@pytest.mark.full
def test_ranks_that_do_not_see_the_drivers_cache_read_its_commit_from_the_hub(
    hub: HubServer, private: Any, tmp_path: Path, own_home: Path
) -> None:
    (commit,) = hub.repos[ID].commits
    snapshots = own_home / "hub" / "models--org--llama" / "snapshots"
    shutil.copytree(tmp_path / "llama", snapshots / commit)
    assert GroupSpec(ID, revision=commit).located().checkpoint == str(snapshots / commit)
    with group_of(ID, tmp_path / "ranks", revision=commit) as group:
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, private(IDS).logits)
        assert group.load_report.checkpoint == f"hf://{ID}@{commit}"
        assert hub.num_bytes(".safetensors") <= 1.1 * (tmp_path / "llama" / "model.safetensors").stat().st_size

        other = changed(private, tmp_path / "other")
        newer = hub.push(ID, tmp_path / "other")
        shutil.copytree(tmp_path / "other", snapshots / newer)
        assert group.load(ID).checkpoint == f"hf://{ID}@{newer}"
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, other(IDS).logits)

        there = tmp_path / "ranks" / "hub" / "models--org--llama" / "snapshots"
        shutil.copytree(tmp_path / "llama", there / commit)
        assert group.load(ID, revision=commit).checkpoint == str(there / commit)


@pytest.mark.full
def test_each_rank_asks_for_its_ranges_only(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    save_file(model.state_dict(), tmp_path / "big" / "model.safetensors")
    hub.push("org/big", tmp_path / "big")

    def build() -> nn.Module:
        from torch import nn

        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    with group_of("org/big", tmp_path / "ranks", model=build) as group:
        assert group.load_report.transport == "local"
        torch.testing.assert_close(group.state_dict(), model.state_dict())
    asked = [one.num_bytes for one in hub.log if one.path.endswith(".safetensors") and one.num_bytes > 4096]
    assert asked == [512 * 256 * 4] * 8


@pytest.mark.full
def test_ranks_read_the_cache_of_their_node(hub: HubServer, private: Any, tmp_path: Path) -> None:
    (commit,) = hub.repos[ID].commits
    folder = tmp_path / "ranks" / "hub" / "models--org--llama"
    shutil.copytree(tmp_path / "llama", folder / "snapshots" / commit)
    with group_of(ID, tmp_path / "ranks", loading=Loading(transport="local")) as group:
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, private(IDS).logits)
        assert group.load_report.checkpoint == str(folder / "snapshots" / commit)
    assert hub.num_bytes(".safetensors") < 4096  # the header, which the driver read


@pytest.mark.full
def test_adapters_name_their_base_by_its_id(hub: HubServer, private: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    with group_of(ID, tmp_path / "ranks", peft_config=lora) as group:
        before = group.forward(Split({"input_ids": IDS})).logits
        group.save(tmp_path / "adapters")
    (commit,) = hub.repos[ID].commits
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (ID, commit)
    with group_of(tmp_path / "adapters", tmp_path / "ranks") as group:
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, before)


@pytest.mark.full
def test_a_typing_error_costs_no_cluster(hub: HubServer, private: Any, tmp_path: Path) -> None:
    script = f"""
import ray
from raysharding import ShardedModelGroup
dry = {{"random_weights": True, "config_overrides": {{"num_hidden_layer": 1}}}}
for given, options in (("org/lama", {{}}), ("{ID}", {{"revision": "v9"}}), ("/x", {{"revision": "v9"}}),
    ("{ID}", dry), ("/no/such", {{}})):
    try:
        ShardedModelGroup.from_checkpoint(given, **options)
    except ValueError as error:
        print(type(error).__name__, error, ray.is_initialized(), sep="|")
"""
    env = os.environ | {"RAY_TMPDIR": str(tmp_path)}  # where a cluster that it could join would be written down
    ran = programs.run(script, environment=env)
    assert ran.returncode == 0, ran.stderr
    wanted = (
        "CheckpointError.*no such model",
        "CheckpointError.*no revision 'v9'",
        "ValueError.*leave the revision out",
        "ValueError.*did you mean 'num_hidden_layers'",
        "CheckpointError.*no such file or directory",
    )
    for pattern, line in zip(wanted, ran.stdout.splitlines(), strict=True):
        assert re.fullmatch(rf"{pattern}.*\|False", line)
