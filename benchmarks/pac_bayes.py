"""What noise costs: one step of a PAC-Bayes posterior beside one step of plain training.

    python benchmarks/pac_bayes.py                         # small networks and T-600, on one CPU core
    python benchmarks/pac_bayes.py --device cuda
    python benchmarks/pac_bayes.py --networks conv --batch 512

Rows are a forward and backward pass alone, and a whole step with RMSprop; "plain" is the network itself, with its
parameters as views of one flat vector, as the noisy passes have them. In a basis of Kronecker eigenvectors four matrix
products a layer come on top, which are (O + I)/B times a layer's own three: the column "products" has their share by
count, and where it is far above the aim no implementation with these products can reach it unless the device is idle
most of the time. All numbers are medians by turns; on a busy machine compare CPU.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import json
import platform
from collections.abc import Callable
from itertools import pairwise

import torch
from measure import Row, by_turns
from torch import nn

from layerwise.bounds.pac_bayes.bases import kronecker_bases, pieces, standard_bases
from layerwise.bounds.pac_bayes.examples import outputs
from layerwise.bounds.pac_bayes.posterior import Objective, Posterior, start
from layerwise.bounds.pac_bayes.prior import PriorGrid

AIM = 1.5
"""Of a noisy pass over a plain one."""
BLOCK = 20
"""Steps that are timed together."""
METHODS = {"noise": ("base", "rotate"), "noise in the eigenbasis": ("iter", "rotate"), "in EKFAC's": ("ekfac", "joint")}


def chain(*sizes: int) -> nn.Sequential:
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int]] = {
    "64-30-2": (lambda: chain(64, 30, 2), (64,), 100),
    "T-600": (lambda: chain(784, 600, 2), (784,), 128),
    "conv": (convolutional, (3, 16, 16), 128),
}
"""How each is made, its inputs and its batch."""


class Setting:
    """A network with a batch, in which everything else is made."""

    def __init__(self, name: str, batch: int | None, device: str) -> None:
        torch.manual_seed(0)
        make, shape, usual = NETWORKS[name]
        self.model = make().to(device)
        self.batch = batch or usual
        self.y = torch.randint(2, (self.batch,), device=device)
        self.x = torch.randn(self.batch, *shape, device=device)
        self.flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}

    def posterior(self, method: str, bias: str) -> Posterior:
        data = (self.x, self.y)
        if method == "base":
            bases = standard_bases(self.model, data, False)
        else:
            bases = kronecker_bases(self.model, data, method, bias)  # pyright: ignore[reportArgumentType]
        objective = Objective(0.9 * self.flat, PriorGrid(), 60_000, 0.025, 1.44)
        return start(objective, self.flat, bases, "weights")

    def products(self) -> float:
        """Multiplications of the rotations over those of a plain pass, by count."""
        plain, turned, positions = 0.0, 0.0, {}

        def keep(layer: nn.Module, _: tuple, out: torch.Tensor) -> None:
            positions[layer] = out.numel() // out.shape[1] if out.ndim > 2 else len(out)

        hooks = [layer.register_forward_hook(keep) for layer in self.model if hasattr(layer, "weight")]
        self.model(self.x)
        for hook in hooks:
            hook.remove()
        for number, (layer, rows) in enumerate(positions.items()):
            o, i = layer.weight.flatten(1).shape
            plain += (2 if number == 0 else 3) * rows * o * i  # nobody needs the gradient of the inputs
            turned += 2 * (o * o * i + o * i * i)
        return turned / plain

    def plain(self, step: bool) -> Callable[[], object]:
        leaf = self.flat.clone().requires_grad_()
        optimizer = torch.optim.RMSprop([leaf], lr=1e-6)

        def call() -> None:
            for _ in range(BLOCK):
                f = outputs(self.model, pieces(leaf, self.shapes), self.x)
                (leaf.grad,) = torch.autograd.grad(nn.functional.cross_entropy(f, self.y), leaf)
                if step:
                    optimizer.step()

        return call

    def noisy(self, method: str, bias: str, step: bool) -> Callable[[], object]:
        q = self.posterior(method, bias)
        theta = nn.Parameter(q.theta)
        theta.grad = q.grad
        optimizer = torch.optim.RMSprop([theta], lr=1e-6)
        generator = torch.Generator(self.x.device).manual_seed(0)

        def call() -> None:
            for _ in range(BLOCK):
                q.backward(self.model, self.x, self.y, generator)
                if step:
                    optimizer.step()
                    q.project()

        return call


def measured(name: str, args: argparse.Namespace) -> dict:
    setting = Setting(name, args.batch, args.device)
    rows = []
    for step in (False, True):
        end = "step" if step else "pass"
        rows.append(Row(f"plain {end}", lambda step=step: setting.plain(step)))
        rows += [
            Row(f"{label}, {end}", lambda how=how, step=step: setting.noisy(*how, step))
            for label, how in METHODS.items()
        ]
    by_turns(rows, args.repeats, args.patience, args.device)
    found = {row.name: row.seconds() for row in rows}
    print(f"\n{name}, batch {setting.batch}, {len(setting.flat)} parameters; products {setting.products():.2f}")
    print(f"{'':34}{'ms':>9}{'CPU ms':>9}{'ratio':>8}{'CPU':>7}")
    ratios = {}
    for label, seconds in found.items():
        relative = seconds.over(found["plain step" if label.endswith("step") else "plain pass"])
        ratios[label] = (round(relative.wall, 3), round(relative.cpu, 3))
        ms, cpu = (1e3 * part / BLOCK for part in (seconds.wall, seconds.cpu))
        print(f"{label:34}{ms:9.3f}{cpu:9.3f}{relative.wall:8.2f}{relative.cpu:7.2f}")
    times = {label: round(1e3 * seconds.wall / BLOCK, 4) for label, seconds in found.items()}
    return {"batch": setting.batch, "products": round(setting.products(), 3), "ms": times, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--batch", type=int, help="instead of each network's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds for a row, at most")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "CPU"
    print(f"{machine}, torch {torch.__version__}, {args.threads} thread(s); the aim of a noisy pass is {AIM}")
    found = {name: measured(name, args) for name in args.networks}
    print(json.dumps({"benchmark": "pac_bayes", "device": args.device, "aim": AIM, "networks": found}))


if __name__ == "__main__":
    main()
