"""The one list of tiny models that every contract runs over.

A `Case` makes a model, its inputs and its labels from a seed, and says which likelihood they are for, in the
options that `layerwise.testing.oracles` takes. All is float64, in eval mode and tiny: at most 300 parameters,
and 3 to 5 examples, the first axis of inputs and outputs. Parameters are moved away from their initial
values, so that no scale is 1 and no bias is 0.

>>> model, x, y = case("mlp").make(seed=0)
>>> [c.name for c in select("norm", "conv")]
['batch_norm2d', 'group_norm', 'instance_norm', 'instance_norm_running']

Tags say what a case exercises; its likelihood is one of them:

| tag | the model has |
|---|---|
| ``linear``, ``conv``, ``conv_transpose``, ``norm``, ``embedding``, ``attention``, ``recurrent`` | one |
| ``tied``, ``repeated`` | a parameter in two modules; a module called more than once |
| ``sequence`` | sequences as inputs, or an output for each position |
| ``layout`` | examples that are not the first axis of some layer, or are merged with positions |
| ``generic`` | a parameter that no rule for its module's type describes |
| ``frozen``, ``unused`` | parameters without ``requires_grad``; parameters the output does not depend on |
| ``inplace`` | in-place operations on the output of a layer |
| ``inputs`` | inputs that are not one tensor |
| ``weights``, ``mask``, ``smoothing`` | class weights; positions that do not count; label smoothing |
| ``piecewise_linear`` | an output piecewise linear in each parameter: its Hessian blocks are GGN blocks |
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from layerwise.foundations.errors import NameLookupError, unknown

Inputs = Tensor | tuple | Mapping
Made = tuple[nn.Module, Inputs, Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """A model with data, a likelihood and what they exercise."""

    name: str
    build: Callable[[], Made] = field(repr=False)
    likelihood: str = "categorical"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    tags: frozenset[str] = frozenset()
    rows: int = 1
    """Rows of the output that are one example: more than 1 where the model merges examples and positions."""

    def make(self, seed: int = 0) -> Made:
        """The model, its inputs and its labels, the same for the same seed; global state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, x, y = self.build()
            model.double().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model, x, y

    @property
    def oracle_options(self) -> dict[str, Any]:
        """Keywords for the oracles: the likelihood and its options."""
        return {"likelihood": self.likelihood, **self.options}

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """1/N Σ_n ℓ_n by PyTorch's own losses, N being the examples in f.

        Meaningful for some of the examples too, save where a mask in ``options`` belongs to the whole batch.
        """
        N = f.shape[0] // self.rows
        if self.likelihood == "categorical":
            return self._cross_entropy(f, y) / N
        if self.likelihood == "gaussian":
            losses = 0.5 * F.mse_loss(f, y, reduction="none")
        else:
            losses = F.binary_cross_entropy_with_logits(f, y, reduction="none")
        mask = self.options.get("mask")
        return (losses if mask is None else losses[mask]).sum() / N

    def _cross_entropy(self, f: Tensor, y: Tensor) -> Tensor:
        ignore_index, weight = self.options.get("ignore_index"), self.options.get("weight")
        return F.cross_entropy(
            f.movedim(self.options.get("class_axis", -1), 1),
            y,
            weight=None if weight is None else weight.to(f),
            ignore_index=-100 if ignore_index is None else ignore_index,
            label_smoothing=self.options.get("label_smoothing", 0.0),
            reduction="sum",
        )


_cases: dict[str, Case] = {}


def case(name: str) -> Case:
    """The case of that name.

    Raises:
        NameLookupError: no case has it; the message names the nearest.
    """
    if name not in _cases:
        raise NameLookupError(unknown("case", name, _cases))
    return _cases[name]


def select(*tags: str, without: Iterable[str] = ()) -> tuple[Case, ...]:
    """The cases that have all of the tags and none of those in ``without``.

    Raises:
        NameLookupError: no case at all has one of the tags, which a misspelt selection would hide.
    """
    without = frozenset(without)
    known = frozenset().union(*(c.tags for c in CASES))
    if odd := sorted({*tags, *without} - known):
        raise NameLookupError(unknown("tag", odd[0], known, where="of cases"))
    return tuple(c for c in CASES if c.tags.issuperset(tags) and not c.tags & without)


