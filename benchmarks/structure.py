"""Leading eigenpairs of one layer's Hessian: factored products against Hessian-vector products by autograd.

    python benchmarks/structure.py                                   # a small network, on one CPU core
    python benchmarks/structure.py --digits                          # digits, 64-20-20-10
    python benchmarks/structure.py --device cuda --paper             # fc2 of 784-600-600-10, 60,000 examples, 100 pairs
    python benchmarks/structure.py --device cuda --paper --products pairs

"layerwise" goes over the data once and keeps inputs and output gradients; "autograd" differentiates the gradient anew
for every vector, batch by batch, under the same Lanczos; "curvlinops" (with SciPy's eigsh) and "pyhessian" (power
iteration, all other layers frozen) are measured where they are installed. The limit is the two large products that a
factored product cannot avoid, as often as Lanczos asked for them. Rows are timed by turns; the table has medians.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: idle threads must not burn a core

import argparse
import importlib.util
import json
import platform
from collections.abc import Callable

import torch
from measure import Row, by_turns
from torch import Tensor, nn
from torch.nn import functional as F

import layerwise as lw
from layerwise.data.digits import digits
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.structure.eigenpairs import BLOCK, lanczos_pairs

AIM_SECONDS, AIM_RATIO = 60.0, 5.0
"""Of 100 pairs at the paper's size on an H200, and of autograd over ours."""
LAYER = 2


