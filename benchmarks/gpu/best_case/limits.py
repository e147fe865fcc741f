"""What no optimizer can avoid on this model and device, in plain torch: passes, products, decompositions."""

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import layerwise as lw
from gpu.best_case.model import Task
from gpu.best_case.timing import synchronisations
from gpu.marks import Marks

REPEATS = 7
COPIED = 2**30
"""Bytes of the buffer whose copy gives the bandwidth."""
COEFFICIENTS = (3.4445, -4.775, 2.0315)
ESTIMATION_AIM = 1.3


def median_ms(task: Task, call: Callable[[], object], repeats: int = REPEATS) -> float:
    """After two calls that do not count."""
    for _ in range(2):
        call()
    marks = Marks(task.device)
    marks.mark()
    for _ in range(repeats):
        call()
        marks.mark()
    return round(statistics.median(marks.milliseconds()), 3)


def padded(d: int) -> int:
    """Up to a multiple of 16, as factors are stored."""
    return -(-d // 16) * 16


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """float32 products in "tf32" or "ieee" arithmetic, for a while."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        before = matmul.allow_tf32
        matmul.allow_tf32 = precision == "tf32"
        try:
            yield
        finally:
            matmul.allow_tf32 = before
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


class Sizes:
    """Shapes of the hidden matrices and of their factors, with how often each occurs."""

    def __init__(self, task: Task) -> None:
        layers = task.layers().values()
        self.matrices = Counter((m.out_features, padded(m.in_features + 1)) for m in layers)
        self.factors = Counter(d for (O, I), n in self.matrices.items() for d in (O, I) for _ in range(n))
        self.tokens = task.x.numel()


def passes(task: Task) -> dict[str, float]:
    """The model alone, and the two backwards: of training, and to the outputs of the layers, as factors need it."""
    model = task.model

    def training() -> None:
        model.zero_grad()
        task.loss(model).backward()

    def to_outputs() -> None:
        edges: list = []
        hooks = [
            m.register_forward_hook(lambda *seen: edges.append(get_gradient_edge(seen[-1])))
            for m in (model.get_submodule(name) for name in task.layers())
        ]
        loss = task.loss(model)
        for hook in hooks:
            hook.remove()
        torch.autograd.grad(loss, edges)

    found = {"forward": median_ms(task, lambda: task.loss(model)), "forward+backward": median_ms(task, training)}
    found["forward + backward to layer outputs"] = median_ms(task, to_outputs)
    model.zero_grad()
    return found


def bandwidth(task: Task) -> float:
    """GB/s read and written together."""
    a = torch.empty(COPIED if task.cuda else COPIED // 64, dtype=torch.uint8, device=task.device)
    b = torch.empty_like(a)
    return round(2 * a.numel() / (1e6 * median_ms(task, lambda: b.copy_(a))), 1)


def factor_products(task: Task, sizes: Sizes) -> float:
    """``XᵀX`` of all layers, inputs and output gradients, in bfloat16 with float32 sums (float32 on a CPU)."""
    dtype = torch.bfloat16 if task.cuda else torch.float32
    X = {d: torch.randn(sizes.tokens, d, device=task.device, dtype=dtype) for d in sizes.factors}
    options: dict[str, Any] = {"out_dtype": torch.float32} if task.cuda else {}

    def products() -> None:
        for d, n in sizes.factors.items():
            for _ in range(n):
                torch.mm(X[d].T, X[d], **options)

    return median_ms(task, products)


def application(task: Task, sizes: Sizes, dtype: torch.dtype) -> float:
    """``P · ∇ · Q`` of all hidden matrices, stacked by shape."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=task.device, dtype=dtype)

    stacks = [(random(n, O, O), random(n, O, I), random(n, I, I)) for (O, I), n in sizes.matrices.items()]
    return median_ms(task, lambda: [P @ G @ Q for P, G, Q in stacks])


def orthogonalisation(task: Task, sizes: Sizes, dtype: torch.dtype, on_gram: bool = False) -> float:
    """Muon's five steps, stacked by shape; `on_gram`: on the Gram matrix where one side is twice the other."""
    shapes = [(n, min(O, I), max(O, I)) for (O, I), n in sizes.matrices.items()]
    stacks = [torch.randn(*shape, device=task.device) for shape in shapes]
    stacks = [(X / X.flatten(1).norm(dim=1).view(-1, 1, 1)).to(dtype) for X in stacks]
    a, b, c = COEFFICIENTS

    def polynomial(A: Tensor) -> Tensor:
        p = torch.baddbmm(A, A, A, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        return p

    def on_matrix(X: Tensor) -> Tensor:
        for _ in range(5):
            A = X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
        return X

    def on_gram_matrix(X: Tensor) -> Tensor:
        """Three steps, the third applied by itself, and two on the Gram matrix of what they give."""
        A = X @ X.mT
        p = polynomial(A)
        A = p @ (p @ A)
        q = polynomial(A)
        A = q @ (q @ A)
        X = polynomial(A) @ ((q @ p) @ X)
        A = X @ X.mT
        p = polynomial(A)
        return (polynomial(p @ (p @ A)) @ p) @ X

    def five_steps() -> None:
        for X in stacks:
            (on_gram_matrix if on_gram and X.shape[-1] >= 2 * X.shape[-2] else on_matrix)(X)

    return median_ms(task, five_steps)


def decompositions(task: Task, sizes: Sizes) -> dict[str, float]:
    """Cholesky of all factors, stacked by size; `eigh` of one factor of each size, times their number."""

    def factors(d: int, n: int) -> Tensor:
        X = torch.randn(n, d, 2 * d, device=task.device)
        return X @ X.mT / (2 * d)

    stacks = [factors(d, n) for d, n in sizes.factors.items()]
    found = {"Cholesky of all factors": median_ms(task, lambda: [torch.linalg.cholesky_ex(S) for S in stacks], 3)}
    total = 0.0
    for d, n in sizes.factors.items():
        one = factors(d, 1)[0]
        torch.linalg.eigh(one)
        marks = Marks(task.device)
        marks.mark()
        torch.linalg.eigh(one)
        marks.mark()
        total += n * marks.milliseconds()[0]
    return found | {"eigh, one of each size × count": round(total, 1)}


def limits(task: Task) -> dict[str, float | str]:
    """All of them; milliseconds but for the bandwidth."""
    sizes = Sizes(task)
    found: dict[str, float | str] = {"copy bandwidth, GB/s": bandwidth(task), **passes(task)}
    found["factor products, bf16"] = factor_products(task, sizes)
    found["P∇Q, bf16"] = application(task, sizes, torch.bfloat16 if task.cuda else torch.float32)
    for precision in ("tf32", "ieee"):
        with products_in(precision):
            found[f"P∇Q, {'fp32' if precision == 'ieee' else precision}"] = application(task, sizes, torch.float32)
    halves = (torch.bfloat16, torch.float16) if task.cuda else (torch.float32, torch.float32)
    found["Muon's five steps, bf16"] = orthogonalisation(task, sizes, halves[0])
    found["Muon's five steps, fp16, on Gram matrices"] = orthogonalisation(task, sizes, halves[1], on_gram=True)
    found |= decompositions(task, sizes)
    if task.cuda:
        torch.cuda.empty_cache()
        found["synchronisations without optimizer"] = synchronisations(task, task.model, None)
        task.model.zero_grad()
    return found


def estimation(task: Task, found: dict[str, float | str]) -> dict:
    """`lw.fisher(structure="kfac")` of the hidden layers, sampled, against forward, backward and factor products."""
    model = task.copy()
    law = lw.likelihoods.Categorical(class_axis=-1)
    select = list(task.layers())

    def estimate() -> None:
        with task.autocast():
            lw.fisher(model, (task.x, task.y), law, "kfac", "sampled", select=select, progress=False)

    taken = median_ms(task, estimate, 5)
    products = float(found["factor products, bf16"])
    limit = float(found["forward+backward"]) + products
    least = float(found["forward + backward to layer outputs"]) + products
    return {
        "ms": taken,
        "limit": round(limit, 3),
        "of_limit": round(taken / limit, 3),
        "limit_without_weight_gradients": round(least, 3),
        "of_limit_without_weight_gradients": round(taken / least, 3),
    }
