"""Labels among a model's keyword arguments, as Hugging Face's collators give them, read as its own loss reads them."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""The label of positions that do not count, as in torch."""


def inputs_and_targets(model: nn.Module, inputs: Mapping[str, Any], labels: Any) -> tuple[dict[str, Any], Any]:
    """What the model is called with, and one target for each position of its output.

    A causal language model's loss compares position t with label t + 1, so labels are shifted. An encoder–decoder model
    makes the decoder's inputs of the labels where it gets none: these are made here, since labels are not passed on.
    """
    config = getattr(model, "config", None)
    if config is None or not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
        return dict(inputs), labels
    if getattr(config, "is_encoder_decoder", False):
        if any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds")):
            return dict(inputs), labels
        return {**inputs, "decoder_input_ids": _decoder_inputs(config, labels)}, labels
    # Of another model than Hugging Face's, `loss_function` is nothing or something else.
    if getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss":
        return dict(inputs), F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    return dict(inputs), labels


def _decoder_inputs(config: Any, labels: Tensor) -> Tensor:
    """The labels one position later, after the token that starts a sequence."""
    start = config.decoder_start_token_id
    shifted = F.pad(labels[..., :-1], (1, 0), value=config.bos_token_id if start is None else start)
    return shifted.masked_fill(shifted == IGNORED, config.pad_token_id or 0)
