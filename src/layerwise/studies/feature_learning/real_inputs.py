"""Inputs that are real images: their covariance is as uneven as pixels make it, and features are known or transferred.

Two problems are made of them. `known_features` asks a two-layer network for the features of a synthetic teacher, so
that its error can be measured; `label_transfer` (a module of its own) keeps the real labels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from layerwise import data
from layerwise.data import Images
from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.covariance import haar
from layerwise.studies.feature_learning.members import member, members
from layerwise.studies.feature_learning.real_data_choices import DAMPED as DAMPED
from layerwise.studies.feature_learning.real_data_choices import DATA as DATA
from layerwise.training import Budget, Problem, tensor_batches, train

LEAST = 1e-2
"""Pixels whose variance is below this part of the mean are dropped: the images say next to nothing along them."""


def images(name: str, limit: int | None = None, pool: int = 1) -> Images:
    """The digits of scikit-learn, or the training images of MNIST from the folder that LAYERWISE_DATA names.

    Args:
        name: "digits" or "mnist".
        limit: only the first so many.
        pool: average over squares of so many pixels a side.

    >>> images("digits", limit=10, pool=2).x.shape
    torch.Size([10, 1, 4, 4])
    """
    if name not in DATA:
        raise InputError(unknown("data", name, DATA))
    found = data.digits(limit) if name == "digits" else data.mnist("train", limit=limit)
    side = min(found.x.shape[2:])
    if not 1 <= pool <= side:
        raise InputError(
            describe(f"pool={pool}", f"a number from 1 to the {side} pixels of a side", "pass e.g. pool=2")
        )
    return Images(nn.functional.avg_pool2d(found.x, pool), found.y)


def scaled_pixels(x: Float[Tensor, "N d"], least: float | int = LEAST) -> Float[Tensor, "N m"]:
    """Centred pixels, all divided by one number so that the mean eigenvalue of their covariance is 1.

    Anisotropy and the basis of pixels stay; (nearly) constant pixels are dropped, as `least` says. Mean, scale and
    dropped pixels are those of all the images passed: where some are held out later, their pixels took part in this
    (their labels did not).

    >>> x = scaled_pixels(images("digits").flat())
    >>> values = torch.linalg.eigvalsh(x.mT @ x / len(x))
    >>> x.shape[1], round(float(values.mean()), 6), float(values.max() / values.min()) > 1000
    (53, 1.0, True)
    """
    x = x.double()
    variance = x.var(0, correction=0)
    kept = variance > least * variance.mean()
    if not kept.any():
        raise InputError(describe("images that are all alike", "pixels that vary", "pass more images"))
    return (x[:, kept] - x[:, kept].mean(0)) / variance[kept].mean().sqrt()


def network(dx: int, width: int, dy: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Fσ(Gx): two layers without biases, in float64.

    >>> network(5, 4, 2)(torch.zeros(3, 5, dtype=torch.float64)).shape
    torch.Size([3, 2])
    """
    G, F = (nn.Linear(a, b, bias=False, dtype=torch.float64) for a, b in ((dx, width), (width, dy)))
    return nn.Sequential(G, activation(), F)


def hidden_weight(model: nn.Module) -> Tensor:
    """G of `network`.

    >>> hidden_weight(network(5, 4, 2)).shape
    torch.Size([4, 5])
    """
    return next(model.parameters()).detach()


def optimizer_of(name: str, likelihood: str) -> Callable[[nn.Module, float], Optimizer]:
    """How a member is made where the labels have this likelihood.

    >>> make = optimizer_of("kfac", "categorical")
    >>> type(make(network(5, 4, 2), 0.1)).__name__
    'KFAC'
    """
    if name == "kfac-damped":
        return members(DAMPED, likelihood)["kfac"].make
    member(name)  # refuses a name that is none
    return members(likelihood=likelihood)[name].make


def trained(problem: Problem, name: str, rate: float | int, *, seed: int, steps: int) -> nn.Sequential:
    """The problem's network trained by a member; the start and the batches depend on the seed alone.

    A training that breaks off, because the loss of a batch is not finite, leaves weights that are not numbers: its
    distance is 1, its loss infinite, its movement not a number and its predictions a guess, wherever it is measured.
    """
    make = optimizer_of(name, str(problem.likelihood))
    done = train(problem, lambda model: make(model, float(rate)), seed=seed, budget=Budget(steps=steps), measures=())
    assert isinstance(done.model, nn.Sequential)
    if done.stopped != "budget":
        for weight in done.model.parameters():
            weight.detach().fill_(torch.nan)
    return done.model


