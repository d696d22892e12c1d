"""Losses of transformers' own classes: which are read, go by the count of labels, or are refused.

`python -m tests.distributed.training.model_losses` examines all classes, for docs/pages/model-losses.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch.nn.functional as F

from tests.distributed.training.model_losses import compare, examine_all, prepared
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

pytestmark = pytest.mark.all_ranks  # most of its modules are not sharded, and have no mesh

pytest.importorskip("transformers")

READ = ("read", "cross_entropy")
TWICE = ("read", "cross_entropy + cross_entropy")
ROUTED = ("own term", "cross_entropy + aux_loss")
COMPARED = ("refused", "MmBackward0 in the model multiplies rows with rows, so that each depends on the others")
MATCHED = ("refused", "SumBackward0 is a sum, and whether it is then divided by a count nobody can tell")
KINDS = {
    "BertForPreTraining": TWICE,
    "BertForSequenceClassification": READ,
    "BertForSequenceClassification (multi_label)": ("read", "binary_cross_entropy_with_logits"),
    "BertForSequenceClassification (regression)": ("read", "mse_loss"),
    "CLIPModel": COMPARED,
    "DebertaForMaskedLM": READ,
    "DetrForObjectDetection": MATCHED,
    "HrmTextForCausalLM": READ,  # runs its blocks without gradients first
    "MixtralForCausalLM": READ,
    "MixtralForCausalLM + output_router_logits": ROUTED,
    "MobileBertForMaskedLM": READ,
    "Wav2Vec2ForCTC": ("read", "ctc_loss"),
    "Wav2Vec2ForPreTraining": ("refused", "cross_entropy(reduction='sum') is a sum"),
}
MORE = {
    **dict.fromkeys((one.model for one in ARCHITECTURES.values()), READ),
    **dict.fromkeys(("DebertaV2ForMaskedLM", "LevitForImageClassification", "LxmertForPreTraining"), READ),
    **dict.fromkeys(("LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "XLNetLMHeadModel"), READ),
    # Pools logits, of as many classes as a rank has rows.
    "EuroBertForSequenceClassification": READ,
    "EuroBertForSequenceClassification (multi_label)": ("read", "binary_cross_entropy_with_logits"),
    "EuroBertForSequenceClassification (regression)": ("read", "mse_loss"),
    **dict.fromkeys(("LlamaForQuestionAnswering", "AlbertForPreTraining", "MobileBertForPreTraining"), TWICE),
    **{case: kind for case, kind in KINDS.items() if case.startswith("Bert")},
    "CLIPModel": COMPARED,
    "GLPNForDepthEstimation": ("refused", "SqrtBackward0 is neither a mean nor a linear combination of means"),
    "MaskFormerForInstanceSegmentation": MATCHED,
    "MixtralForCausalLM + output_router_logits": ROUTED,
    "NllbMoeForConditionalGeneration": READ,
    "NllbMoeForConditionalGeneration + output_router_logits": (
        "own term",
        "cross_entropy + encoder_aux_loss + decoder_aux_loss",
    ),
    "ProphetNetForConditionalGeneration": ("read", "nll_loss"),
    "Qwen3MoeForCausalLM + output_router_logits": ROUTED,
    "SegformerForSemanticSegmentation": READ,
    "ElectraForPreTraining": ("read", "binary_cross_entropy_with_logits"),
}


def examine(cases: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    found = examine_all(sorted({case.split(" ")[0] for case in cases}))
    return {one.case: (one.result, one.told) for one in found}


@pytest.mark.timeout(300)
def test_a_class_of_each_kind() -> None:
    assert examine(KINDS) == KINDS


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_zoo() -> None:
    assert examine(MORE) == MORE


def with_aux_loss() -> list[tuple[str, str]]:
    from transformers import LlamaForCausalLM

    class WithAuxLoss(LlamaForCausalLM):
        """Its `aux_loss` is a mean over other tokens than the rest of its loss."""

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any, **kwargs: Any) -> Any:
            output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
            output["aux_loss"] = self.auxiliary(output.logits, input_ids, attention_mask)
            output["loss"] = output.loss + 0.5 * output["aux_loss"]
            return output

        def auxiliary(self, logits: Any, ids: Any, mask: Any) -> Any:
            return F.cross_entropy(logits.mT, ids.masked_fill(mask == 0, -100))

    class WithMaskedMean(WithAuxLoss):
        def auxiliary(self, logits: Any, ids: Any, mask: Any) -> Any:
            return (logits.logsumexp(-1).square() * mask).sum() / mask.sum()

    model, batch = prepared("LlamaForCausalLM")
    found = []
    for kind in (WithAuxLoss, WithMaskedMean):
        model.__class__ = kind
        found.append(compare(model, batch))
    return found


def test_an_aux_loss_of_no_mixture_is_a_term_like_any_other() -> None:
    refused = ("refused", "SumBackward0 is a sum, and whether it is then divided by a count nobody can tell")
    assert run_ranks(2, with_aux_loss) == [[TWICE, refused]] * 2


def compiled() -> tuple[str, str]:
    return compare(*prepared("LlamaForCausalLM"), backend="eager")


@pytest.mark.timeout(120)
def test_a_model_compiled_whole_goes_by_the_count() -> None:
    assert run_ranks(2, compiled, timeout_s=110) == [("by the count", "labels")] * 2
