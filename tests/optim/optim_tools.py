"""What the tests of this folder share: small models, batches, and slow references made by autograd alone.

Nothing of `layerwise` is used to form a matrix. A reference owns a copy of the model, records inputs by its own
hooks, and subtracts what a plain function of explicit matrices returns.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from random_tensors import randn64 as gaussian

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


def mlp(*sizes: int, seed: int = 0, bias: bool = True) -> nn.Module:
    """Tanh layers in float64; two of one shape by default."""
    sizes = sizes or (5, 5, 5, 3)

    def make() -> nn.Module:
        layers = [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o, bias=bias), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    return _seeded(make, seed)


def convnet(seed: int = 0) -> nn.Module:
    """Padding, strides, groups, with and without bias: [N, 2, 4, 4] to [N, 3]."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(4, 4, 2, stride=2, groups=2, bias=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    return _seeded(make, seed)


def labels(*shape: int, classes: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed + 1000))


def batches(steps: int, *shape: int, n: int = 12, positions: tuple[int, ...] = ()) -> list[Batch]:
    """A new batch for every step."""
    return [(gaussian(n, *shape, seed=t), labels(n, *positions, seed=t)) for t in range(steps)]


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    """Summed over positions, averaged over examples."""
    return F.cross_entropy(f.reshape(-1, f.shape[-1]), y.reshape(-1), reduction="sum") / len(f)


def squares(f: Tensor, y: Tensor) -> Tensor:
    """Half the squared distance to fixed random targets: gradients of full rank, which cross-entropy has not."""
    targets = gaussian(3, f.shape[-1], seed=99)
    return 0.5 * (f - targets[y] - 0.1 * y.unsqueeze(-1)).square().sum() / len(f)


def train_step(model: Callable[[Tensor], Tensor], opt: torch.optim.Optimizer, batch: Batch, loss: Loss) -> float:
    opt.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    opt.step()
    return float(value.detach())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# --- references -------------------------------------------------------------------------------------------


@dataclass
class Record:
    """One layer on one batch: inputs (bias column included) and gradients of a sum over examples."""

    a: Tensor  # N S K I
    g: Tensor  # V N S K O

    def Q(self) -> Tensor:
        rows = self.a.flatten(0, 1)
        return torch.einsum("mki,mkj->kij", rows, rows) / len(rows)

    def P(self) -> Tensor:
        return torch.einsum("vnsko,vnskp->kop", self.g, self.g) / self.a.shape[0]

    def reduced(self) -> "Record":
        return Record(self.a.mean(1, keepdim=True), self.g.sum(2, keepdim=True))

    def rows(self) -> Tensor:
        """``[V, N, K, O, I]``."""
        return torch.einsum("vnsko,nski->vnkoi", self.g, self.a)


def _matrices(module: nn.Module, weight: Tensor) -> Tensor:
    """``[K, O, I]`` of a weight or its gradient."""
    k = getattr(module, "groups", 1)
    return weight.reshape(k, weight.shape[0] // k, -1)


def _inputs(module: nn.Module, x: Tensor) -> Tensor:
    """``[N, S, K, I]`` without the bias column."""
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)  # N CKK S
        n, i, s = patches.shape
        return patches.transpose(1, 2).reshape(n, s, module.groups, i // module.groups)
    return x.reshape(x.shape[0], -1, 1, x.shape[-1])


def _outputs(module: nn.Module, dy: Tensor) -> Tensor:
    """``[N, S, K, O]``."""
    if isinstance(module, nn.Conv2d):
        n, o = dy.shape[:2]
        return dy.flatten(2).transpose(1, 2).reshape(n, -1, module.groups, o // module.groups)
    return dy.reshape(dy.shape[0], -1, 1, dy.shape[-1])


def record(model: nn.Module, x: Tensor, cotangents: Callable[[Tensor], Sequence[Tensor]], bias: bool = True):
    """``{layer: Record}`` by hooks of its own, one backward a cotangent."""
    seen: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, (m, args[0], out)))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    f = model(x)
    for handle in handles:
        handle.remove()
    vectors = cotangents(f.detach())
    outs = [out for _, _, out in seen.values()]
    pulled = [torch.autograd.grad(f, outs, v, retain_graph=True) for v in vectors]
    found = {}
    for place, (name, (module, a, _)) in enumerate(seen.items()):
        rows = _inputs(module, a.detach())
        if bias and module.bias is not None:
            rows = F.pad(rows, (0, 1), value=1.0)
        found[name] = Record(rows, torch.stack([_outputs(module, grads[place]) for grads in pulled]))
    return found


Direction = Callable[[int, dict[str, Tensor], dict[str, Record]], dict[str, Tensor]]


