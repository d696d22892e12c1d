"""Mutated checkpoints on a disk: headers, sizes, indexes and names.

The reader refuses with a `CheckpointError`, or what it accepts lies inside the files, and is what the safetensors
library reads. No other error, no hang, and no file outside the directory is ever opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as safetensors_load

from raysharding.checkpoint import Checkpoint, FileReader, open_checkpoint
from raysharding.checkpoint.format.header import parse_header, read_header_bytes
from raysharding.errors import CheckpointError
from tests.checkpoint.build import GOOD, GOOD_PAYLOAD, bits, write_raw

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
OTHER = {"d": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}
EXAMPLE_S = 5.0
"""Most CPU time of one example."""

NUMBERS = [-1, 0, 1, 3, 8, 31, 33, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 200, 0.5, 1e308, True]
WORDS = ["", "F32", "BF16", "U8", "F4", "F8_E4M3", "f32", "a", "b", "dtype", "shape", "__metadata__", "\ud800", "é\0"]
CUSTOM = ["data_offsets", "dtype", "shape", "weight_map", "metadata", "a", "b", "c", "d", "__metadata__"]
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.integers(0, 40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(CUSTOM), inner, max_size=3),
    max_leaves=6,
)
TEXTS = [b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 1500, b'"\\ud800"', b"\xff", b"\0", b"//"]
NAMES = [
    *("../outside.safetensors", "./" + FIRST, "sub/" + FIRST, "..", ".", "", "\0", "a\\b.safetensors"),
    *("pytorch_model.bin", "model.pt", ".hidden.safetensors", "missing.safetensors", "x" * 5000 + ".safetensors"),
    *("link.safetensors", "directory.safetensors", "pipe.safetensors", "\ud800.safetensors", "loop.safetensors"),
    *(None, 3, [FIRST], {"file": FIRST}, FIRST.upper(), FIRST, SECOND),
]


def container_of(data: st.DataObject, root: Any) -> Any:
    """A dict or list anywhere in a JSON value, not always the outermost."""
    while isinstance(root, (dict, list)):
        values = root.values() if isinstance(root, dict) else root
        inner = [value for value in values if isinstance(value, dict | list)]
        if not inner or data.draw(st.booleans()):
            return root
        root = data.draw(st.sampled_from(inner))
    return root


def change_value(data: st.DataObject, encoded: bytes) -> bytes:
    """Replace, remove or add a value anywhere in a JSON text."""
    root = json.loads(encoded)
    target = container_of(data, root)
    keys = list(target) if isinstance(target, dict) else list(range(len(target)))
    what = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if what == "add" or not keys:
        if isinstance(target, dict):
            target[data.draw(st.sampled_from(WORDS))] = data.draw(JUNK)
        else:
            target.append(data.draw(JUNK))
    elif what == "remove":
        del target[data.draw(st.sampled_from(keys))]
    else:
        target[data.draw(st.sampled_from(keys))] = data.draw(JUNK)
    return json.dumps(root).encode()


def move_bytes(data: st.DataObject, encoded: bytes) -> bytes:
    """Shift a tensor of a header, or let two swap places: holes, overlaps, and headers that are as good as before."""
    root = json.loads(encoded)
    entries = [entry for entry in root.values() if isinstance(entry, dict) and "data_offsets" in entry]
    if entries:
        one = data.draw(st.sampled_from(entries))
        shift = data.draw(st.sampled_from([-8, -1, 0, 1, 8]))
        if shift:
            one["data_offsets"] = [offset + shift for offset in one["data_offsets"]]
        else:
            other = data.draw(st.sampled_from(entries))
            one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    return json.dumps(root).encode()


def repeat_key(data: st.DataObject, encoded: bytes) -> bytes:
    """Give a key of the outermost object, or of one inside, a second time."""
    key = data.draw(st.sampled_from(CUSTOM))
    value = json.dumps(data.draw(st.none() | st.integers(0, 9))).encode()
    starts = [place for place, byte in enumerate(encoded) if byte == ord("{")]
    if not starts:
        return encoded
    start = data.draw(st.sampled_from(starts)) + 1
    return encoded[:start] + b'"%b":%b,' % (key.encode(), value) + encoded[start:]


def change_bytes(data: st.DataObject, encoded: bytes) -> bytes:
    """Flip bits, or put hostile text in the place of some bytes."""
    changed = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 3))):
        if not changed:
            break
        place = data.draw(st.integers(0, len(changed) - 1))
        if data.draw(st.booleans()):
            changed[place] ^= 1 << data.draw(st.integers(0, 7))
        else:
            text = data.draw(st.sampled_from(TEXTS))
            changed[place : place + data.draw(st.integers(0, 6))] = text
    return bytes(changed)


def pad(data: st.DataObject, encoded: bytes) -> bytes:
    """White space, which the format allows behind the object and inside it."""
    spaces = b" " * data.draw(st.integers(0, 9))
    return data.draw(st.sampled_from([encoded + spaces, encoded.replace(b":", b":" + spaces), spaces + encoded]))


TEXT_MUTATIONS: list[Callable[[st.DataObject, bytes], bytes]] = [change_value, move_bytes] * 2
TEXT_MUTATIONS += [repeat_key, change_bytes, pad]


def drawn_file(data: st.DataObject, directory: Path, names: list[str]) -> Path:
    """One of the files; a ValueError where another mutation made it a symlink, whose target a write would change."""
    path = directory / data.draw(st.sampled_from(names))
    if path.is_symlink():
        raise ValueError(f"{path} is a symlink")
    return path


def change_header(data: st.DataObject, directory: Path) -> None:
    """Mutate the header of one file, its length told truly or not."""
    path = drawn_file(data, directory, [FIRST, SECOND])
    file = path.read_bytes()
    end = 8 + int.from_bytes(file[:8], "little")
    encoded, payload = file[8:end], file[end:]
    changed = data.draw(st.sampled_from(TEXT_MUTATIONS))(data, encoded)
    told = data.draw(st.sampled_from([len(changed)] * 8 + [0, len(changed) - 1, len(changed) + 1, 1 << 27, 1 << 63]))
    path.write_bytes(max(told, 0).to_bytes(8, "little") + changed + payload)


def change_size(data: st.DataObject, directory: Path) -> None:
    """Cut a file short anywhere, or let something follow it."""
    path = drawn_file(data, directory, [FIRST, SECOND, INDEX])
    num_bytes = path.stat().st_size
    size = data.draw(st.sampled_from([0, 7, 8, 9, num_bytes - 1, num_bytes + 1]) | st.integers(0, num_bytes + 64))
    os.truncate(path, size)


def change_index(data: st.DataObject, directory: Path) -> None:
    """Mutate the index as a text."""
    path = drawn_file(data, directory, [INDEX])
    path.write_bytes(data.draw(st.sampled_from(TEXT_MUTATIONS))(data, path.read_bytes()))


def change_name(data: st.DataObject, directory: Path) -> None:
    """Let the index name another file: outside, through a symlink, no safetensors, no file at all."""
    path = drawn_file(data, directory, [INDEX])
    index = json.loads(path.read_bytes())
    names = [*NAMES, str(directory.parent / "outside.safetensors")]
    index["weight_map"][data.draw(st.sampled_from(["a", "b", "c", "d", "e"]))] = data.draw(st.sampled_from(names))
    path.write_text(json.dumps(index))


def replace_by_link(data: st.DataObject, directory: Path) -> None:
    """Put a symlink in the place of a file that the index rightly names."""
    path = directory / data.draw(st.sampled_from([FIRST, SECOND, INDEX]))
    path.unlink()
    path.symlink_to(data.draw(st.sampled_from(["../outside.safetensors", SECOND, path.name, "gone"])))


MUTATIONS = [*[change_header] * 5, change_size, change_index, *[change_name] * 2, replace_by_link]
"""As often as they are tried."""

GOOD_INDEX = json.dumps({"metadata": {"total_size": 48}, "weight_map": dict.fromkeys("abc", FIRST) | {"d": SECOND}})


def write_good(directory: Path) -> None:
    """Two files and an index, and beside them what a hostile index may name."""
    for name in (FIRST, SECOND, INDEX):
        (directory / name).unlink(missing_ok=True)  # it may be a symlink: write to it, and the target changes
    write_raw(directory / FIRST, GOOD, GOOD_PAYLOAD)
    write_raw(directory / SECOND, OTHER, bytes(range(16)))
    (directory / INDEX).write_text(GOOD_INDEX)


class OpenedPaths:
    """What Python opened while `watched`: an audit hook, which nothing can go round."""

    def __init__(self) -> None:
        self._paths: list[str] | None = None
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self._paths is not None and isinstance(arguments[0], (str, bytes)):
            self._paths.append(os.fsdecode(arguments[0]))

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[str]]:
        found: list[str] = []
        self._paths = found
        try:
            yield found
        finally:
            self._paths = None


OPENED = OpenedPaths()


def open_watched(directory: Path) -> Checkpoint | None:
    """Open the checkpoint; `None` where it was refused. Any other error fails the test, and so does a stray file."""
    refused = ""
    with OPENED.watched() as paths:
        try:
            checkpoint = open_checkpoint(directory)
            with FileReader(checkpoint.files) as reader:
                values = {name: reader.read_tensor(info) for name, info in checkpoint.tensors.items()}
                reader.verify_unchanged()
        except CheckpointError as error:
            refused = str(error)
    assert len(refused) < 2000 + 6 * len(os.fsencode(directory))
    for path in paths:
        assert Path(os.path.realpath(path)).is_relative_to(directory), f"opened {path}"
    if refused:
        return None
    assert_same_as_library(checkpoint, values)
    return checkpoint


def assert_same_as_library(checkpoint: Checkpoint, values: dict[str, Any]) -> None:
    """Ranges lie inside their files and apart from each other, and hold what the safetensors library reads."""
    names: set[str] = set()
    for number, file in enumerate(checkpoint.files):
        content = Path(file.path).read_bytes()
        position = 8 + int.from_bytes(content[:8], "little")
        for info in sorted((t for t in checkpoint.tensors.values() if t.file == number), key=lambda t: t.offset):
            assert info.offset >= position
            position = info.offset + info.num_bytes
            assert position <= len(content)
        for name, tensor in safetensors_load(content).items():
            names.add(name)
            assert (checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(values[name]).equal(bits(tensor))
    assert names == set(checkpoint.tensors)


def assert_header_reads_inside(directory: Path) -> None:
    """Ask for the headers through a function that sees each read: none goes over the file's end."""
    for name in (FIRST, SECOND):
        path = directory / name
        if path.is_symlink():
            continue
        content = path.read_bytes()

        def read(offset: int, length: int, content: bytes = content) -> bytes:
            assert 0 <= offset <= offset + length <= len(content)
            return content[offset : offset + length]

        with contextlib.suppress(CheckpointError):
            parse_header(name, 0, len(content), read_header_bytes(name, len(content), read))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_examples", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_mutated_checkpoints(num_examples: int, tmp_path: Path) -> None:
    root = tmp_path
    directory = root / "checkpoint"
    directory.mkdir()
    write_raw(root / "outside.safetensors", GOOD, GOOD_PAYLOAD)
    (directory / "link.safetensors").symlink_to("../outside.safetensors")
    (directory / "loop.safetensors").symlink_to("loop.safetensors")
    (directory / "directory.safetensors").mkdir()
    os.mkfifo(directory / "pipe.safetensors")  # who opens it and waits for a writer hangs
    outcomes: Counter[str] = Counter()

    # A deadline would count the seconds of a machine that stands still; see below.
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def example(data: st.DataObject) -> None:
        write_good(directory)
        begun_s = time.process_time()
        kinds = data.draw(st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=2))
        for mutate in kinds:
            # After another mutation it may be no JSON any more, or of another form, or a link to nowhere.
            with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError, OSError):
                mutate(data, directory)
        assert_header_reads_inside(directory)
        outcomes["refused" if open_watched(directory) is None else "accepted"] += 1
        # A reader that waits, for a pipe's writer say, is ended by the test's own timeout.
        assert time.process_time() - begun_s < EXAMPLE_S

    example()
    print(f"{num_examples} examples: {dict(outcomes)}")
    assert outcomes.total() >= num_examples * 0.9
    # A reader that refuses, or accepts, all that it is given would pass otherwise.
    assert outcomes["accepted"] >= num_examples / 50
    assert outcomes["refused"] >= num_examples / 2


def test_the_unchanged_checkpoint_is_accepted_and_the_watch_sees_what_is_opened(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    write_good(directory)
    checkpoint = open_watched(directory)
    assert checkpoint is not None
    assert list(checkpoint.tensors) == ["a", "b", "c", "d"]
    with OPENED.watched() as paths:
        (directory / FIRST).read_bytes()
    assert paths == [str(directory / FIRST)]
