"""Networks drawn at random, each with one fault drawn at random: a set that no threshold of `lw.doctor` has seen.

A number names a set. Everything comes from it: family, width, depth, nonlinearity, data, whether the network was
trained for some steps before, which fault, where in the network and how large. Written, and its ranges fixed, without
looking at the doctor's rules; a set counts as blind the first time that it is run.

Families are others than those of `doctor_zoo`: residual CNN with group norm, separable CNN with batch norm, dilated
convolutions in time, Llama-like language model (RMSNorm, SwiGLU, scaled_dot_product_attention), Perceiver, DeepSets,
graph convolutions, bidirectional recurrent networks, DenseNet-like perceptron, auto-encoder, network of Fourier
features, tabular perceptron, multi-label perceptron, plain deep perceptrons and convolutions.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from doctor_zoo import Case, seeded
from torch import Tensor, nn
from torch.nn import functional as F

# --- drawing ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def whole(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def log_uniform(low: float, high: float) -> float:
    return math.exp(math.log(low) + (math.log(high) - math.log(low)) * torch.rand(()).item())


def choice(options: Sequence[T]) -> T:
    return options[whole(0, len(options) - 1)]


def coin(probability: float = 0.5) -> bool:
    return torch.rand(()).item() < probability


SMOOTH_OR_RECTIFIED = (nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh)


@dataclass
class Net:
    """A healthy network with its data, and the places at which a fault can be planted."""

    family: str
    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: str | None = None
    hidden: list[nn.Module] = field(default_factory=list)
    """Linear and convolutional layers whose outputs go into the nonlinearity."""
    blocks: list[nn.Module] = field(default_factory=list)
    """Parts that someone could freeze or forget."""
    attention: list[Callable[[float], None]] = field(default_factory=list)
    """Each multiplies the queries and keys of one layer."""

    @property
    def head(self) -> nn.Linear:
        return self.model.get_submodule("head")  # type: ignore[return-value]


class Body(nn.Module):
    """``head(body(x))``; with `cut` no gradient reaches the body."""

    cut = False

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h.detach() if self.cut else h)


# --- data -------------------------------------------------------------------------------------------------------------


def even_labels(f: Tensor) -> Tensor:
    return ((f - f.mean(0)) / f.std(0)).argmax(1)


def table(n: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    """Columns of several laws, standardised; labels by a random teacher with products of columns."""
    x = torch.randn(n, features)
    x[:, ::3] = torch.rand(n, len(range(0, features, 3))) * 3.4 - 1.7
    x[:, 1::5] = x[:, 1::5].sign()
    f = x @ torch.randn(features, classes) + (x @ torch.randn(features, classes) / 2).sin() * 2
    return x, even_labels(f)


def pictures(n: int, classes: int, size: int) -> tuple[Tensor, Tensor]:
    """Colour gratings whose direction is the label, with noise."""
    y = torch.randint(classes, (n,))
    grid = torch.linspace(-1, 1, size)
    angle = math.pi * y / classes
    wave = angle.cos()[:, None, None] * grid + angle.sin()[:, None, None] * grid[:, None]
    phase = 2 * math.pi * torch.rand(n, 1, 1)
    x = torch.sin(5 * wave + phase)[:, None] * torch.tensor([1.0, 0.7, 0.4])[:, None, None]
    x = x + 0.5 * torch.randn(n, 3, size, size)
    return (x - x.mean()) / x.std(), y


def series(n: int, length: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    """Oscillations with noise; the class is the frequency. [N, T, F]"""
    y = torch.randint(classes, (n,))
    time = torch.arange(length) / length
    wave = torch.sin(2 * math.pi * (1.0 + y)[:, None] * time + 6.28 * torch.rand(n, 1))
    x = wave[..., None] * torch.randn(features) + 0.5 * torch.randn(n, length, features)
    return (x - x.mean()) / x.std(), y


def letters(n: int, length: int, size: int) -> tuple[Tensor, Tensor]:
    """Text whose next letter depends on the last two."""
    table_ = torch.softmax(2.5 * torch.randn(size, size), -1)
    other = torch.softmax(2.5 * torch.randn(size, size), -1)
    rows = [torch.randint(size, (n,)), torch.randint(size, (n,))]
    for _ in range(length - 1):
        chances = 0.7 * table_[rows[-1]] + 0.3 * other[rows[-2]]
        rows.append(torch.multinomial(chances, 1)[:, 0])
    tokens = torch.stack(rows, 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def clouds(n: int, points: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    """Sets of points; the class is the covariance that they were drawn with."""
    y = torch.randint(classes, (n,))
    mix = torch.randn(classes, features, features) / features**0.5
    x = torch.einsum("npf,nfg->npg", torch.randn(n, points, features), mix[y]) + 0.5 * torch.randn(n, 1, features)
    return x / x.std(), y


# --- families ---------------------------------------------------------------------------------------------------------


def perceptron(widths: list[int], nonlinearity: type[nn.Module], gain: float | None = None) -> nn.Sequential:
    """Linear layers, each followed by the nonlinearity; torch's own initialisation unless a gain is given."""
    parts: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        if gain is not None:
            nn.init.normal_(layer.weight, std=(gain / inputs) ** 0.5)
            nn.init.zeros_(layer.bias)
        parts += [layer, nonlinearity()]
    return nn.Sequential(*parts)


