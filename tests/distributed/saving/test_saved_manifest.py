"""The manifest that `save_checkpoint` writes: the same for any number of ranks, and right by other people's code."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import safe_open

from raysharding.checkpoint import check_manifest, open_checkpoint, read_manifest
from raysharding.distributed import init_mesh, save_checkpoint, shard_module
from raysharding.distributed.saving import file_writers as file_writing
from tests.distributed.models import filled
from tests.spawn import device_type, run_ranks

pytestmark = pytest.mark.all_ranks  # the ranks make new process groups

NAME = "raysharding.manifest.json"


def save_on_ranks(root: Path) -> None:
    """Three ranks save; then the first two, and the third alone, in new groups: fewer processes to start."""
    save(root)
    rank = dist.get_rank()
    dist.destroy_process_group()
    group, rank, world_size = ("alone", 0, 1) if rank == 2 else ("pair", rank, 2)
    dist.init_process_group("gloo", init_method=f"file://{root}/{group}", rank=rank, world_size=world_size)
    save(root)


def save(root: Path) -> None:
    """`one`: a single file. `many`: a file for each rank, other values, and copied sidecars."""
    mesh = init_mesh(device_type())
    folder = root / str(dist.get_world_size())
    file_writing.SMALL_BYTES = 256 << 20
    save_checkpoint(shard_module(filled(seed=1), mesh), folder / "one")
    if dist.get_rank() == 0:
        (folder / "one" / "tokenizer.json").write_text("{}")
    file_writing.SMALL_BYTES = 0
    save_checkpoint(shard_module(filled(), mesh), folder / "many", source=open_checkpoint(folder / "one"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W → one, many."""
    path = tmp_path_factory.mktemp("saves")
    run_ranks(3, save_on_ranks, path)
    return path


def computed(directory: Path) -> dict[str, Any]:
    """The manifest of a directory, from its files, by the safetensors library, hashlib and zlib."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        files[path.name] = {"num_bytes": len(data), "header_sha256": hashlib.sha256(header).hexdigest()}
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                value = file.get_tensor(name).numpy().tobytes()
                tensors[name] = {"num_bytes": len(value), "crc32": f"{zlib.crc32(value):08x}"}
    return {"format_version": 1, "algorithm": "crc32", "files": files, "tensors": tensors}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("save", ["one", "many"])
def test_it_is_what_safetensors_and_zlib_say(root: Path, world_size: int, save: str) -> None:
    directory = root / str(world_size) / save
    manifest = json.loads((directory / NAME).read_text())
    assert manifest == computed(directory)
    assert len(manifest["files"]) == (world_size if save == "many" else 1)
    checkpoint = open_checkpoint(directory)
    read = read_manifest(checkpoint)
    assert read is not None
    check_manifest(read, checkpoint)


@pytest.mark.timeout(200)
def test_any_number_of_ranks_saves_the_same(root: Path) -> None:
    one = [(root / str(world_size) / "one" / NAME).read_bytes() for world_size in (1, 2, 3)]
    assert one[0] == one[1] == one[2]
    many = [json.loads((root / str(world_size) / "many" / NAME).read_text()) for world_size in (1, 2, 3)]
    assert many[0]["tensors"] == many[1]["tensors"] == many[2]["tensors"]
    assert many[0]["tensors"] != json.loads(one[0])["tensors"]


@pytest.mark.timeout(200)
def test_a_save_beside_copied_sidecars_has_its_own(root: Path) -> None:
    assert (root / "2" / "many" / "tokenizer.json").exists()
    assert (root / "2" / "many" / NAME).read_bytes() != (root / "2" / "one" / NAME).read_bytes()