# --- parts ------------------------------------------------------------------------------------------------


def _add(
    name: str,
    tags: str,
    build: Callable[[], Made],
    *,
    likelihood: str = "categorical",
    rows: int = 1,
    **options: Any,
) -> None:
    _cases[name] = Case(
        name=name,
        build=build,
        likelihood=likelihood,
        options=MappingProxyType(options),
        tags=frozenset({*tags.split(), likelihood}),
        rows=rows,
    )


def _case(tags: str, **settings: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Add the decorated function as the case of its name."""

    def add(build: Callable[[], Made]) -> Callable[[], Made]:
        _add(build.__name__, tags, build, **settings)
        return build

    return add


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _classes(*shape: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, shape)


def _coins(*shape: int) -> Tensor:
    return _classes(*shape, classes=2).double()


def _mlp(*sizes: int, bias: bool = True, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


class _Apply(nn.Module):
    """A module between two functions: for layouts that `nn.Sequential` cannot write."""

    def __init__(self, net: nn.Module, *, before: Callable | None = None, after: Callable | None = None):
        super().__init__()
        self.net, self.before, self.after = net, before, after

    def forward(self, x: Tensor) -> Tensor:
        """after(net(before(x)))."""
        y = self.net(self.before(x) if self.before else x)
        return self.after(y) if self.after else y


class _Quiet(nn.Module):
    """Runs a module without its warnings: PyTorch warns that an even kernel with padding="same" is slower."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """net(x)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.net(x)


# --- linear layers ----------------------------------------------------------------------------------------


def _linear(name: str, tags: str, make: Callable[[], nn.Module]) -> None:
    """Inputs [4, 4] with a label out of 3."""
    _add(name, f"linear {tags}", lambda: (make(), _normal(4, 4), _classes(4)))


def _deep_linear(bias: bool) -> Made:
    return _mlp(4, 3, 5, 2, bias=bias, activation=nn.Identity), _normal(4, 4), _normal(4, 2)


def _inplace_relu() -> nn.Module:
    return nn.ReLU(inplace=True)


_linear("mlp", "", lambda: _mlp(4, 5, 3))
_linear("mlp_no_bias", "", lambda: _mlp(4, 5, 3, bias=False))
_linear("softmax_regression", "piecewise_linear", lambda: nn.Linear(4, 3))
_linear("relu", "piecewise_linear", lambda: _mlp(4, 5, 5, 3, activation=nn.ReLU))
_linear("inplace_relu", "inplace piecewise_linear", lambda: _mlp(4, 5, 5, 3, activation=_inplace_relu))
_add("deep_linear", "linear piecewise_linear", lambda: _deep_linear(False), likelihood="gaussian")
_add("deep_linear_bias", "linear piecewise_linear", lambda: _deep_linear(True), likelihood="gaussian")


# --- convolutions -----------------------------------------------------------------------------------------


def _classifier(features: nn.Module, *shape: int) -> Made:
    """Features of 3 inputs of that shape, flattened into a linear head over 3 classes."""
    x = _normal(3, *shape)
    with torch.no_grad():
        width = features.double().eval()(x).flatten(1).shape[1]
    return nn.Sequential(features, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3)), x, _classes(3)


def _conv(name: str, tags: str, shape: tuple[int, ...], make: Callable[[], nn.Module]) -> None:
    _add(name, f"linear {tags}", lambda: _classifier(make(), *shape))


