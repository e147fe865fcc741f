"""Orthogonal matching pursuit of a whole batch at once, on any device.

Atoms are columns of a dictionary ``[m, q]``, as in the text; inside they are rows, since whole atoms are gathered.
Several dictionaries, each with samples of its own, are one call: leading axes are a batch of problems.
"""

import math
from numbers import Integral
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

SCORES = {"cpu": 2**21, "cuda": 2**28}
"""Inner products that are held at a time: what a cache of a CPU has room for, and what keeps a GPU busy."""
SINGLE_FROM = 128
"""Atoms from which float64 inner products are made in float32 first, on a CPU."""


class SparseCode(NamedTuple):
    """k atoms a sample, all different, and what they are multiplied by; zero where fewer atoms are enough.

    >>> code = omp(torch.tensor([[0.0, 3.0, 1.0]]), torch.eye(3), 2)
    >>> code.indices.tolist(), code.values.tolist(), code.dense(3).tolist()
    ([[1, 2]], [[3.0, 1.0]], [[0.0, 3.0, 1.0]])
    """

    indices: Int64[Tensor, "*batch n k"]
    values: Float[Tensor, "*batch n k"]

    def dense(self, q: int) -> Float[Tensor, "*batch n q"]:
        """The codes as rows of q numbers."""
        return self.values.new_zeros(*self.values.shape[:-1], q).scatter_(-1, self.indices, self.values)


@torch.no_grad()
def omp(
    Y: Float[Tensor, "*batch n m"],
    D: Float[Tensor, "*batch m q"],
    k: int,
    *,
    visible: Bool[Tensor, "*#batch m"] | None = None,
    normalize: bool = False,
) -> SparseCode:
    """k-sparse codes of samples: k times, the atom with the largest |⟨D_j, y − D z⟩| joins, and z is refitted.

    In float64 this selects the atoms that scikit-learn's `orthogonal_mp` selects, with its coefficients. A sample that
    fewer atoms represent exactly has zeros for the others. Codes are constants: no gradient flows through them.

    Args:
        Y: samples as rows.
        D: atoms as columns, of any norms.
        k: atoms a sample.
        visible: the rows of D, and coordinates of y, that may be seen; by default all.
        normalize: divide inner products by the norms of the atoms (of their visible rows). Without, as in Wu (2023)
            and in scikit-learn, long atoms are preferred: about one masked sample in five gets other atoms.

    >>> D = torch.tensor([[1.0, 0.0, 0.6], [0.0, 1.0, 0.8]])
    >>> omp(torch.tensor([[1.2, 1.6]]), D, 1)
    SparseCode(indices=tensor([[2]]), values=tensor([[2.]]))
    """
    check_shapes(Y, D, k, visible)
    batch, (n, m), q = Y.shape[:-2], Y.shape[-2:], D.shape[-1]
    keep = None if visible is None else visible.to(Y.dtype).expand(*batch, m).reshape(-1, m)
    (samples, of_Y), (columns, of_D) = _moderate(Y, -1), _moderate(D, (-2, -1))
    columns = columns.reshape(-1, m, q)
    atoms = columns.mT.contiguous()
    sizes = (atoms if keep is None else atoms * keep[:, None]).norm(dim=-1)
    check_numbers(Y, D, sizes)
    found = pursue(samples.reshape(-1, n, m), columns, sizes, k, atoms=atoms, visible=keep, normalize=normalize)
    indices, values = (part.reshape(*batch, n, k) for part in found)
    return SparseCode(indices, values * (of_Y / of_D))


def _moderate(part: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, Tensor | int]:
    """What can be squared, and what it is to be multiplied by: a power of two, so that nothing is rounded."""
    largest = part.abs().amax(dim, keepdim=True)
    least, most = largest.aminmax()
    if float(least) > 1e-9 and float(most) < 1e9:  # as nearly always
        return part, 1
    exponent = torch.frexp(largest).exponent.clamp_min(math.frexp(torch.finfo(part.dtype).tiny)[1]) - 1
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return part / scale, scale


