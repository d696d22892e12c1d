"""Seven rows for any class of transformers, with labels that count unevenly."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from tests.models.tiny import FIRST_WORD, NUM_LABELS

NUM_ROWS, LENGTH, VOCAB = 7, 12, 64
Batch = dict[str, Any]
"""Tensors and lists whose first dim holds the rows, or several entries for each row; and flags."""
_WORDS = (
    r"CausalLM|ConditionalGeneration|LMHead|MaskedLM|DoubleHeads|Pretraining|PreTraining|Text2Text|Decoder|CTC|RNNT|TDT"
)


def tiny_batches(model: Any) -> Iterator[Batch]:
    """Yield batches that a model may take, the likely ones first."""
    taken = set(inspect.signature(model.forward).parameters)
    for inputs in _inputs(model, taken):
        for labels in _labels(model, taken, inputs):
            yield {key: value for key, value in (inputs | labels).items() if key in taken}


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(FIRST_WORD, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _rows(*row: int) -> torch.Tensor:
    return torch.tensor([row] * NUM_ROWS)


def _inputs(model: Any, taken: set[str]) -> Iterator[Batch]:
    seen = [*_images(model.config, taken), *_sounds(model.config, taken)]
    if "input_ids" not in taken:
        yield from seen
        return
    text = _text(model)
    for one in seen:
        with suppress(ValueError, RuntimeError, TypeError, AttributeError, IndexError, KeyError):
            yield _beside(model, text, one)
    yield {key: value for key, value in text.items() if key != "decoder_input_ids"}
    yield text


def _text(model: Any) -> Batch:
    ids = _ids(NUM_ROWS, LENGTH)
    lengths = LENGTH - torch.tensor([5, 3, 6, 0, 1, 0, 0])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids[mask == 0] = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) or 0
    ids[torch.arange(NUM_ROWS), lengths - 1] = 2  # the end, which some models look for
    found: Batch = {"input_ids": ids, "attention_mask": mask}
    if re.search("MultipleChoice|DoubleHeads", type(model).__name__):
        found = {key: torch.stack([value, value.roll(1, 0)], 1) for key, value in found.items()}
    found["decoder_input_ids"] = _ids(NUM_ROWS, LENGTH - 3)
    found["bbox"] = torch.tensor([1, 2, 3, 4]).expand(NUM_ROWS, LENGTH, 4).clone()
    found |= {"visual_feats": _floats(NUM_ROWS, 3, 2048), "visual_pos": _floats(NUM_ROWS, 3, 4).sigmoid()}
    return found


def _beside(model: Any, text: Batch, other: Batch) -> Batch:
    """Return text behind as many placeholders as the model makes of a row's image or sound."""
    kind = "image" if "pixel_values" in other else "audio"
    tokens = [getattr(model.config, f"{kind}_token_{end}", None) for end in ("id", "index")]
    token = next((one for one in tokens if one is not None), None)
    features = getattr(model, f"get_{kind}_features", None)
    if features is None or token is None:
        return text | other
    known = set(inspect.signature(features).parameters)
    with torch.no_grad():
        found = features(**{key: value for key, value in other.items() if key in known})
    found = getattr(found, "pooler_output", found)
    parts = list(found) if isinstance(found, list | tuple) else [found]
    count = sum(part.numel() for part in parts) // parts[0].shape[-1] // NUM_ROWS
    places = _rows(7, *[token] * count, 8)
    ids = torch.cat([places, text["input_ids"]], 1)
    mask = torch.cat([torch.ones_like(places), text["attention_mask"]], 1)
    kinds = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), (ids == token).long())
    return text | other | kinds | {"input_ids": ids, "attention_mask": mask}


def _images(config: Any, taken: set[str]) -> Iterator[Batch]:
    if "pixel_values" not in taken:
        return
    vision = getattr(config, "vision_config", config)
    channels, size, patch = (
        getattr(vision, name, None) or default
        for name, default in (("num_channels", 3), ("image_size", 32), ("patch_size", 8))
    )
    size, patch = (one if isinstance(one, int) else one[-1] for one in (size, patch))
    if "image_grid_thw" in taken:
        depth = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
        yield {"pixel_values": _floats(NUM_ROWS * 16, depth), "image_grid_thw": _rows(1, 4, 4)}
        return
    frames = getattr(config, "num_frames", 1)  # of a video; or some images for each row
    small, large = sorted((size, 64))
    for shape in (channels, small, small), (channels, large, large), (frames, channels, size, size):
        yield {"pixel_values": _floats(NUM_ROWS, *shape)}
    if "image_sizes" in taken:
        yield {"pixel_values": _floats(NUM_ROWS, channels, size, size), "image_sizes": _rows(size, size)}