_conv("conv1d", "conv", (2, 9), lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2))
_conv("conv2d", "conv", (2, 6, 5), lambda: nn.Conv2d(2, 3, (3, 2), (2, 1), padding=(1, 2), dilation=(1, 2)))
_conv("conv3d", "conv", (2, 4, 3, 4), lambda: nn.Conv3d(2, 2, (2, 3, 2), (2, 1, 2), 1, dilation=(1, 1, 2)))
_conv("conv2d_no_bias", "conv", (2, 4, 4), lambda: nn.Conv2d(2, 3, 3, bias=False))
_conv("conv2d_grouped", "conv", (4, 4, 4), lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2))
_conv("conv2d_depthwise", "conv", (3, 4, 4), lambda: nn.Conv2d(3, 6, 2, groups=3))
_conv("conv1d_circular", "conv", (2, 7), lambda: nn.Conv1d(2, 3, 4, 2, padding=3, padding_mode="circular"))
_conv("conv2d_reflect", "conv", (2, 4, 3), lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"))
_conv(
    "conv2d_replicate",
    "conv",
    (2, 3, 4),
    lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate"),
)
_conv("conv2d_same_even", "conv", (2, 4, 5), lambda: _Quiet(nn.Conv2d(2, 2, (4, 2), padding="same")))
_conv(
    "conv1d_same_circular",
    "conv",
    (2, 6),
    lambda: nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"),
)
_conv("conv_transpose1d", "conv_transpose", (3, 4), lambda: nn.ConvTranspose1d(3, 2, 3, 2, 1, output_padding=1))
_conv(
    "conv_transpose2d",
    "conv_transpose",
    (4, 2, 2),
    lambda: nn.ConvTranspose2d(4, 4, (2, 3), 2, padding=1, output_padding=(0, 1), groups=2, dilation=(1, 2)),
)


@_case("conv sequence", class_axis=1)
def segmentation() -> Made:
    """Logits [N, C, H, W] for labels [N, H, W]."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    return net, _normal(3, 2, 4, 3), _classes(3, 4, 3)


class _Residual(nn.Module):
    def __init__(self, *body: nn.Module):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """x + body(x)."""
        return x + self.body(x)


@_case("conv linear piecewise_linear")
def residual_cnn() -> Made:
    """A stem, a residual block of two convolutions, the mean over pixels and a head."""
    block = _Residual(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1, bias=False))
    stem = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    net = nn.Sequential(stem, nn.ReLU(), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    return net, _normal(4, 2, 6, 6), _classes(4)


# --- sequences and their layouts --------------------------------------------------------------------------

_T = 5


def _tokens(model: nn.Module) -> Made:
    """Inputs [3, T, 4] with a label out of 3 for each position."""
    return model, _normal(3, _T, 4), _classes(3, _T)


def _sequence(name: str, tags: str, make: Callable[[], nn.Module], **options: Any) -> None:
    _add(name, f"sequence {tags}", lambda: _tokens(make()), **options)


def _swap(x: Tensor) -> Tensor:
    """From [N, T, …] to [T, N, …] and back."""
    return x.transpose(0, 1)


def _split_time(z: Tensor) -> Tensor:
    """From [T·N, …] to [N, T, …]."""
    return _swap(z.unflatten(0, (_T, -1)))


def _pointwise() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 5, 1), nn.Tanh(), nn.Conv1d(5, 3, 1))


def _merged() -> nn.Module:
    return _Apply(_mlp(4, 5, 3), before=lambda x: x.flatten(0, 1), after=lambda z: z.unflatten(0, (-1, _T)))


def _merged_time_major() -> nn.Module:
    return _Apply(_mlp(4, 5, 3), before=lambda x: _swap(x).flatten(0, 1), after=_split_time)


# All of these are one function with one set of weights for a seed: only layouts differ.
_sequence("sequence_linear", "linear", lambda: _mlp(4, 5, 3))
_sequence("sequence_conv", "conv", lambda: _Apply(_pointwise(), before=lambda x: x.mT), class_axis=1)
_sequence("merged_inside", "linear layout", _merged)
_sequence("merged_time_major", "linear layout", _merged_time_major)
_sequence("time_first_inside", "linear layout", lambda: _Apply(_mlp(4, 5, 3), before=_swap, after=_swap))


@_case("linear sequence layout", rows=_T, examples=3)
def flattened_outputs() -> Made:
    """Logits [N·T, C], example-major, as language models hand them to the loss."""
    net, x, y = _tokens(_mlp(4, 5, 3))
    return _Apply(net, after=lambda z: z.flatten(0, 1)), x, y.flatten()


@_case("linear sequence")
def pooled_sequence() -> Made:
    """One label for a sequence: positions share weights, and their outputs are averaged."""
    return _Apply(_mlp(4, 5, 3), after=lambda z: z.mean(1)), _normal(4, _T, 4), _classes(4)


# --- normalization ----------------------------------------------------------------------------------------


def _norm(name: str, tags: str, make: Callable[[], nn.Module], *shape: int) -> None:
    """Inputs [*shape, 4] through a layer, the norm of its 5 outputs and a head."""

    def build() -> Made:
        net = nn.Sequential(nn.Linear(4, 5), make(), nn.Tanh(), nn.Linear(5, 3))
        return net, _normal(*shape, 4), _classes(*shape)

    _add(name, f"norm linear {tags}", build)


def _conv_norm(name: str, make: Callable[[], nn.Module]) -> None:
    _conv(name, "norm conv", (2, 4, 3), lambda: nn.Sequential(nn.Conv2d(2, 4, 2), make()))


def _trained(norm: Any) -> nn.Module:
    """Running statistics as training would have left them, not the initial 0 and 1."""
    norm.running_mean.copy_(0.3 * torch.randn_like(norm.running_mean))
    norm.running_var.copy_(0.5 + torch.rand_like(norm.running_var))
    return norm


_norm("layer_norm", "sequence", lambda: nn.LayerNorm(5), 3, _T)
_norm("layer_norm_no_bias", "", lambda: nn.LayerNorm(5, bias=False), 4)
_norm("layer_norm_two_axes", "sequence", lambda: nn.LayerNorm([_T, 5]), 3, _T)
_norm("rms_norm", "sequence", lambda: nn.RMSNorm(5), 3, _T)
_norm("batch_norm1d", "", lambda: _trained(nn.BatchNorm1d(5)), 4)
_conv_norm("batch_norm2d", lambda: _trained(nn.BatchNorm2d(4)))
_conv_norm("group_norm", lambda: nn.GroupNorm(2, 4))
_conv_norm("instance_norm", lambda: nn.InstanceNorm2d(4, affine=True))
_conv_norm("instance_norm_running", lambda: _trained(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)))


# --- embeddings -------------------------------------------------------------------------------------------


@_case("embedding linear sequence")
def embedding() -> Made:
    """The mean over tokens, some of them padding, and a head."""
    tokens = torch.tensor([[1, 2, 0, 0], [3, 3, 4, 0], [5, 1, 2, 6]])
    net = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 5), nn.Tanh())
    return nn.Sequential(_Apply(net, after=lambda h: h.mean(1)), nn.Linear(5, 3)), tokens, _classes(3)


def _language_model(tied: bool) -> Made:
    """Next-token logits [N, T, vocabulary]; tied, the embedding's matrix is the head's weight too."""
    net: Any = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7, bias=False))
    if tied:
        net[3].weight = net[0].weight
    return net, _classes(3, _T, classes=7), _classes(3, _T, classes=7)


_add("language_model", "embedding linear sequence", lambda: _language_model(False))
_add("language_model_tied", "embedding linear sequence tied generic", lambda: _language_model(True))


# --- attention --------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Self-attention of [N, T, 4] and a head over 3 classes at each position."""

    def __init__(self, *, need_weights: bool = False, causal: bool = False, **settings: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **settings)
        self.head = nn.Linear(4, 3)
        self.need_weights, self.causal = need_weights, causal

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits [N, T, 3], whichever layout the attention itself works in."""
        h = x if self.attention.batch_first else _swap(x)
        mask = torch.ones(_T, _T, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        h, _ = self.attention(h, h, h, key_padding_mask, need_weights=self.need_weights, attn_mask=mask)
        return self.head((h if self.attention.batch_first else _swap(h)).tanh())


class _CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Logits [N, T, 3]."""
        return self.head(self.attention(query, key, value, need_weights=False)[0].tanh())


def _biased_keys() -> nn.Module:
    return _Attention(batch_first=True, add_bias_kv=True, add_zero_attn=True)


_sequence("attention", "attention linear", lambda: _Attention(batch_first=True))
_sequence("attention_time_first", "attention linear layout", lambda: _Attention(need_weights=True))
_sequence("attention_causal", "attention linear", lambda: _Attention(batch_first=True, causal=True))
_sequence("attention_no_bias", "attention linear", lambda: _Attention(batch_first=True, bias=False))
_sequence("attention_bias_kv", "attention linear generic", _biased_keys)


@_case("attention linear sequence inputs")
def attention_padded() -> Made:
    """Keys of padding are masked; the inputs are a mapping."""
    net, x, y = _tokens(_Attention(batch_first=True))
    padding = torch.arange(_T) >= torch.tensor([[5], [3], [4]])
    return net, {"x": x, "key_padding_mask": padding}, y


@_case("attention linear sequence inputs")
def attention_cross() -> Made:
    """Keys and values from elsewhere, of other widths and another length."""
    x = (_normal(3, 4, 4), _normal(3, 3, 3), _normal(3, 3, 2))
    return _CrossAttention(), x, _classes(3, 4)


def _transformer(**settings: Any) -> nn.Module:
    """A gelu encoder layer (smooth, so that its Hessian can be checked by differences) and a head."""
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, activation="gelu", **settings)
    batch_first = settings.get("batch_first", False)
    return nn.Sequential(layer if batch_first else _Apply(layer, before=_swap, after=_swap), nn.Linear(4, 3))


