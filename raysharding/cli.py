"""The command line: `raysharding inspect PATH` shows what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from raysharding.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from raysharding.errors import CheckpointError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: this process's own.

    Returns:
        Exit status: 0, or 1 for a checkpoint that cannot be trusted, with the reason on stderr.
    """
    options = _parser().parse_args(arguments)
    try:
        checkpoint = open_checkpoint(options.path)
    except CheckpointError as error:
        print(f"raysharding: {error}", file=sys.stderr)
        return 1
    print("\n".join(describe(checkpoint, all_tensors=options.tensors)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raysharding", description="Hugging Face checkpoints on a Ray cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="validate headers and index, and show what a checkpoint holds")
    inspect.add_argument("path", help="Hugging Face directory, .safetensors file, index JSON, or URI (s3://, gs://)")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    return parser


def describe(checkpoint: Checkpoint, *, all_tensors: bool = False) -> list[str]:
    """Describe a checkpoint in lines for a person.

    Args:
        checkpoint: What `open_checkpoint` returned.
        all_tensors: Also list name, dtype, shape and size of every tensor, in file order.
    """
    config = checkpoint.config or {}
    architectures = ", ".join(config.get("architectures") or ()) or "none named"
    lines = [
        checkpoint.path,
        f"  architectures  {architectures}",
        f"  tensors        {len(checkpoint.tensors)}, {_size(checkpoint.num_bytes)}",
    ]
    held: Counter[int] = Counter()
    elements: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        held[info.file] += 1
        elements[_dtype(info)] += info.num_elements
    lines += [f"  {dtype:<14} {number:,} elements" for dtype, number in elements.most_common()]
    for index, file in enumerate(checkpoint.files):
        lines.append(f"  {file.name}: {held[index]} tensors, {_size(file.num_bytes)}")
    if all_tensors:
        width = max((len(name) for name in checkpoint.tensors), default=0)
        lines += [f"    {name:<{width}}  {_row(info)}" for name, info in checkpoint.tensors.items()]
    return lines


def _row(info: TensorInfo) -> str:
    return f"{_dtype(info):<10} {_size(info.num_bytes):>10}  {list(info.shape)}"


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.2f} {unit}" if unit != "B" else f"{num_bytes} B"
