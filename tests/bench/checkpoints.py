"""Makes the benchmarks' checkpoints: random values, several files with an index; and builds the modules they fill.

Run as `python -m tests.bench.checkpoints DIRECTORY [--kind dense] [--size-gib 1.78]`. `KINDS` lists the kinds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from raysharding.checkpoint import open_checkpoint
from raysharding.models import build_module
from raysharding.models.build import parameters_on_meta
from raysharding.units import GIB
from tests.bench.models import ManySmall, OddRows, OneHuge, Quantized

VOCABULARY = 32_000
ARGUMENTS_FILE = "module.json"
"""Beside the weights of a plain module: the arguments of its constructor."""
POOL_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint, and the module that it fills."""

    name: str
    what: str
    """What it is for, in a line."""
    size_gib: float
    """Size of the files that is meant."""
    module: Callable[..., nn.Module] | None = None
    """Constructor of a plain module. Default: the transformers model that config.json names."""
    arguments: Callable[[float], dict[str, int]] = field(default=lambda size_gib: {})
    """Size in GiB → arguments of `module`."""
    dtype: torch.dtype | None = None
    """dtype to load into: `build` makes the module in it, our arms are told by `Loading(dtype=...)`. Default: that of
    the files."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Peer → why it cannot load this kind, as seen."""


_NO_MODEL = dict.fromkeys(
    ("transformers", "transformers_forward", "transformers_device_map"),
    "builds transformers models only, and this is a plain module",
)
_NO_PLAIN = "takes every entry of the state dict for a DTensor, and finds no parameters of a plain module's root"
_NO_FLOAT8 = dict.fromkeys(("accelerate", "torch", "fastsafetensors"), "gloo sends no float8: `Invalid scalar type`")

_KINDS = (
    Kind("dense", "Llama, bf16", 1.78),
    Kind("fp32", "the files of dense, loaded as fp32", 1.78, dtype=torch.float32),
    Kind(
        "small",
        "20,000 tensors of 4 KiB, bf16",
        20_000 * 4096 / GIB,
        ManySmall,
        lambda size_gib: {"num_blocks": max(1, round(size_gib * GIB / (4096 * ManySmall.PER_BLOCK)))},
        cannot=_NO_MODEL,
    ),
    Kind(
        "huge",
        "one tensor of 512 MiB beside a few small ones, bf16",
        0.5,
        OneHuge,
        lambda size_gib: {"num_rows": max(1, round(size_gib * GIB / (2 * OneHuge.COLUMNS)))},
        cannot=_NO_MODEL,
    ),
    Kind(
        "odd",
        "odd row counts, ties, 0-dim parameters and buffers, fp32",
        0.1,
        OddRows,
        lambda size_gib: {"num_blocks": max(1, round((size_gib * GIB / 4 / 521 - 10_007) / 522))},
        cannot=_NO_MODEL | {"accelerate": _NO_PLAIN},
    ),
    Kind(
        "fp8",
        "float8 weights, passed through as bytes, with fp32 scales",
        0.25,
        Quantized,
        lambda size_gib: {"num_blocks": max(1, round(size_gib * 1024)), "width": 1024},
        cannot=_NO_MODEL | _NO_FLOAT8,
    ),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}


def make(kind: str, directory: Path, size_gib: float | None = None, num_files: int = 4) -> None:
    """Write a checkpoint of a kind into a new directory; needs the memory of its largest file.

    Args:
        kind: One of `KINDS`.
        directory: Made here, with config.json or `ARGUMENTS_FILE` beside the files.
        size_gib: Roughly the size of all files. Default: the kind's own.
        num_files: Number of safetensors files.
    """
    chosen = KINDS[kind]
    size_gib = size_gib or chosen.size_gib
    if chosen.module is None:
        make_checkpoint(directory, size_gib, num_files)
        return
    directory.mkdir(parents=True)
    arguments = chosen.arguments(size_gib)
    module = build_plain(chosen.module, arguments)
    once = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    tensors = {name: value for name, value in module.state_dict().items() if name in once}
    write_files(directory, {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}, num_files)
    (directory / ARGUMENTS_FILE).write_text(json.dumps(arguments))