_sequence("transformer", "attention linear norm", lambda: _transformer(batch_first=True))
_sequence("transformer_time_first", "attention linear norm layout", lambda: _transformer(norm_first=True))


# --- shared weights ---------------------------------------------------------------------------------------


class _Repeated(nn.Module):
    """A module called several times, then a head."""

    def __init__(self, cell: nn.Module, head: nn.Module, times: int = 2):
        super().__init__()
        self.cell, self.head, self.times = cell, head, times

    def forward(self, x: Tensor) -> Tensor:
        """head(tanh∘cell applied `times` times)."""
        for _ in range(self.times):
            x = self.cell(x).tanh()
        return self.head(x)


def _tied(*names: str) -> nn.Module:
    """An MLP whose second layer takes these parameters from the first."""
    net: Any = _mlp(4, 4, 4, 3)
    for name in names:
        setattr(net[2], name, getattr(net[0], name))
    return net


_linear("repeated_linear", "repeated", lambda: _Repeated(nn.Linear(4, 4), nn.Linear(4, 3)))
_linear("tied_weights", "tied", lambda: _tied("weight"))
_linear("tied_weights_and_biases", "tied", lambda: _tied("weight", "bias"))


@_case("conv linear repeated")
def repeated_conv() -> Made:
    """A convolution called three times."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    return _Repeated(nn.Conv1d(2, 2, 3, padding=1), head, times=3), _normal(3, 2, 6), _classes(3)


@_case("linear repeated sequence")
def repeated_lengths() -> Made:
    """A linear layer called on inputs of different lengths: 5 positions, then 1."""
    fc = nn.Linear(4, 4)
    second = _Apply(fc, before=lambda h: h.tanh().mean(1, keepdim=True), after=lambda h: h.squeeze(1))
    return nn.Sequential(fc, second, nn.Tanh(), nn.Linear(4, 3)), _normal(3, _T, 4), _classes(3)


# --- recurrent layers, bare parameters and other uses of weights ------------------------------------------


def _lstm() -> nn.Module:
    return nn.Sequential(_Apply(nn.LSTM(4, 3, batch_first=True), after=lambda h: h[0]), nn.Linear(3, 3))


_sequence("lstm", "recurrent linear generic", _lstm)


@_case("recurrent linear sequence layout generic")
def gru() -> Made:
    """A time-first recurrent layer whose last state is classified."""
    net = _Apply(nn.GRU(3, 4), before=_swap, after=lambda h: h[1][-1])
    return nn.Sequential(net, nn.Linear(4, 3)), _normal(3, 4, 3), _classes(3)


class _BareParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.position = nn.Parameter(torch.zeros(_T, 4))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of scale · x + position."""
        return self.fc((self.scale * x + self.position).tanh())