def linears(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]


def tabular(nonlinearity: type[nn.Module] | None = None, n: int = 700) -> Net:
    act, width, classes, features = (
        nonlinearity or choice(SMOOTH_OR_RECTIFIED),
        whole(40, 180),
        whole(2, 6),
        whole(12, 40),
    )
    body = perceptron([features] + [width] * whole(2, 3), act)
    model = Body(body, nn.Linear(width, classes))
    return Net("tabular perceptron", model, *table(n, features, classes), hidden=linears(body), blocks=linears(body))


def multi_label(nonlinearity: type[nn.Module] | None = None, n: int = 700) -> Net:
    net = tabular(nonlinearity, n)
    labels = whole(3, 6)
    net.y = ((net.x @ torch.randn(net.x.shape[1], labels)).tanh() + 0.3 * torch.randn(n, labels) > 0).float()
    net.model.head = nn.Linear(net.head.in_features, labels)
    net.family, net.likelihood = "multi-label perceptron", "bernoulli"
    return net


class Dense(nn.Module):
    def __init__(self, features: int, growth: int, depth: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features + growth * k, growth) for k in range(depth))
        self.act, self.width = act(), features + growth * depth

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, self.act(layer(x))], -1)
        return x


def dense_net(nonlinearity: type[nn.Module] | None = None, n: int = 700) -> Net:
    features, classes = whole(12, 30), whole(3, 6)
    body = Dense(features, whole(24, 64), whole(3, 5), nonlinearity or choice(SMOOTH_OR_RECTIFIED))
    model = Body(body, nn.Linear(body.width, classes))
    return Net("DenseNet-like", model, *table(n, features, classes), hidden=list(body.layers), blocks=list(body.layers))


class Residual(nn.Module):
    """Pre-activation residual block of convolutions with group norm."""

    def __init__(self, width: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act(self.conv1(self.norm(x))))


class Average(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


def residual_cnn(nonlinearity: type[nn.Module] | None = None, n: int = 320) -> Net:
    width, classes, act = 4 * whole(2, 5), whole(3, 5), nonlinearity or choice((nn.ReLU, nn.SiLU, nn.GELU))
    stages = [Residual(width, act) for _ in range(whole(2, 4))]
    body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *stages, nn.GroupNorm(1, width), Average())
    net = Net("residual CNN", Body(body, nn.Linear(width, classes)), *pictures(n, classes, whole(9, 13)))
    net.hidden, net.blocks = [stage.conv1 for stage in stages], list(stages)
    return net


def separable_cnn(nonlinearity: type[nn.Module] | None = None, n: int = 320) -> Net:
    width, classes, act = 4 * whole(3, 6), whole(3, 5), nonlinearity or choice((nn.ReLU, nn.Hardswish, nn.SiLU))
    stages = []
    for _ in range(whole(2, 3)):
        stages.append(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
                nn.BatchNorm2d(width),
                nn.Conv2d(width, width, 1),
                act(),
            )
        )
    body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, stride=2), *stages, Average())
    net = Net("separable CNN", Body(body, nn.Linear(width, classes)), *pictures(n, classes, whole(10, 14)))
    net.hidden, net.blocks = [stage[2] for stage in stages], list(stages)
    return net


