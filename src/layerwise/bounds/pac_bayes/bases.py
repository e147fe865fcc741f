"""Orthogonal bases of the layers in which a posterior is diagonal: (C.272) and (C.273), for any layer's form.

A layer ``X [K, O, I]`` is turned to ``Uᵀ X V``, two products, with U and V the eigenvectors of the Kronecker factors G
and A of the exact Fisher matrix, which are E[M] and E[xxᵀ] of the thesis; convolutions and groups come with the
layer's form. Layers without Kronecker factors (norms, parameters without a rule) keep the standard basis. Eigenvectors
are in the order of their eigenvalues, so that a variance keeps its rank when a basis is computed anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.curvature.block_diagonal import BlockDiagonal
from layerwise.curvature.build import fisher
from layerwise.foundations.errors import UnsupportedError, describe
from layerwise.foundations.kronecker import EigenKronecker, Kronecker
from layerwise.foundations.linalg import guarded_eigh
from layerwise.foundations.types import trainable
from layerwise.layers.form import Form, Part
from layerwise.layers.table import LayerTable

Bias = Literal["rotate", "leave", "joint"]
METHODS = ("base", "appr", "iter", "iter-d", "iter-m", "ekfac")


@dataclass(frozen=True, eq=False)
class Rotation:
    """The basis of one layer."""

    form: Form
    left: Float[Tensor, "*B K O O"]
    """U, eigenvectors as columns."""
    right: Float[Tensor, "*B K i i"] | None
    """V, of the weight's inputs, and of the bias where that is a column; None is the identity (inputs are indices)."""
    bias: Bias = "rotate"

    def turn(self, flat: Tensor, out: Tensor, where: Mapping[str, tuple[int, tuple[int, ...]]], back: bool) -> None:
        """Write this layer of ``U X Vᵀ`` (`back`), or of ``Uᵀ X V``, into the flat vector `out`."""
        left = self.left if back else self.left.mT
        right = self.right.mT if self.right is not None and back else self.right
        if self._plain:
            self._turn_in_place(flat, out, where, left[..., 0, :, :], None if right is None else right[..., 0, :, :])
            return
        params = {part.name: _piece(flat, where[part.name]) for part in self.form.parts}
        X, i = self.form.join(params), self.form.weight_inputs
        if self.form.bias is None or self.bias == "joint":
            Y = _product(left, X, right)
        else:
            own = X[..., i:] if self.bias == "leave" else left @ X[..., i:]
            Y = torch.cat([_product(left, X[..., :i], right), own], dim=-1)
        for part, tensor in self.form.split(Y):
            part.of({part.name: _piece(out, where[part.name])}).copy_(tensor)

    @property
    def written(self) -> list[Part]:
        """The parameters that `turn` writes."""
        return [part for part in self.form.parts if part != self.form.bias or self.bias != "leave"]

    @property
    def _plain(self) -> bool:
        """Whether weight and bias are matrices of their own that lie in a flat vector as they are."""
        f = self.form
        apart = f.bias is None or self.bias != "joint"
        return apart and f.groups == 1 and not f.transposed and all(part.rows is None for part in f.parts)

    def _turn_in_place(
        self,
        flat: Float[Tensor, "*B P"],
        out: Float[Tensor, "*B P"],
        where: Mapping[str, tuple[int, tuple[int, ...]]],
        left: Float[Tensor, "*b O O"],
        right: Float[Tensor, "*b i i"] | None,
    ) -> None:
        """Weight and bias where they lie: joined, their rows would be of odd length, which makes products slow."""
        f = self.form
        assert f.weight is not None
        at = where[f.weight.name][0]
        X, Y = (v[..., at : at + f.outputs * f.weight_inputs] for v in (flat, out))
        X, Y = (v.unflatten(-1, (f.outputs, f.weight_inputs)) for v in (X, Y))
        if flat.ndim > 1:
            Y.copy_(_product(left, X.contiguous(), right))
        elif right is None:
            torch.mm(left, X, out=Y)
        else:
            torch.mm(left @ X, right, out=Y)
        if f.bias is not None and self.bias == "rotate":
            at = where[f.bias.name][0]
            own = flat[..., at : at + f.outputs].unsqueeze(-1)
            out[..., at : at + f.outputs] = (left @ own).squeeze(-1)


