"""The command line: `raysharding inspect PATH` shows a checkpoint's contents.

`raysharding plan PATH` prints the memory that a group would need and whether the group fits, `raysharding doctor`
checks a cluster, and `raysharding merge CHECKPOINT_DIR OUTPUT_PATH` converts a sharded torch checkpoint to standard
files. Each command imports what it needs when it runs: `--help` and `--version` import neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from raysharding.errors import RayshardingError
from raysharding.units import format_bytes

if TYPE_CHECKING:
    from raysharding.checkpoint import Checkpoint, TensorInfo
    from raysharding.group.cluster import NodeCapacity

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: this process's own.

    Returns:
        Exit status: 0; 1 if the command failed (the reason is on stderr), a plan does not fit, or the doctor found
            errors; 2 if the words are not a command; 130 after Ctrl-C; 141 if the reader of the output has gone.
    """
    options = _parser().parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], bool | None] = options.run
        status = 1 if run(options) is False else 0
        sys.stdout.flush()  # here, where a broken pipe is caught
        return status
    except BrokenPipeError:
        # What is still in the buffer would raise again at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (RayshardingError, ImportError, OSError, ValueError) as error:
        print(f"raysharding: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("raysharding: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _inspect(options: argparse.Namespace) -> None:
    from raysharding.checkpoint import locate, open_checkpoint

    checkpoint = open_checkpoint(locate(options.path, options.revision))
    found = contents(checkpoint, all_tensors=options.tensors)
    _show(options, "\n".join(_lines(found)), found)


def _show(options: argparse.Namespace, text: object, value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2) if options.json else text)