class Problem:
    """A network, its data in batches, and the layer in question."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width, inputs = args.width, 64 if args.digits else 784
        if args.digits:
            found = digits(args.examples)
            self.x, self.y = found.x.float().flatten(1), found.y
        else:
            self.x = torch.rand(args.examples, inputs) * (torch.rand(args.examples, inputs) < 0.2)  # as sparse as MNIST
            self.y = torch.randint(10, (args.examples,))
        layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        self.model = nn.Sequential(*layers).to(args.device)
        self.x, self.y = self.x.to(args.device), self.y.to(args.device)
        self.batches = list(zip(self.x.split(args.batch), self.y.split(args.batch), strict=True))
        self.weight = self.model[LAYER].weight
        self.pairs, self.tol, self.products = args.pairs, args.tol, args.products
        self.columns: dict[str, int] = {}
        self.values: dict[str, Tensor] = {}

    def keep(self, name: str, values: Tensor) -> None:
        self.values[name] = values.detach().cpu().double()

    def ours(self) -> None:
        H = lw.structure.layer_hessian(self.model, self.batches, str(LAYER), gauss_newton=True)
        if self.products == "pairs":
            H.rows.multiply = split_fp16.product  # pyright: ignore[reportAttributeAccessIssue]
        counted = self.counted("layerwise", H._times)
        self.keep("layerwise", self.lanczos(counted))

    def autograd(self) -> None:
        """One vector at a time, a fresh graph a batch: what `torch.autograd` gives without more."""

        def product(v: Tensor) -> Tensor:
            total = torch.zeros_like(self.weight)
            for x, y in self.batches:
                loss = F.cross_entropy(self.model(x), y, reduction="sum")
                (grad,) = torch.autograd.grad(loss, self.weight, create_graph=True)
                (found,) = torch.autograd.grad(grad, self.weight, v.view_as(grad))
                total += found
            return total.flatten() / len(self.x)

        def times(X: Tensor) -> Tensor:
            return torch.stack([product(v) for v in X.mT], 1)

        self.keep("autograd", self.lanczos(self.counted("autograd", times)))

    def lanczos(self, times: Callable[[Tensor], Tensor]) -> Tensor:
        d, w = self.weight.numel(), self.weight
        found = lanczos_pairs(times, d, self.pairs, dtype=w.dtype, device=w.device, tol=self.tol, max_steps=500, seed=0)
        return found.values

    def counted(self, name: str, times: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        self.columns[name] = 0

        def product(X: Tensor) -> Tensor:
            self.columns[name] += X.shape[1]
            return times(X)

        return product

    def curvlinops(self) -> None:
        from curvlinops import HessianLinearOperator
        from scipy.sparse.linalg import eigsh

        loss = nn.CrossEntropyLoss()
        H = HessianLinearOperator(self.model, loss, [self.weight], self.batches, check_deterministic=False)
        H = H.to_scipy() if hasattr(H, "to_scipy") else H
        values, _ = eigsh(H, k=self.pairs, tol=self.tol)
        self.keep("curvlinops", torch.as_tensor(values.copy()).flip(0))

    def pyhessian(self) -> None:
        from pyhessian import hessian

        for p in self.model.parameters():
            p.requires_grad_(p is self.weight)
        try:
            cuda = self.weight.device.type == "cuda"
            found = hessian(self.model, nn.CrossEntropyLoss(), dataloader=self.batches, cuda=cuda)
            values, _ = found.eigenvalues(maxIter=100, tol=1e-3, top_n=self.pairs)
            self.keep("pyhessian", torch.tensor(values))
        finally:
            self.model.requires_grad_(True)

    def limit(self) -> Callable[[], object]:
        """The two products of one block, as often as ours makes them."""
        n, w = len(self.x), self.weight.shape[0]
        x, V = torch.rand(n, w, device=self.x.device), torch.rand(w, w * BLOCK, device=self.x.device)
        size = max(1, 2**28 // (4 * w * BLOCK))
        blocks = -(-self.columns["layerwise"] // BLOCK)

        def products() -> None:
            for _ in range(blocks):
                for part in x.split(size):
                    _ = part.mT @ (part @ V)

        return products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--paper", action="store_true", help="width 600, 60,000 examples, 100 pairs")
    parser.add_argument("--digits", action="store_true", help="digits and width 20")
    parser.add_argument("--width", type=int)
    parser.add_argument("--examples", type=int)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--tol", type=float, default=1e-5)
    parser.add_argument("--products", choices=("plain", "pairs"), default="plain", help="arithmetic of large products")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that the turns of a row may take")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    sizes = (600, 60_000, 100) if args.paper else (20, 1400, 20) if args.digits else (100, 2000, 20)
    for name, size in zip(("width", "examples", "pairs"), sizes, strict=True):
        setattr(args, name, getattr(args, name) or size)
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if args.device != "cpu" else platform.machine()
    problem = Problem(args)
    rows = [Row("layerwise", lambda: problem.ours), Row("autograd", lambda: problem.autograd)]
    for name in ("curvlinops", "pyhessian"):
        row = Row(name, lambda name=name: getattr(problem, name))
        row.note = "" if importlib.util.find_spec(name) else "not installed"
        rows.append(row)
    problem.ours()  # how many columns it needs is what the limit is made of
    rows.append(Row("limit", problem.limit))
    by_turns(rows, args.repeats, args.patience, args.device)
    report(problem, rows, args, where)


def report(problem: Problem, rows: list[Row], args: argparse.Namespace, where: str) -> None:
    print(
        f"{args.pairs} leading eigenpairs of a {args.width} × {args.width} layer, {len(problem.x)} examples, {where}\n"
    )
    print(f"{'':12s}{'wall s':>10s}{'CPU s':>10s}{'columns':>9s}{'off by':>10s}")
    truth, found = problem.values["layerwise"], {}
    for row in rows:
        if row.note:
            print(f"{row.name:12s}{row.note}")
            continue
        seconds, values = row.seconds(), problem.values.get(row.name)
        off = float((values - truth).abs().max() / truth[0]) if values is not None else None
        shown = "" if off is None else f"{off:10.1e}"
        print(f"{row.name:12s}{seconds.wall:10.3f}{seconds.cpu:10.3f}{problem.columns.get(row.name, ''):>9}{shown}")
        found[row.name] = {"wall": seconds.wall, "cpu": seconds.cpu, "off_by": off}
    side = "wall" if args.device != "cpu" else "cpu"
    ratio = found["autograd"][side] / found["layerwise"][side]
    print(
        f"\nautograd / layerwise: {ratio:.1f}; layerwise / limit: {found['layerwise'][side] / found['limit'][side]:.2f}"
    )
    if args.paper and args.device != "cpu":
        for name, held, value in (
            (f"seconds ≤ {AIM_SECONDS:g}", found["layerwise"]["wall"] <= AIM_SECONDS, found["layerwise"]["wall"]),
            (f"autograd / layerwise ≥ {AIM_RATIO:g}", ratio >= AIM_RATIO, ratio),
        ):
            print(f"aim {name}: {'held' if held else 'not held'} ({value:.2f})")
    record = {"benchmark": "structure", "machine": where, "torch": torch.__version__, **vars(args)}
    print(json.dumps({**record, "columns": problem.columns, "rows": found, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