@dataclass
class Reference:
    """A model of its own, stepped by a function of explicit matrices; one `[K, O, I]` a layer.

    ``separate`` leaves biases out of the matrices and gives them Adam's update, as Shampoo, SOAP and Muon do.
    """

    model: nn.Module
    direction: Direction
    loss: Loss
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    separate: bool = False
    cotangents: Callable[[Tensor, Tensor, int], Sequence[Tensor]] | None = None
    taken: int = 0
    buffers: dict[str, Tensor] = field(default_factory=dict)
    adam: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                yield name, module

    def step(self, batch: Batch) -> None:
        x, y = batch
        self.taken += 1
        number = self.taken - 1

        def empirical(f: Tensor) -> list[Tensor]:
            f = f.clone().requires_grad_()
            return [torch.autograd.grad(self.loss(f, y), f)[0] * len(f)]

        own = self.cotangents
        make = empirical if own is None else lambda f: own(f, y, number)
        records = record(self.model, x, make, bias=not self.separate)
        params = dict(self.model.named_parameters())
        grads = dict(zip(params, torch.autograd.grad(self.loss(self.model(x), y), params.values()), strict=True))
        blocks = {}
        for name, module in self.layers():
            W = _matrices(module, grads[f"{name}.weight"])
            if module.bias is not None and not self.separate:
                W = torch.cat([W, grads[f"{name}.bias"].reshape(*W.shape[:2], 1)], dim=-1)
            blocks[name] = W
        found = self.direction(self.taken, blocks, records)
        with torch.no_grad():
            for name, module in self.layers():
                D = self._with_momentum(name, found[name])
                if module.bias is not None and not self.separate:
                    self._subtract(module.bias, D[..., -1])
                    D = D[..., :-1]
                self._subtract(module.weight, D)
                if module.bias is not None and self.separate:
                    D = self._adam(name, grads[f"{name}.bias"])
                    self._subtract(module.bias, D)

    def _subtract(self, p: Tensor, D: Tensor) -> None:
        p.mul_(1 - self.lr * self.weight_decay).sub_(self.lr * D.reshape(p.shape))

    def _with_momentum(self, name: str, D: Tensor) -> Tensor:
        if not self.momentum:
            return D
        self.buffers[name] = self.momentum * self.buffers.get(name, torch.zeros_like(D)) + D
        return D + self.momentum * self.buffers[name] if self.nesterov else self.buffers[name]

    def _adam(self, name: str, g: Tensor) -> Tensor:
        m, v = self.adam.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
        m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2, self.taken
        self.adam[name] = m, v
        return (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def assert_same_steps(
    opt: torch.optim.Optimizer, model: nn.Module, reference: Reference, data: Sequence[Batch], tol: float = 1e-9
) -> None:
    """Equal parameters after every one of the steps, and the parameters did move."""
    start = flat(model)
    for t, batch in enumerate(data, start=1):
        train_step(model, opt, batch, reference.loss)
        reference.step(batch)
        error = float((flat(model) - flat(reference.model)).abs().max())
        assert error < tol * max(1.0, float(flat(model).abs().max())), f"step {t}: {error:.3g}"
    assert float((flat(model) - start).abs().max()) > 1e-4


class Mean:
    """A running mean with bias correction, as a ratio of two plain sums."""

    def __init__(self, decay: float) -> None:
        self.decay, self.weights, self.total = decay, 0.0, None

    def add(self, M: Tensor) -> Tensor:
        self.weights = self.decay * self.weights + 1
        self.total = M.clone() if self.total is None else self.decay * self.total + M
        return self.value()

    def value(self) -> Tensor:
        assert self.total is not None
        return self.total / self.weights


def power(M: Tensor, p: float) -> Tensor:
    """``M^p`` by the eigenvalues."""
    s, U = torch.linalg.eigh(M)
    return (U * s.clamp_min(0).pow(p).unsqueeze(-2)) @ U.mT


def eye(M: Tensor) -> Tensor:
    return torch.eye(M.shape[-1], dtype=M.dtype)


def mean_eigenvalue(M: Tensor) -> Tensor:
    return M.diagonal(dim1=-2, dim2=-1).mean(-1).view(-1, 1, 1)


# --- every member -----------------------------------------------------------------------------------------

MEMBERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda m, **k: lw.optim.SGD(m, **{"lr": 0.05, "momentum": 0.9, **k}),
    "Adam": lambda m, **k: lw.optim.Adam(m, **{"lr": 0.01, **k}),
    "Sign": lambda m, **k: lw.optim.Sign(m, **{"lr": 0.01, **k}),
    "KFAC": lambda m, **k: lw.optim.KFAC(m, **{"lr": 0.05, "refresh_every": 3, **k}, scale="formula"),
    "KFAC exact split": lambda m, **k: lw.optim.KFAC(
        m, **{"lr": 0.05, "refresh_every": 3, "damping_split": "exact", **k}, scale="formula"
    ),
    "KFAC sampled": lambda m, **k: lw.optim.KFAC(
        m, **{"lr": 0.05, "refresh_every": 3, "likelihood": "categorical", "factor_every": 2, **k}, scale="formula"
    ),
    "EKFAC": lambda m, **k: lw.optim.EKFAC(m, **{"lr": 0.05, "refresh_every": 3, **k}, scale="formula"),
    "EKFAC running": lambda m, **k: lw.optim.EKFAC(
        m, **{"lr": 0.05, "refresh_every": 3, "scaling": "running", **k}, scale="formula"
    ),
    "FOOF": lambda m, **k: lw.optim.FOOF(m, **{"lr": 0.05, "refresh_every": 3, **k}, scale="formula"),
    "LocoProp": lambda m, **k: lw.optim.LocoProp(m, **{"lr": 0.5, **k}),
    "NGD": lambda m, **k: lw.optim.NGD(m, **{"lr": 0.1, "momentum": 0.5, **k}),
    "Shampoo": lambda m, **k: lw.optim.Shampoo(
        m, **{"lr": 0.01, "refresh_every": 3, "graft": "adam", **k}, scale="formula"
    ),
    "SOAP": lambda m, **k: lw.optim.SOAP(m, **{"lr": 0.01, "refresh_every": 3, **k}, scale="formula"),
    "Muon": lambda m, **k: lw.optim.Muon(m, **{"lr": 0.01, "orthogonalize": "polar", **k}, scale="formula"),
    "MahalanobisSpectral": lambda m, **k: lw.optim.MahalanobisSpectral(
        m, **{"lr": 0.01, "refresh_every": 3, **k}, scale="formula"
    ),
    "Layerwise": lambda m, **k: lw.optim.Layerwise(
        m, **{"left": "gradient", "right": "inputs", "power": (0.5, 1.0), "lr": 0.01, **k}
    ),
}
"""Every member with settings that touch most of its state."""


def member(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return MEMBERS[name](model, **options)
