"""Models of the hub without Ray: pinned commits, exact ranges, the cache, and what each refusal says."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from raysharding import CheckpointError
from raysharding.checkpoint import FileReader, locate, open_checkpoint, open_config
from raysharding.checkpoint.format.locate import seen_here
from raysharding.checkpoint.storage import hub as hub_module
from raysharding.checkpoint.storage.hub import HubAccess, HubPath, adopt_access, hub_access
from raysharding.checkpoint.storage.remote import read_bytes, remote_storage
from raysharding.checkpoint.storage.requests import RemoteOptions
from raysharding.cli import main
from tests.checkpoint.build import refused
from tests.clock import now
from tests.hub import TOKEN, HubServer, hub, read_environment

__all__ = ["hub"]

ID = "org/name"
FAST = RemoteOptions(backoff_s=0.01, max_backoff_s=0.01, num_tries=3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Some tensors of 4 kB each, and a config.json."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({f"w{index}": torch.full((1000,), float(index)) for index in range(20)}, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


def read(path: str, name: str) -> torch.Tensor:
    """Read one tensor."""
    checkpoint = open_checkpoint(path)
    with FileReader(checkpoint.files) as reader:
        return reader.read_tensor(checkpoint.tensors[name])


def snapshot(home: Path, model: Path, commit: str) -> Path:
    """Put a model into the Hugging Face cache, as a download of `main` does."""
    folder = home / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    shutil.copytree(model, folder / "snapshots" / commit)
    return folder / "snapshots" / commit


def test_each_read_is_one_request_for_its_range(hub: HubServer, model: Path, tmp_path: Path) -> None:
    commit = hub.push(ID, model)
    checkpoint = open_checkpoint(ID)
    assert checkpoint.path == f"hf://org/name@{commit}"
    assert checkpoint.config == {"model_type": "llama"}
    hub.log.clear()
    info = checkpoint.tensors["w7"]
    with FileReader(checkpoint.files) as reader:
        assert reader.read_tensor(info).eq(7).all()
        reader.verify_unchanged()
    assert [one.range for one in hub.log] == [f"bytes={info.offset}-{info.offset + 3999}"]
    assert not (tmp_path / "hf-home").exists()  # nothing is written to the cache


def test_the_token_goes_to_the_hub_alone_and_an_expired_address_is_asked_for_again(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.push(ID, model)
    hub.repos[ID].is_gated = hub.repos[ID].is_redirected = True
    checkpoint = open_checkpoint(ID)
    tensors = list(checkpoint.tensors.values())
    with closing(remote_storage(FAST).open(checkpoint.files[0].path)) as file:
        hub.log.clear()
        read_bytes(file, tensors[0].offset, 100)
        read_bytes(file, tensors[1].offset, 100)
        resolved = [one for one in hub.log if "/resolve/" in one.path]
        served = [one for one in hub.log if one.path.startswith("/cdn/")]
        assert (len(resolved), len(served)) == (1, 2)
        assert all(one.has_token for one in resolved)
        assert not any(one.has_token for one in served)
        hub.expired.add("first")
        hub.signature = "second"
        value = torch.frombuffer(bytearray(read_bytes(file, tensors[2].offset, 4000)), dtype=torch.float32)
        assert value.eq(float(tensors[2].name[1:])).all()
        assert [one.path.split("/")[1] for one in hub.log[-3:]] == ["cdn", "org", "cdn"]


def test_a_moved_branch_does_not_mix_commits(hub: HubServer, model: Path) -> None:
    before = hub.push(ID, model)
    found = locate(ID)
    save_file({"w1": torch.full((1000,), -1.0)}, model / "model.safetensors")
    after = hub.push(ID, model)
    assert before != after
    assert read(found, "w1").eq(1).all()
    assert read(ID, "w1").eq(-1).all()
    assert locate(ID, before) == found
    assert locate(f"hf://{ID}@main") == f"hf://{ID}@{after}"


def test_a_path_that_exists_wins(hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push(ID, model)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / ID)
    assert locate(ID) == ID
    assert not hub.log
    for given in (ID, str(model), "s3://bucket/model", f"hf://{ID}"):
        with pytest.raises(ValueError, match=r"revision=.main.*leave the revision out"):
            locate(given, "main")


def test_a_cached_commit_is_read_from_the_cache(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(ID, model)
    cached = snapshot(tmp_path / "hf-home", model, commit)
    assert locate(ID) == locate(ID, commit) == str(cached)
    (model / "extra.json").write_text("{}")
    newer = hub.push(ID, model)
    assert locate(ID) == f"hf://{ID}@{newer}"
    assert seen_here(str(cached)) == str(cached)
    (cached / "model.safetensors").unlink()
    assert seen_here(str(cached)) == f"hf://{ID}@{commit}", "as a tokenizer leaves it on a node"
    assert locate(ID, commit) == f"hf://{ID}@{commit}"
    assert locate(ID, commit, weights=False) == str(cached)


@pytest.mark.parametrize("why", ["HF_HUB_OFFLINE", "unreachable"])
def test_without_the_hub_the_cache_counts(
    why: str, hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = snapshot(tmp_path / "hf-home", model, hub.push(ID, model))
    if why == "HF_HUB_OFFLINE":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    read_environment()
    assert locate(ID) == str(cached)
    assert read(ID, "w3").eq(3).all()


GATED = r"gated.*accept its licence at http://127.*/org/name and set HF_TOKEN"


@pytest.mark.parametrize(
    ("given", "revision", "is_gated", "environment", "says"),
    [
        (ID, None, True, {}, GATED),
        (ID, None, True, {"HF_TOKEN": "hf_someSecret"}, GATED),
        ("org/nmae", None, False, {}, r"no such model.*no such path.*spelling.*private: set HF_TOKEN"),
        (ID, "v9", False, {}, r"no revision 'v9'.*spelling"),
        (ID, "0" * 40, False, {}, r"no revision '0+'.*spelling"),
        (ID, None, False, {"HF_HUB_OFFLINE": "1"}, r"HF_HUB_OFFLINE is set.*cache.*run `hf download org/name`"),
    ],
)
def test_a_refusal_says_which_and_the_cure(
    given: str,
    revision: str | None,
    is_gated: bool,
    environment: dict[str, str],
    says: str,
    hub: HubServer,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.push(ID, model)
    hub.repos[ID].is_gated = is_gated
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    read_environment()
    with pytest.raises(CheckpointError, match=says) as raised:
        open_checkpoint(locate(given, revision))
    assert "Secret" not in str(raised.value)


def test_short_answers_are_asked_for_again_and_then_an_error(hub: HubServer, model: Path) -> None:
    hub.push(ID, model)
    checkpoint = open_checkpoint(ID)
    hub.short_answers = 2
    with FileReader(checkpoint.files, remote=FAST) as reader:
        assert reader.read_tensor(checkpoint.tensors["w5"]).eq(5).all()
    hub.short_answers = 1000
    with (
        FileReader(checkpoint.files, remote=FAST) as reader,
        pytest.raises(CheckpointError, match=r"model.safetensors.*3999 bytes instead of 4000"),
    ):
        reader.read_tensor(checkpoint.tensors["w5"])


def test_a_config_is_read_without_the_weights(hub: HubServer, model: Path) -> None:
    hub.push(ID, model)
    assert open_config(ID).config == {"model_type": "llama"}
    assert hub.num_bytes(".safetensors") == 0


def test_nothing_is_saved_to_the_hub(hub: HubServer, model: Path) -> None:
    hub.push(ID, model)
    with pytest.raises(CheckpointError, match=r"a save to the hub is not supported.*hf upload"):
        remote_storage(FAST).put(f"hf://{ID}/new.json", b"{}")


def test_a_driver_without_a_token_takes_none_from_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_adopted", [])
    for endpoint, token in (("https://a", "first"), ("https://a", None), ("https://a", "second")):
        adopt_access(HubAccess(endpoint, token))
        assert hub_access() == HubAccess(endpoint, token or "first")
    adopt_access(HubAccess("https://b", None))
    assert hub_access() == HubAccess("https://b", None)
    assert "Secret" not in repr(HubAccess("https://huggingface.co", "hf_someSecret"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/name", HubPath("org/name", None)),
        ("hf://org/name@refs%2Fpr%2F1/a%20b/c", HubPath("org/name", "refs/pr/1", "a b/c")),
        ("hf://datasets/org/name", None),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("a/b/c", None),
        ("org/na--me", None),
        ("s3://org/name", None),
    ],
)
def test_what_is_a_model_of_the_hub(text: str, found: HubPath | None) -> None:
    assert HubPath.of(text) == found


def test_the_command_line_takes_ids(hub: HubServer, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = hub.push(ID, model, "v1")
    assert main(["inspect", ID, "--revision", "v1"]) == 0
    assert f"hf://{ID}@{commit}" in capsys.readouterr().out
    assert main(["inspect", ID]) == 1
    assert "no revision 'main'" in capsys.readouterr().err
    assert main(["inspect", str(model), "--revision", "v1"]) == 1
    assert "leave the revision out" in capsys.readouterr().err


def test_the_real_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        socket.create_connection(("huggingface.co", 443), 3).close()
    except OSError as error:
        pytest.skip(f"no hub: {error}")
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_HOME", str(tmp_path))
        read_environment()
        checkpoint = open_checkpoint("hf-internal-testing/tiny-random-LlamaForCausalLM")
        assert checkpoint.path.startswith("hf://hf-internal-testing/tiny-random-LlamaForCausalLM@")
        with FileReader(checkpoint.files) as reader:
            assert reader.read_tensor(next(iter(checkpoint.tensors.values()))).isfinite().all()
    read_environment()


def test_the_threads_of_a_listing_that_is_never_answered_end(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def requests() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "raysharding-request"]

    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        read_environment()
        options = RemoteOptions(request_s=0.5, num_tries=2)
        refused(f"hf://{ID}@{'a' * 40}", "no full answer within|does not answer", remote=options)
        until = now() + 10.0
        while requests():
            assert now() < until
            time.sleep(0.05)
