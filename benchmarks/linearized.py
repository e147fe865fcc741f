"""A step of lw.linearized against a step of the plain model: forward, backward and SGD.

    python benchmarks/linearized.py                 # models of benchmarks/models.py, on a CPU
    python benchmarks/linearized.py --device cuda
    python benchmarks/linearized.py --tiny          # small models, to see that all runs

"α" has two forward passes and one backward pass, "α, start known" is given f₀'s outputs, "limit" is alpha=inf, one pass
in forward mode and one backward through its tangent. Steps are timed by turns; the table has medians and their ratio to
the plain step. On a busy machine use --threads 1 and compare CPU time.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import json
import platform

import torch
from measure import Call, Row, by_turns
from torch import nn
from torch.nn import functional

import layerwise as lw
from layerwise.studies.fisher_geometry.convolutional import network

AIM = 2.2
ALPHA = 100.0


def perceptron(tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    width = 32 if tiny else 512
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers), torch.randn(16 if tiny else 256, 64)


def residual(tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    return network("resnet18", width=4 if tiny else 32), torch.randn(4 if tiny else 32, 3, 32, 32)


class Transformer(nn.Module):
    """Two blocks over sequences of features, and the mean of their outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(block, 2, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean(1))


def transformer(tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    width = 16 if tiny else 128
    return Transformer(width), torch.randn(4 if tiny else 32, 8 if tiny else 64, width)


MODELS = {"perceptron": perceptron, "resnet18": residual, "transformer": transformer}
KINDS = ("plain", "α", "α, start known", "limit")


def step_of(kind: str, make: tuple[nn.Module, torch.Tensor], device: str) -> Call:
    """One step, ready to be timed."""
    model, x = make[0].to(device), make[1].to(device)
    y, known = torch.randint(10, (len(x),), device=device), {}
    net = model
    if kind != "plain":
        net = lw.linearized(model, float("inf") if kind == "limit" else ALPHA)
    if kind == "α, start known":
        net.eval()  # outputs of the start have no dropout noise
        known = {"at_start": net.at_start(x)}
    opt = torch.optim.SGD(net.parameters(), lr=1e-4)
    if kind.startswith("α"):
        lw.regimes.rescaled(opt, ALPHA)

    def step() -> None:
        opt.zero_grad()
        functional.cross_entropy(net(x, **known), y).backward()
        opt.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if args.device != "cpu" else platform.machine()
    print(f"on {where}, {args.threads} threads; ratios to the plain step, CPU time (wall time on a GPU)\n")
    print(f"{'':14s}{'plain ms':>10s}" + "".join(f"{kind:>18s}" for kind in KINDS[1:]))
    found: dict[str, dict[str, float]] = {}
    for name in args.models:
        rows = [
            Row(kind, lambda kind=kind, name=name: step_of(kind, MODELS[name](args.tiny), args.device))
            for kind in KINDS
        ]
        by_turns(rows, args.repeats, 60.0, args.device)
        base = rows[0].seconds()
        ratios = {row.name: row.seconds().over(base) for row in rows[1:]}
        shown = {kind: r.cpu if args.device == "cpu" else r.wall for kind, r in ratios.items()}
        milliseconds = 1e3 * (base.cpu if args.device == "cpu" else base.wall)
        print(f"{name:14s}{milliseconds:10.2f}" + "".join(f"{shown[kind]:17.2f}×" for kind in KINDS[1:]))
        found[name] = {"plain_ms": round(milliseconds, 3), **{kind: round(r, 3) for kind, r in shown.items()}}
    worst = max(row["α"] for row in found.values())
    print(f"\naim: α ≤ {AIM:g}×: {'held' if worst <= AIM else 'not held'} ({worst:.2f}×)")
    print(
        json.dumps(
            {"benchmark": "linearized", "machine": where, "torch": torch.__version__, **vars(args), "rows": found}
        )
    )


if __name__ == "__main__":
    main()
