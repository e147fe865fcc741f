"""Families of networks, each drawn with its width, depth, nonlinearity and data; lists of those that a fault can have.

None of them is in `zoo`: residual CNN with group norm, separable CNN with batch norm, dilated convolutions in time,
Llama-like language model (RMSNorm, SwiGLU, scaled_dot_product_attention), Perceiver, DeepSets, graph convolutions,
bidirectional recurrent networks, DenseNet-like perceptron, auto-encoder, network of Fourier features, tabular
perceptron, multi-label perceptron, plain deep perceptrons and convolutions.
"""

import itertools
from collections.abc import Callable

import torch
from torch import nn

from doctor.case import initialise
from doctor.data import clouds, even_labels, letters, pictures, series, table
from doctor.drawn.draw import choice, whole
from doctor.drawn.modules import (
    Average,
    Dense,
    Dilated,
    Ends,
    Graph,
    LastMean,
    Perceiver,
    Places,
    Pooled,
    Residual,
    SwiGLUBlock,
    TimeLast,
    Waves,
)
from doctor.drawn.network import Body, Net, linears

Family = Callable[..., Net]


SMOOTH_OR_RECTIFIED = (nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh)


def perceptron(widths: list[int], nonlinearity: type[nn.Module], gain: float | None = None) -> nn.Sequential:
    """Linear layers, each followed by the nonlinearity; torch's own initialisation unless a gain is given."""
    parts: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        if gain is not None:
            initialise(layer, gain)
        parts += [layer, nonlinearity()]
    return nn.Sequential(*parts)


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
    net.model.head = nn.Linear(net.model.head.in_features, labels)
    net.family, net.likelihood = "multi-label perceptron", "bernoulli"
    return net


def dense_net(nonlinearity: type[nn.Module] | None = None, n: int = 700) -> Net:
    features, classes = whole(12, 30), whole(3, 6)
    body = Dense(features, whole(24, 64), whole(3, 5), nonlinearity or choice(SMOOTH_OR_RECTIFIED))
    model = Body(body, nn.Linear(body.width, classes))
    return Net("DenseNet-like", model, *table(n, features, classes), hidden=list(body.layers), blocks=list(body.layers))


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


def dilated(nonlinearity: type[nn.Module] | None = None, n: int = 320, depth: int | None = None) -> Net:
    width, classes, features = whole(16, 40), whole(3, 5), whole(3, 8)
    act = nonlinearity or choice((nn.ReLU, nn.GELU, nn.Tanh))
    stages = [Dilated(width, 2 ** (k % 3), act) for k in range(depth or whole(2, 4))]
    body = nn.Sequential(TimeLast(), nn.Conv1d(features, width, 1), *stages, LastMean())
    model = Body(body, nn.Linear(width, classes))
    net = Net("dilated convolutions", model, *series(n, whole(16, 28), features, classes))
    net.hidden, net.blocks = [stage.conv for stage in stages], list(stages)
    return net


def llama(nonlinearity: type[nn.Module] | None = None, n: int = 128) -> Net:
    heads, size, length = whole(2, 4), whole(16, 40), whole(16, 28)
    width = heads * choice((8, 12, 16))
    stages = [SwiGLUBlock(width, heads) for _ in range(whole(1, 3))]
    body = nn.Sequential(Places(size, length, width), *stages, nn.RMSNorm(width))
    net = Net("Llama-like", Body(body, nn.Linear(width, size, bias=False)), *letters(n, length, size))
    net.hidden, net.blocks, net.attention = [], list(stages), [stage.sharpen for stage in stages]
    return net


def perceiver(nonlinearity: type[nn.Module] | None = None, n: int = 400) -> Net:
    width, queries, classes, features = 4 * whole(4, 10), whole(2, 5), whole(3, 5), whole(4, 9)
    body = Perceiver(features, width, queries, nonlinearity or choice((nn.ReLU, nn.GELU)))
    model = Body(body, nn.Linear(width * queries, classes))
    net = Net("Perceiver", model, *clouds(n, whole(8, 16), features, classes))
    net.hidden, net.blocks, net.attention = [body.up], [body.embed, body.look, body.up], [body.sharpen]
    return net


def deep_sets(nonlinearity: type[nn.Module] | None = None, n: int = 500) -> Net:
    width, classes, features = whole(32, 96), whole(3, 5), whole(5, 12)
    act = nonlinearity or choice((nn.ReLU, nn.GELU, nn.ELU))
    body = Pooled(perceptron([features, width, width], act), perceptron([width, width], act))
    net = Net("DeepSets", Body(body, nn.Linear(width, classes)), *clouds(n, whole(8, 14), features, classes))
    net.hidden = net.blocks = linears(body)
    return net


def graph(nonlinearity: type[nn.Module] | None = None, n: int = 500) -> Net:
    nodes, features, classes, width = whole(6, 10), whole(4, 10), whole(3, 4), whole(32, 80)
    body = Graph(nodes, features, width, 2, nonlinearity or choice((nn.ReLU, nn.GELU, nn.Tanh)))
    x = torch.randn(n, nodes, features)
    f = (body.mean @ x).tanh().flatten(1) @ torch.randn(nodes * features, classes)
    f = f + 4 * (x.mean(1) @ torch.randn(features, classes))
    net = Net("graph convolutions", Body(body, nn.Linear(width, classes)), x, even_labels(f))
    net.hidden = net.blocks = list(body.layers)
    return net


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
        initialise(layer, gain)
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
