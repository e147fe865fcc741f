"""Faults, each planted in a drawn network at a drawn place and of a drawn size."""

import math

import torch
from torch import nn

from doctor.case import Case, parameter
from doctor.data import even_labels
from doctor.drawn.draw import choice, coin, log_uniform, whole
from doctor.drawn.network import Net, linears


def case(net: Net, optimizer: torch.optim.Optimizer | None = None) -> Case:
    """The network as it is, with an optimizer or, sometimes, one that is no part of the fault."""
    if optimizer is None and coin(0.3):
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
    parameter(net.model.head, "weight").mul_(log_uniform(60, 200))
    return case(net)


def some_hidden(net: Net) -> list[nn.Module]:
    """One hidden layer, or all of them."""
    return [choice(net.hidden)] if coin() else net.hidden


def dead_units(net: Net) -> Case:
    share = 0.6 + 0.35 * torch.rand(())
    for layer in some_hidden(net):
        bias = parameter(layer, "bias")
        bias[torch.rand(len(bias)) < share] -= log_uniform(12, 60)
    return case(net)


def saturated_units(net: Net) -> Case:
    if "RNN" in net.family:
        for name, _ in net.blocks[0].named_parameters():
            parameter(net.blocks[0], name).mul_(log_uniform(15, 40))
    else:
        for layer in some_hidden(net):
            parameter(layer, "weight").mul_(log_uniform(40, 120))
    return case(net)


def collapsed_attention(net: Net) -> Case:
    factor = log_uniform(10, 30)
    for sharpen in net.attention:
        sharpen(factor)
    return case(net)


def identical_units(net: Net) -> Case:
    layer, value = choice(net.hidden), choice((0.0, 0.02, 0.1))
    parameter(layer, "weight").fill_(value)
    parameter(layer, "bias").zero_()
    return case(net)


def exploding_activations(net: Net) -> Case:
    factor = log_uniform(2.5, 5)
    for stage in net.blocks:
        for part in linears(stage):
            parameter(part, "weight").mul_(factor)
    return case(net)


def vanishing_activations(net: Net) -> Case:
    factor = log_uniform(0.08, 0.25)
    for layer in net.hidden[1:]:
        parameter(layer, "weight").mul_(factor)
    return case(net)


def frozen(net: Net) -> Case:
    choice([block for block in net.blocks if any(True for _ in block.parameters())]).requires_grad_(False)
    return case(net)


def unused(net: Net) -> Case:
    if coin():
        net.model.cut = True
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
        weight = parameter(choice(linears(net.model)), "weight")
        weight.view(-1)[whole(0, weight.numel() - 1)] = math.nan if kind == 1 else math.inf
    return case(net)


def anisotropic_inputs(net: Net) -> Case:
    """Columns that are nearly one another's copies, and labels by what tells them apart. Every column has size one."""
    n, features = net.x.shape
    z = torch.randn(n, features)
    net.x = (torch.randn(n, 1) + log_uniform(0.002, 0.02) * z).contiguous()
    net.x = (net.x - net.x.mean(0)) / net.x.std(0)
    net.y = even_labels(z @ torch.randn(features, int(net.y.max()) + 1))
    return case(net)


def nothing_else(net: Net) -> Case:
    return case(net)
