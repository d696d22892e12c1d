"""The command line, run as a user runs it: in this process by its words, and once as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

import raysharding
from raysharding.cli import main
from tests import programs
from tests.checkpoint.torch_formats.dcp_files import save_with_torch
from tests.models.architectures import ENCODER


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two dtypes in one file, with a config."""
    tensors = {"a.weight": torch.zeros(300, 10, dtype=torch.bfloat16), "a.steps": torch.tensor(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def test_inspect(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    size = (checkpoint / "model.safetensors").stat().st_size
    assert capsys.readouterr().out.splitlines() == [
        str(checkpoint),
        "  architectures  LlamaForCausalLM",
        "  tensors        2, 5.87 KiB",
        "  bfloat16       3,000 elements",
        "  int64          1 elements",
        f"  model.safetensors: 2 tensors, {size / 1024:.2f} KiB",
    ]


def test_inspect_lists_tensors(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--tensors", str(checkpoint)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert sorted(rows) == [
        ["a.steps", "int64", "8", "B", "[]"],
        ["a.weight", "bfloat16", "5.86", "KiB", "[300,", "10]"],
    ]


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    weight = torch.randn(300, 10).bfloat16()
    save_with_torch(source, {"model": {"a.weight": weight, "a.steps": torch.tensor(7), "a.scale": 0.5}})
    assert main(["merge", str(source), str(output), "--bin"]) == 0
    assert capsys.readouterr() == (f"2 tensors, 5.87 KiB:\n  {output}/pytorch_model.bin\n", "")
    state = torch.load(output / "pytorch_model.bin", weights_only=True)
    assert state["a.scale"] == 0.5
    assert torch.equal(state["a.weight"], weight)
    assert main(["merge", str(source), str(output), "--remove"]) == 0
    told = capsys.readouterr()
    assert told.out == f"2 tensors, 5.87 KiB:\n  {output}/model.safetensors\n"
    assert told.err.startswith("raysharding: left out of model.safetensors")
    assert told.err.endswith(": model.a.scale\n")
    assert torch.equal(load_file(output / "model.safetensors")["a.weight"], weight)
    assert not source.exists()
    assert main(["merge", str(source), str(output)]) == 1
    assert capsys.readouterr().err == f"raysharding: {source}: no such directory\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explode"], "inspect"),
        *(
            (["doctor", "--port-range", given], f"{given!r}: give a first and a last port, such as 29500-29599")
            for given in ("29500", "29599-29500", "a-b", "0-80")
        ),
        (["plan", "x", "--gpu-memory", "much"], "give an amount such as 80GiB"),
        (
            ["plan", "x", "--config-overrides", "num_labels"],
            "'num_labels': give a field of config.json and its value, such as num_labels=3",
        ),
    ],
)
def test_words_that_are_no_command_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A tiny transformers checkpoint, headers and all."""
    BertModel(BertConfig(**ENCODER)).save_pretrained(tmp_path)
    return tmp_path


def test_plan(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(bert), "--world-size", "4", "--device", "cuda", "--optimizer", "AdamW"]
    assert main([*words, "--nodes", "2", "--gpu-memory", "80GiB", "--node-memory", "64GB"]) == 0
    told = capsys.readouterr().out
    assert f"{bert}: " in told
    assert "4 ranks on cuda, AdamW" in told
    assert "node 1  2      2          2" in told
    assert "fits, as far as is known" in told
    assert "activations, the batch and its outputs, and a background save's copies of the shards are left out" in told
    assert main([*words, "--gpu-memory", "1MiB"]) == 1
    assert "node 0: GPU memory: a rank needs 512." in capsys.readouterr().out


def test_plan_of_a_config_with_other_values(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(bert), "--json", "--nodes", "1", "--model", "AutoModelForSequenceClassification"]
    sizes = []
    for fields in (["num_labels=2"], ["num_labels=3"], ["num_labels=3", "hidden_act=relu", "use_cache=False"]):
        main([*words, "--config-overrides", *fields])
        ranks = json.loads(capsys.readouterr().out)["ranks"]
        sizes.append(sum(one["footprint"]["parameter_bytes"] for one in ranks))
    assert sizes[1] - sizes[0] == 4 * (16 + 1), "a row of the head, and its bias"
    assert sizes[2] == sizes[1]
    assert main([*words, "--config-overrides", "num_lables=3"]) == 1
    assert "BertConfig has no field 'num_lables'; did you mean 'num_labels'" in capsys.readouterr().err


ROOT = Path(__file__).resolve().parents[1]


def run_program(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=100)


LIGHT = """
import sys
from raysharding.cli import main
try:
    main(sys.argv[1:])