class _SlicedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(_T + 2, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of x + the first rows of a table that is never called."""
        return self.fc((x + self.position.weight[: x.shape[1]]).tanh())


class _FunctionalReuse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """A weight used by its module and, unseen by any hook, beside it."""
        return self.head(F.linear(self.fc(x).tanh(), self.fc.weight).tanh())


class _ScaledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        """A linear layer by type, with another function of its weight."""
        return F.linear(input, 2.0 * self.weight, self.bias)


class _Row(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        """Rows of unit length."""
        return weight / weight.norm(dim=1, keepdim=True)


def _parametrized() -> nn.Module:
    """A linear layer whose weight is no parameter, but computed from one."""
    net = _mlp(4, 5, 3)
    register_parametrization(net[0], "weight", _Row())
    return net


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 3)
        self.net = _mlp(4, 5, 3)
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Logits that depend on `net` alone."""
        return self.net(x)


def _frozen(*names: str) -> nn.Module:
    net = _mlp(4, 5, 5, 3)
    for name in names:
        net.get_parameter(name).requires_grad_(False)
    return net


_sequence("bare_parameters", "linear generic", _BareParameters)
_sequence("sliced_positions", "linear embedding generic", _SlicedPositions)
_linear("functional_reuse", "generic", _FunctionalReuse)
_linear("scaled_linear", "generic", lambda: nn.Sequential(_ScaledLinear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
_linear("parametrized", "generic", _parametrized)
_linear("prelu", "generic", lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 3)))
_linear("unused_parameters", "unused generic", _Unused)
_linear("frozen_weight", "frozen", lambda: _frozen("2.weight"))
_linear("frozen_bias", "frozen", lambda: _frozen("0.bias"))
_linear("frozen_layer", "frozen", lambda: _frozen("0.weight", "0.bias"))


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Logits of the sum of two maps."""
        return self.head((self.left(first) + self.right(second)).tanh())


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(3, 2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Logits of a bilinear form of two inputs."""
        return self.head(self.mix(first, second).tanh())


_add("two_inputs", "linear inputs", lambda: (_TwoInputs(), (_normal(4, 3), _normal(4, 2)), _classes(4)))
_add("bilinear", "linear inputs generic", lambda: (_Bilinear(), (_normal(4, 3), _normal(4, 2)), _classes(4)))


# --- likelihoods and their options ------------------------------------------------------------------------

_WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
_COUNTED = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]) == 1