def _sounds(config: Any, taken: set[str]) -> Iterator[Batch]:
    audio = getattr(config, "audio_config", getattr(config, "encoder_config", config))
    bins = getattr(audio, "num_mel_bins", None) or 80
    if "input_values" in taken:
        yield {"input_values": _floats(NUM_ROWS, 4800)}
        yield {"input_values": _floats(NUM_ROWS, getattr(audio, "max_length", 64), bins)}
    if "input_features" in taken:
        steps = 2 * int(getattr(audio, "max_source_positions", 32) or 32)
        mask = torch.ones(NUM_ROWS, steps, dtype=torch.long)
        masks = {"feature_attention_mask": mask, "input_features_mask": mask}
        yield {"input_features": _floats(NUM_ROWS, bins, steps), **masks}
        yield {"input_features": _floats(NUM_ROWS, steps, getattr(audio, "input_feat_per_channel", bins))}


def _labels(model: Any, taken: set[str], inputs: Batch) -> Iterator[Batch]:
    name, rows = type(model).__name__, torch.arange(NUM_ROWS)
    if "start_positions" in taken:
        start = torch.tensor([1, 99, 99, 2, 3, 0, 4])  # a position behind the end does not count
        yield {"start_positions": start, "end_positions": torch.tensor([4, 99, 99, 99, 5, 2, LENGTH - 1])}
        yield {"start_positions": start % 5, "end_positions": start % 5 + 1, "cls_index": start % 3}
    elif "mask_labels" in taken:
        masks = [(torch.arange(32) < 4 + row).float().expand(1 + row % 3, 32, 32).clone() for row in range(NUM_ROWS)]
        yield {"mask_labels": masks, "class_labels": [torch.arange(len(one)) for one in masks]}
    elif "labels" in taken:
        names = ("next_sentence_label", "sentence_order_label", "mc_labels")
        yield from ({"labels": one} | dict.fromkeys(names, rows % 2) for one in _named_labels(name, model, inputs))
    elif "sampled_negative_indices" in taken:
        times = torch.arange(14) < rows[:, None] + 3
        yield {"mask_time_indices": times, "sampled_negative_indices": _ids(NUM_ROWS, 14, 5) % 3}
    else:
        yield {"return_loss": True}


def _named_labels(name: str, model: Any, inputs: Batch) -> list[Any]:
    """Return what may be a class's `labels`, the likely ones first."""
    rows = torch.arange(NUM_ROWS)
    ids = inputs.get("input_ids", torch.full((NUM_ROWS, LENGTH), FIRST_WORD))
    size = inputs["pixel_values"].shape[-1] if "pixel_values" in inputs else 32
    classes = rows % (2 if re.search("MultipleChoice|Retrieval|Reasoning|NextSentence", name) else NUM_LABELS)
    if re.search("CTC|RNNT|TDT", name):
        return [_masked(_ids(NUM_ROWS, 4))]
    if re.search(_WORDS, name):
        own = torch.where(ids < FIRST_WORD, -100, _masked(ids))
        shorter = _masked(_ids(NUM_ROWS, LENGTH - 3))
        return [shorter, own] if model.config.is_encoder_decoder else [own, shorter, classes]
    if "TokenClassification" in name:
        return [_masked((rows[:, None] + torch.arange(LENGTH)) % NUM_LABELS)]
    if re.search("ObjectDetection|DetrForSegmentation", name):
        return [[_objects(row) for row in range(NUM_ROWS)]]
    if "Segmentation" in name:
        maps = (torch.arange(size)[None] + torch.arange(size)[:, None]).repeat(NUM_ROWS, 1, 1) % NUM_LABELS
        maps[0], maps[1, : size // 2] = 255, 255
        return [maps, (maps == 1).float()]
    if "AudioFrame" in name:
        return [torch.eye(NUM_LABELS)[(rows[:, None] + torch.arange(14)) % NUM_LABELS]]
    if re.search("Depth|Resolution|Matting|Keypoint", name):
        return [_floats(NUM_ROWS, size, size), _floats(NUM_ROWS, 3, size, size)]
    return [classes, _masked(ids), torch.eye(getattr(model.config, "num_labels", NUM_LABELS))[classes % 2]]


def _masked(labels: torch.Tensor) -> torch.Tensor:
    """Return labels of which rows have more and more that count."""
    start = torch.tensor([-2, -1, -3, -2, 1, 0, 0]) % labels.shape[-1]
    start = start.reshape(-1, *[1] * (labels.ndim - 1))
    return torch.where(torch.arange(labels.shape[-1]) < start, -100, labels)


def _objects(row: int) -> dict[str, torch.Tensor]:
    boxes = torch.tensor([[0.5, 0.5, 0.2 + 0.05 * row, 0.3], [0.3, 0.3, 0.2, 0.2]])[: 1 + row % 2]
    return {"class_labels": torch.arange(len(boxes)), "boxes": boxes, "masks": torch.ones(len(boxes), 32, 32)}