class Dilated(nn.Module):
    def __init__(self, width: int, dilation: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, dilation=dilation, padding=dilation)
        self.mix, self.act = nn.Conv1d(width, width, 1), act()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.act(self.conv(x)))


class LastMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


class TimeLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def dilated(nonlinearity: type[nn.Module] | None = None, n: int = 320, depth: int | None = None) -> Net:
    width, classes, features = whole(16, 40), whole(3, 5), whole(3, 8)
    act = nonlinearity or choice((nn.ReLU, nn.GELU, nn.Tanh))
    stages = [Dilated(width, 2 ** (k % 3), act) for k in range(depth or whole(2, 4))]
    body = nn.Sequential(TimeLast(), nn.Conv1d(features, width, 1), *stages, LastMean())
    model = Body(body, nn.Linear(width, classes))
    net = Net("dilated convolutions", model, *series(n, whole(16, 28), features, classes))
    net.hidden, net.blocks = [stage.conv for stage in stages], list(stages)
    return net


class SwiGLUBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.RMSNorm(width), nn.RMSNorm(width), heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x)
        q, k, v = (f(z).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        z = self.norm2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))

    def sharpen(self, factor: float) -> None:
        self.q.weight.mul_(factor)
        self.k.weight.mul_(factor)


class Places(nn.Module):
    def __init__(self, size: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.places.weight[: x.shape[1]]


def llama(nonlinearity: type[nn.Module] | None = None, n: int = 128) -> Net:
    heads, size, length = whole(2, 4), whole(16, 40), whole(16, 28)
    width = heads * choice((8, 12, 16))
    stages = [SwiGLUBlock(width, heads) for _ in range(whole(1, 3))]
    body = nn.Sequential(Places(size, length, width), *stages, nn.RMSNorm(width))
    net = Net("Llama-like", Body(body, nn.Linear(width, size, bias=False)), *letters(n, length, size))
    net.hidden, net.blocks, net.attention = [], list(stages), [stage.sharpen for stage in stages]
    return net


class Perceiver(nn.Module):
    """Learned queries look at a set through torch's attention, then a perceptron."""

    def __init__(self, features: int, width: int, queries: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.queries = nn.Linear(features, width), nn.Parameter(torch.randn(queries, width))
        self.look = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 2 * width), act(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.embed(x))
        h = self.look(self.queries.expand(len(x), -1, -1), z, z, need_weights=False)[0]
        return (h + self.down(self.act(self.up(self.norm2(h))))).flatten(1)

    def sharpen(self, factor: float) -> None:
        self.look.in_proj_weight[: 2 * self.look.embed_dim].mul_(factor)


def perceiver(nonlinearity: type[nn.Module] | None = None, n: int = 400) -> Net:
    width, queries, classes, features = 4 * whole(4, 10), whole(2, 5), whole(3, 5), whole(4, 9)
    body = Perceiver(features, width, queries, nonlinearity or choice((nn.ReLU, nn.GELU)))
    model = Body(body, nn.Linear(width * queries, classes))
    net = Net("Perceiver", model, *clouds(n, whole(8, 16), features, classes))
    net.hidden, net.blocks, net.attention = [body.up], [body.embed, body.look, body.up], [body.sharpen]
    return net


class Pooled(nn.Module):
    def __init__(self, each: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.each, self.after = each, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.each(x).mean(1))


def deep_sets(nonlinearity: type[nn.Module] | None = None, n: int = 500) -> Net:
    width, classes, features = whole(32, 96), whole(3, 5), whole(5, 12)
    act = nonlinearity or choice((nn.ReLU, nn.GELU, nn.ELU))
    body = Pooled(perceptron([features, width, width], act), perceptron([width, width], act))
    net = Net("DeepSets", Body(body, nn.Linear(width, classes)), *clouds(n, whole(8, 14), features, classes))
    net.hidden = net.blocks = linears(body)
    return net


class Graph(nn.Module):
    def __init__(self, nodes: int, features: int, width: int, depth: int, act: type[nn.Module]) -> None:
        super().__init__()
        adjacency = (torch.rand(nodes, nodes) < 0.3).float()
        adjacency = ((adjacency + adjacency.T) > 0).float() + torch.eye(nodes)
        self.register_buffer("mean", adjacency / adjacency.sum(1, keepdim=True))
        self.layers = nn.ModuleList(nn.Linear(features if k == 0 else width, width) for k in range(depth))
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(self.mean @ x))
        return x.mean(1)


