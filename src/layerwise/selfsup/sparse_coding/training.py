"""Dictionaries trained by decoding and descent: many of them, with and without masks, as one tensor program.

Each step decodes a batch of samples with the dictionary as it is (codes are constants of the gradient), takes one step
of an optimizer on it, and divides its atoms by their norms. Without hidden coordinates this is algorithm 2 of chapter 2
of Wu (2023); with some, drawn anew for each batch, algorithm 3: codes see the others alone, and the loss is of the
hidden ones alone.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress, Silent
from layerwise.selfsup.sparse_coding.losses import gathered
from layerwise.selfsup.sparse_coding.omp import check_numbers, check_shapes, pursue

Watch = Callable[[int, Float[Tensor, "r d q"]], object]
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def train_dictionaries(
    Y: Float[Tensor, "r n d"],
    B: Float[Tensor, "r d q"],
    k: int,
    *,
    hidden: Sequence[int],
    generators: Sequence[torch.Generator],
    lr: float | int = 1e-3,
    batch_size: int = 200,
    epochs: int = 500,
    optimizer: Make | None = None,
    watch: Watch | None = None,
    every: int = 1,
    normalize: bool = False,
    progress: Progress | None = None,
) -> Float[Tensor, "r d q"]:
    """Dictionaries after training, each on samples of its own, in their order.

    Args:
        Y: samples of each problem, not shuffled between epochs.
        B: where dictionaries start; columns are divided by their norms.
        k: atoms a sample.
        hidden: how many coordinates are hidden from each problem's codes; 0 is the standard objective.
        generators: each problem's own, for its masks (on the CPU, so that all devices draw the same).
        lr: of Adam.
        batch_size: samples a step; the last step of an epoch may have fewer.
        epochs: passes over the samples.
        optimizer: from a list of one parameter to an optimizer, in place of Adam. The parameter has atoms as rows,
            ``[r, q, d]``; of one problem it is a matrix, ``[q, d]``, as Shampoo, Muon and others want it.
        watch: called with the epoch and the dictionaries before the first epoch, after every `every` epochs and after
            the last; a truth value ends the training.
        every: see `watch`.
        normalize: see `omp`.
        progress: shows epochs.

    >>> Y, B = torch.randn(2, 30, 8), torch.eye(8).expand(2, 8, 8)
    >>> random = [torch.Generator(), torch.Generator()]
    >>> train_dictionaries(Y, B, 2, hidden=[0, 1], generators=random, batch_size=10, epochs=3).shape
    torch.Size([2, 8, 8])
    """
    check_shapes(Y, B, k)
    (R, n, d), sizes = Y.shape, B.detach().norm(dim=-2, keepdim=True)
    check_numbers(Y, B, sizes[..., 0, :])
    _check(R, n, d, k, hidden, generators, batch_size, epochs)
    atoms = (B.detach() / sizes).mT.clone(memory_format=torch.contiguous_format)
    parameter = torch.nn.Parameter(atoms[0] if R == 1 else atoms)  # the same memory
    grad = torch.zeros_like(atoms)
    parameter.grad = grad[0] if R == 1 else grad
    steps = optimizer([parameter]) if optimizer else torch.optim.Adam([parameter], lr=lr, fused=True)
    with torch.no_grad():
        if watch and watch(0, atoms.mT.clone()):
            return atoms.mT
        for epoch in (progress or Silent()).track(range(1, epochs + 1), "epochs", epochs):
            batches = Y.split(batch_size, 1)
            for Yb, visible in zip(batches, _masks(hidden, generators, len(batches), Y), strict=True):
                _gradient(Yb, atoms, k, visible, grad, normalize)
                steps.step()
                atoms /= atoms.norm(dim=-1, keepdim=True)
            if watch and (epoch % every == 0 or epoch == epochs) and watch(epoch, atoms.mT.clone()):
                break
    return atoms.mT


def _check(R: int, n: int, d: int, k: int, hidden: Sequence[int], generators: Sequence, size: int, epochs: int) -> None:
    if len(hidden) != R or len(generators) != R:
        given = f"{R} problems, {len(hidden)} numbers of hidden coordinates and {len(generators)} generators"
        raise InputError(describe(given, "one of each a problem", "repeat them"))
    for count in hidden:
        if not 0 <= count <= d - k:
            given = f"{count} hidden coordinates of {d}, with k={k}"
            raise InputError(describe(given, f"0 to {d - k}, so that k can be seen", "hide fewer, or take a smaller k"))
    if min(n, size, epochs) < 1:
        given = f"{n} samples, batch_size={size}, epochs={epochs}"
        raise InputError(describe(given, "at least one of each", "correct them"))


def _masks(
    hidden: Sequence[int], generators: Sequence[torch.Generator], batches: int, like: Tensor
) -> Iterable[Tensor | None]:
    """For each batch of an epoch, which coordinates each problem's codes may see (1 or 0); None if all see all."""
    if not any(hidden):
        return [None] * batches
    visible = torch.ones(len(hidden), batches, like.shape[-1])
    for problem, (count, generator) in enumerate(zip(hidden, generators, strict=True)):
        if count:
            drawn = torch.rand(batches, like.shape[-1], generator=generator).topk(count, -1).indices
            visible[problem].scatter_(-1, drawn, 0.0)
    return visible.to(like).unbind(1)


def _gradient(Y: Tensor, atoms: Tensor, k: int, visible: Tensor | None, grad: Tensor, normalize: bool = False) -> None:
    """That of the mean loss of a batch, into ``grad``."""
    columns = atoms.mT.contiguous()
    sizes = atoms.new_ones(atoms.shape[:2])  # of whole atoms
    if normalize and visible is not None:
        sizes = (atoms * visible[:, None]).norm(dim=-1)
    indices, values = pursue(Y, columns, sizes, k, atoms=atoms, visible=visible, normalize=normalize)
    error = gathered(indices, atoms, values) - Y
    if visible is not None:
        standard = visible.all(-1, keepdim=True)  # problems that hide nothing have the loss of all coordinates
        error *= (1 - visible + standard)[:, None]
    total = sums_by_index if Y.device.type == "cpu" else sums_by_product
    total(indices, values, 2 / Y.shape[1] * error, grad)


def sums_by_index(indices: Tensor, values: Tensor, error: Tensor, out: Tensor) -> None:
    """Zᵀ E into ``out [r, q, d]``, for codes Z by their entries: little work on a CPU."""
    R, q, d = out.shape
    at = (indices + (torch.arange(R, device=out.device) * q)[:, None, None]).view(-1)
    out.zero_().view(-1, d).index_add_(0, at, (values[..., None] * error[:, :, None]).view(-1, d))


def sums_by_product(indices: Tensor, values: Tensor, error: Tensor, out: Tensor) -> None:
    """The same as a product of matrices: on a GPU sums of atomic additions would differ from run to run."""
    codes = values.new_zeros(*values.shape[:2], out.shape[1]).scatter_(-1, indices, values)
    torch.bmm(codes.mT, error, out=out)