def _merge(options: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    from raysharding.distributed.saving import merge_checkpoint, skipped_line

    with tqdm(desc="merge", unit="B", unit_scale=True, unit_divisor=1024, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        paths = options.checkpoint_dir, options.output_path
        report = merge_checkpoint(*paths, not options.bin, options.remove, progress=progress)
    assert report is not None, "a command has no process group"
    print(f"{report.num_tensors} tensors, {format_bytes(report.num_bytes)}:", *report.files, sep="\n  ")
    if report.skipped:
        print(f"raysharding: {skipped_line(report)}", file=sys.stderr)


def _plan(options: argparse.Namespace) -> bool:
    import torch

    from raysharding.config import Loading, Placement, Sharding
    from raysharding.group import ShardedModelGroup

    plan = ShardedModelGroup.plan(
        options.path,
        revision=options.revision,
        model=options.model,
        base=options.base,
        config_overrides=None if options.config_overrides is None else dict(options.config_overrides),
        world_size=options.world_size,
        device=options.device,
        sharding=Sharding(replicate_size=options.replicate_size, cpu_offload=options.cpu_offload),
        loading=Loading(dtype=options.dtype, strict=not options.not_strict),
        placement=Placement(strategy=options.strategy),
        optimizer=None if options.optimizer is None else getattr(torch.optim, options.optimizer),
        nodes=_imagined_nodes(options),
    )
    _show(options, plan, asdict(plan) | {"fits": plan.fits})
    return plan.fits


def _imagined_nodes(options: argparse.Namespace) -> list[NodeCapacity] | None:
    """Return the nodes that the options describe; `None` if the options describe none, to plan for the real nodes."""
    from raysharding.group.cluster import NodeCapacity

    given = (options.nodes, options.gpus_per_node, options.gpu_memory, options.node_memory)
    if all(value is None for value in given):
        return None
    num_nodes = options.nodes or 1
    share = -(-(options.world_size or num_nodes) // num_nodes)
    # Without a number of ranks a node has the CPUs of the two ranks that a group has on CPUs.
    cpus = 2 if options.world_size is None else share
    gpus = options.gpus_per_node
    if gpus is None:
        gpus = 0 if options.gpu_memory is None else share
    node = NodeCapacity("", float(max(cpus, gpus)), gpus, options.node_memory, options.gpu_memory)
    return [replace(node, name=f"node {number}") for number in range(num_nodes)]


def _doctor(options: argparse.Namespace) -> bool:
    from raysharding.group.launch import diagnose

    report = diagnose(options.address, options.port_range)
    _show(options, report, asdict(report))
    return not report.errors


_PATH = "Hugging Face directory, .safetensors file, index JSON, hub id (org/name), or URI"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raysharding", description="Hugging Face checkpoints on a Ray cluster.")
    # The package's own names are on a floor beside this one.
    parser.add_argument("--version", action="version", version=f"raysharding {sys.modules['raysharding'].__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="validate headers and index, and show a checkpoint's contents")
    inspect.add_argument("path", help=f"{_PATH} (s3://, gs://)")
    inspect.add_argument("--revision", help="branch, tag or commit of a hub id; default main")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    _add_json(inspect)
    inspect.set_defaults(run=_inspect)
    _add_plan(commands.add_parser("plan", help="print each rank's memory in a group, and whether the group fits"))
    _add_doctor(commands.add_parser("doctor", help="check a Ray cluster: versions, interfaces, links, exposure"))
    _add_merge(commands.add_parser("merge", help="convert a sharded torch checkpoint to standard files"))
    return parser


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.description = (
        "Reads headers only and starts no actor. Compares the group's memory with the nodes that the last four options "
        "describe; without them, with the nodes of the cluster that RAY_ADDRESS names or that runs on this machine; "
        "without a cluster, with this machine. The exit status is 1 if the group does not fit."
    )
    plan.add_argument("path", help=_PATH)
    plan.add_argument("--revision", help="branch, tag or commit of a hub id; default main")
    plan.add_argument("--world-size", type=_count, help="ranks; default: one per free GPU; on CPUs two, or one")
    plan.add_argument("--device", help="device type, such as cuda or cpu; default: cuda if there are GPUs, else cpu")
    plan.add_argument("--model", help="name of a transformers auto class; default: the class that config.json names")
    plan.add_argument("--base", help="base model of a directory of adapters; default: the hub id that they name")
    plan.add_argument("--config-overrides", type=_field, nargs="+", metavar="FIELD=VALUE", help="as num_labels=3")
    plan.add_argument("--dtype", help="as Loading(dtype=): bfloat16, bf16, ...; default: the checkpoint's dtype")
    plan.add_argument("--optimizer", choices=("AdamW", "Adam", "SGD", "Adafactor", "Adagrad"), help="to train with")
    plan.add_argument("--replicate-size", type=_count, default=1, help="replicas of the model (HSDP); default 1")
    plan.add_argument("--cpu-offload", action="store_true", help="shards, gradients, optimizer in host memory")
    plan.add_argument("--not-strict", action="store_true", help="accept missing or unexpected keys")
    strategies = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    plan.add_argument("--strategy", choices=strategies, default="PACK", help="Ray's placement strategy; default PACK")
    plan.add_argument("--nodes", type=_count, help="number of nodes to assume")
    plan.add_argument("--gpus-per-node", type=_count, help="GPUs of each node; default: as many as --world-size needs")
    plan.add_argument("--gpu-memory", type=_bytes, metavar="80GiB", help="free memory of each GPU")
    plan.add_argument("--node-memory", type=_bytes, metavar="1TiB", help="free host memory of each node")
    _add_json(plan)
    plan.set_defaults(run=_plan)


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.description = (
        "Starts a small process on every node (two if there is only one node), connects the processes as ranks "
        "connect, and removes them. The exit status is 1 if a finding would prevent a group from working."
    )
    doctor.add_argument("--address", help="cluster address, host:port; default: as ray.init() finds or starts one")
    doctor.add_argument(
        "--port-range", type=_port_range, metavar="FIRST-LAST", help="as Placement.port_range; default: any port"
    )
    _add_json(doctor)
    doctor.set_defaults(run=_doctor)


def _add_merge(merge: argparse.ArgumentParser) -> None:
    merge.description = (
        "Merges a directory that torch.distributed.checkpoint saved (.metadata and *.distcp files, as in accelerate's "
        "pytorch_model_fsdp_0) into model.safetensors, or into several files with an index if it exceeds 5 GB. "
        "Needs memory for the largest tensor and one chunk of it, and runs no pickle."
    )
    merge.add_argument("checkpoint_dir", metavar="CHECKPOINT_DIR", help="the directory that holds .metadata")
    merge.add_argument("output_path", metavar="OUTPUT_PATH", help="the directory to write into; its other files stay")
    merge.add_argument("--bin", action="store_true", help="write pytorch_model.bin, which also holds optimizer state")
    merge.add_argument("--remove", action="store_true", help="remove CHECKPOINT_DIR once the output is on disk")
    merge.set_defaults(run=_merge)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give an amount such as 80GiB, 80GB, or a number of bytes")
    power = " KMGT".index(found[2].upper() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def _field(text: str) -> tuple[str, Any]:
    name, is_given, value = text.partition("=")
    if not is_given:
        raise argparse.ArgumentTypeError(f"{text!r}: give a field of config.json and its value, such as num_labels=3")
    try:
        return name, json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except json.JSONDecodeError:
        return name, value


def _port_range(text: str) -> tuple[int, int] | None:
    from raysharding.config import Placement

    try:
        first, last = map(int, text.split("-"))
        return Placement(port_range=(first, last)).port_range
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give a first and a last port, such as 29500-29599") from error


def _lines(found: Mapping[str, Any]) -> list[str]:
    """Return what `contents` returned as lines for a terminal."""
    lines = [
        found["path"],
        f"  architectures  {', '.join(found['architectures']) or 'none named'}",
        f"  tensors        {found['num_tensors']}, {format_bytes(found['num_bytes'])}",
    ]
    lines += [f"  {dtype:<14} {number:,} elements" for dtype, number in found["elements"].items()]
    for file in found["files"]:
        lines.append(f"  {file['name']}: {file['num_tensors']} tensors, {format_bytes(file['num_bytes'])}")
    tensors = found.get("tensors", {})
    width = max(map(len, tensors), default=0)
    for name, info in tensors.items():
        size = format_bytes(info["num_bytes"])
        lines.append(f"    {name:<{width}}  {info['dtype']:<10} {size:>10}  {info['shape']}")
    return lines


def contents(checkpoint: Checkpoint, *, all_tensors: bool) -> dict[str, Any]:
    """Describe a checkpoint as data for JSON; sizes are in bytes.

    Args:
        checkpoint: What `open_checkpoint` returned.
        all_tensors: Also describe each tensor, in file order.
    """
    elements: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        elements[_dtype(info)] += info.num_elements
    held = Counter(info.file for info in checkpoint.tensors.values())
    found: dict[str, Any] = {
        "path": checkpoint.path,
        "architectures": (checkpoint.config or {}).get("architectures") or [],
        "num_tensors": len(checkpoint.tensors),
        "num_bytes": checkpoint.num_bytes,
        "elements": dict(elements.most_common()),
        "files": [
            {"name": file.name, "num_tensors": held[index], "num_bytes": file.num_bytes}
            for index, file in enumerate(checkpoint.files)
        ],
    }
    if all_tensors:
        found["tensors"] = {
            name: {"dtype": _dtype(info), "shape": list(info.shape), "num_bytes": info.num_bytes}
            for name, info in checkpoint.tensors.items()
        }
    return found


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")
