"""Layers drawn at random, on which theorems about the eigenbasis of K-FAC are tried."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from layerwise.curvature.build import fisher
from layerwise.foundations.random import stream
from layerwise.optim.members.kfac import KFAC
from layerwise.studies.fisher_geometry.kronecker_basis import KroneckerBasis, empirical_fisher, relative_error

CLASSES = 3
PERTURBATIONS = 20


def random_layer(seed: int, number: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A linear layer of random sizes between two others, on anisotropic inputs, and labels that depend on them."""
    generator = stream(seed, "layer", number)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    inputs, fan_in, fan_out, n = size(2, 8), size(1, 7), size(1, 6), size(3, 40)
    model = nn.Sequential(nn.Linear(inputs, fan_in), nn.Tanh(), nn.Linear(fan_in, fan_out, bias=bool(size(0, 1))))
    model.extend([nn.Tanh(), nn.Linear(fan_out, CLASSES)]).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 1.5)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64) * torch.logspace(0, 1.5, inputs)
    return model, x, torch.randint(CLASSES, (n,), generator=generator)


def of_linear(seed: int, number: int) -> dict[str, float]:
    """What theorems 1 to 3 say of one random layer, as numbers that are to be zero, or not negative."""
    model, x, y = random_layer(seed, number)
    F, basis = empirical_fisher(model, "2", x, y), KroneckerBasis.of(model, "2", x, y)
    ekfac = basis.ekfac(F)
    library = cast(Any, fisher(model, (x, y), "categorical", "ekfac", "empirical", select="2")).operators["2"]
    eye = torch.eye(len(F), dtype=F.dtype).reshape(len(F), *library.shape)
    eigenvalues, vectors = torch.linalg.eigh(F)
    true = KroneckerBasis(vectors, eigenvalues)
    best = (F - ekfac).norm()
    generator, gains = stream(seed, "perturbation", number), []
    for _ in range(PERTURBATIONS):
        change = torch.randn(len(F), generator=generator, dtype=F.dtype) * basis.scalings(F).mean() * 0.1
        moved = (basis.Q * (basis.scalings(F) + change)) @ basis.Q.T
        gains.append(float(((F - moved).norm() - best) / F.norm()))
    return {
        "nearer than others": min(gains),
        "nearer than K-FAC": relative_error(basis.kfac(), F) - relative_error(ekfac, F),
        "trace": abs(float(ekfac.trace() / F.trace()) - 1),
        "true basis": relative_error(true.ekfac(F), F),
        "library": relative_error(library.mv(eye).reshape(F.shape), ekfac),
    }


def of_convolution(seed: int, number: int) -> dict[str, float]:
    """K-FAC of convolutions where it must be that of linear layers, and where uncorrelated offsets change nothing."""
    generator = stream(seed, "convolution", number)
    channels = [int(torch.randint(low, 5, (), generator=generator)) for low in (1, 2)]  # two classes at least
    weights = torch.randn(channels[1], channels[0], 2, 2, generator=generator, dtype=torch.float64)
    x = torch.randn(12, channels[0], 2, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(channels[1], (12,), generator=generator)
    conv = nn.Conv2d(channels[0], channels[1], 2, dtype=torch.float64)  # its kernel covers the image: one position
    linear = nn.Linear(4 * channels[0], channels[1], dtype=torch.float64)
    with torch.no_grad():
        conv.weight.copy_(weights)
        linear.weight.copy_(weights.flatten(1))
        linear.bias.copy_(cast(Tensor, conv.bias))
    blocks = [
        fisher(nn.Sequential(layer, nn.Flatten()), (given, y), "categorical", "kfac", "empirical").to_dense()
        for layer, given in ((conv, x), (linear, x.flatten(1)))
    ]
    return {"one position": relative_error(blocks[0], blocks[1]), "one offset": _sua_of_one_offset(channels, x, y)}


def _sua_of_one_offset(channels: list[int], x: Tensor, y: Tensor) -> float:
    """A step of K-FAC with kernels of one pixel, with offsets taken to be uncorrelated and not."""
    weights = []
    for sua in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(channels[0], channels[1], 1), nn.Flatten(2)).double()
        opt = KFAC(model, lr=0.1, scale="formula", likelihood="categorical", estimator="empirical", sua=sua)
        f = model(x).mean(2)
        nn.functional.cross_entropy(f, y).backward()
        opt.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return float((weights[0] - weights[1]).norm() / weights[1].norm())
