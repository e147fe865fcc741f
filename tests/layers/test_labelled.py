"""Labels among a model's keyword arguments are read as its own loss reads them."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.layers.capture.source import inputs_and_targets


def ForCausalLMLoss(logits: Tensor, labels: Tensor) -> Tensor:
    """Named as Hugging Face's: position t predicts label t + 1."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


class Causal(nn.Module):
    """Called and configured as Hugging Face's models are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.config = SimpleNamespace(is_encoder_decoder=False)
        self.loss_function = ForCausalLMLoss

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.table(input_ids))
        return {"logits": logits} if labels is None else {"loss": self.loss_function(logits, labels), "logits": logits}


def _own_trace(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    parameters = list(model.parameters())
    squares = 0.0
    for x, y in zip(ids, labels, strict=True):
        loss = model(input_ids=x.unsqueeze(0), labels=y.unsqueeze(0))["loss"]
        squares += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, parameters))
    return squares / len(ids)


def test_the_empirical_fisher_of_a_causal_model_is_that_of_its_own_loss() -> None:
    model, ids = Causal(), torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3] = -100
    found = lw.fisher(model, {"input_ids": ids, "labels": labels}, structure="diag", estimator="empirical").trace()
    torch.testing.assert_close(float(found), _own_trace(model, ids, labels), rtol=1e-5, atol=0.0)


def test_a_pair_is_taken_as_it_is() -> None:
    model, ids = Causal(), torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(1))
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    pair = lw.fisher(model, ({"input_ids": ids}, shifted), structure="diag", estimator="empirical").trace()
    keys = lw.fisher(model, {"input_ids": ids, "labels": ids}, structure="diag", estimator="empirical").trace()
    torch.testing.assert_close(pair, keys)


def test_an_encoder_decoder_gets_the_labels_one_later() -> None:
    model: Any = nn.Linear(1, 1)
    model.config = SimpleNamespace(is_encoder_decoder=True, decoder_start_token_id=7, bos_token_id=1, pad_token_id=0)
    labels = torch.tensor([[3, 4, -100]])
    inputs, targets = inputs_and_targets(model, {"input_ids": labels}, labels)
    assert inputs["decoder_input_ids"].tolist() == [[7, 3, 4]]
    assert targets is labels
    given, _ = inputs_and_targets(model, {"decoder_input_ids": labels}, labels)
    assert given["decoder_input_ids"] is labels


def test_other_models_are_left_alone() -> None:
    labels = torch.tensor([[3, 4]])
    assert inputs_and_targets(nn.Linear(1, 1), {}, labels) == ({}, labels)
