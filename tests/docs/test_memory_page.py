"""docs/pages/memory-and-speed.md shows what `raysharding plan` prints."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
import torch

from raysharding.cli import main

PAGE = (Path(__file__).parents[2] / "docs/pages/memory-and-speed.md").read_text()
COMMAND, OUTPUT = re.findall(r"test_plan -->\n```bash\n(.*?)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)[0]
ROWS = re.findall(r"^\| (?:`(--.*?)`|no optimizer.*?) \| (\S+ \S+) \| (\S+ \S+) \|$", PAGE, re.MULTILINE)


def write_headers(path: Path) -> None:
    """A Llama of 8 billion parameters in a file with holes for its values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(
        **sizes, num_key_value_heads=8, vocab_size=128256, dtype="bfloat16", architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(path)
    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)


def test_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("path/to/llama-8b")
    write_headers(path)
    capsys.readouterr()
    assert main(COMMAND.split()[1:]) == 0
    assert capsys.readouterr().out == OUTPUT
    base = COMMAND.split(" --optimizer")[0].split()[1:]
    assert len(ROWS) == 4
    for options, gpu, host in ROWS:
        assert main([*base, *options.split()]) == 0
        last = next(line for line in reversed(capsys.readouterr().out.splitlines()) if re.match(r"\d-", line))
        shown = re.split(r"  +", last)[-2:]
        assert [shown[1], shown[0].replace(".00 MiB", " MiB")] == [gpu, host], options