def check_shapes(Y: Tensor, D: Tensor, k: int, visible: Tensor | None = None) -> None:
    """Raise an `InputError` for what has no codes, whatever its numbers are."""
    if not (isinstance(Y, Tensor) and isinstance(D, Tensor)):
        given = f"samples of type {type(Y).__name__} and a dictionary of type {type(D).__name__}"
        raise InputError(describe(given, "tensors", "convert them with torch.as_tensor"))
    if Y.dim() < 2 or D.dim() < 2 or not Y.numel():
        given = f"samples of shape {tuple(Y.shape)} and a dictionary of shape {tuple(D.shape)}"
        raise InputError(describe(given, "samples [n, m], one or more, and atoms [m, q]", "use y[None] for one sample"))
    m, q = D.shape[-2:]
    if Y.shape[-1] != m or Y.shape[:-2] != D.shape[:-2]:
        given = f"samples of shape {tuple(Y.shape)} and a dictionary of shape {tuple(D.shape)}"
        raise InputError(describe(given, "samples [n, m] and atoms [m, q]", "transpose one, if it is the other way"))
    if Y.dtype != D.dtype or Y.device != D.device or Y.dtype not in (torch.float32, torch.float64):
        given = f"samples of {Y.dtype} on {Y.device}, a dictionary of {D.dtype} on {D.device}"
        do = "convert them with .to(…), half precision with .float()"
        raise InputError(describe(given, "one floating-point type, float32 or float64, and one device", do))
    if visible is not None:
        _check_visible(visible, (*Y.shape[:-2], m))
    if not isinstance(k, Integral) or isinstance(k, bool):
        raise InputError(describe(f"k={k!r}", "a whole number of atoms a sample", "take e.g. k=2"))
    seen = m if visible is None else int(visible.sum(-1).min())
    if seen == 0:
        raise InputError(describe("no visible row", "at least k visible rows", "hide fewer coordinates"))
    if not 1 <= k <= min(seen, q):
        given = f"k={k} atoms a sample, of {q} atoms with {seen} visible rows"
        raise InputError(describe(given, f"1 ≤ k ≤ {min(seen, q)}", "take another k"))


def _check_visible(visible: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        given = f"visible of type {getattr(visible, 'dtype', type(visible).__name__)}"
        raise InputError(describe(given, "truth values, as a tensor of torch.bool", "convert it with .bool()"))
    own, behind = visible.shape, shape[-visible.dim() :]
    if (
        not 1 <= visible.dim() <= len(shape)
        or own[-1] != shape[-1]
        or any(a not in (1, b) for a, b in zip(own, behind, strict=True))
    ):
        given = f"visible of shape {tuple(own)} for samples of {shape[-1]} coordinates"
        raise InputError(describe(given, f"one truth value a coordinate, {list(shape)}", "give all coordinates once"))


def check_numbers(Y: Tensor, columns: Tensor, sizes: Tensor) -> None:
    """Raise an `InputError` for NaN, for infinity, and for atoms whose `sizes` (where they can be seen) are zero."""
    for name, part in (("samples", Y), ("a dictionary", columns)):
        if not bool(torch.isfinite(part.sum()) or torch.isfinite(part).all()):
            given = f"{name} with NaN or infinite entries"
            raise InputError(describe(given, "finite numbers", "leave such rows out, or fill them"))
    if bool((sizes == 0).any()):
        zero = (sizes == 0).nonzero()
        given = f"a dictionary whose column {int(zero[0, -1])} is zero in all visible rows ({len(zero)} are)"
        raise InputError(describe(given, "atoms that are not zero", "leave such columns out, or draw them anew"))


@torch.no_grad()
def pursue(
    Y: Float[Tensor, "r n m"],
    columns: Float[Tensor, "r m q"],
    sizes: Float[Tensor, "r q"],
    k: int,
    *,
    atoms: Float[Tensor, "r q m"] | None = None,
    visible: Float[Tensor, "r m"] | None = None,
    normalize: bool = False,
) -> tuple[Int64[Tensor, "r n k"], Float[Tensor, "r n k"]]:
    """`omp` without its checks, given the norms of the atoms, and atoms as rows where the caller has them.

    Hidden coordinates become zeros of residuals, so that rows of `columns` there do not matter.
    """
    Y = Y if visible is None else Y * visible[:, None]
    atoms = columns.mT.contiguous() if atoms is None else atoms
    scores = _Scores(columns, sizes, normalize)
    rows = max(1, SCORES.get(Y.device.type, SCORES["cpu"]) // sizes.numel())
    parts = [_pursue(part, atoms, sizes, k, visible, scores) for part in Y.split(rows, 1)]
    return parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1))


def _pursue(
    Y: Tensor, atoms: Tensor, sizes: Tensor, k: int, visible: Tensor | None, scores: "_Scores"
) -> tuple[Tensor, Tensor]:
    if Y.device.type == "cpu":  # on a GPU the question whether all went well would have to wait
        indices, values, regular = _steps(Y, atoms, sizes, k, visible, scores, careful=False)
        if regular:
            return indices, values
    return _steps(Y, atoms, sizes, k, visible, scores, careful=True)[:2]


