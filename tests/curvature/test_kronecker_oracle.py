"""K-FAC's factors equal those computed by loops from inputs and gradients that plain hooks saw."""

from typing import Any

import pytest
import torch
from coverage_table import EVERY_LIKELIHOOD, others
from references import (
    Rows,
    block_order,
    close,
    counts,
    data_of,
    label_cotangent,
    law_of,
    name_of,
    patches,
    root_cotangents,
    rows_of,
    with_likelihood,
)
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.kronecker import Kronecker
from layerwise.layers.table import LayerSpec
from layerwise.testing.cases import CASES, Case, case, select

HIDDEN = {"attention", "generic"}
"""Tags of cases in which some Kronecker layers cannot be seen by hooks."""


def _keep(c: Case, y: Tensor, rows: Rows) -> Tensor | None:
    """Positions that count, where the layer's positions are the mask's."""
    mask = c.options.get("mask")
    ignored = c.options.get("ignore_index")
    if mask is None and ignored is not None:
        mask = y != ignored
    return mask if mask is not None and mask.shape == rows.a.shape[:2] else None


def _hooked(spec: LayerSpec) -> bool:
    """Whether the oracle's hooks see all of a layer: not where it was found by use."""
    return spec.structure("kfac") == "kfac" and not any(site.used for site in spec.sites)


def _compare(c: Case, estimator: str, sharing: str, normalize: str = "examples") -> list[str]:
    model, x, y = c.make()
    K: Any = lw.fisher(model, data_of(c, x, y), law_of(c), "kfac", estimator, sharing=sharing, normalize=normalize)
    n, terms = counts(c, model, x, y)
    cotangents = (root_cotangents if estimator == "exact" else label_cotangent)(c, model, x, y)
    seen = rows_of(model, x, cotangents, [s for s in K.table.layers if _hooked(s)], n)
    scale = n / terms if normalize == "terms" else 1.0
    for name, rows in seen.items():
        operator = K.operators[name]
        assert isinstance(operator, Kronecker)
        one_hot = K.table.spec(name).form.one_hot  # the mean of one-hot vectors is none: always expanded
        A, G = rows.factors("expand" if one_hot else sharing, _keep(c, y, rows))
        size = float(rows.g.square().sum()) / n  # summed over positions, gradients may cancel to nothing
        close(operator.A.dense(), A)
        close(operator.G, G * scale, scale=size)
        order = block_order(K.shapes, K.table.spec(name))
        expected = torch.block_diag(*(torch.kron(g, a) for g, a in zip(G * scale, A, strict=True)))
        close(K.to_dense()[order.unsqueeze(1), order], expected, scale=size)
    return list(seen)