def graph(nonlinearity: type[nn.Module] | None = None, n: int = 500) -> Net:
    nodes, features, classes, width = whole(6, 10), whole(4, 10), whole(3, 4), whole(32, 80)
    body = Graph(nodes, features, width, 2, nonlinearity or choice((nn.ReLU, nn.GELU, nn.Tanh)))
    x = torch.randn(n, nodes, features)
    f = (body.mean @ x).tanh().flatten(1) @ torch.randn(nodes * features, classes)
    f = f + 4 * (x.mean(1) @ torch.randn(features, classes))
    net = Net("graph convolutions", Body(body, nn.Linear(width, classes)), x, even_labels(f))
    net.hidden = net.blocks = list(body.layers)
    return net


class Ends(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], features: int, width: int) -> None:
        super().__init__()
        self.rnn = kind(features, width, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].mean(1)


def recurrent(nonlinearity: type[nn.Module] | None = None, n: int = 400) -> Net:
    kind = nn.RNN if nonlinearity else choice((nn.GRU, nn.LSTM))
    width, classes, features = whole(16, 40), whole(3, 4), whole(3, 8)
    body = Ends(kind, features, width)
    net = Net(
        "bidirectional " + kind.__name__, Body(body, nn.Linear(2 * width, classes)), *series(n, 16, features, classes)
    )
    net.blocks = [body.rnn]
    return net


def auto_encoder(nonlinearity: type[nn.Module] | None = None, n: int = 600) -> Net:
    features, width, code = whole(16, 32), whole(32, 80), whole(4, 8)
    body = perceptron([features, width, code * 2, width], nonlinearity or choice((nn.ELU, nn.Tanh, nn.GELU)))
    x = torch.randn(n, code) @ torch.randn(code, features) / code**0.5 + 0.3 * torch.randn(n, features)
    x = x / x.std(0)
    net = Net("auto-encoder", Body(body, nn.Linear(width, features)), x, x.clone(), "gaussian")
    net.hidden = net.blocks = linears(body)
    return net


