"""docs/pages/errors.md quotes what the product says now, and has an entry for every public error.

A quoted text is marked by a comment above its block. `seen: KEY` is the text of an error (or warning) that a test here
causes; `in: MODULE` one that takes more than this machine has (several nodes, a firewall, a GPU): one of that module's
f-strings, whole. In both, `…` stands for what differs from run to run, and spaces and line ends are alike.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from raysharding import Loading, ShardedModelGroup, Split, Timeouts, errors
from raysharding.checkpoint import locate, open_checkpoint
from raysharding.group.launch.spec import fitted_module
from tests.conftest import room_for
from tests.docs.messages import messages
from tests.hub import HubServer, hub, read_environment
from tests.models.architectures import ARCHITECTURES

__all__ = ["hub"]

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/pages/errors.md").read_text()
BLOCK = re.compile(r"<!-- (seen|in): (\S+) -->\n```text\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall(TEXT)
HEADINGS = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
Said = dict[str, str]


def flat(text: str) -> str:
    return " ".join(text.split())


def pattern(quoted: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, flat(quoted).split("…"))), re.DOTALL)


def compare(said: Said, origin: str) -> None:
    """Every text of this origin is quoted, and what is quoted was said."""
    quoted = {name: text for kind, name, text in BLOCKS if kind == "seen" and name.startswith(f"{origin}/")}
    assert {f"{origin}/{key}" for key in said} == set(quoted)
    wrong = [text for name, text in quoted.items() if not pattern(text).fullmatch(flat(said[name.partition("/")[2]]))]
    assert not wrong, "\n".join(f"the page quotes\n{text}" for text in wrong) + f"\nsaid was\n{said}"


def say(do: Callable[[], Any]) -> str:
    """What a user reads below the traceback, or the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            do()
        except Exception as error:
            return "".join(traceback.format_exception_only(error))
    return "\n".join(f"{warning.category.__name__}: {warning.message}" for warning in caught)


def test_every_error_has_an_entry_and_every_text_a_check() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    names = {cls.__name__ for cls in classes if issubclass(cls, errors.RayshardingError)}
    assert {f"`{name}`" for name in names} <= set(HEADINGS)
    entries = [heading.strip("`") for heading in HEADINGS if heading.startswith("`")]
    assert entries == sorted(entries)
    assert len(BLOCKS) == TEXT.count("```text") > 40


@pytest.mark.parametrize("module", sorted({name for kind, name, _ in BLOCKS if kind == "in"}))
def test_quoted_words_are_the_modules(module: str) -> None:
    path = Path(ray.__file__).parents[1] / module if module.startswith("ray/") else ROOT / "raysharding" / module
    said = messages(path)
    for text in (flat(text) for kind, name, text in BLOCKS if (kind, name) == ("in", module)):
        kind, _, message = text.partition(": ")
        assert not message or kind.rpartition(".")[2] in path.read_text(), f"{module} has no {kind}"
        found = [one for quoted in (message, text) for one in said if quoted and pattern(quoted).fullmatch(one)]
        assert found, f"{module} does not say {message or text!r}"


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    ARCHITECTURES["llama"].make().save_pretrained("llama")
    return Path("llama")


def changed(llama: Path, name: str, change: Callable[[Path], Any]) -> Path:
    shutil.copytree(llama, name)
    change(Path(name))
    return Path(name)


def config(**fields: Any) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def pickled(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").touch()


def other_keys(path: Path) -> None:
    held = load_file(path / "model.safetensors")
    held["model.norm.weigth"] = held.pop("model.norm.weight")
    held["model.embed_tokens.weight"] = held["model.embed_tokens.weight"][:-1].contiguous()
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})


def test_texts_of_files(llama: Path) -> None:
    def of(name: str, change: Callable[[Path], Any]) -> str:
        path = changed(llama, name, change)
        return say(lambda: fitted_module(None, open_checkpoint(path), Loading()))

    foreign = config(architectures=["Own"], auto_map={"AutoModelForCausalLM": "own.Own"}, model_type="own")
    said = {
        "truncated": of("a", lambda path: os.truncate(path / "model.safetensors", 20_000)),
        "pickled": of("b", pickled),
        "absent": say(lambda: open_checkpoint("path/to/lama")),
        "keys": of("c", other_keys),
        "code": of("d", foreign),
        "quantized": of("e", config(quantization_config={"quant_method": "gptq"})),
        "no-config": of("f", lambda path: (path / "config.json").unlink()),
    }
    compare(said, "files")


