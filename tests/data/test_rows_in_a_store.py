"""Rows of files in a store that fails: as weights, they are asked for again, and never other than they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysharding.checkpoint.storage import DEFAULT_REMOTE, remote_storage
from raysharding.data import DataPath, ParquetFiles, TextFiles, epoch_batches, list_files
from raysharding.errors import DataError
from tests.faulty_proxy import Fault
from tests.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

NUMBERS = np.random.default_rng(0).integers(0, 1 << 60, 2000).tolist()
ONCE_EACH = [
    Fault("status", status=503, code="SlowDown", path=r"list-type|prefix", times=1),
    Fault("status", status=503, method="HEAD", path=r"rows\.", times=1),
    Fault("status", status=503, code="SlowDown", path=r"rows\.", times=1),
    Fault("short", path=r"rows\.", times=2),
]


@pytest.fixture(params=["parquet", "jsonl", "csv"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> str:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / f"rows.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.table({"number": NUMBERS}), path)
    elif request.param == "jsonl":
        path.write_text("".join(json.dumps({"number": number}) + "\n" for number in NUMBERS))
    else:
        path.write_text("number\n" + "".join(f"{number}\n" for number in NUMBERS))
    return s3.upload(tmp_path / "data", f"data-{request.param}")


def opened(uri: str) -> ParquetFiles | TextFiles:
    kind = ParquetFiles if "data-parquet" in uri else TextFiles
    return kind.open(DataPath(uri), list_files(uri), (), None)


def numbers(uri: str) -> list[int]:
    source = opened(uri)
    return [row["number"] for one in epoch_batches(source, 100, 0, 1) if one is not None for row in one.rows]


def test_errors_and_short_answers_change_no_row(uri: str, s3: S3Server) -> None:
    faults = [Fault(**vars(fault)) for fault in ONCE_EACH]
    s3.proxy.faults += faults
    assert numbers(uri) == NUMBERS
    assert [fault.times for fault in faults] == [0, 0, 0, 0], "a fault never hit"
    s3.proxy.faults.append(Fault("short", path=r"rows\."))
    with pytest.raises(DataError, match=r"rows\.\w+: cannot be read: reading .* tried 5 times: the answer has fewer"):
        numbers(uri)


def test_refused_and_expired_credentials_and_a_shortened_object_have_their_own_cures(uri: str, s3: S3Server) -> None:
    source = opened(uri)
    for status, code, said in (
        (403, "AccessDenied", "access was refused: set AWS_ACCESS_KEY_ID"),
        (400, "ExpiredToken", "temporary credentials .* have expired: renew them"),
        (None, "", "it was written anew meanwhile"),
    ):
        s3.proxy.reset()
        if status is None:
            directory = uri.partition("?")[0].removeprefix(f"s3://{s3.bucket}/")
            s3.put(f"{directory}/rows.{directory.rpartition('-')[2]}", b"")
        else:
            s3.proxy.faults.append(Fault("status", status=status, code=code, path=r"rows\."))
        with pytest.raises(DataError, match=rf"tried once: .*{said}"):
            list(epoch_batches(source, 100, 0, 1))


def test_all_directories_of_a_bucket_share_one_file_system(s3: S3Server) -> None:
    storage = remote_storage(DEFAULT_REMOTE)
    found = {id(storage.file_system(s3.uri(f"step-{step} é"))[0]._system) for step in range(20)}
    assert len(found) == 1
    assert storage.file_system(s3.uri("step-1 é"))[1] == f"{s3.bucket}/step-1 é"
