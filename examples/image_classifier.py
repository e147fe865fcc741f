"""A small convolutional network on handwritten digits: K-FAC beside Adam, in the same plain loop.

K-FAC has Adam's rate and nothing else. It recognises a classifier by the gradient at its output, and draws labels from
the network's own predictions: an extra backward, which the loop does not see. Run
`python examples/image_classifier.py --help`.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw

TRAINED_ON = 1400
BATCH = 100

EXPLANATION = """\
loss and accuracy after each epoch; loss on the training images, accuracy on held-out ones.
K-FAC's epochs are dearer: seconds say how much. Both learning rates fall to zero along a cosine."""


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [N, 1, 8, 8] to train on and their labels, held-out images and theirs; mean 0, variance 1."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = torch.as_tensor(pixels, dtype=torch.float32)[order].view(-1, 1, 8, 8)
    y = torch.as_tensor(labels, dtype=torch.long)[order]
    x = (x - x[:TRAINED_ON].mean()) / x[:TRAINED_ON].std()
    return x[:TRAINED_ON], y[:TRAINED_ON], x[TRAINED_ON:], y[TRAINED_ON:]


def network(seed: int) -> nn.Sequential:
    """Two convolutions and a linear layer, with batch norm between them: 14,000 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """K-FAC from the library, or torch's own Adam: the loop is the same."""
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=3e-3)
    return lw.optim.KFAC(model, lr=3e-3)  # AdamW's rate, and nothing else: the loop needs no change


def train(name: str, data: tuple[Tensor, ...], epochs: int, seed: int) -> Iterator[tuple[int, float, float, float]]:
    """Yields (epoch, loss on the training images, accuracy on held-out ones, seconds so far)."""
    x, y, held_out, labels = data
    model = network(seed)
    opt = optimizer(name, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * -(-len(x) // BATCH))
    generator = torch.Generator().manual_seed(seed)
    seconds = 0.0
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        model.train()
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            opt.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            opt.step()
            schedule.step()
        seconds += time.perf_counter() - start
        model.eval()
        with torch.no_grad():
            fitted = float(F.cross_entropy(model(x), y))
            accuracy = float((model(held_out).argmax(1) == labels).float().mean())
        yield epoch, fitted, accuracy, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8, help="passes over the 1400 training images")
    parser.add_argument("--quick", action="store_true", help="one epoch on 300 images, to see that it runs")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the batches")
    given = parser.parse_args()
    if given.epochs < 1:
        parser.error("give at least one epoch")
    try:
        data = digits(given.seed)
    except ImportError:
        sys.exit("This example needs scikit-learn for its data: pip install scikit-learn")
    if given.quick:
        data, given.epochs = tuple(part[:300] for part in data), 1
    print(EXPLANATION)
    for name in ("adam", "kfac"):
        print(f"\n{name:<8}{'epoch':>6}{'loss':>10}{'accuracy':>10}{'seconds':>9}")
        for epoch, loss, accuracy, seconds in train(name, data, given.epochs, given.seed):
            print(f"{'':8}{epoch:>6}{loss:>10.4f}{accuracy:>10.3f}{seconds:>9.1f}")
    print(f"\nwhat K-FAC does for each parameter:\n{optimizer('kfac', network(given.seed))}")


if __name__ == "__main__":
    main()