class Waves(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 3 * torch.randn(2, width // 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sin(x @ self.frequencies), torch.cos(x @ self.frequencies)], -1)


def fourier(nonlinearity: type[nn.Module] | None = None, n: int = 600) -> Net:
    width, outputs = 2 * whole(16, 40), whole(1, 3)
    body = nn.Sequential(Waves(width), perceptron([width, width, width], nonlinearity or choice((nn.ReLU, nn.GELU))))
    x = 2 * torch.rand(n, 2) - 1
    f = torch.sin(x @ torch.randn(2, 12) * 4) @ torch.randn(12, outputs)
    net = Net("Fourier features", Body(body, nn.Linear(width, outputs)), x, (f - f.mean(0)) / f.std(0), "gaussian")
    net.hidden = net.blocks = linears(body)
    return net


def plain_deep(
    nonlinearity: type[nn.Module] = nn.ReLU, n: int = 500, depth: int | None = None, gain: float = 2.0
) -> Net:
    width, classes, features = whole(32, 80), whole(3, 5), whole(12, 24)
    body = perceptron([features] + [width] * (depth or whole(5, 8)), nonlinearity, gain)
    net = Net("plain deep perceptron", Body(body, nn.Linear(width, classes)), *table(n, features, classes))
    net.hidden = net.blocks = linears(body)
    return net


def plain_time(
    nonlinearity: type[nn.Module] = nn.ReLU, n: int = 300, depth: int | None = None, gain: float = 2.0
) -> Net:
    """Convolutions in time without residuals."""
    width, classes, features = whole(16, 32), whole(3, 4), whole(3, 6)
    parts: list[nn.Module] = [TimeLast()]
    for k in range(depth or whole(4, 6)):
        layer = nn.Conv1d(features if k == 0 else width, width, 3, padding=1)
        nn.init.normal_(layer.weight, std=(gain / layer.weight[0].numel()) ** 0.5)
        nn.init.zeros_(layer.bias)
        parts += [layer, nonlinearity()]
    body = nn.Sequential(*parts, LastMean())
    net = Net("plain convolutions in time", Body(body, nn.Linear(width, classes)), *series(n, 20, features, classes))
    net.hidden = net.blocks = linears(body)
    return net


VALUES = (auto_encoder, fourier)
VECTORS = (tabular, multi_label, dense_net)
CLASSES = (tabular, dense_net, residual_cnn, separable_cnn, dilated, perceiver, deep_sets, graph, recurrent)
REAL_INPUTS = (*CLASSES, multi_label)
HIDDEN = (
    tabular,
    multi_label,
    dense_net,
    residual_cnn,
    separable_cnn,
    dilated,
    perceiver,
    deep_sets,
    graph,
    auto_encoder,
)
ALL = (*CLASSES, multi_label, llama, *VALUES, plain_deep, plain_time)


# --- before the fault -------------------------------------------------------------------------------------------------


def loss_of(net: Net) -> Tensor:
    f = net.model(net.x)
    if net.likelihood == "gaussian":
        return 0.5 * (f - net.y).square().sum(-1).mean()
    if net.likelihood == "bernoulli":
        return F.binary_cross_entropy_with_logits(f, net.y, reduction="none").sum(-1).mean()
    return F.cross_entropy(f.flatten(0, -2), net.y.flatten())


def trained(net: Net, steps: int) -> Net:
    """After some steps of Adam: the middle of a training that goes well."""
    opt = torch.optim.Adam(net.model.parameters(), lr=2e-3)
    net.model.train()
    for _ in range(steps):
        opt.zero_grad()
        loss_of(net).backward()
        opt.step()
    net.model.zero_grad()
    return net


def maybe_trained(net: Net) -> Net:
    return trained(net, whole(10, 40)) if coin(0.35) else net


# --- faults -----------------------------------------------------------------------------------------------------------


def case(net: Net, optimizer: torch.optim.Optimizer | None = None) -> Case:
    if optimizer is None and coin(0.3):  # a sound optimizer that is no part of the fault
        optimizer = torch.optim.Adam(net.model.parameters(), lr=1e-3)
    return Case(net.model, (net.x, net.y), optimizer, net.likelihood)


def input_scale(net: Net) -> Case:
    kind = whole(0, 2)
    if kind == 0:
        net.x = net.x * log_uniform(100, 5000)
    elif kind == 1:
        axis = 1 if net.x.ndim == 4 else -1
        one = torch.ones(net.x.shape[axis])
        one[whole(0, len(one) - 1)] = log_uniform(300, 10000)
        net.x = net.x * (one[:, None, None] if net.x.ndim == 4 else one)
    else:
        net.x = net.x * log_uniform(1e-5, 1e-3)
    return case(net)


def input_offset(net: Net) -> Case:
    net.x = net.x + log_uniform(30, 200)
    return case(net)


def constant_features(net: Net) -> Case:
    """Columns that nobody fills in, so that the network is wider at its input than what it is told."""
    keep = torch.rand(net.x.shape[-1]) > 0.6 + 0.3 * torch.rand(())
    keep[:3] = True
    net.x = torch.where(keep, net.x, torch.zeros(()))
    net.y = net.y if net.likelihood else even_labels(net.x @ torch.randn(net.x.shape[-1], int(net.y.max()) + 1))
    return case(net)


def class_imbalance(net: Net) -> Case:
    common = whole(0, int(net.y.max()))
    kept = (net.y == common) | (torch.rand(len(net.y)) < log_uniform(0.02, 0.06))
    net.x, net.y = net.x[kept], net.y[kept]
    return case(net)


def unrelated_labels(net: Net) -> Case:
    net.y = net.y[torch.randperm(len(net.y))]
    return case(net)


def target_scale(net: Net) -> Case:
    net.y = net.y * log_uniform(100, 3000) + (log_uniform(100, 5000) if coin() else 0.0)
    return case(net)


def output_scale(net: Net) -> Case:
    with torch.no_grad():
        net.head.weight.mul_(log_uniform(60, 200))
    return case(net)


def some_hidden(net: Net) -> list[nn.Module]:
    """One hidden layer, or all of them."""
    return [choice(net.hidden)] if coin() else net.hidden


def dead_units(net: Net) -> Case:
    share = 0.6 + 0.35 * torch.rand(())
    with torch.no_grad():
        for layer in some_hidden(net):
            layer.bias[torch.rand(len(layer.bias)) < share] -= log_uniform(12, 60)
    return case(net)


def saturated_units(net: Net) -> Case:
    with torch.no_grad():
        if "RNN" in net.family:
            for p in net.blocks[0].parameters():
                p.mul_(log_uniform(15, 40))
        else:
            for layer in some_hidden(net):
                layer.weight.mul_(log_uniform(40, 120))
    return case(net)


def collapsed_attention(net: Net) -> Case:
    with torch.no_grad():
        factor = log_uniform(10, 30)
        for sharpen in net.attention:
            sharpen(factor)
    return case(net)


def identical_units(net: Net) -> Case:
    layer, value = choice(net.hidden), choice((0.0, 0.02, 0.1))
    nn.init.constant_(layer.weight, value)
    nn.init.zeros_(layer.bias)
    return case(net)


def exploding_activations(net: Net) -> Case:
    factor = log_uniform(2.5, 5)
    with torch.no_grad():
        for stage in net.blocks:
            for part in linears(stage):
                part.weight.mul_(factor)
    return case(net)


def vanishing_activations(net: Net) -> Case:
    factor = log_uniform(0.08, 0.25)
    with torch.no_grad():
        for layer in net.hidden[1:]:
            layer.weight.mul_(factor)
    return case(net)


def frozen(net: Net) -> Case:
    choice([block for block in net.blocks if any(True for _ in block.parameters())]).requires_grad_(False)
    return case(net)


def unused(net: Net) -> Case:
    if coin():
        net.model.cut = True  # type: ignore[assignment]
    else:
        net.model.old_head = nn.Sequential(nn.Linear(whole(16, 64), whole(16, 64)), nn.ReLU(), nn.Linear(8, 2))
    return case(net)


def not_in_optimizer(net: Net) -> Case:
    lost = {id(p) for p in choice(net.blocks).parameters()}
    kept = [p for p in net.model.parameters() if id(p) not in lost]
    kind = choice((torch.optim.SGD, torch.optim.AdamW))
    return case(net, kind(kept, lr=1e-3))


def rate_too_high(net: Net) -> Case:
    kind = choice(("SGD", "momentum", "AdamW", "RMSprop", "NAdam"))
    parameters = net.model.parameters()
    if kind == "SGD":
        return case(net, torch.optim.SGD(parameters, lr=log_uniform(30, 300)))
    if kind == "momentum":
        return case(net, torch.optim.SGD(parameters, lr=log_uniform(20, 200), momentum=0.9))
    return case(net, getattr(torch.optim, kind)(parameters, lr=log_uniform(0.5, 3)))


def rate_too_low(net: Net) -> Case:
    kind = choice(("SGD", "AdamW", "NAdam"))
    rate = log_uniform(1e-8, 1e-6) if kind == "SGD" else log_uniform(1e-9, 1e-7)
    return case(net, getattr(torch.optim, kind)(net.model.parameters(), lr=rate))


def not_finite(net: Net) -> Case:
    kind = whole(0, 2)
    if kind == 0:
        net.x = net.x.clone()
        net.x[whole(0, len(net.x) - 1)].view(-1)[0] = math.nan
    else:
        layer = choice(linears(net.model))
        with torch.no_grad():
            layer.weight.view(-1)[whole(0, layer.weight.numel() - 1)] = math.nan if kind == 1 else math.inf
    return case(net)


def anisotropic_inputs(net: Net) -> Case:
    """Columns that are nearly one another's copies, and labels by what tells them apart. Every column has size one."""
    n, features = net.x.shape
    z = torch.randn(n, features)
    net.x = (torch.randn(n, 1) + log_uniform(0.002, 0.02) * z).contiguous()
    net.x = (net.x - net.x.mean(0)) / net.x.std(0)
    net.y = even_labels(z @ torch.randn(features, int(net.y.max()) + 1))
    return case(net)


@dataclass(frozen=True)
class Fault:
    kind: str
    plant: Callable[[Net], Case]
    networks: Callable[[], Net]
    """Draws a family, width, depth, data."""


def of(families: tuple, trained_before: bool = False, **options) -> Callable[[], Net]:
    def draw() -> Net:
        net = choice(families)(**options)
        return maybe_trained(net) if trained_before else net

    return draw


def with_act(families: tuple, acts: tuple, trained_before: bool = False, **options) -> Callable[[], Net]:
    def draw() -> Net:
        act = choice(acts)
        net = choice(families)(nonlinearity=act, **options)
        return maybe_trained(net) if trained_before else net

    return draw


def deep_residual() -> Net:
    return dilated(nn.ReLU, depth=whole(7, 10)) if coin() else plain_deep(depth=whole(7, 10))


def deep_plain() -> Net:
    return plain_deep(depth=whole(6, 10)) if coin() else plain_time(depth=whole(5, 8))


def deep_sigmoid() -> Net:
    kind = choice((plain_deep, plain_time))
    return kind(nn.Sigmoid, depth=whole(8, 12), gain=1.0)


def chaotic() -> Net:
    return plain_deep(nn.Tanh, depth=whole(20, 30), gain=log_uniform(8, 12))


def nothing_else(net: Net) -> Case:
    return case(net)


SATURATING = tuple(family for family in HIDDEN if family not in (auto_encoder, separable_cnn))

FAULTS = (
    Fault("input-scale", input_scale, of(REAL_INPUTS)),
    Fault("input-offset", input_offset, of(REAL_INPUTS)),
    Fault("constant-features", constant_features, of(VECTORS)),
    Fault("class-imbalance", class_imbalance, of(CLASSES, n=2400)),
    Fault("unrelated-labels", unrelated_labels, of(CLASSES)),
    Fault("target-scale", target_scale, of(VALUES)),
    Fault("output-scale", output_scale, of((*CLASSES, llama, multi_label), True)),
    Fault("dead-units", dead_units, with_act(HIDDEN, (nn.ReLU,), True)),
    Fault("saturated-units", saturated_units, with_act((*SATURATING, recurrent), (nn.Tanh, nn.Sigmoid, nn.Hardtanh))),
    Fault("collapsed-attention", collapsed_attention, of((llama, perceiver), True)),
    Fault("identical-units", identical_units, with_act(HIDDEN, (nn.ReLU, nn.GELU, nn.Tanh))),
    Fault("exploding-activations", exploding_activations, deep_residual),
    Fault("vanishing-activations", vanishing_activations, deep_plain),
    Fault("vanishing-gradients", nothing_else, deep_sigmoid),
    Fault("exploding-gradients", nothing_else, chaotic),
    Fault("frozen", frozen, of(ALL, True)),
    Fault("unused", unused, of(ALL, True)),
    Fault("not-in-optimizer", not_in_optimizer, of(ALL, True)),
    Fault("rate-too-high", rate_too_high, of(ALL, True)),
    Fault("rate-too-low", rate_too_low, of(ALL)),
    Fault("not-finite", not_finite, of(REAL_INPUTS, True)),
    Fault("anisotropic-inputs", anisotropic_inputs, of((tabular, dense_net))),
)
HEALTHY = tuple(of((family,), True) for family in ALL)


@dataclass(frozen=True)
class Drawn:
    name: str
    fault: str | None
    family: str
    case: Case


def drawn(number: int, repeats: int = 3) -> Iterator[Drawn]:
    """The patients of a set: every fault `repeats` times on networks drawn anew, every family once without a fault."""
    for place, fault in enumerate(FAULTS):
        for repeat in range(repeats):
            with seeded(100_000 * number + 100 * place + repeat):
                net = fault.networks()
                yield Drawn(f"{fault.kind}-{repeat}", fault.kind, net.family, fault.plant(net))
    for place, draw in enumerate(HEALTHY):
        with seeded(100_000 * number + 50_000 + place):
            net = draw()
            yield Drawn(f"healthy-{place}", None, net.family, case(net))
