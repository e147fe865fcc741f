"""The sweep as one would write it first: a loop over runs, each with samples and gradients of its own."""

import torch
from torch import Tensor

from layerwise import feature_learning as fl
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.batch import draw
from layerwise.studies.feature_learning.covariance import haar, power
from layerwise.studies.feature_learning.problem import Task, draw_problem


def samples(task: Task, n: int, *names: str | int) -> tuple[Tensor, Tensor]:
    """The same draws as the batched program, as matrices X and Y."""
    u, noise, _ = draw(task, n, stream(int(names[0]), "train", *names[1:]))
    x = u.double() @ task.root
    return x, x @ task.map.mT + noise


def ortho(G: Tensor) -> Tensor:
    Q, R = torch.linalg.qr(G.mT)
    return (Q * R.diagonal().sign()).mT


def head(G: Tensor, X: Tensor, Y: Tensor) -> Tensor:
    Z = X @ G.mT
    return torch.cholesky_solve(Z.mT @ Y, torch.linalg.cholesky(Z.mT @ Z)).mT


def gradients(F: Tensor, G: Tensor, X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    Z = X @ G.mT
    R = Z @ F.mT - Y
    return R.mT @ Z / len(X), (R @ F).mT @ X / len(X)


def over_inputs(g: Tensor, X: Tensor) -> Tensor:
    """g (XᵀX/n)⁻¹."""
    return torch.cholesky_solve(g.mT, torch.linalg.cholesky(X.mT @ X / len(X))).mT


def over_head(F: Tensor, g: Tensor) -> Tensor:
    """(FᵀF)⁻¹ g."""
    return torch.cholesky_solve(g, torch.linalg.cholesky(F.mT @ F))


def run(name: str, lr: float, seed: int, steps: int, setting: fl.Setting, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """One algorithm, one rate, one seed; stops when it is not finite."""
    problem = draw_problem(setting, stream(seed, "problem"))
    task, n = problem.train, setting.batch
    task = Task(
        Sigma=task.Sigma.to(device),
        root=task.root.to(device),
        map=task.map.to(device),
        deviation=task.deviation,
        uniform=task.uniform,
    )
    whiten = power(task.Sigma, -0.5)

    def batch(*names: str | int) -> tuple[Tensor, Tensor]:
        X, Y = samples(task, n, seed, *names)
        return (X @ whiten if name == "amgd-bn" else X), Y

    G = haar(setting.k, setting.dx, stream(seed, "init")).to(device)
    F = head(G, *batch(0))
    moments = [torch.zeros_like(p) for p in (F, G, F, G)]
    for t in range(1, steps + 1):
        old = F, G
        X, Y = batch(t, "first")
        X2, Y2 = batch(t, "second")
        gF, gG = gradients(F, G, X, Y)
        if name == "sgd":
            F, G = F - lr * gF, G - lr * gG
        elif name == "adam":
            new = []
            for i, (p, g) in enumerate(((F, gF), (G, gG))):
                moments[i] = 0.9 * moments[i] + 0.1 * g
                moments[i + 2] = 0.999 * moments[i + 2] + 0.001 * g * g
                root = (moments[i + 2] / (1 - 0.999**t)).sqrt()
                new.append(p - lr * (moments[i] / (1 - 0.9**t)) / (root + 1e-8))
            F, G = new
        elif name == "ngd":
            W = over_inputs((X @ G.mT @ F.mT - Y).mT @ X / n, X)
            dG = over_head(F, F.mT @ W)
            Z = X @ G.mT
            outside = (W - F @ dG) @ (X.mT @ Z)
            F = F - lr * torch.cholesky_solve(outside.mT, torch.linalg.cholesky(Z.mT @ Z)).mT
            moved = G - lr * dG
            G = ortho(moved)
            F = F @ (moved @ G.mT)
        else:
            if name == "dfw":
                gG = over_inputs(gG, X)
            elif name == "kfac":
                gG = over_head(F, over_inputs(gG, X))
            G = ortho(G - lr * gG)
            F = head(G, X2, Y2)
        if not (F.isfinite().all() and G.isfinite().all()):
            return old
    return F, G
