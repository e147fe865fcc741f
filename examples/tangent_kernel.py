"""How does training change what a network takes to be similar? Its tangent kernel, before and after.

A 64-80-80-80-10 ReLU network is trained on the digits that scikit-learn brings. For three pairs of classes, the tangent
kernel of the binary function f_c2 - f_c1 on 50 + 50 held-out images is computed, normalized, and projected on its two
leading principal components. Run `python examples/tangent_kernel.py --help`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import layerwise as lw

PAIRS = ((3, 8), (4, 9), (1, 8))
STEPS = (0, 50, 200, 600)
TRAINED_ON = 1000
HELD_OUT = 50
"""Images of each class that the kernel is computed on."""

EXPLANATION = """\
Entries of the normalized kernel are cosines between gradients of f_c2 - f_c1 on two images.
  contrast   mean entry within a class (but the diagonal, which is 1) minus mean entry between classes
  accuracy   of a linear discriminant in the plane of the two leading principal components
  fisher     squared distance of the class means in that plane over the sum of the classes' variances"""


@dataclass(frozen=True)
class View:
    """One pair of classes at one step of the training; fields as in the explanation above."""

    pair: tuple[int, int]
    step: int
    contrast: float
    accuracy: float
    fisher: float
    cosines: Tensor
    """The normalized kernel, `[N, N]`, one class after the other."""
    plane: Tensor
    """Coordinates along the two leading principal components, `[N, 2]`."""


def digits(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images to train on and their labels, held-out images and theirs: pixels in [0, 1], minus the mean image."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(labels, dtype=torch.long)[order]
    x = x - x[:TRAINED_ON].mean(0)
    return x[:TRAINED_ON], y[:TRAINED_ON], x[TRAINED_ON:], y[TRAINED_ON:]


def network(generator: torch.Generator) -> nn.Sequential:
    """64-80-80-80-10 ReLU, weights N(0, 2/fan_in), biases 0."""
    sizes = (64, 80, 80, 80, 10)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.normal_(layer.weight, std=(2 / fan_in) ** 0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(x: Tensor, y: Tensor, steps: Sequence[int] = STEPS, seed: int = 0) -> Iterator[tuple[int, float, nn.Module]]:
    """SGD, rate 0.02, momentum 0.9, batches of 100; yields (step, loss on all data, the network as it is then)."""
    generator = torch.Generator().manual_seed(seed)
    model = network(generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(max(steps) + 1):
        if step in steps:
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model(x), y)
            yield step, float(loss), model
        batch = torch.randint(len(x), (100,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def measure(model: nn.Module, x: Tensor, y: Tensor, pair: tuple[int, int], step: int = 0) -> View:
    """The kernel of one binary function on held-out images of its two classes, and what is seen in it."""
    c1, c2 = pair
    chosen = torch.cat([(y == c).nonzero().flatten()[:HELD_OUT] for c in pair])
    second = y[chosen] == c2
    K = lw.ntk(model, x[chosen], outputs=lambda f: f[:, c2] - f[:, c1]).normalized()
    cosines, plane = K.matrix(), K.kernel_pca(2).coordinates.double()
    same = second.unsqueeze(1) == second
    contrast = cosines[same & ~torch.eye(len(second), dtype=torch.bool)].mean() - cosines[~same].mean()
    return View(pair, step, float(contrast), *separation(plane[~second], plane[second]), cosines, plane)


def separation(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Accuracy of the linear discriminant on the points it is made from, and |m_a - m_b|^2 / (tr S_a + tr S_b)."""
    across = b.mean(0) - a.mean(0)
    covariances = torch.cov(a.mT, correction=0) + torch.cov(b.mT, correction=0)
    direction, middle = torch.linalg.solve(covariances, across), (a.mean(0) + b.mean(0)) / 2
    right = ((a - middle) @ direction <= 0).sum() + ((b - middle) @ direction > 0).sum()
    return float(right) / (len(a) + len(b)), float(across.square().sum() / covariances.trace())


def table(views: Sequence[View]) -> str:
    """One row a pair, each measure at the first and at the last step."""
    lines = [f"{'pair':<9}{'contrast':>17}{'accuracy':>17}{'fisher':>17}"]
    for pair in dict.fromkeys(view.pair for view in views):
        first, *_, last = [view for view in views if view.pair == pair]
        values = [(first.contrast, last.contrast), (first.accuracy, last.accuracy), (first.fisher, last.fisher)]
        lines.append(f"{pair[0]} vs {pair[1]:<4}" + "".join(f"{a:>8.3f} -> {b:.3f}" for a, b in values))
    return "\n".join(lines)


def draw(views: Sequence[View], path: Path) -> None:
    """Kernels and planes: two rows a pair, one column a step."""
    from matplotlib.figure import Figure

    pairs, steps = (list(dict.fromkeys(seen)) for seen in ([v.pair for v in views], [v.step for v in views]))
    figure = Figure(figsize=(2.2 * len(steps), 4.2 * len(pairs)), layout="constrained")
    axes = figure.subplots(2 * len(pairs), len(steps), squeeze=False)
    for view in views:
        row, column = 2 * pairs.index(view.pair), steps.index(view.step)
        matrix, plane = axes[row, column], axes[row + 1, column]
        matrix.imshow(view.cosines.numpy(), vmin=0, vmax=1, cmap="magma")
        matrix.set_title(f"{view.pair[0]} vs {view.pair[1]}, step {view.step}", fontsize=9)
        points_of = view.plane.numpy().reshape(2, -1, 2)  # one class after the other, equally many
        for points, marker in zip(points_of, "ox", strict=True):
            plane.scatter(points[:, 0], points[:, 1], s=9, marker=marker, linewidths=0.8)
        for axis in (matrix, plane):
            axis.set(xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="steps to look at (quick: 0 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the batches")
    parser.add_argument("--out", type=Path, default=Path("build/tangent_kernel.png"), help="where the figure goes")
    given = parser.parse_args()
    if min(given.steps) < 0 or len(set(given.steps)) < 2:
        parser.error("give at least two different steps >= 0")
    try:
        x, y, held_out, labels = digits(given.seed)
    except ImportError:
        sys.exit("This example needs scikit-learn for its data: pip install scikit-learn")
    print(EXPLANATION)
    views = []
    for step, loss, model in train(x, y, given.steps, given.seed):
        print(f"step {step}, training loss {loss:.3f}")
        views += [measure(model, held_out, labels, pair, step) for pair in PAIRS]
    print(table(views))
    try:
        draw(views, given.out)
        print(f"figure: {given.out}")
    except ImportError:
        print("no figure: that needs matplotlib (pip install matplotlib)")


if __name__ == "__main__":
    main()
