"""A tiny random model of any class of transformers: the defaults of its configuration, with small numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tests.models.architectures import ARCHITECTURES, RESNET, Architecture

MAX_PARAMETERS = 30_000_000
NUM_LABELS = 3
_TOKENS = {"pad": 0, "bos": 1, "cls": 1, "decoder_start": 1, "forced_bos": 1, "eos": 2, "sep": 2, "forced_eos": 2}
_TOKENS |= {"video": 4, "image": 5, "audio": 6, "vision_start": 7, "vision_end": 8}
FIRST_WORD = 10
"""The tokens before it have a meaning of their own."""

_NAMES = {
    1: "topk_group n_shared_experts encoder_sparse_step decoder_sparse_step",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers depth n_group "
    "num_encoder_layers num_blocks num_key_value_heads num_kv_heads num_experts_per_tok moe_k moe_topk "
    "decoder_num_hidden_layers",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts state_size mamba_d_state ssm_state_size qk_rope_head_dim "
    "qk_nope_head_dim v_head_dim window_size d_state attention_window decoder_num_attention_heads rotary_dim "
    "mm_tokens_per_image num_image_tokens",
    6: "num_queries",
    8: "head_dim d_kv attention_head_size key_value_proj_dim relative_attention_num_buckets mamba_n_heads mamba_d_head "
    "mamba_head_dim mamba_num_heads patch_size q_lora_rank kv_lora_rank sliding_window num_mel_bins "
    "num_conv_pos_embedding_groups",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size codebook_size "
    "expert_ffn_hidden_size bottleneck_size entity_vocab_size entity_emb_size",
    32: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim width word_embed_proj_dim hidden_dim "
    "lru_width decoder_hidden_size projection_dim pooler_hidden_size image_size "
    "out_hidden_size",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner ffn_hidden_size mlp_dim "
    "dim_feedforward feed_forward_size mlp_hidden_size decoder_intermediate_size",
    64: "vocab_size text_vocab_size audio_vocab_size max_position_embeddings n_positions max_source_positions "
    "max_target_positions n_ctx",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_DEPTHS = {name: size for name, size in SIZES.items() if re.search("layer|^depth$|num_blocks|vocab", name)}
"""For models whose widths depend on each other."""
_WHEN_UNSET = {"vocab_size": 64, "num_experts_per_tok": 2, "pad_token_id": 0, "prediction_length": 12}
_LEFT_OUT = ("transformers_version", "id2label", "label2id", "out_features", "out_indices", "stage_names")
_SET = {"use_cache": False, "decoder_start_token_id": 1}
_STAGES = {"hidden_sizes": [8, 8, 12, 16], "depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"]}
_BACKBONE = RESNET | _STAGES | {"model_type": "resnet"}
"""Instead of one that needs timm."""


def _shrunk(key: str, value: Any, sizes: Mapping[str, int], lists: bool) -> Any:
    """Return a value of a configuration with small numbers."""
    token = re.fullmatch(r"(\w+?)_token_(id|index)", key)
    if isinstance(value, dict):
        if value.get("model_type") == "timm_backbone":
            return _BACKBONE
        fields = {name: _shrunk(str(name), one, sizes, lists) for name, one in value.items()}
        if "qk_rope_head_dim" in fields:  # latent attention: no groups of heads
            fields.pop("head_dim", None)
            fields["num_key_value_heads"] = fields["num_attention_heads"]
        return fields
    if value is None:
        return sizes.get(key) if key == "head_dim" else _WHEN_UNSET.get(key)
    if token and isinstance(value, int | list):
        number = next((_TOKENS[kind] for kind in (token[1], *token[1].split("_")) if kind in _TOKENS), 9)
        return [number] if isinstance(value, list) else number
    if isinstance(value, int) and not isinstance(value, bool) and key in sizes:
        return min(value, sizes[key]) if key.startswith(("num_", "n_")) and value > 0 else sizes[key]
    return _shrunk_list(key, value, lists) if isinstance(value, list) and value else value


def _shrunk_list(key: str, value: list[Any], lists: bool) -> list[Any]:
    if key in ("mrope_section", "image_size"):
        return [2, 1, 1] if key == "mrope_section" else [32, 32]
    if key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        return (list(dict.fromkeys(value)) * 2)[:2]
    if lists and key.endswith("depths"):
        return [min(one, 2) for one in value]
    if lists and re.search(r"(hidden_sizes|embed_dims?|channels|dims)$", key):
        return [max(8, one // 64 * 8) if isinstance(one, int) else one for one in value]
    return value


def tiny_models(name: str) -> Iterator[Any]:
    """Yield random models of a class, in eval mode, until one can be called.

    Raises:
        RuntimeError: Why the last configuration makes none.
    """
    import transformers

    config = getattr(transformers, name).config_class
    by_hand = [one.fields for one in ARCHITECTURES.values() if one.config == config.__name__]
    problem, num_made = "", 0
    for index in range(len(by_hand) + 3):
        try:
            if index < len(by_hand):
                fields = dict(by_hand[index])
            else:
                sizes, lists = ((SIZES, False), (SIZES, True), (_DEPTHS, False))[index - len(by_hand)]
                fields = _shrunk("", config().to_dict(), sizes, lists)
            fields = {key: value for key, value in fields.items() if key not in _LEFT_OUT} | _SET
            if re.search("Classification|Segmentation|Detection|XVector", name):
                fields["num_labels"] = NUM_LABELS
            model = Architecture(name, config.__name__, fields)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model.make().parameters())
            if size > MAX_PARAMETERS:
                raise RuntimeError(f"{size / 1e6:.0f} million parameters")
            made = model.make()
        except Exception as error:
            problem = problem or f"{type(error).__name__}: {error}"
            continue
        num_made += 1
        yield made
    if not num_made:
        raise RuntimeError(problem)