def _classification() -> Made:
    return (
        _mlp(4, 5, 3),
        _normal(4, 4),
        torch.tensor([2, 0, 1, 0]),
    )  # every class, so that every weight matters


def _ignoring(index: int) -> Made:
    net, x, y = _tokens(_mlp(4, 5, 3))
    return net, x, y.masked_fill(~_COUNTED, index)


_add("class_weights", "linear weights", _classification, weight=_WEIGHT)
_add("label_smoothing", "linear smoothing", _classification, label_smoothing=0.2)
_add("weights_smoothing", "linear weights smoothing", _classification, weight=_WEIGHT, label_smoothing=0.2)
_add("ignore_index", "linear sequence mask", lambda: _ignoring(-100), ignore_index=-100)
# A real class is ignored here, wherever it occurs.
_add("ignore_class", "linear sequence mask weights", lambda: _ignoring(1), ignore_index=1, weight=_WEIGHT)


def _gaussian(name: str, tags: str, build: Callable[[], Made], **options: Any) -> None:
    _add(name, f"linear {tags}", build, likelihood="gaussian", **options)


def _bernoulli(name: str, tags: str, build: Callable[[], Made], **options: Any) -> None:
    _add(name, f"linear {tags}", build, likelihood="bernoulli", **options)


def _squeezed() -> Made:
    """Outputs [N], with no axis for classes."""
    return _Apply(_mlp(4, 5, 1), after=lambda z: z.squeeze(1)), _normal(5, 4), _coins(5)


_gaussian("regression", "", lambda: (_mlp(4, 5, 3), _normal(4, 4), _normal(4, 3)))
_gaussian("scalar_output", "", lambda: (_mlp(4, 5, 1), _normal(5, 4), _normal(5, 1)))
_gaussian(
    "regression_masked",
    "sequence mask",
    lambda: (_mlp(4, 5, 2), _normal(3, _T, 4), _normal(3, _T, 2)),
    mask=_COUNTED,
)
_gaussian(
    "regression_entries_masked",
    "mask",
    lambda: (_mlp(4, 5, 5), _normal(3, 4), _normal(3, 5)),
    mask=_COUNTED,
)
_bernoulli("multi_label", "", lambda: (_mlp(4, 5, 3), _normal(4, 4), _coins(4, 3)))
_bernoulli("squeezed_output", "", _squeezed)
_bernoulli(
    "multi_label_masked",
    "sequence mask",
    lambda: (_mlp(4, 5, 2), _normal(3, _T, 4), _coins(3, _T, 2)),
    mask=_COUNTED,
)

CASES: tuple[Case, ...] = tuple(_cases.values())
