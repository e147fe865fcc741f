"""`Net`: a healthy network with its data, and the places at which a fault can be planted."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doctor.drawn.draw import coin, whole


@dataclass
class Net:
    """A healthy network with its data, and the places at which a fault can be planted."""

    family: str
    model: "Body"
    x: Tensor
    y: Tensor
    likelihood: str | None = None
    hidden: list[nn.Module] = field(default_factory=list)
    """Linear and convolutional layers whose outputs go into the nonlinearity."""
    blocks: list[nn.Module] = field(default_factory=list)
    """Parts that someone could freeze or forget."""
    attention: list[Callable[[float], None]] = field(default_factory=list)
    """Each multiplies the queries and keys of one layer."""


class Body(nn.Module):
    """``head(body(x))``; with `cut` no gradient reaches the body."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head, self.cut = body, head, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h.detach() if self.cut else h)


def linears(module: nn.Module) -> list[nn.Module]:
    """Linear and convolutional layers, in order."""
    return [part for part in module.modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]


def loss_of(net: Net) -> Tensor:
    """The mean over terms."""
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
    """One of three networks is in the middle of its training."""
    return trained(net, whole(10, 40)) if coin(0.35) else net