def _steps(
    Y: Tensor, atoms: Tensor, sizes: Tensor, k: int, visible: Tensor | None, scores: "_Scores", *, careful: bool
) -> tuple[Tensor, Tensor, bool]:
    """The steps of the pursuit, and whether every one of them found an atom that was useful.

    If `careful`, a sample that has none left takes no further step; otherwise it would divide by zero.
    """
    (R, n, m), q = Y.shape, atoms.shape[1]
    eps, tiny = torch.finfo(Y.dtype).eps, torch.finfo(Y.dtype).tiny
    length = Y.norm(dim=-1, keepdim=True)
    residual = Y / length.clamp_min(tiny)  # of unit rows, so that all that follows is free of scale
    flat, first = atoms.view(R * q, m), torch.arange(R, device=Y.device)[:, None] * q
    basis, triangle = Y.new_empty(R, k, n, m), Y.new_zeros(R, n, k, k)
    indices = torch.zeros(R, n, k, dtype=torch.int64, device=Y.device)
    along, lengths, found, alive = [], [], [], None
    for t in range(k):
        best, chosen = scores.largest(residual, indices[..., :t])
        indices[..., t] = chosen
        at = (chosen + first).view(-1)
        atom = flat.index_select(0, at).view(R, n, m)
        if visible is not None:
            atom *= visible[:, None]
        if t:  # Gram and Schmidt, by sums of products: batched products of such small matrices are slow
            overlap = torch.linalg.vecdot(basis[:, :t], atom[:, None])
            triangle[:, :, :t, t] = overlap.mT
            for s in range(t):
                atom.addcmul_(basis[:, s], overlap[:, s, :, None], value=-1)
        new = atom.norm(dim=-1)
        if careful:
            useful = (new > eps**0.5 * sizes.view(-1)[at].view(R, n)) & (best > scores.least)
            alive = useful if alive is None else alive & useful
            unit = atom.mul_((alive / new.clamp_min(tiny))[..., None])
            new = new.masked_fill(~alive, 1)
        else:
            unit = atom.div_(new[..., None])
        step = torch.linalg.vecdot(unit, residual)
        along.append(step)
        lengths.append(new)
        found.append(best)
        if t + 1 < k:
            basis[:, t] = unit
            residual.addcmul_(unit, step[..., None], value=-1)
    diagonal = torch.stack(lengths, -1)
    triangle.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    values = torch.linalg.solve_triangular(triangle, torch.stack(along, -1)[..., None], upper=True)[..., 0]
    if careful:
        return indices, values * length, True
    whole = sizes.gather(-1, indices.view(R, -1)).view(R, n, k)
    regular = (diagonal > eps**0.5 * whole) & (torch.stack(found, -1) > scores.least[..., None])
    return indices, values * length, bool(regular.all())


class _Scores:
    """|⟨atom, residual⟩| of all atoms, and the largest of each sample.

    On a CPU, products of many float64 atoms are made in float32, in half of the time; where the largest two are closer
    than rounding can move them, in float64 again. So the choice is the one that float64 makes.
    """

    def __init__(self, columns: Tensor, sizes: Tensor, normalize: bool) -> None:
        m, kind = columns.shape[1], columns.dtype
        if normalize:
            columns = columns / sizes.clamp_min(torch.finfo(kind).tiny)[:, None]
        self.longest = torch.ones_like(sizes[:, :1]) if normalize else sizes.amax(-1, keepdim=True)  # [r, 1]
        self.least = m * torch.finfo(kind).eps * self.longest  # what is left of a residual that is zero
        self.single = columns.device.type == "cpu" and kind == torch.float64 and columns.shape[2] >= SINGLE_FROM
        self.columns = columns if self.single else columns.contiguous()
        if self.single:
            self.rounded = torch.empty(columns.shape, dtype=torch.float32)
            torch.mul(columns, 1 / self.longest[..., None], out=self.rounded)
            self.rounding = (m + 4) * torch.finfo(torch.float32).eps  # of a sum of so many products
        self._room: Tensor | None = None

    def largest(self, residual: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """The largest score of each sample, and its atom, among those not taken; residuals are no longer than 1."""
        if not self.single:
            return _first(self._scores(residual, self.columns), taken)
        scores = self._scores(residual.float(), self.rounded)
        best, chosen = _first(scores, taken)
        second = scores.scatter_(-1, chosen[..., None], -1.0).amax(-1)
        unsure = best - second <= 2 * self.rounding
        best = best * self.longest
        if bool(unsure.any()):
            for r in unsure.any(-1).nonzero()[:, 0].tolist():
                rows = unsure[r].nonzero()[:, 0]
                best[r, rows], chosen[r, rows] = _first((residual[r, rows] @ self.columns[r]).abs_(), taken[r, rows])
        return best, chosen

    def _scores(self, residual: Tensor, columns: Tensor) -> Tensor:
        """Always in the same room: memory that is asked for anew costs time."""
        shape = (*residual.shape[:2], columns.shape[2])
        if self._room is None or self._room.shape != shape:
            self._room = residual.new_empty(shape)
        return torch.bmm(residual, columns, out=self._room).abs_()


def _first(scores: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, and where; those taken are lost."""
    if taken.shape[-1]:
        scores.scatter_(-1, taken, -1.0)
    best = scores.max(-1)
    return best.values, best.indices
