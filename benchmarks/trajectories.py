"""Whether a change of the code changes a training: trajectories of all members, here and at another commit, bit by bit.

    python benchmarks/trajectories.py --against HEAD~3        # a table; exit code 1 if any of them differs
    python benchmarks/trajectories.py --only KFAC --steps 40

Both are run on this machine, in processes of their own with one thread, so that equal arithmetic gives equal bits. For
a refactoring nothing may differ; what a deliberate change of the arithmetic moves is shown with the largest difference
of the parameters after the last step, relative to the largest parameter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve()
MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"momentum": 0.9}),
    "Adam": ("Adam", {}),
    "Sign": ("Sign", {}),
    "Muon": ("Muon", {}),
    "Mahalanobis": ("MahalanobisSpectral", {}),
    "Shampoo": ("Shampoo", {"refresh_every": 3}),
    "Shampoo, formula": ("Shampoo", {"refresh_every": 2, "scale": "formula"}),
    "SOAP": ("SOAP", {"refresh_every": 3}),
    "FOOF": ("FOOF", {"refresh_every": 3, "factor_every": 2}),
    "KFAC": ("KFAC", {"likelihood": "categorical", "refresh_every": 3, "factor_every": 2}),
    "KFAC, sampled": ("KFAC", {"likelihood": "categorical", "estimator": "sampled"}),
    "KFAC, formula": ("KFAC", {"likelihood": "categorical", "scale": "formula", "damping": 0.1}),
    "EKFAC": ("EKFAC", {"likelihood": "categorical", "refresh_every": 3}),
    "EKFAC, running": ("EKFAC", {"likelihood": "categorical", "scaling": "running", "refresh_every": 2}),
    "LocoProp": ("LocoProp", {"likelihood": "categorical"}),
    "NGD": ("NGD", {"likelihood": "categorical"}),
}
"""By label: the class, and options; one that a version lacks is left out there and said so."""


class Characters(nn.Module):
    """A small transformer: embedding, attention, norms, tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """One class a sequence."""
        return self.head(self.block(self.embed(x)).mean(1))


def dense() -> nn.Module:
    """Odd sizes, with and without biases."""
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))


def convolutional() -> nn.Module:
    """Convolutions, a norm layer and a pool."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.Conv2d(4, 5, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.dtype], Tensor]]] = {
    "dense": (dense, lambda dtype: torch.randn(12, 7, dtype=dtype)),
    "convolutional": (convolutional, lambda dtype: torch.randn(12, 2, 8, 8, dtype=dtype)),
    "transformer": (Characters, lambda dtype: torch.randint(11, (12, 6))),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def trajectory(member: str, model: str, dtype: torch.dtype, steps: int) -> list[float] | str:
    """All parameters after so many steps, each on a batch of its own; or why there are none."""
    import layerwise as lw

    name, options = MEMBERS[member]
    made, draw = MODELS[model]
    torch.manual_seed(0)
    net = made().to(dtype)
    try:
        opt = getattr(lw.optim, name)(net, lr=1e-2, **options)
        for _ in range(steps):
            x, y = draw(dtype), torch.randint(3, (12,))
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
    except (TypeError, AttributeError, lw.LayerwiseError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return torch.cat([p.detach().double().flatten() for p in net.parameters()]).tolist()


def configurations(only: str) -> Iterator[tuple[str, str, str]]:
    """Members whose label has these words, on all models, in both precisions."""
    for member in MEMBERS:
        if only in member:
            for model in MODELS:
                for dtype in DTYPES:
                    yield member, model, dtype


def run_here(only: str, steps: int, to: Path) -> None:
    """Write all trajectories of the code that is on the path."""
    torch.set_num_threads(1)
    found = {
        f"{member} / {model} / {dtype}": trajectory(member, model, DTYPES[dtype], steps)
        for member, model, dtype in configurations(only)
    }
    to.write_text(json.dumps(found))


def run_at(root: Path, only: str, steps: int, to: Path) -> dict[str, list[float] | str]:
    """The same in a process of its own, with the code of another folder."""
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", str(HERE), "--only", only, "--steps", str(steps), "--to", str(to)]
    subprocess.run(words, env=environment, check=True)
    return json.loads(to.read_text())


def compared(before: list[float] | str, now: list[float] | str) -> str:
    """One word, or how far apart they are."""
    if isinstance(now, str) or isinstance(before, str):
        return "neither runs" if before == now else f"NOT COMPARED: {before if isinstance(before, str) else now}"
    if before == now:
        return "equal"
    if len(before) != len(now):
        return f"DIFFER: {len(before)} parameters before, {len(now)} now"
    a, b = torch.tensor(before, dtype=torch.float64), torch.tensor(now, dtype=torch.float64)
    return f"DIFFER by {float((a - b).abs().max() / a.abs().max()):.1e}"


def main() -> int:
    """Compare, or write for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", help="commit to compare the working tree with")
    parser.add_argument("--only", default="", help="members whose label has this in it")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.to is not None:
        run_here(options.only, options.steps, options.to)
        return 0
    here = HERE.parents[1]
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "before"
        git = ["git", "-C", str(here), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(there), options.against], check=True)
        try:
            before = run_at(there, options.only, options.steps, Path(folder) / "before.json")
            now = run_at(here, options.only, options.steps, Path(folder) / "now.json")
        finally:
            subprocess.run([*git, "remove", "--force", str(there)], check=True)
    verdicts = {name: compared(before[name], now[name]) for name in now}
    for name, verdict in verdicts.items():
        print(f"{name:<48}{verdict}")
    kinds = ("equal", "DIFFER", "NOT COMPARED", "neither runs")
    counts = {kind: sum(verdict.startswith(kind) for verdict in verdicts.values()) for kind in kinds}
    print(json.dumps({"against": options.against, "steps": options.steps} | counts))
    return int(counts["DIFFER"] + counts["NOT COMPARED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
