"""An object store that fails: errors that pass are tried again, others end in a `CheckpointError` in time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding.checkpoint import Checkpoint, FileReader, open_checkpoint
from raysharding.checkpoint.storage import DEFAULT_REMOTE, read_bytes, remote_storage
from raysharding.checkpoint.storage.requests import RemoteOptions
from raysharding.errors import CheckpointError
from tests.checkpoint.build import save
from tests.clock import now
from tests.faulty_proxy import Fault
from tests.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

QUICK = RemoteOptions(num_tries=3, request_s=1.0, backoff_s=0.01, part_bytes=1 << 20)
SLACK_S = 5.0  # of threads on a loaded machine: pyarrow alone notices a stalled body after 8 s, and three are tried
VALUES = torch.arange(1_000_000, dtype=torch.int32)
NUM_PARTS = -(-VALUES.nbytes // QUICK.part_bytes)


@pytest.fixture(scope="module")
def uri(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = save(tmp_path_factory.mktemp("x") / "model.safetensors", {"a": VALUES})
    return s3_server.upload(path.parent, "ckpt")


@pytest.fixture
def checkpoint(uri: str, s3: S3Server) -> Checkpoint:
    opened = open_checkpoint(uri, remote=QUICK)
    s3.proxy.reset()
    return opened


def read(checkpoint: Checkpoint, options: RemoteOptions = QUICK) -> torch.Tensor:
    with FileReader(checkpoint.files, options) as reader:
        return reader.read_tensor(checkpoint.tensors["a"])


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=500, code="InternalError", times=2),
        Fault("status", status=503, code="SlowDown", times=2),
        Fault("status", status=503, method="HEAD", times=2),
        Fault("status", status=429, code="TooManyRequests", times=2),
        Fault("reset", after_bytes=400_000, times=2),
        Fault("reset", after_bytes=-1, times=2),
        Fault("stall", after_bytes=400_000, times=2),
        Fault("stall", after_bytes=-1, times=1),
        Fault("short", times=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.method}-{fault.after_bytes}",
)
def test_what_passes_is_tried_again_and_the_bytes_are_right(checkpoint: Checkpoint, s3: S3Server, fault: Fault) -> None:
    s3.proxy.faults.append(fault)
    begun = now()
    assert torch.equal(read(checkpoint), VALUES)
    assert now() - begun < 3 * QUICK.request_s + SLACK_S
    assert fault.times == 0, "the fault never hit"


def test_opening_tries_again_too(uri: str, s3: S3Server) -> None:
    faults = [Fault("status", path="list-type", times=2), Fault("status", method="HEAD", path="safetensors$", times=2)]
    s3.proxy.faults += [*faults, Fault("reset", path="safetensors$", after_bytes=3, times=2)]
    assert list(open_checkpoint(uri, remote=QUICK).tensors) == ["a"]
    assert [fault.times for fault in s3.proxy.faults] == [0, 0, 0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("status", status=500, code="InternalError"), "INTERNAL_FAILURE"),
        (Fault("reset"), "NETWORK_CONNECTION"),
        (Fault("stall"), "no full answer within 1 s|Operation too slow"),
        (Fault("short"), "the answer has fewer"),
        (Fault("stall", after_bytes=-1), "no full answer within 1 s|Operation too slow"),
    ],
    ids=["500", "reset", "stall", "short", "silence"],
)
def test_what_stays_ends_in_an_error_before_the_deadline(
    checkpoint: Checkpoint, s3: S3Server, fault: Fault, said: str
) -> None:
    s3.proxy.faults.append(fault)
    begun = now()
    with pytest.raises(CheckpointError, match=rf"reading \d+ bytes at \d+ failed, tried 3 times: .*({said})") as caught:
        read(checkpoint)
    assert now() - begun < 3 * QUICK.request_s + SLACK_S
    sent = sum(fault.times for fault in s3.proxy.faults)
    most = NUM_PARTS * QUICK.num_tries * (2 if fault.kind == "short" else 1)  # a short answer is asked for twice
    assert (1 << 30) - most <= sent <= (1 << 30) - QUICK.num_tries
    assert caught.value.path == checkpoint.files[0].path
    assert caught.value.tensor == "a"
    assert f"failed, tried {QUICK.num_tries} times" in caught.value.message
    assert "check the network and the store" in caught.value.message
    s3.proxy.reset()
    assert torch.equal(read(checkpoint), VALUES)


def test_a_range_may_end_in_any_byte(s3: S3Server) -> None:
    s3.put("ends/bytes", data := bytes(range(256)))
    lengths = range(1, 257)
    file = remote_storage(DEFAULT_REMOTE).open(s3.uri("ends/bytes"))  # a slow machine needs no second try
    assert [read_bytes(file, 0, length) for length in lengths] == [data[:length] for length in lengths]
    assert len([request for request in s3.proxy.requests if request.method == "GET"]) == len(lengths) + 1


def test_a_header_of_which_every_answer_is_short_is_an_error(checkpoint: Checkpoint, s3: S3Server) -> None:
    s3.proxy.faults.append(Fault("short", path="safetensors$"))
    with pytest.raises(CheckpointError, match=r"reading 8 bytes at 0 failed"):
        open_checkpoint(checkpoint.directory, remote=QUICK)


def test_refusals_are_not_tried_again_and_name_the_variables(checkpoint: Checkpoint, s3: S3Server) -> None:
    opened = remote_storage(QUICK).open(checkpoint.files[0].path)
    s3.proxy.reset()
    s3.proxy.faults.append(Fault("status", status=403, code="AccessDenied"))
    one_part = RemoteOptions(num_tries=3, request_s=1.0, part_bytes=8 << 20, max_in_flight=1)
    with pytest.raises(CheckpointError, match=r"tried once: .*ACCESS_DENIED.*AWS_ACCESS_KEY_ID"):
        read(checkpoint, one_part)
    assert len([request for request in s3.proxy.requests if request.method == "GET"]) == 1
    with pytest.raises(CheckpointError, match=r"tried once: .*ACCESS_DENIED.*AWS_ACCESS_KEY_ID"):
        read_bytes(opened, 0, 8)  # an answer with less room than the text of the error


def test_a_part_that_fails_for_good_stops_the_others(checkpoint: Checkpoint, s3: S3Server) -> None:
    options = RemoteOptions(part_bytes=100_000, max_in_flight=3, num_tries=3, request_s=5.0)
    for _ in range(3):
        s3.proxy.reset()
        s3.proxy.faults.append(Fault("status", status=403, code="AccessDenied", skip=1))
        with pytest.raises(CheckpointError, match="ACCESS_DENIED"):
            read(checkpoint, options)
        assert len(s3.proxy.requests) < 9  # of 40 parts
    s3.proxy.reset()
    s3.proxy.delay_s = 0.05
    assert torch.equal(read(checkpoint, options), VALUES)
    assert s3.proxy.most_in_flight == 3, "leave to send was not given back"


def test_a_read_that_failed_writes_nothing_later(checkpoint: Checkpoint, s3: S3Server) -> None:
    s3.proxy.faults.append(Fault("stall", after_bytes=500_000))
    buffer = bytearray(2_000_000)
    with FileReader(checkpoint.files, QUICK) as reader, pytest.raises(CheckpointError):
        reader.read_into(0, 100, memoryview(buffer))
    before = bytes(buffer)
    s3.proxy.reset()
    time.sleep(0.3)  # the stalled requests end now, in threads that nobody waits for
    assert buffer == before


_EXIT = """
import sys
from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.checkpoint.storage import DEFAULT_REMOTE, join_path, read_bytes, remote_storage
from raysharding.checkpoint.storage.requests import RemoteOptions
options = RemoteOptions(num_tries=1, request_s=1.0)
checkpoint = open_checkpoint(sys.argv[1], remote=options)
print("opened", flush=True)
sys.stdin.readline()
with FileReader(checkpoint.files, options) as reader:
    reader.read_tensor(checkpoint.tensors["a"])
"""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, id="right", marks=pytest.mark.full),
        pytest.param(Fault("stall"), id="stall", marks=pytest.mark.full),
        pytest.param(Fault("stall", after_bytes=-1), id="mute"),
    ],
)
def test_a_process_ends_cleanly_with_a_request_still_under_way(uri: str, s3: S3Server, fault: Fault | None) -> None:
    root = Path(__file__).resolve().parents[3]
    command, pipe = [sys.executable, "-c", _EXIT, uri], subprocess.PIPE
    process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "opened\n"
    s3.proxy.faults += [fault] if fault is not None else []
    start = time.monotonic()
    _, errors = process.communicate("\n", timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode == (0 if fault is None else 1), errors
    assert fault is None or "CheckpointError" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"part_bytes": 0},
        {"max_in_flight": 1.5},
        {"num_tries": True},
        {"request_s": float("inf")},
        {"backoff_s": -1.0},
        {"max_backoff_s": "1"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_options_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RemoteOptions(**wrong)
