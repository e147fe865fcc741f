"""Odd but legitimate models and data: every number equals that of one plain backward a position and class."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import layerwise as lw
from layerwise.testing import oracles

TOLERANCE = 1e-9
STRUCTURES = ("dense", "diag", "block", "ekfac", "implicit")
BOTH = ("exact", "empirical")


# --- the truth ---------------------------------------------------------------------------------------------


def _jacobian(model: nn.Module, z: Tensor) -> Tensor:
    """``[N, S, C, d]``: one backward an entry of the output."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for entry in z.reshape(-1):
        grads = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat(
                [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(parameters, grads, strict=True)]
            )
        )
    return torch.stack(rows).reshape(*z.shape, -1)


def _curvature(z: Tensor, law: str) -> Tensor:
    p = z.softmax(-1)
    return {
        "categorical": torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2),
        "gaussian": torch.diag_embed(torch.ones_like(z)),
        "poisson": torch.diag_embed(z.exp()),
    }[law]


def _slope(z: Tensor, y: Tensor, law: str) -> Tensor:
    if law == "categorical":
        return z.softmax(-1) - F.one_hot(y.reshape(z.shape[:-1]), z.shape[-1])
    return (z if law == "gaussian" else z.exp()) - y.reshape(z.shape)


def _truth(model: nn.Module, outputs: Iterable[tuple[Tensor, Tensor]], estimator: str, law: str) -> Tensor:
    """From the outputs ``[N, S, C]`` and targets of every batch."""
    total: Any = 0.0
    examples = 0
    for z, y in outputs:
        J, z = _jacobian(model, z), z.detach()
        if estimator == "exact":
            total = total + torch.einsum("nsci,nscd,nsdj->ij", J, _curvature(z, law), J)
        else:
            g = torch.einsum("nsci,nsc->ni", J, _slope(z, y, law))
            total = total + g.T @ g
        examples += len(z)
    return total / examples


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _agrees(
    model: nn.Module,
    data: Any,
    outputs: Callable[[], list[tuple[Tensor, Tensor]]],
    *,
    law: str = "categorical",
    structures: tuple[str, ...] = STRUCTURES,
    estimators: tuple[str, ...] = ("exact",),
    **options: Any,
) -> None:
    likelihood = POISSON if law == "poisson" else law
    for estimator in estimators:
        expected = _truth(model, outputs(), estimator, law)
        for structure in structures:
            F_ = lw.fisher(model, data, likelihood, structure, estimator, **options)
            if structure == "implicit":
                v = torch.randn(len(expected), 2, generator=torch.Generator().manual_seed(0)).double()
                gap = _gap(F_ @ v, expected @ v)
            elif structure == "ekfac":
                gap = _gap(F_.trace(), expected.trace())
            elif structure == "diag":
                gap = _gap(F_.diagonal().flat(), expected.diagonal())
            elif structure == "block":
                found = F_.to_dense()
                gap = _gap(found[found != 0], expected[found != 0]) + _gap(found.diagonal(), expected.diagonal())
            else:
                gap = _gap(F_.to_dense(), expected)
            assert gap < TOLERANCE, (estimator, structure, gap)


POISSON = lw.likelihoods.Custom(loss_fn=lambda f, y: (f.exp() - y * f).sum())


# --- models ------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """Named layers and parameters, and a forward written as a function of them."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(_normal(*shape))


def _time_major(m: Any, x: Tensor) -> Tensor:
    """Rows (time · examples), and only the last time counts."""
    n, t, _ = x.shape
    z = m.a(x.transpose(0, 1).reshape(t * n, -1)).tanh().reshape(t, n, -1) * m.scale
    return m.h(z[-1])


