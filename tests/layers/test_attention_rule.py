"""While recording, attention runs an equivalent forward: it must give the module's own numbers."""

import pytest
import torch
from torch import Tensor, nn

from layerwise.layers.rules.attention import AttentionRule
from layerwise.testing import check_layer_rule

N, T, S, E, HEADS = 3, 5, 4, 6, 2


def _attention(**settings) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, HEADS, dtype=torch.float64, **{"batch_first": True, **settings}).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()  # biases start at zero, which would hide their loss
    return module


def _inputs(module: nn.MultiheadAttention, batched: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((N, T, E), (N, S, module.kdim), (N, S, module.vdim))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if not batched:
        found = [t[0] for t in found]
    elif not module.batch_first:
        found = [t.transpose(0, 1) for t in found]
    return found[0], found[1], found[2]


def _agree(module: nn.MultiheadAttention, inputs, seed: int | None = None, **arguments) -> None:
    recorded = {}

    def record(site: str, x: Tensor, y: Tensor) -> None:
        recorded[site] = (x, y)

    if seed is not None:
        torch.manual_seed(seed)
    out, weights = module(*inputs, **arguments)
    if seed is not None:
        torch.manual_seed(seed)
    own_out, own_weights = AttentionRule().forward(module, record, *inputs, **arguments)
    assert out.shape == own_out.shape
    assert (out - own_out).abs().max() < 1e-12
    assert (weights is None) == (own_weights is None)
    if weights is not None:
        assert weights.shape == own_weights.shape
        assert (weights - own_weights).abs().max() < 1e-12
    assert list(recorded) == ["q", "k", "v"]
    assert all(recorded[site][0] is x for site, x in zip("qkv", inputs, strict=True))


PADDING = torch.arange(S) >= torch.tensor([[4], [2], [3]])
CAUSAL = torch.ones(T, S, dtype=torch.bool).triu(1)
MODULES = {
    "plain": {},
    "time_first": {"batch_first": False},
    "no_bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv_zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 3, "vdim": 2},
    "widths_time_first": {"kdim": 3, "vdim": 2, "batch_first": False, "add_zero_attn": True},
}
ARGUMENTS = {
    "none": {},
    "padding_bool": {"key_padding_mask": PADDING},
    "padding_float": {"key_padding_mask": torch.where(PADDING, -2.0, 0.5).double()},
    "mask_2d": {"attn_mask": CAUSAL},
    "mask_2d_float": {"attn_mask": torch.where(CAUSAL, -1.5, 0.25).double()},
    "mask_3d": {"attn_mask": CAUSAL.expand(N * HEADS, T, S).clone().index_fill(0, torch.tensor([1]), False)},
    "both_masks": {"attn_mask": CAUSAL, "key_padding_mask": PADDING & (torch.arange(S) > 1)},
    "causal_hint": {"attn_mask": CAUSAL, "is_causal": True},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("settings", MODULES)
def test_the_equivalent_forward(settings: str, arguments: str, need_weights: bool):
    module = _attention(**MODULES[settings])
    _agree(module, _inputs(module), need_weights=need_weights, **ARGUMENTS[arguments])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_inputs_without_a_batch_axis(batch_first: bool, need_weights: bool):
    module = _attention(batch_first=batch_first)
    inputs = _inputs(module, batched=False)
    _agree(module, inputs, need_weights=need_weights)
    _agree(module, inputs, need_weights=need_weights, key_padding_mask=PADDING[1])
    _agree(module, inputs, need_weights=need_weights, attn_mask=CAUSAL.expand(HEADS, T, S))


def test_weights_of_every_head():
    module = _attention(add_zero_attn=True)
    _agree(module, _inputs(module), need_weights=True, average_attn_weights=False)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_draws_the_same_numbers(need_weights: bool):
    module = _attention(dropout=0.5).train()
    _agree(module, _inputs(module), seed=7, need_weights=need_weights, attn_mask=CAUSAL)
    torch.manual_seed(7)
    first = module(*_inputs(module))[0]
    torch.manual_seed(8)
    assert not torch.equal(first, module(*_inputs(module))[0])  # dropout was really there


def test_a_causal_hint_without_its_mask_is_an_error_as_in_torch():
    module = _attention()
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(*_inputs(module), is_causal=True)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        AttentionRule().forward(module, lambda *_: None, *_inputs(module), is_causal=True)


def test_an_argument_that_torch_does_not_know_is_refused():
    module = _attention()
    with pytest.raises(TypeError, match=r"unexpected arguments.*masks"):
        AttentionRule().forward(module, lambda *_: None, *_inputs(module), masks=None)


@pytest.mark.parametrize("settings", ["plain", "no_bias", "widths"])
def test_contract(settings: str):
    module = _attention(**MODULES[settings])
    check_layer_rule(module, _inputs(module), tol=1e-10)


def test_contract_with_masks_as_arguments_by_name():
    module = _attention()
    query, key, value = _inputs(module)
    arguments = {"query": query, "key": key, "value": value, "key_padding_mask": PADDING}
    check_layer_rule(module, arguments, tol=1e-10)
