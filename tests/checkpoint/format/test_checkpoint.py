"""`Checkpoint`: config, sidecar files, the JSON that travels to other ranks, and the time it takes to open one."""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from pathlib import Path

import pytest
import torch

from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.errors import CheckpointError
from tests.checkpoint.build import entry, random_tensors, save, save_sharded, sidecar_files, write_raw


def test_json_and_pickle_round_trips_are_exact(tmp_path: Path) -> None:
    tensors = random_tensors() | {'odd " \\ \n имя': torch.zeros(2)}
    names = list(tensors)
    files = {"x.safetensors": {name: tensors[name] for name in names[::2]}}
    files["y.safetensors"] = {name: tensors[name] for name in names[1::2]}
    directory = save_sharded(tmp_path / "ckpt", files)
    (directory / "config.json").write_text('{"dtype": "bfloat16", "limit": [0.0, Infinity], "ключ": null}')
    checkpoint = open_checkpoint(directory)
    assert set(checkpoint.tensors) == set(tensors)
    for copy in (Checkpoint.from_json(checkpoint.to_json()), pickle.loads(pickle.dumps(checkpoint))):
        assert copy == checkpoint
        assert list(copy.tensors) == list(checkpoint.tensors)
        assert copy.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert copy.config == {"dtype": "bfloat16", "limit": [0.0, math.inf], "ключ": None}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"\xff", b'{"path":"","files":[[]],"tensors":[["a","F31",[],0,0]]}']
)
def test_json_of_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="not an encoded Checkpoint"):
        Checkpoint.from_json(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b'"x"', "is a JSON str, not an object"),
        (b'{"a":"\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.path == str(tmp_path / "config.json")


def test_sidecar_files_are_small_files_that_are_no_weights_and_no_code(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    wanted = ["chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "tokenizer.json"]
    wanted += ["tokenizer.model", "vocab.txt", "README.md", "LICENSE", "NOTICE", "bpe.codes", "prophetnet.tokenizer"]
    wanted += ["sentencepiece.bpe.model", "spiece.model", "qwen.tiktoken", "dict.txt", "source.spm"]
    unwanted = [".hidden.json", "pytorch_model.bin.index.json", "modeling.py", "pytorch_model.bin", "x.safetensors.bak"]
    unwanted += ["optimizer.pt", "rng_state_0.pth", "training_args.bin", "events.out.tfevents.17.host", "run.log"]
    unwanted += ["model.onnx", "tf_model.h5", "flax_model.msgpack", "pytorch_model-00001-of-00002.bin"]
    for name in wanted + unwanted:
        (tmp_path / name).write_text("{}")
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(64 << 20)
    (tmp_path / "dir.json").mkdir()
    (tmp_path / "passwd.txt").symlink_to("/etc/passwd")
    (tmp_path / "gone.txt").symlink_to("gone")
    checkpoint = open_checkpoint(tmp_path)
    assert sidecar_files(checkpoint) == tuple(sorted(wanted))
    assert checkpoint.directory == str(tmp_path)


def test_sidecar_files_lie_in_folders_too(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    modules = [{"idx": 0, "path": ""}, {"path": "2_Dense"}, {"path": "3_Router"}, {"path": "../up"}, {"path": 3}, 4]
    wanted = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"]
    wanted += ["3_Router/document_0_Dense/pytorch_model.bin", "additional_chat_templates/tool_use.jinja"]
    wanted += ["a/b/c/deep.txt", "images/loss.png", "linked/config.json"]
    unwanted = ["2_Dense/modeling.py", "3_Router/.cache/x.json", "a/b/c/d/deeper.txt", "a/model.py", ".git/HEAD"]
    unwanted += ["checkpoint-500/model.safetensors", "checkpoint-500/config.json", "checkpoint-500/runs/x.txt"]
    unwanted += ["onnx/model.onnx", "onnx/config.json", "original/consolidated.00.pth", "original/params.json"]
    unwanted += ["openvino/openvino_model.bin", "openvino/openvino_model.xml", "runs/events.out.tfevents.17.host"]
    unwanted += ["optimizer/raysharding.optimizer.json", "training/raysharding.training.json", "images/data.parquet"]
    unwanted += [f"samples/{number}.txt" for number in range(101)] + ["large/half.json", "large/other.json"]
    (tmp_path.parent / "up").mkdir()
    (tmp_path.parent / "up" / "config.json").write_text("{}")
    for name in wanted + unwanted:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for name in ("large/half.json", "large/other.json"):
        os.truncate(tmp_path / name, 32 << 20)
    os.truncate(tmp_path / "2_Dense" / "model.safetensors", 65 << 20)
    (tmp_path / "linked" / "passwd.txt").symlink_to("/etc/passwd")
    (tmp_path / "out").symlink_to("/etc")
    (tmp_path / "again").symlink_to("images")
    (tmp_path / "images" / "circle").symlink_to("..")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "pipe.json")
    assert sidecar_files(open_checkpoint(tmp_path)) == tuple(sorted(wanted))
    for text in ("{", "[[]]", '{"a": 1}', '"x"', "\xff"):
        (tmp_path / "modules.json").write_text(text)
        assert sidecar_files(open_checkpoint(tmp_path)) == tuple(
            sorted(set(wanted) - {wanted[2], wanted[1], wanted[4]})
        )


def test_folders_of_a_snapshot_in_the_cache_are_links_into_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    (snapshot / "1_Pooling").mkdir(parents=True)
    blobs.mkdir()
    save(blobs / "w", {"a": torch.zeros(1)})
    (snapshot / "model.safetensors").symlink_to(blobs / "w")
    (blobs / "p").write_text("{}")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/p")
    (tmp_path / "secret").write_text("{}")
    (snapshot / "1_Pooling" / "secret.json").symlink_to("../../../../secret")
    assert sidecar_files(open_checkpoint(snapshot)) == ("1_Pooling/config.json",)


def test_metadata_of_the_files_is_merged_and_the_first_file_decides(tmp_path: Path) -> None:
    byte = entry("U8", [1], [0, 1])
    write_raw(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt", "by": "a"}, "s": byte}, b"x")
    write_raw(tmp_path / "b.safetensors", {"__metadata__": {"by": "b", "more": "b"}, "t": byte}, b"x")
    weight_map = {"s": "a.safetensors", "t": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_checkpoint(tmp_path).metadata == {"format": "pt", "by": "a", "more": "b"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads files whatever their mode")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    path.chmod(0)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        open_checkpoint(tmp_path)


@pytest.mark.full
def test_the_time_to_open_grows_with_the_tensors_alone(tmp_path: Path) -> None:
    few, many = make_headers(tmp_path / "few", 2_000), make_headers(tmp_path / "many", 20_000)
    seconds: dict[Path, list[float]] = {few: [], many: []}
    for _ in range(4):
        for path in (few, many):
            start = time.process_time()  # CPU time: other tests may run beside this one
            checkpoint = open_checkpoint(path)
            again = Checkpoint.from_json(checkpoint.to_json())
            seconds[path].append(time.process_time() - start)
            assert again == checkpoint
    assert len(checkpoint.tensors) == 20_000
    assert min(seconds[many]) < 40 * min(seconds[few]), "ten times as many tensors; a square would be a hundred times"


def make_headers(directory: Path, num_tensors: int) -> Path:
    """A checkpoint of so many tensors, whose data is a hole."""
    names = [f"model.layers.{i // 100}.mlp.experts.{i % 100}.weight" for i in range(num_tensors)]
    header = {name: entry("BF16", [64, 64], [i * 8192, (i + 1) * 8192]) for i, name in enumerate(names)}
    directory.mkdir()
    path = write_raw(directory / "x.safetensors", header, b"")
    os.truncate(path, path.stat().st_size + num_tensors * 8192)
    index = json.dumps({"weight_map": dict.fromkeys(header, "x.safetensors")})
    (directory / "model.safetensors.index.json").write_text(index)
    return directory
