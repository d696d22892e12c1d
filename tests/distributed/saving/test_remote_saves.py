"""`save_checkpoint` to a URI: the same checkpoint as on a disk, written in file order by every rank, or none at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysharding.checkpoint import FileReader, SaveRecord, check_manifest, open_checkpoint, read_manifest
from raysharding.checkpoint.storage.remote import remote_storage
from raysharding.checkpoint.storage.requests import RemoteOptions
from raysharding.checkpoint.storage.uri import join_path
from raysharding.checkpoint.writing import create_staging, is_left_over, write_file
from raysharding.distributed import init_mesh, load_checkpoint, save_checkpoint, shard_module, using_group
from raysharding.distributed.fully_shard.layout import local_tensor
from raysharding.distributed.saving import Destination, begin_save
from raysharding.distributed.saving import file_writers as file_writing
from raysharding.distributed.transfer.bucket_plan import PlannedTensor, plan_in_order
from raysharding.errors import CheckpointError
from tests.distributed.models import filled
from tests.distributed.transfer.test_transfer import ranges_of, tensors
from tests.faulty_proxy import Fault
from tests.s3 import S3Server, s3, s3_server
from tests.spawn import device_type, part_of_ranks, run_ranks

__all__ = ["s3", "s3_server"]

pytestmark = pytest.mark.timeout(180)


@settings(max_examples=150, deadline=None)
@given(tensors(), st.sampled_from([1, 100, 10_000, 1 << 20]))
def test_buckets_lie_end_to_end(case: tuple[int, list[PlannedTensor]], bucket_bytes: int) -> None:
    num_shards, planned = case
    total = sum(item.layout.num_elements * item.wire_dtype.itemsize for item in planned)
    bucket_bytes = max(bucket_bytes, total // 100)
    plan = plan_in_order(planned, num_shards, bucket_bytes)
    reached = (0, 0)
    for bucket in plan:
        segments = [segment for section in bucket.sections for segment in section.segments]
        for tensor, start, stop in sorted((one.tensor, one.start, one.stop) for one in segments):
            assert start == (reached[1] if tensor == reached[0] else 0)
            assert all(item.layout.num_elements == 0 for item in planned[reached[0] + 1 : tensor])
            reached = (tensor, stop)
        assert bucket.payload_bytes <= max(bucket_bytes, 8)
        assert bucket.payload_bytes <= bucket.num_bytes <= plan.max_bucket_bytes
    for (index, shard), found in ranges_of(plan).items():
        start, stop = planned[index].layout.local_range(max(shard, 0))
        assert found[0][0] == start
        assert found[-1][1] == stop
    assert sum(bucket.payload_bytes for bucket in plan) == total


def save_and_train(root: Path, uri: str) -> list[str]:
    """Save to a disk and to a URI, files for every rank, with an optimizer; then what fails, fails everywhere."""
    file_writing.SMALL_BYTES = 0
    module = shard_module(filled(), init_mesh(device_type()))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for target in (root / "saved", join_path(uri, "saved")):
        save_checkpoint(module, target, optimizer=optimizer)
    again = shard_module(filled(seed=2), init_mesh(device_type()))
    load_checkpoint(again, join_path(uri, "saved"))
    for mine, loaded in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(local_tensor(mine), local_tensor(loaded))
    try:
        save_checkpoint(module, join_path(uri, "refused"))
    except CheckpointError as error:
        return [str(error)]
    return []


def test_a_save_is_the_one_that_a_disk_has(s3: S3Server, tmp_path: Path) -> None:
    s3.proxy.faults.append(Fault("status", method="PUT", path="refused.*00002-of", status=403, code="AccessDenied"))
    s3.proxy.faults.append(Fault("status", method="PUT", path="saved", times=2))
    errors = run_ranks(3, save_and_train, tmp_path, s3.uri("ranks"), timeout_s=150)
    assert all("cannot be written" in said for (said,) in errors), errors
    assert remote_storage(RemoteOptions()).list_names(s3.uri("ranks")) == ["saved"]
    local, remote = open_checkpoint(tmp_path / "saved"), open_checkpoint(s3.uri("ranks/saved"))
    assert remote.tensors.keys() == local.tensors.keys()
    manifests: list[Any] = [read_manifest(one) for one in (local, remote)]
    assert manifests[0].tensors == manifests[1].tensors
    assert [*manifests[0].files.values()] == [*manifests[1].files.values()], "the names hold the save's token"
    check_manifest(manifests[1], remote)
    for folder in ("", "/optimizer"):
        ours, theirs = open_checkpoint(s3.uri(f"ranks/saved{folder}")), open_checkpoint(f"{tmp_path}/saved{folder}")
        with FileReader(ours.files) as reader, FileReader(theirs.files) as expected:
            for name, info in theirs.tensors.items():
                assert torch.equal(reader.read_tensor(ours.tensors[name]), expected.read_tensor(info)), name
    assert len(remote.files) == 3


def two_saves(uri: str) -> list[str]:
    """Begin a save, let another one replace it, then end the first: by an error, and by going on."""
    file_writing.SMALL_BYTES = 0
    module = shard_module(filled(), init_mesh(device_type()))
    errors = []
    for end in ("abort", "run"):
        first = begin_save(module, Destination(join_path(uri, end)), None, None, 60.0)
        save_checkpoint(module, join_path(uri, end), overwrite=True)
        try:
            with using_group(part_of_ranks()):
                first.discard(KeyError()) if end == "abort" else first.run()
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def test_a_save_that_another_one_replaced_removes_nothing_of_it(s3: S3Server) -> None:
    uri = s3.uri("two")
    for errors in run_ranks(2, two_saves, uri, timeout_s=150):
        assert len(errors) == 1
        assert "another save to it has begun meanwhile" in errors[0]
    storage = remote_storage(RemoteOptions())
    for end in ("abort", "run"):
        saved = open_checkpoint(join_path(uri, end))
        assert len(saved.files) == 2
        with FileReader(saved.files) as reader:
            name = next(iter(filled().state_dict()))
            assert torch.equal(reader.read_tensor(saved.tensors[name]), filled().state_dict()[name])
        weights = [name for name in storage.list_names(saved.directory) if name.endswith(".safetensors")]
        assert weights == sorted(file.name for file in saved.files), "the replaced save has removed its own"


def save_between(uri: str) -> str:
    """Begin another save where the first has looked at its claim, and has not committed."""
    module = shard_module(filled(), init_mesh(device_type()))
    describe = SaveRecord.of

    def begin_another(token: str, sidecars: Mapping[str, bytes]) -> SaveRecord:
        create_staging(uri, overwrite=True)
        return describe(token, sidecars)

    with (
        patch.object(SaveRecord, "of", begin_another),
        pytest.raises(CheckpointError) as caught,
        using_group(part_of_ranks()),
    ):
        begin_save(module, Destination(uri), None, None, 60.0).run()
    return str(caught.value)


def alone(uri: str) -> tuple[str, list[str]]:
    return save_between(join_path(uri, "between")), save_over_its_source(join_path(uri, "own-source"))


def save_over_its_source(uri: str) -> list[str]:
    module = shard_module(filled(), init_mesh(device_type()))
    with using_group(part_of_ranks()):
        save_checkpoint(module, uri)
        write_file(uri, "tokenizer.json", b"{}")
        SaveRecord.of("0a", {"tokenizer.json": b"{}"}).write(uri)
        save_checkpoint(module, uri, overwrite=True, source=open_checkpoint(uri))
    return remote_storage(RemoteOptions()).list_names(uri)


def test_a_save_without_weights_is_none_and_one_over_its_own_source_keeps_the_small_files(s3: S3Server) -> None:
    """The weights of the first were removed by another save, which began meanwhile."""
    ((said, names),) = run_ranks(1, alone, s3.uri("alone"), timeout_s=100)
    assert "another save to it has removed model-00001-of-00001-" in said
    assert is_left_over(s3.uri("alone/between"))
    assert "tokenizer.json" in names