@pytest.mark.parametrize("c", CASES, ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_expanded_factors_equal_the_oracle(c: Case, covered: set):
    for estimator in ("exact", "empirical"):
        seen = _compare(c, estimator, "expand")
        assert seen or c.tags & HIDDEN, "no layer was compared"
    covered |= {(c.name, c.likelihood, "kfac")}


@pytest.mark.parametrize("c", [c for c in CASES if "layout" not in c.tags], ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_reduced_factors_equal_the_oracle(c: Case):
    for estimator in ("exact", "empirical"):
        seen = _compare(c, estimator, "reduce")
        assert seen or c.tags & HIDDEN, "no layer was compared"


@pytest.mark.parametrize("name", EVERY_LIKELIHOOD)
@pytest.mark.usefixtures("untyped")
def test_factors_under_other_likelihoods_equal_the_oracle(name: str, covered: set):
    for likelihood in others(case(name)):
        seen = _compare(with_likelihood(case(name), likelihood), "exact", "expand")
        assert seen or case(name).tags & HIDDEN, "no layer was compared"
        covered |= {(name, likelihood, "kfac")}


@pytest.mark.parametrize("name", ["ignore_class", "class_weights", "multi_label_masked", "segmentation"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_the_mean_over_terms_equal_the_oracle(name: str, sharing: str):
    assert _compare(case(name), "exact", sharing, "terms")


# --- layers that hooks cannot see -------------------------------------------------------------------------


class _WrittenOut(nn.Module):
    """Self-attention with its projections as linear layers."""

    def __init__(self, packed: Any):
        super().__init__()
        attention, e = packed.attention, packed.attention.embed_dim
        self.heads = attention.num_heads
        self.qkv = nn.ModuleList(nn.Linear(e, e, dtype=torch.float64) for _ in range(3))
        self.out, self.head = attention.out_proj, packed.head
        with torch.no_grad():
            for i, linear in enumerate(self.qkv):
                linear.weight.copy_(attention.in_proj_weight[i * e : (i + 1) * e])
                linear.bias.copy_(attention.in_proj_bias[i * e : (i + 1) * e])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.head(self.out((weights @ v).transpose(1, 2).flatten(2)).tanh())


# Reduced factors of few examples are singular and leave EKFAC's basis open, so that pair is not compared.
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "bernoulli"])
@pytest.mark.parametrize(
    ("structure", "sharing"), [("kfac", "expand"), ("kfac", "reduce"), ("ekfac", "expand"), ("block", "expand")]
)
@pytest.mark.usefixtures("untyped")
def test_attention_has_the_exact_blocks_of_its_projections_written_out(structure: str, sharing: str, likelihood: str):
    packed, x, y = with_likelihood(case("attention"), likelihood).make()
    if likelihood == "categorical":
        y = case("attention").make()[2]
    written = _WrittenOut(packed)
    close(written(x), packed(x))
    options: Any = {"structure": structure, "estimator": "exact", "sharing": sharing}
    found, expected = (lw.fisher(m, (x, y), likelihood, **options) for m in (packed, written))
    pairs = {"attention.q": "qkv.0", "attention.k": "qkv.1", "attention.v": "qkv.2", "attention.out_proj": "out"}
    for ours, theirs in pairs.items():
        if sharing == "reduce" and ours == "attention.k":  # a shift of all keys changes nothing: gradients sum to 0
            assert found.layer(ours).trace() <= 1e-9
            continue
        close(found.layer(ours).to_dense(), expected.layer(theirs).to_dense())


# --- convolutions without correlations between offsets ----------------------------------------------------


@pytest.mark.parametrize("c", select("conv", without=["norm", "repeated", "layout"]), ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_sua_factors_equal_the_oracle(c: Case):
    """A = A_channels ⊗ I, A_channels the second moment over all pixels; the bias is a block of its own."""
    model, x, y = c.make()
    S: Any = lw.fisher(model, data_of(c, x, y), law_of(c), "kfac", "exact", conv="sua")
    E: Any = lw.fisher(model, data_of(c, x, y), law_of(c), "ekfac", "exact", conv="sua")
    expected = lw.fisher(model, data_of(c, x, y), law_of(c), "dense", "exact")
    close(E.trace(), expected.trace())
    convolutions = [s for s in S.table.layers if s.kind.startswith("Conv") and s.form.weight and s.form.taps > 1]
    seen = rows_of(model, x, root_cotangents(c, model, x, y), convolutions, counts(c, model, x, y)[0])
    for spec in convolutions:
        _, G = seen[spec.name].factors()
        close(S.operators[spec.name].G, G)
        assert spec.form.bias is None
    if len(convolutions) == 1 and next(iter(seen)) == S.table.layers[0].name and spec.form.groups == 1:
        pixels = x.flatten(2).mT.flatten(0, 1)
        channels = pixels.mT @ pixels / len(pixels)
        close(S.operators[spec.name].A.dense()[0], torch.kron(channels, torch.eye(spec.form.taps).double()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_sua_is_exact_for_one_by_one_kernels(stride: int, bias: bool):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1, stride=stride, bias=bias), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3, bias=False)
    ).double()
    x, y = torch.randn(4, 3, 4, 4).double(), torch.randint(3, (4,))
    model(x)
    for structure in ("kfac", "ekfac"):
        sua = lw.fisher(model, (x, y), structure=structure, estimator="exact", conv="sua").to_dense()
        kfc = lw.fisher(model, (x, y), structure=structure, estimator="exact").to_dense()
        if not bias:
            close(sua, kfc)
        elif structure == "kfac":  # the bias is apart, the weights' block is the same
            close(sua[:12, :12], kfc[:12, :12])


def test_kfc_with_one_position_is_exact_linear_kfac():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(2, 4, (3, 2)), nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)).double()
    flat = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for p, q in zip(flat.parameters(), conv.parameters(), strict=True):
            p.copy_(q.view_as(p))
    x, y = torch.randn(5, 2, 3, 2).double(), torch.randint(3, (5,))
    for structure in ("kfac", "ekfac", "block"):
        a, b = (lw.fisher(m, (x, y), structure=structure, estimator="exact").to_dense() for m in (conv, flat))
        close(a, b)


def test_patches_are_those_of_a_convolution():
    """The reference of this file is itself checked: patches times kernel is the layer's output."""
    torch.manual_seed(0)
    for conv in (nn.Conv1d(4, 6, 3, 2, 1, groups=2), nn.Conv2d(4, 6, (3, 2), padding="same"), nn.Conv3d(2, 2, 2)):
        x = torch.randn(2, conv.in_channels, *[5] * len(conv.kernel_size))
        rows = patches(conv, x)
        weight = conv.weight.unflatten(0, (conv.groups, -1)).flatten(2)
        out = torch.einsum("nski,koi->nkos", rows, weight).flatten(1, 2) + conv.bias.view(1, -1, 1)
        assert torch.allclose(out, conv(x).flatten(2), atol=1e-5)
