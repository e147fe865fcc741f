"""What a tangent kernel costs at least, and what it is: bare operations to time, and a reference in float64."""

from dataclasses import dataclass

import torch
from limits import TRAINING, Bare, Recorder
from measure import Row, Seconds
from models import Problem
from torch import Tensor

PULLED_BACK = "forward, all outputs pulled back"
PRODUCT = "one square matrix product"


@dataclass(frozen=True)
class Limit:
    """All outputs pulled back to the layers, and the counted multiply-adds at the speed of one matrix product.

    The count is that of the orders of contraction that layerwise chose, with an allowance for memory traffic, so
    this is the limit of these orders and not of every method there may be.
    """

    multiply_adds: float
    side: int

    def seconds(self, rows: dict[str, Row]) -> Seconds:
        each = 1 / self.side**3
        return Seconds.weighted(
            [(rows[PULLED_BACK].seconds(), 1.0), (rows[PRODUCT].seconds(), self.multiply_adds * each)]
        )


def limit(p: Problem, tiny: bool) -> Limit:
    import layerwise as lw

    side = 256 if tiny else 2048 if p.x.device.type == "cpu" else 8192
    return Limit(lw.ntk(p.copy(), p.x).plan().multiply_adds, side)


def bare_rows(p: Problem, side: int) -> list[Row]:
    bare = Bare(p)
    M = torch.randn(side, side, device=p.x.device)
    return [
        Row(TRAINING, lambda: bare.forward_backward),
        Row(PULLED_BACK, lambda: lambda: pull_back(bare)),
        Row(PRODUCT, lambda: lambda: M @ M),
    ]


def pull_back(bare: Bare) -> None:
    """Gradients of each output for the outputs of all layers, and for no weights, one after the other."""
    recorder = Recorder(bare.layers)
    f = recorder.forward(bare.model, bare.problem.x).flatten(1).sum(0)
    for v in range(len(f)):
        recorder.output_gradients(f[v], retain_graph=v + 1 < len(f))


def reference(p: Problem) -> Tensor:
    """The kernel in float64 by plain autograd: one example and one output at a time, no batch."""
    model = p.copy().double()
    parameters = list(model.parameters())
    rows = []
    for x in as_float64(p.x):
        f = model(x.unsqueeze(0)).flatten()
        for i in range(len(f)):
            gradients = torch.autograd.grad(f[i], parameters, retain_graph=i + 1 < len(f))
            rows.append(torch.cat([g.flatten() for g in gradients]))
    J = torch.stack(rows)
    return J @ J.mT


def float64_rows(p: Problem) -> Tensor:
    """The kernel in float64 by layerwise, from per-example gradients of every layer."""
    import layerwise as lw

    return lw.ntk(p.copy().double(), as_float64(p.x), algorithm="rows").matrix()


def as_float64(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def relative_difference(K: Tensor, other: Tensor) -> float:
    """In the Frobenius norm, on the examples both have."""
    n = min(len(K), len(other))
    K, other = (M[:n, :n].double().cpu() for M in (K, other))
    return float((K - other).norm() / other.norm())