def mean_loss(problem: Problem, model: nn.Module, x: Float[Tensor, "N d"], y: Tensor) -> float:
    """The problem's loss on examples; infinite where it overflows or is not a number: such a rate is never chosen."""
    with torch.no_grad():
        return float(problem.loss(model(x), y).nan_to_num(nan=torch.inf, posinf=torch.inf))


# --- Known features -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownFeatures:
    """Real inputs with the labels y = F⋆ tanh(G⋆x) + ε of a teacher, divided into training and held-out images."""

    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N dy"]
    held_x: Float[Tensor, "M d"]
    held_y: Float[Tensor, "M dy"]
    """Without noise."""
    G: Float[Tensor, "k d"]

    def problem(self, width: int, batch: int) -> Problem:
        """The student: a two-layer tanh network on minibatches of the training images."""
        dx, dy = self.x.shape[1], self.y.shape[1]
        return Problem(
            name="known features",
            model=lambda seed: network(dx, width, dy),
            batches=tensor_batches({"train": (self.x, self.y)}, batch),
            likelihood="gaussian",
        )


def known_features(
    x: Float[Tensor, "N d"],
    seed: int,
    *,
    k: int = 4,
    dy: int = 8,
    noise: float | int = 0.02,
    held: float = 0.2,
    rotated: bool = False,
) -> KnownFeatures:
    """A teacher drawn for these inputs: G⋆ with orthonormal rows, F⋆ Gaussian with rows of mean square norm 1.

    Args:
        x: such as `scaled_pixels` gives them.
        seed: of the division, the teacher, the noise and the rotation.
        k: number of features.
        dy: number of outputs.
        noise: standard deviation.
        held: part of the images that is not trained on.
        rotated: turn the inputs by a random rotation, which keeps the eigenvalues and takes away the basis of pixels.

    >>> problem = known_features(scaled_pixels(images("digits").flat()), seed=0)
    >>> len(problem.x), len(problem.held_x), problem.G.shape
    (1438, 359, torch.Size([4, 53]))
    """
    if not 1 <= k <= x.shape[1]:
        raise InputError(describe(f"k={k} features", f"a number from 1 to the {x.shape[1]} pixels", "pass e.g. k=4"))
    n = len(x) - round(held * len(x))
    if not 1 <= n < len(x):
        raise InputError(describe(f"held={held} of {len(x)} images", "some to train on and some held out", "change it"))
    x = x[torch.randperm(len(x), generator=stream(seed, "division"))]
    if rotated:
        x = x @ haar(x.shape[1], x.shape[1], stream(seed, "rotation")).to(x)
    G = haar(k, x.shape[1], stream(seed, "features"))
    F = torch.randn(dy, k, generator=stream(seed, "head"), dtype=torch.float64) / k**0.5
    clean = torch.tanh(x @ G.mT) @ F.mT
    noisy = clean + noise * torch.randn(clean.shape, generator=stream(seed, "noise"), dtype=torch.float64)
    return KnownFeatures(x=x[:n], y=noisy[:n], held_x=x[n:], held_y=clean[n:], G=G)


# --- Measures -----------------------------------------------------------------------------------------------


def eigen_directions(x: Float[Tensor, "N d"]) -> tuple[Float[Tensor, "d"], Float[Tensor, "d d"]]:
    """Eigenvalues of the inputs' covariance, largest first, and the eigenvectors as rows."""
    values, vectors = torch.linalg.eigh(x.mT @ x / len(x))
    return values.flip(0), vectors.mT.flip(0)


def movement(
    start: Float[Tensor, "m d"], end: Float[Tensor, "m d"], directions: Float[Tensor, "d d"]
) -> Float[Tensor, "d"]:
    """‖ΔG v_j‖² by direction v_j (rows), as parts of the sum; NaN where ΔG is zero or not finite.

    >>> movement(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), torch.eye(2))
    tensor([0.3600, 0.6400])
    """
    along = ((end - start) @ directions.mT).square().sum(0)
    return along / along.sum()


def in_thirds(parts: Float[Tensor, "d"]) -> tuple[float, float, float]:
    """Sums over the first, the middle and the last third.

    >>> in_thirds(torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64))
    (0.7, 0.2, 0.1)
    """
    d = len(parts)
    edges = (0, round(d / 3), round(2 * d / 3), d)
    top, middle, bottom = (round(float(parts[a:b].sum()), 12) for a, b in pairwise(edges))
    return top, middle, bottom