except SystemExit as error:
    assert error.code == 0, error
heavy = {"torch", "ray", "transformers", "pyarrow", "numpy", "tqdm"} & {*sys.modules}
assert not heavy, heavy
"""


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    done = run_program("-c", LIGHT, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"raysharding {raysharding.__version__}" if words == ["--version"] else "usage: ")


def test_inspect_in_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", "--tensors", str(checkpoint)]) == 0
    told = json.loads(capsys.readouterr().out)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert told == {
        "path": str(checkpoint),
        "architectures": ["LlamaForCausalLM"],
        "num_tensors": 2,
        "num_bytes": 6008,
        "elements": {"bfloat16": 3000, "int64": 1},
        "files": [{"name": "model.safetensors", "num_tensors": 2, "num_bytes": size}],
        "tensors": {
            "a.weight": {"dtype": "bfloat16", "shape": [300, 10], "num_bytes": 6000},
            "a.steps": {"dtype": "int64", "shape": [], "num_bytes": 8},
        },
    }


def test_plan_in_json(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(bert), "--json", "--nodes", "1", "--optimizer", "AdamW"]
    assert main([*words, "--dtype", "bf16"]) == 0
    low = json.loads(capsys.readouterr().out)
    assert (low["world_size"], low["device"], low["fits"]) == (2, "cpu", True)
    assert main([*words, "--dtype", "float32", "--node-memory", "1MiB"]) == 1
    full = json.loads(capsys.readouterr().out)
    assert not full["fits"]
    assert full["shortages"][0].startswith("node 0: host memory: its 2 ranks need ")
    sizes = [plan["ranks"][1]["footprint"]["parameter_bytes"] for plan in (low, full)]
    assert 2 * sizes[0] == sizes[1] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "{path}", "--dtype", "bf17", "--nodes", "1"], "dtype='bf17': give a floating dtype such as torch.bf"),
        (["inspect", "{path}/config.json/x"], "{path}/config.json/x: "),
        (["inspect", "{path}/cut"], "{path}/cut/model.safetensors: "),
        (["inspect", "--json", "{path}/nothing"], "{path}/nothing"),
        (["merge", "{path}", "{path}/config.json"], "{path}"),
        (
            ["plan", "{path}", "--nodes", "1", "--device", "cuda"],
            "world_size=None means one rank per GPU, but no GPU is available: give world_size\n",
        ),
    ],
)
def test_a_users_error_is_one_line(words: list[str], said: str, bert: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (bert / "cut").mkdir()
    (bert / "cut/model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-1])
    assert main([word.format(path=bert) for word in words]) == 1
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"raysharding: {said.format(path=bert)}")
    assert told.err.count("\n") == 1


def test_an_address_that_is_none_is_one_line() -> None:
    # A program of its own: in this one Ray may be connected.
    done = programs.run("import raysharding.cli; exit(raysharding.cli.main(['doctor', '--address', 'nonsense']))")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "raysharding: Invalid address format: nonsense\n"


def test_a_reader_who_has_gone_and_a_full_disk_end_the_command(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "raysharding", "inspect", str(checkpoint)]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as read,
        subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE) as written,
    ):
        assert read.stdout is not None
        read.stdout.close()
        assert read.communicate(timeout=60)[1] == b"", "without a word"
        assert written.communicate(timeout=60)[1] == b"raysharding: [Errno 28] No space left on device\n"
    assert (read.returncode, written.returncode) == (141, 1)
