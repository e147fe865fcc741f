"""Transfer by refitting the head: features learned on one task, and one least-squares step for another.

A network learns a source task. Its body is then frozen, and a new head for a target task is fitted on the features in a
single step of FOOF with a rate of 1: for the square loss `∇L Q⁻¹` is the whole way to the least-squares solution. Run
`python examples/head_refit.py --help`.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw

RIDGE = 1e-3
"""Damping of the least-squares step, relative to the mean eigenvalue of the features' second moment."""
TARGET_IMAGES = 300

EXPLANATION = """\
Two targets. parity: odd or even, after all ten digits on other images. unseen: digits 5 to 9, after 0 to 4.
Accuracy on held-out images of the target, for heads on three bodies:
  pixels    no body: the images themselves
  random    a body that was never trained
  trained   a body that has learned the source task
Heads: one step of FOOF with lr=1 (checked against a least-squares solver), beside epochs of Adam on the same loss."""


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images [N, 64] in a random order and their labels; pixels in [0, 1], minus the mean image."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16
    return x - x.mean(0), torch.as_tensor(labels, dtype=torch.long)[order]


def tasks(x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """By name of the target: images and labels of the source, images and labels of the target."""
    low = y < 5
    return {
        "parity": (x[:900], y[:900], x[900:], y[900:] % 2),
        "unseen": (x[low], y[low], x[~low], y[~low] - 5),
    }


def body(seed: int) -> nn.Sequential:
    """64-100-50 ReLU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU())


def fit(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, loss, epochs: int, seed: int) -> None:
    """The plain loop; the rate falls to zero along a cosine."""
    generator = torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * -(-len(x) // 100))
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(100):
            opt.zero_grad()
            loss(model(x[batch]), y[batch]).backward()
            opt.step()
            schedule.step()


def square(f: Tensor, targets: Tensor) -> Tensor:
    """½ E‖f − y‖²."""
    return 0.5 * (f - targets).square().sum(1).mean()


def learn(x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Sequential:
    """A body and a head for the source task, trained together; the body is returned.

    K-FAC for the body, Adam for the head: `overrides` gives layers options of their own, by name.
    """
    features = body(seed)
    model = nn.Sequential(features, nn.Linear(50, int(y.max()) + 1))
    opt = lw.optim.KFAC(
        model,
        lr=3e-3,
        damping=1e-3,
        damping_scale="absolute",  # steps shrink as the network becomes sure; with relative damping they do not
        likelihood="categorical",
        overrides={"1": {"update": "fallback"}},
        scale="formula",
    )
    fit(model, opt, x, y, F.cross_entropy, epochs, seed)
    return features


def refit(features: nn.Module, width: int, x: Tensor, targets: Tensor) -> nn.Sequential:
    """A new head in one step, W ← W − ∇L (Q + λI)⁻¹ from W = 0; frozen parameters are not the optimizer's."""
    model = nn.Sequential(features.requires_grad_(False), nn.Linear(width, targets.shape[1]))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    opt = lw.optim.FOOF(model, lr=1.0, momentum=0.0, damping=RIDGE, scale="formula")
    square(model(x), targets).backward()
    opt.step()
    with torch.no_grad():
        a = F.pad(features(x), (0, 1), value=1.0).double()  # the bias is a column of ones
    Q = a.mT @ a / len(a)
    Q += RIDGE * Q.diagonal().mean() * torch.eye(len(Q))
    solved = torch.linalg.solve(Q, a.mT @ targets.double() / len(a)).mT
    found = torch.cat([model[1].weight, model[1].bias.unsqueeze(1)], dim=1).detach()
    assert (found - solved).norm() < 1e-2 * solved.norm(), "a step of FOOF with lr=1 is least squares"
    return model


def adam(features: nn.Module, width: int, x: Tensor, targets: Tensor, epochs: int, seed: int) -> nn.Sequential:
    """The same loss on the same frozen features, by Adam."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(features.requires_grad_(False), nn.Linear(width, targets.shape[1]))
    fit(model, torch.optim.Adam(model[1].parameters(), lr=1e-2), x, targets, square, epochs, seed)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="of the source task; Adam's heads get four times as many")
    parser.add_argument("--quick", action="store_true", help="one epoch, to see that it runs")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the batches")
    given = parser.parse_args()
    if given.epochs < 1:
        parser.error("give at least one epoch")
    epochs, seed = 1 if given.quick else given.epochs, given.seed
    try:
        x, y = digits(seed)
    except ImportError:
        sys.exit("This example needs scikit-learn for its data: pip install scikit-learn")
    print(f"{EXPLANATION}\n\n{'target':<10}{'body':<10}{'one step':>10}{f'{4 * epochs} epochs':>12}")
    for name, (source, classes, images, labels) in tasks(x, y).items():
        targets = F.one_hot(labels).float()
        bodies = {"pixels": nn.Identity(), "random": body(seed + 1), "trained": learn(source, classes, epochs, seed)}
        for title, features in bodies.items():
            n, width = TARGET_IMAGES, 64 if title == "pixels" else 50
            once = refit(features, width, images[:n], targets[:n])
            often = adam(features, width, images[:n], targets[:n], 4 * epochs, seed)
            with torch.no_grad():
                right = [float((m(images[n:]).argmax(1) == labels[n:]).float().mean()) for m in (once, often)]
            print(f"{name:<10}{title:<10}{right[0]:>10.3f}{right[1]:>12.3f}")


if __name__ == "__main__":
    main()
