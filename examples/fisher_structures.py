"""How good are the structures of the Fisher matrix? One small network, every structure against the dense matrix.

A 64-20-10 tanh network is trained on the digits that scikit-learn brings. At a few steps of the training the exact
Fisher matrix is computed whole and in five structures, and each is asked what users ask of it: its trace, a
product, a damped solve. Run it with `make demo`, or `python examples/fisher_structures.py --help`.
"""

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import layerwise as lw

STEPS = (0, 50, 1000)
DAMPINGS = (1e-4, 1e-3, 1e-2, 1e-1)
STRUCTURES = ("diag", "quasidiag", "block", "kfac", "ekfac")
DIRECTIONS = 20

EXPLANATION = """\
Each row compares one structure with the dense matrix F (1510 x 1510, exact Fisher of the softmax).
  frobenius   |M - F| / |F|, lower is better
  trace       |tr M - tr F| / tr F, lower is better; only kfac changes the trace
  cos Fv      cosine of M v and F v, higher is better
  solve       cosine of v and (M + aI)^-1 (F + aI) v for a damping a, higher is better
Cosines are means over {count} random directions. kfac solves in two ways: "exact" damps the product of its factors,
"trace" damps each factor. No row wins everywhere: that is why there are several."""


@dataclass(frozen=True)
class Row:
    """One structure against the dense matrix; fields as in the explanation above."""

    name: str
    frobenius: float
    trace: float
    product: float
    solve: tuple[float, ...]
    """One cosine for each of `DAMPINGS`."""
    error: float
    """Largest standard error of the cosines."""


def digits() -> tuple[Tensor, Tensor]:
    """1797 images of 8 × 8, pixels in [0, 1] with the mean image taken off, and their labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float64) / 16
    return x - x.mean(0), torch.as_tensor(labels, dtype=torch.long)


def network(generator: torch.Generator) -> nn.Sequential:
    """64-20-10 tanh, weights N(0, 1/fan_in), biases 0, float64."""
    model = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10)).double()
    for layer in (model[0], model[2]):
        assert isinstance(layer, nn.Linear)
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
    return model


def train(x: Tensor, y: Tensor, steps: Sequence[int] = STEPS, seed: int = 0) -> Iterator[tuple[int, float, nn.Module]]:
    """SGD with batches of 100 and a rate of 0.5; yields (step, loss on all data, copy of the network)."""
    generator = torch.Generator().manual_seed(seed)
    model = network(generator)
    wanted = sorted(set(steps))
    for step in range(wanted[-1] + 1):
        if step in wanted:
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model(x), y)
            yield step, float(loss), copy.deepcopy(model)
        batch = torch.randint(len(x), (100,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        lw.ParamVector(dict(zip(dict(model.named_parameters()), gradient, strict=True))).add_to(model, scale=-0.5)


def sphere(d: int, count: int = DIRECTIONS, seed: int = 0) -> Tensor:
    """Columns `[d, count]`, uniform on the unit sphere."""
    v = torch.randn(d, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return v / v.norm(dim=0)


def matrices(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, lw.ParamMatrix]:
    """The exact Fisher matrix in every structure, the dense one included."""
    return {name: lw.fisher(model, (x, y), structure=name, estimator="exact") for name in ("dense", *STRUCTURES)}


def measure(found: dict[str, lw.ParamMatrix], v: Tensor) -> list[Row]:
    """One row a structure; kfac has two, one for each way of damping a solve."""
    dense = found["dense"]
    F, trace, Fv = dense.to_dense(), dense.trace(), dense @ v
    rows = []
    for name in STRUCTURES:
        M = found[name]
        frobenius = float((M.to_dense() - F).norm() / F.norm())
        off = float((M.trace() - trace).abs() / trace)
        product = torch.cosine_similarity(M @ v, Fv, dim=0)
        for split in ("exact", "trace") if name == "kfac" else (None,):
            solved = [M.solve(Fv + a * v, damping=a, damping_split=split) for a in DAMPINGS]
            cosines = torch.stack([product, *(torch.cosine_similarity(s, v, dim=0) for s in solved)])
            means, errors = cosines.mean(1).tolist(), cosines.std(1) / v.shape[1] ** 0.5
            label = f"{name} {split}" if split else name
            rows.append(Row(label, frobenius, off, means[0], tuple(means[1:]), float(errors.max())))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Aligned plain text."""
    lines = [f"{'structure':<12}{'frobenius':>10}{'trace':>10}{'cos Fv':>9}" + "   solve, damping"]
    lines.append(" " * 41 + "".join(f"{a:>9.0e}" for a in DAMPINGS))
    for r in rows:
        solves = "".join(f"{c:>9.3f}" for c in r.solve)
        lines.append(f"{r.name:<12}{r.frobenius:>10.3f}{r.trace:>10.1e}{r.product:>9.3f}{solves}")
    return "\n".join([*lines, f"(largest standard error of a cosine: {max(r.error for r in rows):.3f})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="steps of training to look at")
    parser.add_argument("--examples", type=int, default=400, help="examples that the Fisher matrix is made of")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and directions")
    given = parser.parse_args()
    if min(given.steps) < 0 or not 1 <= given.examples <= 1797:
        parser.error("give steps >= 0 and 1 to 1797 examples")
    try:
        x, y = digits()
    except ImportError:
        sys.exit("This example needs scikit-learn for its data: pip install scikit-learn")
    print(EXPLANATION.format(count=DIRECTIONS))
    n = given.examples
    for step, loss, model in train(x, y, given.steps, given.seed):
        found = matrices(model, x[:n], y[:n])
        rows = measure(found, sphere(found["dense"].numel(), seed=given.seed))
        print(f"\nstep {step}, training loss {loss:.3f}, {n} examples\n{table(rows)}")


if __name__ == "__main__":
    main()
