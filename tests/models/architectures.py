"""Tiny random transformers models, one for each architecture: how to make one, and what to call it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TEXT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
DECODER = TEXT | {"num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 32}
ENCODER = TEXT | {"num_hidden_layers": 2, "pad_token_id": 0, "max_position_embeddings": 32}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
PATCHES = VISION | {"image_size": 16, "patch_size": 8}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
SEQ2SEQ = (
    {"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2}
)


def token_inputs() -> dict[str, torch.Tensor]:
    """Four rows of seven tokens."""
    return {"input_ids": torch.arange(28).reshape(4, 7) % 60 + 3}


def seq2seq_inputs() -> dict[str, torch.Tensor]:
    """Tokens for encoder and decoder."""
    ids = token_inputs()["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": ids[:, :5]}


def image_inputs(size: int = 16) -> dict[str, torch.Tensor]:
    """Two images."""
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size)}


@dataclass(frozen=True)
class Architecture:
    """One model class with a tiny configuration."""

    model: str
    """Name of the model class."""
    config: str
    """Name of the configuration class."""
    fields: dict[str, Any]
    """What the configuration is made with."""
    inputs: Callable[[], dict[str, torch.Tensor]] = token_inputs
    """What forward is called with."""

    def make(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
        """A model with random weights; every tensor that its class would set to a constant is random too."""
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**self.fields)
        config.dtype = dtype
        model = getattr(transformers, self.model)._from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_()
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 1.5)
                elif name.endswith("num_batches_tracked"):
                    buffer.fill_(7)
        return model.eval()


def _clip() -> dict[str, Any]:
    return {
        "text_config": ENCODER | {"projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1},
        "vision_config": PATCHES | {"projection_dim": 8},
        "projection_dim": 8,
    }


def _llava() -> dict[str, Any]:
    return {
        "vision_config": PATCHES | {"model_type": "clip_vision_model", "projection_dim": 8},
        "text_config": DECODER | {"model_type": "llama"},
        "image_token_index": 3,
        "vision_feature_layer": -1,
    }


def _qwen2_vl() -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 10000.0}
    return {
        "text_config": DECODER | {"rope_parameters": rope},
        "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
        "image_token_id": 60,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
    }


def clip_inputs() -> dict[str, torch.Tensor]:
    """Texts and images."""
    return token_inputs() | image_inputs()


def audio_inputs() -> dict[str, torch.Tensor]:
    """A spectrogram and decoder tokens."""
    features = torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)
    return {"input_features": features, "decoder_input_ids": token_inputs()["input_ids"][:2, :5]}


MOE = DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
DEEPSEEK = (
    DECODER
    | MLA
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    | {"first_k_dense_replace": 1, "moe_intermediate_size": 8}
)
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
DISTILBERT = {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 32}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}
CONVNEXT = {"hidden_sizes": [8, 12], "depths": [1, 2], "num_stages": 2, "patch_size": 2, "num_labels": 3}
WHISPER = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
BLOOM = {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 4}
MAMBA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2], "layer_type": "basic"}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama-tied": Architecture("LlamaForCausalLM", "LlamaConfig", DECODER | {"tie_word_embeddings": True}),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": Architecture("BertForMaskedLM", "BertConfig", ENCODER),
    "bert-classifier": Architecture("BertForSequenceClassification", "BertConfig", ENCODER | {"num_labels": 3}),
    "mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 4}),
    "qwen3-moe": Architecture("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE | {"head_dim": 4}),
    "t5": Architecture("T5ForConditionalGeneration", "T5Config", T5, seq2seq_inputs),
    "vit": Architecture("ViTForImageClassification", "ViTConfig", PATCHES | {"num_labels": 3}, image_inputs),
    "resnet": Architecture("ResNetForImageClassification", "ResNetConfig", RESNET | {"num_labels": 3}, image_inputs),
    "clip": Architecture("CLIPModel", "CLIPConfig", _clip(), clip_inputs),
    "mamba": Architecture("MambaForCausalLM", "MambaConfig", MAMBA),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", DECODER | {"head_dim": 4}),
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, seq2seq_inputs),
    "whisper": Architecture("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, audio_inputs),
    "phi": Architecture("PhiForCausalLM", "PhiConfig", DECODER | {"partial_rotary_factor": 0.5}),
    "falcon": Architecture("FalconForCausalLM", "FalconConfig", DECODER | {"bos_token_id": 1, "eos_token_id": 2}),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", DECODER | {"word_embed_proj_dim": 16, "ffn_dim": 24}),
    "bloom": Architecture("BloomForCausalLM", "BloomConfig", BLOOM),
    "deepseek-v3": Architecture("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK),
    "llava": Architecture("LlavaForConditionalGeneration", "LlavaConfig", _llava()),
    "qwen2-vl": Architecture("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", _qwen2_vl()),
    "roberta": Architecture("RobertaForMaskedLM", "RobertaConfig", ENCODER | {"pad_token_id": 1}),
    "distilbert": Architecture("DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT),
    "deit": Architecture("DeiTForImageClassification", "DeiTConfig", PATCHES | {"num_labels": 3}, image_inputs),
    "convnext": Architecture("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT, image_inputs),
    "gpt-neox": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER),
    "swin": Architecture("SwinForImageClassification", "SwinConfig", SWIN | {"num_labels": 3}, image_inputs),
    "albert": Architecture("AlbertForMaskedLM", "AlbertConfig", ENCODER | {"embedding_size": 8}),
}
"""By short name."""
