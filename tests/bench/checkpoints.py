"""Makes checkpoints for the benchmarks: random, Llama-shaped, bf16, in several files with an index.

Run as `python -m tests.bench.checkpoints DIRECTORY [--size-gib 1.78]`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GIB = 1 << 30
VOCABULARY = 32_000


def llama_config(size_gib: float, hidden_size: int = 2048) -> dict[str, Any]:
    """A config.json of about `size_gib` in bf16: the width stays, the number of layers follows. 1.78 gives 16."""
    intermediate_size = hidden_size * 11 // 4
    fixed_bytes = 2 * 2 * VOCABULARY * hidden_size
    layer_bytes = 2 * (4 * hidden_size**2 + 3 * hidden_size * intermediate_size)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": max(1, round((size_gib * GIB - fixed_bytes) / layer_bytes)),
        "num_attention_heads": hidden_size // 128,
        "num_key_value_heads": hidden_size // 128,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def llama_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint's tensors, in the order of the model."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{layer}.self_attn.{name}.weight", (hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}.mlp.{name}.weight", (intermediate, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def make_checkpoint(directory: Path, size_gib: float = 1.78, num_files: int = 4, hidden_size: int = 2048) -> None:
    """Write a Hugging Face directory: config.json, index, and files of about equal size; needs one file in memory."""
    directory.mkdir(parents=True)
    config = llama_config(size_gib, hidden_size)
    shapes = dict(llama_shapes(config))
    weight_map = assign_files(shapes, num_files)
    # Slices of one pool at odd offsets: no two tensors are alike, and gigabytes of random numbers need not be drawn.
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    offsets = {name: 7919 * position for position, name in enumerate(shapes)}
    for file in dict.fromkeys(weight_map.values()):
        names = [name for name in shapes if weight_map[name] == file]
        tensors = {name: _values(pool, prod(shapes[name]), offsets[name]).reshape(shapes[name]) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": _num_bytes(shapes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def assign_files(shapes: Mapping[str, tuple[int, ...]], num_files: int) -> dict[str, str]:
    """Tensor → file name: the tensors in order, cut into runs of about equal bytes."""
    total_bytes = _num_bytes(shapes)
    weight_map: dict[str, str] = {}
    done_bytes = 0
    for name, shape in shapes.items():
        number = min(done_bytes * num_files // total_bytes, num_files - 1) + 1
        weight_map[name] = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        done_bytes += 2 * prod(shape)
    return weight_map


def _num_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(2 * prod(shape) for shape in shapes.values())


def _values(pool: torch.Tensor, num_elements: int, start: int) -> torch.Tensor:
    repeats = (start + num_elements) // pool.numel() + 1
    return pool.repeat(repeats)[start : start + num_elements].clone()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size-gib", type=float, default=1.78)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--num-files", type=int, default=4)
    args = parser.parse_args()
    make_checkpoint(args.directory, args.size_gib, args.num_files, args.hidden_size)


if __name__ == "__main__":
    main()