def _middle(m: Any, x: Tensor) -> Tensor:
    n, t, _ = x.shape
    return m.h(m.a(x.transpose(0, 1).reshape(t * n, -1)).tanh().reshape(t, n, -1)[t // 2] * m.scale)


def _time_first(m: Any, x: Tensor) -> Tensor:
    return m.h((m.a(x.transpose(0, 1)).tanh() * m.scale)[-1])


def _last_position(m: Any, x: Tensor) -> Tensor:
    return m.h((m.a(x + m.pos(torch.arange(x.shape[1])[None])).tanh() * m.scale)[:, -1])


def _each_alone(m: Any, x: Tensor) -> Tensor:
    return m.h(torch.stack([m.a(row).tanh()[-1] for row in x]) * m.scale)


POOLING = {
    "rows by time": _time_major,
    "rows by time, middle": _middle,
    "time first": _time_first,
    "position indices": _last_position,
    "one example a call": _each_alone,
}


@pytest.mark.parametrize(("n", "t"), [(3, 4), (2, 2), (4, 4), (5, 2), (2, 3)])
@pytest.mark.parametrize("name", POOLING)
def test_one_position_alone_counts(name: str, n: int, t: int):
    """Its gradient leaves few rows to find the examples by; sizes that coincide make it worse."""
    torch.manual_seed(0)
    model = Apply(POOLING[name], a=nn.Linear(2, 3), h=nn.Linear(3, 2), scale=_bare(3), pos=nn.Embedding(5, 2)).double()
    if name != "position indices":
        del model.pos
    x, y = _normal(n, t, 2), torch.randint(2, (n,))
    _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)], structures=("dense",), estimators=("empirical",))