def build(kind: str, directory: Path) -> nn.Module:
    """The module that a checkpoint fills, on meta and not yet sharded; no collective.

    Args:
        kind: One of `KINDS`; `"dense"` and `"fp32"` do for any Hugging Face directory.
        directory: From `make`.
    """
    chosen = KINDS[kind]
    if chosen.module is None:
        return build_module(None, open_checkpoint(directory), chosen.dtype)
    return build_plain(chosen.module, json.loads((directory / ARGUMENTS_FILE).read_text()))


def build_plain(module: Callable[..., nn.Module], arguments: Mapping[str, int]) -> nn.Module:
    """A plain module with parameters on meta and real buffers."""
    with parameters_on_meta():
        return module(**arguments)


def llama_config(size_gib: float) -> dict[str, Any]:
    """A config.json of about `size_gib` in bf16: the width stays, the number of layers follows. 1.78 gives 16.

    Width 2048 for a GiB and more; below, the embeddings would be most of it, and narrower layers are taken.
    """
    hidden_size = 2048 if size_gib >= 1 else 512 if size_gib >= 0.1 else 128
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


def make_checkpoint(directory: Path, size_gib: float = 1.78, num_files: int = 4) -> None:
    """Write a Llama's Hugging Face directory: config.json, index, and files of about equal size."""
    directory.mkdir(parents=True)
    config = llama_config(size_gib)
    specs = {name: (shape, torch.bfloat16) for name, shape in llama_shapes(config)}
    write_files(directory, specs, num_files)
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def write_files(directory: Path, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], num_files: int) -> None:
    """Write random tensors of the shapes and dtypes given, in order, and the index; one file in memory at a time."""
    sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in specs.items()}
    weight_map = assign_files(sizes, num_files)
    # Slices of one pool at odd offsets: no two tensors are alike, and gigabytes of random numbers need not be drawn.
    pools = {dtype: _pool(dtype) for dtype in {dtype for _, dtype in specs.values()}}
    offsets = {name: 7919 * position for position, name in enumerate(specs)}
    for file in dict.fromkeys(weight_map.values()):
        tensors = {}
        for name in (name for name in specs if weight_map[name] == file):
            shape, dtype = specs[name]
            tensors[name] = _values(pools[dtype], prod(shape), offsets[name]).reshape(shape)
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def assign_files(sizes: Mapping[str, int], num_files: int) -> dict[str, str]:
    """Tensor → file name: the tensors in order, cut into runs of about equal bytes."""
    total_bytes = sum(sizes.values())
    numbers: dict[str, int] = {}
    done_bytes = 0
    for name, num_bytes in sizes.items():
        numbers[name] = min(done_bytes * num_files // total_bytes, num_files - 1)
        done_bytes += num_bytes
    # A large tensor leaves numbers out: the names count the files that there are.
    used = sorted(set(numbers.values()))
    name_of = {number: f"model-{used.index(number) + 1:05d}-of-{len(used):05d}.safetensors" for number in used}
    return {name: name_of[number] for name, number in numbers.items()}


def _pool(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(POOL_ELEMENTS, generator=generator).mul_(0.02).to(dtype)
    num_bytes = POOL_ELEMENTS * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype)


def _values(pool: torch.Tensor, num_elements: int, start: int) -> torch.Tensor:
    """`num_elements` of the pool from `start` on, round and round."""
    size = pool.dtype.itemsize
    source = pool.view(torch.uint8)  # float8 has no copy kernels of its own everywhere
    values = torch.empty(num_elements * size, dtype=torch.uint8)
    done, position = 0, start * size % len(source)
    while done < len(values):
        part = source[position : position + len(values) - done]
        values[done : done + len(part)] = part
        done, position = done + len(part), 0
    return values.view(pool.dtype)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", default="dense", choices=KINDS)
    parser.add_argument("--size-gib", type=float, help="rough size of the files; default: the kind's own")
    parser.add_argument("--num-files", type=int, default=4)
    args = parser.parse_args()
    make(args.kind, args.directory, args.size_gib, args.num_files)


if __name__ == "__main__":
    main()