def _product(left: Tensor, X: Tensor, right: Tensor | None) -> Tensor:
    return left @ X if right is None else left @ X @ right


def _piece(flat: Tensor, place: tuple[int, tuple[int, ...]]) -> Tensor:
    at, shape = place
    return flat[..., at : at + torch.Size(shape).numel()].unflatten(-1, shape) if shape else flat[..., at]


@dataclass(frozen=True, eq=False)
class Bases:
    """Those of all layers, and the curvature along their directions where it was asked for."""

    table: LayerTable
    rotations: Mapping[str, Rotation]
    curvature: Float[Tensor, " P"] | None = None
    """In the order of flat parameters."""

    @cached_property
    def _where(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """First entry and shape of each parameter in a flat vector."""
        return {name: (cut.start, self.table.shapes[name]) for name, cut in self.table.slices().items()}

    def to_standard(self, flat: Float[Tensor, "*B P"]) -> Float[Tensor, "*B P"]:
        """From coordinates in the bases to parameters."""
        return self._turned(flat, back=True)

    def to_basis(self, flat: Float[Tensor, "*B P"]) -> Float[Tensor, "*B P"]:
        """From parameters to coordinates in the bases."""
        return self._turned(flat, back=False)

    def _turned(self, flat: Tensor, back: bool) -> Tensor:
        if not self.rotations:
            return flat
        out = torch.empty_like(flat) if self._complete else flat.clone()  # then the rest is there already
        for rotation in self.rotations.values():
            rotation.turn(flat, out, self._where, back)
        return out

    @cached_property
    def _complete(self) -> bool:
        """Whether every parameter is written by the rotation of its layer."""
        left = {name: torch.Size(shape).numel() for name, shape in self.table.shapes.items()}
        for rotation in self.rotations.values():
            for part in rotation.written:
                left[part.name] -= part.numel()
        return not any(left.values())

    def layer_sums(self, flat: Float[Tensor, " P"]) -> dict[str, float]:
        """The sum of all entries of each layer."""
        blocks = self.table.to_blocks(pieces(flat.double(), self.table.shapes))
        return {name: float(block.sum()) for name, block in blocks.items()}


def pieces(flat: Float[Tensor, "*B P"], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Views of a flat vector (or of several), by parameter."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    lead = flat.shape[:-1]
    return {
        name: part.view(*lead, *shape) if shape else part.view(lead)
        for (name, shape), part in zip(shapes.items(), flat.split(sizes, dim=-1), strict=True)
    }


def joined(params: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Float[Tensor, "*B P"]:
    """The inverse of `pieces`."""
    lead = next(params[name].shape[: params[name].ndim - len(shape)] for name, shape in shapes.items())
    return torch.cat([params[name].reshape(*lead, -1) for name in shapes], dim=-1)


def standard_bases(model: nn.Module, data: Any, curvature: bool) -> Bases:
    """No rotation; as curvature, the diagonal of the exact Fisher matrix."""
    if not curvature:
        return Bases(LayerTable.from_model(model), {})
    F = fisher(model, data, structure="diag", estimator="exact", progress=False)
    assert isinstance(F, BlockDiagonal)
    return Bases(F.table, {}, F.diagonal().flat())


def kronecker_bases(
    model: nn.Module, data: Any, method: str, bias: Bias = "rotate", curvature: bool = False, check: str = "first"
) -> Bases:
    """Eigenbases at the model's weights.

    Args:
        model: at the weights that the basis is for, in eval mode.
        data: batches.
        method: "iter-m" replaces G by M̃ of (C.265); "ekfac" takes as curvature the second moments of EKFAC, all others
            the products of the factors' eigenvalues.
        bias: "rotate" turns it by U alone, "leave" does not, and "joint" counts it as a column of the weight, whose
            input is 1, as K-FAC does.
        curvature: whether the curvature along each direction is wanted.
        check: as for `lw.fisher`.
    """
    corrected = method == "ekfac" and curvature
    F = fisher(
        model,
        data,
        structure="ekfac" if corrected else "kfac",
        estimator="exact",
        progress=False,
        check="never" if check == "never" else "first",
    )
    assert isinstance(F, BlockDiagonal)
    outputs = linear_chain(model, F) if method == "iter-m" else {}
    rotations: dict[str, Rotation] = {}
    values: dict[str, Tensor] = {}
    for name, op in F.operators.items():
        form = F.table.spec(name).form
        if isinstance(op, EigenKronecker):
            rotations[name], values[name] = Rotation(form, op.U_G, op.basis.vectors, "joint"), op.scalings
        elif isinstance(op, Kronecker):
            rotations[name], values[name] = _rotation(op, outputs.get(name, op.G), form, bias, name)
        else:
            values[name] = op.diagonal()
    flat = joined(F.table.to_params(values), F.table.shapes) if curvature else None
    return Bases(F.table, rotations, flat)


def _rotation(op: Kronecker, G: Tensor, form: Form, bias: Bias, name: str) -> tuple[Rotation, Tensor]:
    """The eigenbasis of ``G ⊗ A``, and the products of eigenvalues along it."""
    s_G, U = guarded_eigh(G, name=f"layer {name!r}, output factor G")
    A, weights = op.A.values, form.weight_inputs
    if op.A.is_diagonal:
        s_A, V = A, None
    elif form.bias is None or bias == "joint":
        s_A, V = guarded_eigh(A, name=f"layer {name!r}, input factor A")
    else:
        s_A, V = guarded_eigh(A[:, :weights, :weights], name=f"layer {name!r}, input factor A")
        s_A = torch.cat([s_A, A[:, weights:, weights:].flatten(1)], dim=-1)
    along = s_G.unsqueeze(-1) * s_A.unsqueeze(-2)
    if form.bias is not None and bias == "leave":
        along[..., -1] = G.diagonal(dim1=-2, dim2=-1) * s_A[:, -1:]
    return Rotation(form, U, V, bias), along


def linear_chain(model: nn.Module, F: BlockDiagonal) -> dict[str, Float[Tensor, "1 O O"]]:
    """M̃ = 4^−(L−p) SᵀE[A]S with S = W_L … W_{p+1}, (C.265): E[M] if half of the units were active, independently.

    E[A], the output Hessian of the logits, is the last layer's output factor.
    """
    specs, found = F.table.layers, {}
    weights = trainable(model)
    for spec in specs:
        op = F.operators[spec.name]
        if not isinstance(op, Kronecker) or spec.kind != "Linear" or spec.form.groups != 1 or len(spec.sites) != 1:
            given = f'method="iter-m" and the layer {spec.name!r}, a {spec.kind}'
            raise UnsupportedError(describe(given, "a chain of nn.Linear", 'take "iter"'))
    last = F.operators[specs[-1].name]
    assert isinstance(last, Kronecker)
    root, after = torch.eye(last.G.shape[-1], dtype=last.G.dtype, device=last.G.device), None
    for spec in reversed(specs):
        if after is not None:
            weight = spec_weight(after, weights)
            if weight.shape[1] != spec.form.outputs:
                given = f'method="iter-m", and {spec.name!r} is not followed by {after.name!r}'
                raise UnsupportedError(
                    describe(given, "a chain of nn.Linear in the order of its layers", 'take "iter"')
                )
            root = 0.5 * root @ weight.detach().to(root)
        found[spec.name] = root.mT @ last.G @ root
        after = spec
    return found


def spec_weight(spec: Any, weights: Mapping[str, nn.Parameter]) -> Tensor:
    """The weight matrix of a linear layer."""
    return weights[spec.form.weight.name]