def test_examples_without_a_gradient_do_not_hide_the_layout():
    """The last examples are dead; rows run over examples first."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        return m.h(m.a(x.transpose(0, 1).reshape(t * n, -1)).relu().reshape(t, n, -1).sum(0))

    model = Apply(forward, a=nn.Linear(2, 4, bias=False), h=nn.Linear(4, 2)).double()
    x, y = _normal(6, 4, 2), torch.randint(2, (6,))
    x[2:] = 0
    _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)], structures=("dense", "diag", "ekfac"), estimators=BOTH)


def test_a_branch_that_starts_at_zero_is_looked_at_again_later():
    """At first the gradient says nothing of the layer; what was believed of it must not be remembered."""
    torch.manual_seed(0)

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    model = Apply(lambda m, x: m.h(x) + m.gate * m.branch(x), h=nn.Linear(3, 3), branch=Doubled(3, 3), gate=_bare(3))
    model.double()
    with torch.no_grad():
        model.gate.zero_()
    x, y = _normal(5, 3), torch.randint(3, (5,))
    outputs = lambda: [(model(x).unsqueeze(1), y)]  # noqa: E731
    _agrees(model, (x, y), outputs, structures=("dense", "diag"))
    with torch.no_grad():
        model.gate.fill_(1.5)
    _agrees(model, (x, y), outputs, estimators=BOTH)


# --- inputs that all examples share ------------------------------------------------------------------------


def _masked(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    z = mask @ m.a(x).tanh()
    return m.h(m.rnn(z)[0].mean(1)) + m.h(z.mean(1))


def _mask_model() -> nn.Module:
    torch.manual_seed(0)
    return Apply(_masked, a=nn.Linear(2, 3), rnn=nn.GRU(3, 3, batch_first=True), h=nn.Linear(3, 2)).double()


@pytest.mark.parametrize("memory", [None, 4000])
@pytest.mark.parametrize("n", [2, 4, 5])
def test_an_input_without_examples_of_their_number(n: int, memory: int | None):
    """A [T, T] mask must not be cut with the batch, also where T = N."""
    model, t = _mask_model(), 4 if n != 2 else 2
    x, mask, y = _normal(n, t, 2), torch.tril(_normal(t, t)), torch.randint(2, (n,))
    structures = ("diag", "implicit") if memory else STRUCTURES
    _agrees(model, ((x, mask), y), lambda: [(model(x, mask).unsqueeze(1), y)], structures=structures, memory=memory)


def test_a_later_batch_has_as_many_examples_as_positions():
    model, mask = _mask_model(), torch.tril(_normal(4, 4))
    batches = [((_normal(n, 4, 2), mask), torch.randint(2, (n,))) for n in (3, 4, 1)]
    outputs = lambda: [(model(*x).unsqueeze(1), y) for x, y in batches]  # noqa: E731
    _agrees(model, batches, outputs, structures=("dense", "diag"), estimators=BOTH)


class Output(dict):
    """What libraries of pretrained models return: a dictionary with attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def _language_model(m: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
    h = m.tokens(input_ids) + m.positions(torch.arange(input_ids.shape[1]))
    h = h if attention_mask is None else h * attention_mask[..., None]
    return Output(loss=None, logits=m.head(m.norm(h + m.mix(h).cumsum(1).tanh())), hidden=h)


@pytest.mark.parametrize("n", [1, 5])
def test_a_tied_language_model_with_a_mapping_for_a_batch(n: int):
    torch.manual_seed(0)
    parts = {"tokens": nn.Embedding(6, 3), "positions": nn.Embedding(5, 3), "head": nn.Linear(3, 6, bias=False)}
    model = Apply(_language_model, mix=nn.Linear(3, 3), norm=nn.LayerNorm(3), **parts).double()
    model.head.weight = model.tokens.weight
    ids, labels, mask = torch.randint(6, (n, 5)), torch.randint(6, (n, 5)), torch.ones(n, 5, dtype=torch.float64)
    mask[0, 3:] = 0
    batch = Output(input_ids=ids, attention_mask=mask, labels=labels)
    outputs = lambda: [(model(ids, mask).logits, labels)]  # noqa: E731
    _agrees(model, batch, outputs, structures=("dense", "implicit"))
    _agrees(model, [dict(batch)], outputs, structures=("diag",), estimators=("empirical",))


def test_batches_of_other_lengths_and_a_single_example_first():
    torch.manual_seed(0)

    def forward(m: Any, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        z = m.tokens(ids) + m.positions(torch.arange(t)[None])
        blocked = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
        return m.head(z + m.mix(z, z, z, attn_mask=blocked, need_weights=False)[0])

    parts = {"tokens": nn.Embedding(4, 2), "positions": nn.Embedding(7, 2), "head": nn.Linear(2, 4, bias=False)}
    model = Apply(forward, mix=nn.MultiheadAttention(2, 1, batch_first=True), **parts).double()
    model.head.weight = model.tokens.weight
    batches = [(torch.randint(4, (n, t)), torch.randint(4, (n, t))) for n, t in ((1, 3), (2, 6), (2, 2), (3, 3))]
    outputs = lambda: [(model(x), y) for x, y in batches]  # noqa: E731
    _agrees(model, batches, outputs, structures=("dense", "implicit"))


def test_loaders_with_an_incomplete_last_batch_and_lists():
    torch.manual_seed(0)
    model = Apply(lambda m, x: (x @ m.w).tanh() * m.scale + m.shift, w=_bare(3, 2), scale=_bare(2), shift=_bare())
    x, y = _normal(7, 3), torch.randint(2, (7,))
    outputs = lambda: [(model(x).unsqueeze(1), y)]  # noqa: E731
    _agrees(model, DataLoader(TensorDataset(x, y), batch_size=3), outputs)
    _agrees(model, [[x[:1], y[:1]], [x[1:], y[1:]]], outputs)


# --- vision ------------------------------------------------------------------------------------------------


class ViT(nn.Module):
    """Class token, position embedding, layer scale, scales of all shapes, a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(1, 2, 2, 2), nn.Linear(2, 3)
        self.cls, self.pos, self.gain, self.layer_scale = _bare(1, 1, 2), _bare(1, 5, 2), _bare(1, 2), _bare(2)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.block = nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z = self.patch(x).flatten(2).transpose(1, 2)
        z = torch.cat([self.cls.expand(len(x), -1, -1), z], 1) + self.pos
        return self.head((z + self.block(z) * self.layer_scale * self.gain)[:, 0]) / self.temperature


@pytest.mark.parametrize("n", [1, 2, 5])
def test_vision_transformer(n: int):
    torch.manual_seed(0)
    model = ViT().double().train(n == 2)
    x, y = _normal(n, 1, 4, 4), torch.randint(3, (n,))
    structures = ("dense", "diag", "implicit") if n == 5 else ("dense",)
    _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)], structures=structures)


def _unet(m: Any, x: Tensor) -> Tensor:
    up = m.mixed(m.up(m.down(x).relu()))
    return m.out(torch.cat([up, x], 1))


def test_segmentation_with_skips_and_every_kind_of_convolution():
    torch.manual_seed(0)
    model = Apply(
        _unet,
        down=nn.Conv2d(1, 2, 3, stride=2, padding=1),
        up=nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=1),
        mixed=nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2, padding_mode="reflect"),
        out=nn.Conv2d(5, 2, 1),
    ).double()
    x, y = _normal(2, 1, 4, 4), torch.randint(2, (2, 4, 4))
    outputs = lambda: [(model(x).movedim(1, -1).flatten(1, 2), y)]  # noqa: E731
    _agrees(model, (x, y), outputs, structures=("dense", "diag"))
    last = model.to(memory_format=torch.channels_last)
    _agrees(
        last,
        (x.transpose(2, 3).contiguous().transpose(2, 3), y),
        outputs,
        structures=("dense",),
        estimators=("empirical",),
    )


def test_in_place_residuals_pooling_and_grouped_convolutions():
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        out = F.relu_(m.norm(m.first(x)))
        out = m.second(out)
        out += x
        return m.head(F.adaptive_avg_pool2d(F.relu_(out), 1).flatten(1))

    model = Apply(
        forward,
        first=nn.Conv2d(2, 2, 3, padding=1, groups=2),
        norm=nn.BatchNorm2d(2),
        second=nn.Conv2d(2, 2, 3, padding=1),
        head=nn.Linear(2, 2),
    )
    model.double().eval()
    x, y = _normal(2, 2, 3, 3), torch.randint(2, (2,))
    _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)])


@pytest.mark.parametrize("batched", [False, True])
def test_a_convolution_called_for_each_example(batched: bool):
    torch.manual_seed(0)
    model = Apply(
        lambda m, x: m.h(torch.stack([m.c(row[None] if batched else row).flatten() for row in x])),
        c=nn.Conv2d(1, 2, 2),
        h=nn.Linear(8, 3),
    ).double()
    x, y = _normal(4, 1, 3, 3), torch.randint(3, (4,))
    _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)], structures=("dense", "diag"))


# --- parameters --------------------------------------------------------------------------------------------


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * x * w * g, (x * x * g).sum(0)


class _LowRankLinear(nn.Linear):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.requires_grad_(False)
        self.down, self.up = _bare(3, 1), _bare(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down @ self.up


def _tied_to_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def _two_names() -> nn.Module:
    one = nn.Linear(3, 3)
    return Apply(lambda m, x: m.b(m.sequence(m.a(x))), a=one, b=one, sequence=nn.Sequential(one, nn.Tanh()))


def _nested() -> nn.Module:
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return nn.Sequential(block, nn.Sequential(block, block), nn.Linear(3, 3))


def _cells(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for _ in range(3):
        h = m.cell(x, h)
    return h


PARAMETERS: dict[str, Callable[[], nn.Module]] = {
    "lists and dictionaries": lambda: Apply(
        lambda m, x: (x @ m.ws[0]).tanh() @ m.ws[1] * m.by["scale"] + m.by["shift"],
        ws=nn.ParameterList([_bare(3, 3), _bare(3, 3)]),
        by=nn.ParameterDict({"scale": _bare(), "shift": _bare(3)}),
    ),
    "weight and spectral norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(3, 3))
    ),
    "tied to a frozen layer": _tied_to_frozen,
    "two names": _two_names,
    "nested repetition": _nested,
    "a function of one's own": lambda: Apply(
        lambda m, x: m.h(_Square.apply(m.l(x), m.w)), l=nn.Linear(3, 3), w=_bare(3), h=nn.Linear(3, 3)
    ),
    "low-rank correction": lambda: nn.Sequential(_LowRankLinear(), nn.Tanh(), nn.Linear(3, 3)),
    "bilinear": lambda: Apply(lambda m, x: m.p(m.b(x, x)), b=nn.Bilinear(3, 3, 3), p=nn.PReLU(3)),
    "recurrent cell": lambda: Apply(_cells, cell=nn.GRUCell(3, 3)),
    "a temperature": lambda: Apply(lambda m, x: m.l(x) / m.t, l=nn.Linear(3, 3), t=nn.Parameter(torch.tensor(1.5))),
    "a parameter called p": lambda: Apply(lambda m, x: m.l(x) * m.p, l=nn.Linear(3, 3), p=_bare(3)).train(),
}


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_every_kind(name: str, n: int):
    torch.manual_seed(0)
    model = PARAMETERS[name]().double()
    model = model if "called p" in name else model.eval()
    x, y = _normal(n, 3), torch.randint(3, (n,))
    structures = STRUCTURES if n == 4 else ("dense",)
    _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)], structures=structures)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weight_norm_of_the_old_kind():
    torch.manual_seed(0)
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 3)).double()
    x, y = _normal(4, 3), torch.randint(3, (4,))
    _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)])


@pytest.mark.parametrize("structure", ["dense", "block", "diag", "implicit"])
def test_the_hessian_of_a_model_with_a_single_number_for_a_parameter(structure: str):
    torch.manual_seed(0)
    model = PARAMETERS["a temperature"]().double()
    x, y = _normal(4, 3), torch.randint(3, (4,))
    H = lw.hessian(model, (x, y), loss=F.cross_entropy, structure=structure)
    expected = oracles.hessian(model, x, y, F.cross_entropy)
    assert _gap(H.diagonal().flat(), expected.diagonal()) < TOLERANCE
    if structure in ("dense", "implicit"):
        v = _normal(H.numel())
        assert _gap(H @ v, expected @ v) < TOLERANCE


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "bag": lambda: Apply(lambda m, i: m.h(m.e(i)), e=nn.EmbeddingBag(5, 3), h=nn.Linear(3, 3)),
    "padding": lambda: Apply(lambda m, i: m.h(m.e(i).mean(1)), e=nn.Embedding(5, 3, padding_idx=0), h=nn.Linear(3, 3)),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(name: str):
    torch.manual_seed(0)
    model = EMBEDDINGS[name]().double()
    ids, y = torch.randint(5, (4, 3)), torch.randint(3, (4,))
    structures = ("dense", "diag", "block") + (("implicit",) if name == "padding" else ())
    _agrees(model, (ids, y), lambda: [(model(ids).unsqueeze(1), y)], structures=structures)


def test_sparse_gradients_are_those_of_the_same_layer_without():
    torch.manual_seed(0)
    model = Apply(lambda m, i: m.h(m.e(i).mean(1)), e=nn.Embedding(5, 3), h=nn.Linear(3, 3)).double()
    batch = torch.randint(5, (4, 3)), torch.randint(3, (4,))
    expected = lw.fisher(model, batch, structure="dense", estimator="exact").to_dense()
    model.e.sparse = True
    assert _gap(lw.fisher(model, batch, structure="dense", estimator="exact").to_dense(), expected) < TOLERANCE


def test_a_model_without_a_second_derivative_says_what_to_use_instead():
    model = EMBEDDINGS["bag"]().double()
    F_ = lw.fisher(model, (torch.randint(5, (4, 3)), torch.randint(3, (4,))), structure="implicit")
    with pytest.raises(lw.LayerwiseError, match=r'Got .*\. Expected .*\. Use structure="lowrank"'):
        F_ @ lw.ParamVector.zeros(model)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_networks_of_both_directions(kind: type[nn.RNNBase], batch_first: bool):
    torch.manual_seed(0)
    rnn = kind(2, 1, bidirectional=True, batch_first=batch_first)
    model = Apply(lambda m, x: m.h(m.rnn(x)[0].mean(1 if batch_first else 0)), rnn=rnn, h=nn.Linear(2, 2)).double()
    for n, t in ((4, 3), (3, 3)):
        x, y = _normal(n, t, 2), torch.randint(2, (n,))
        x = x if batch_first else x.transpose(0, 1)
        _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)], structures=("dense", "diag"))  # noqa: B023


# --- ways of running ---------------------------------------------------------------------------------------


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    def block(z: Tensor) -> Tensor:
        return m.mix(z, z, z)[0] * m.scale

    return m.h(checkpoint(block, m.pre(x), use_reentrant=False).mean(1))


def test_checkpoints_that_run_attention_again():
    torch.manual_seed(0)
    mix = nn.MultiheadAttention(2, 1, batch_first=True)
    model = Apply(_checkpointed, pre=nn.Linear(2, 2), mix=mix, scale=_bare(2), h=nn.Linear(2, 2)).double()
    x, y = _normal(3, 3, 2), torch.randint(2, (3,))
    _agrees(model, (x, y), lambda: [(model(x).unsqueeze(1), y)])


@pytest.mark.parametrize("how", ["wrapped", "in place", "a part"])
def test_compiled_models(how: str):
    """A compiled part that has run before runs without hooks: it must not be recorded half."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    inner = torch.compile(part, backend="eager") if how == "a part" else part
    model = nn.Sequential(inner, nn.Linear(3, 3).double())
    used = torch.compile(model, backend="eager") if how == "wrapped" else model
    if how == "in place":
        model.compile(backend="eager")
    x, y = _normal(4, 3), torch.randint(3, (4,))
    used(x)
    _agrees(used, (x, y), lambda: [(model(x).unsqueeze(1), y)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_callers_in_no_grad_and_inference_mode(mode: Callable[[], Any]):
    torch.manual_seed(0)
    model = PARAMETERS["lists and dictionaries"]().double()
    x, y = _normal(4, 3), torch.randint(3, (4,))
    expected = _truth(model, [(model(x).unsqueeze(1), y)], "exact", "categorical")
    second = oracles.hessian(model, x, y, F.cross_entropy)
    for structure in (*STRUCTURES, "kfac", "lowrank"):
        with mode():
            F_ = lw.fisher(model, (x.clone(), y), structure=structure, estimator="exact")
            v = _normal(F_.numel())
            product, _ = F_ @ v, F_.solve(v, damping=0.1)
        if structure in ("dense", "implicit", "lowrank"):
            assert _gap(product, expected @ v) < TOLERANCE
            assert _gap(F_ @ v.clone(), expected @ v) < TOLERANCE
    with mode():
        v = _normal(len(second))
        H = lw.hessian(model, (x, y), loss=F.cross_entropy)
        assert _gap(H @ v, second @ v) < TOLERANCE
        C = lw.gradient_moment(model, (x, y), loss=F.cross_entropy, structure="dense")
    assert _gap(C.to_dense(), oracles.gradient_moment(model, x, y, F.cross_entropy)) < TOLERANCE


class Dropping(NamedTuple):
    model: nn.Module
    batch: tuple[Tensor, Tensor]


@pytest.fixture
def dropping() -> Dropping:
    torch.manual_seed(0)
    model = Apply(
        lambda m, x: m.h(F.dropout(m.drop(m.a(x).tanh()), 0.3) * m.scale),
        a=nn.Linear(3, 4),
        drop=nn.Dropout(0.4),
        scale=_bare(4),
        h=nn.Linear(4, 3),
    )
    return Dropping(model.double().train(), (_normal(5, 3), torch.randint(3, (5,))))


def test_dropout_draws_the_same_in_every_structure_and_for_a_seed(dropping: Dropping):
    def build(structure: str, seed: int = 0) -> Any:
        return lw.fisher(dropping.model, dropping.batch, structure=structure, estimator="exact", seed=seed)

    dense = build("dense").to_dense()
    assert torch.equal(dense, build("dense").to_dense())
    assert not torch.allclose(dense, build("dense", seed=1).to_dense())
    assert _gap(build("diag").diagonal().flat(), dense.diagonal()) < TOLERANCE
    assert _gap(build("ekfac").trace(), dense.trace()) < TOLERANCE
    assert _gap(build("lowrank").to_dense(), dense) < TOLERANCE
    v = _normal(len(dense))
    F_ = build("implicit")
    torch.manual_seed(5)
    assert _gap(F_ @ v, dense @ v) < TOLERANCE


# --- outputs and likelihoods -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
def test_positions_merged_into_the_rows_of_the_output(n: int):
    """N = T = C at n = 3."""
    torch.manual_seed(0)
    model = Apply(lambda m, x: m.h(m.a(x).tanh()).flatten(0, 1), a=nn.Linear(2, 3), h=nn.Linear(3, 3)).double()
    x, y = _normal(n, 3, 2), torch.randint(3, (n, 3))
    _agrees(model, (x, y.flatten()), lambda: [(model(x).reshape(n, 3, 3), y)], estimators=BOTH)


@pytest.mark.parametrize("shape", [(4, 2), (4,), (1,)])
def test_a_poisson_likelihood(shape: tuple[int, ...]):
    torch.manual_seed(0)
    outputs = shape[1] if len(shape) > 1 else 1
    flat = nn.Flatten(0) if len(shape) == 1 else nn.Identity()
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, outputs), flat).double()
    x, y = _normal(shape[0], 3), torch.randint(5, shape).double()
    _agrees(model, (x, y), lambda: [(model(x).reshape(shape[0], 1, -1), y)], law="poisson", estimators=BOTH)


def test_values_that_are_missing_may_be_nan_under_the_mask():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y, mask = _normal(4, 3), _normal(4, 2), torch.tensor([True, False, True, True])
    found = [
        lw.fisher(model, (x, target, mask), "gaussian", "dense", "empirical").to_dense()
        for target in (y, torch.where(mask[:, None], y, torch.nan))
    ]
    assert torch.equal(*found)


def test_an_incomplete_model_output_is_looked_for_in_containers():
    torch.manual_seed(0)
    x, y = _normal(4, 3), torch.randint(3, (4,))
    net = nn.Linear(3, 3).double()
    expected = lw.fisher(net, (x, y), structure="dense", estimator="exact").to_dense()
    for wrap in (
        lambda f: (f, f.argmax(-1)),
        lambda f: {"scores": f},
        lambda f: {"hidden": f * 2, "logits": f},
        lambda f: Output(labels=f.argmax(-1), scores=f),
        lambda f: [f.argmax(-1), f],
    ):
        model = Apply(lambda m, x, wrap=wrap: wrap(m.net(x)), net=net)
        assert torch.equal(lw.fisher(model, (x, y), structure="dense", estimator="exact").to_dense(), expected)


def test_a_first_batch_of_one_example_does_not_show_all():
    """Only with two does the layer have to fall back: what was summed up before is begun anew."""
    torch.manual_seed(0)
    model = Apply(
        lambda m, x: m.h(torch.stack([m.a(row).tanh().mean(0) for row in x])), a=nn.Linear(2, 2), h=nn.Linear(2, 3)
    ).double()
    batches = [(_normal(n, 3, 2), torch.randint(3, (n,))) for n in (1, 4, 2)]
    _agrees(model, batches, lambda: [(model(x).unsqueeze(1), y) for x, y in batches])
    with pytest.raises(lw.LayerwiseError, match=r"Got a generator .*\. Expected .*\. Pass .*put the small batch last"):
        lw.fisher(model, iter(batches), structure="diag")


def test_the_hessian_of_a_model_with_time_first_weighs_batches_by_their_examples():
    torch.manual_seed(0)
    model = Apply(lambda m, x: m.h(m.rnn(x)[0].mean(0)), rnn=nn.RNN(2, 2), h=nn.Linear(2, 3)).double()
    batches = [(_normal(5, n, 2), torch.randint(3, (n,))) for n in (2, 6)]
    expected = sum(len(y) * oracles.hessian(model, x, y, F.cross_entropy) for x, y in batches) / 8
    for given in ({"loss": F.cross_entropy}, {"likelihood": "categorical"}):
        H = lw.hessian(model, batches, structure="dense", **given)
        assert _gap(H.to_dense(), expected) < TOLERANCE