def test_texts_of_the_hub(hub: HubServer, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("org/name", llama)
    said = {"unknown": say(lambda: locate("org/nmae")), "revision": say(lambda: locate("org/name", "v9"))}
    hub.repos["org/name"].is_gated = True
    said["gated"] = say(lambda: open_checkpoint("org/name"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    read_environment()
    said["offline"] = say(lambda: open_checkpoint("org/name"))
    compare({key: text.replace(hub.endpoint, "https://huggingface.co") for key, text in said.items()}, "hub")


def test_texts_of_arguments(llama: Path) -> None:
    make = ShardedModelGroup.from_checkpoint
    held = torch.optim.AdamW([torch.zeros(1)])
    said = {
        "other-name": say(lambda: make(llama, torch_dtype="bfloat16")),  # type: ignore[call-arg]
        "trust": say(lambda: make(llama, trust_remote_code=True)),  # type: ignore[call-arg]
        "optimizer": say(lambda: make(llama, optimizer=held)),  # type: ignore[arg-type]
    }
    compare(said, "arguments")


def slow() -> None:
    import time

    time.sleep(0.5)


def late() -> None:
    import time

    import torch.distributed as dist

    from raysharding import current_worker

    if current_worker().rank == 1:
        time.sleep(60)
    dist.barrier()


def dying() -> None:
    import os

    import torch.distributed as dist

    from raysharding import current_worker

    if current_worker().rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def failing() -> None:
    from raysharding import current_worker

    if current_worker().rank == 1:
        raise KeyError("prompt")


def summed(output: Any) -> torch.Tensor:
    return output.logits.square().sum()


def by_value(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which ranks need not import from the tests."""
    assert isinstance(fn, FunctionType)
    made = FunctionType(fn.__code__, {"__builtins__": __builtins__}, fn.__name__)
    made.__module__ = "__main__"
    return made


def of_placement(llama: Path) -> Iterator[tuple[str, str]]:
    make = ShardedModelGroup.from_checkpoint
    yield "infeasible", say(lambda: make(llama, world_size=64, device="cpu"))
    yield "no-gpu", say(lambda: make(llama, world_size=4, device="cuda"))
    yield "no-path", say(lambda: make("/path/to/lama", world_size=2, device="cpu"))
    yield "attach", say(lambda: ShardedModelGroup.attach("lama"))


def of_batches(group: ShardedModelGroup) -> Iterator[tuple[str, str]]:
    ids = torch.arange(32).reshape(4, 8)
    yield "no-optimizer", say(lambda: group.train_step(Split({"input_ids": ids, "labels": ids})))
    group.set_optimizer(torch.optim.AdamW, lr=1e-3)
    yield "no-labels", say(lambda: group.train_step(Split({"input_ids": ids})))
    masked = torch.full_like(ids, -100)
    yield "masked", say(lambda: group.train_step(Split({"input_ids": ids, "labels": masked})))
    yield "unreadable", say(lambda: group.train_step(Split({"input_ids": ids}), loss=by_value(summed)))
    yield "no-split", say(lambda: group.forward(input_ids=ids))
    yield "half-split", say(lambda: group.forward(input_ids=Split(ids), labels=ids))
    yield "rows", say(lambda: group.forward(input_ids=Split(ids), labels=Split(ids[:3])))
    yield "ragged", say(lambda: group.forward(input_ids=Split([[1, 2], [3]])))
    yield "ids", say(lambda: group.forward(input_ids=Split(ids + 60)))
    yield "pickle", say(lambda: group.call(by_value(slow), threading.Lock()))
    yield "columns", say(lambda: group.fit([{"text": "a"}] * 4, batch_size=4, max_steps=1))
    yield "no-data", say(lambda: group.fit("rows.parquet", batch_size=4, max_steps=1))
    two, three = ({"input_ids": [1] * size, "labels": [1] * size} for size in (2, 3))
    yield "lengths", say(lambda: group.fit([two, three] * 2, batch_size=4, max_steps=1))


def of_calls(group: ShardedModelGroup, llama: Path) -> Iterator[tuple[str, str]]:
    make = ShardedModelGroup.from_checkpoint
    with room_for(1):
        yield "busy", say(lambda: make(llama, world_size=2, device="cpu", timeouts=Timeouts(place_s=0.2)))
    yield "taken", say(lambda: make(llama, world_size=1, device="cpu", name="llama")).partition("\n")[0]
    yield "raised", say(lambda: group.call(by_value(failing)))
    yield "memory", say(lambda: group.call(torch.empty, 1 << 50))
    yield "large", say(lambda: group.call(torch.zeros, 1 << 18))
    running, queued = group.call.remote(by_value(slow)), group.call.remote(by_value(slow))
    group.interrupt()
    yield "cancelled", say(queued.result)
    say(running.result)
    group.save("out")
    yield "exists", say(lambda: group.save("out"))
    held = bytearray(Path("out/model.safetensors").read_bytes())
    held[-1] ^= 1
    Path("out/model.safetensors").write_bytes(held)
    yield "keys", say(lambda: group.load("other"))


def of_failures(group: ShardedModelGroup, llama: Path) -> Iterator[tuple[str, str]]:
    again = ShardedModelGroup.attach("llama", timeouts=Timeouts(call_s=1))
    yield "hung", say(lambda: again.call(by_value(late)))
    yield "broken", say(lambda: again.call(by_value(slow)))
    again.shutdown()
    yield "shut-down", say(lambda: again.call(by_value(slow)))
    full = Loading(verify="full")
    yield "checksum", say(lambda: ShardedModelGroup.from_checkpoint("out", world_size=1, device="cpu", loading=full))
    with ShardedModelGroup.from_checkpoint(llama, world_size=2, device="cpu") as group:
        yield "died", say(lambda: group.call(by_value(dying)))


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
def test_texts_of_a_group(llama: Path) -> None:
    said = dict(of_placement(llama))
    changed(llama, "other", other_keys)
    made: list[ShardedModelGroup] = []

    def make() -> None:
        options: dict[str, Any] = {"name": "llama", "max_output_bytes": 1 << 19}
        made.append(ShardedModelGroup.from_checkpoint(llama, world_size=2, device="cpu", **options))

    said["started"] = say(make)
    try:
        said |= dict(of_batches(made[0])) | dict(of_calls(made[0], llama)) | dict(of_failures(made[0], llama))
    finally:
        made[0].shutdown()
    compare(said, "group")
