"""Leading eigenvectors of the whole network's Gauss–Newton matrix, from one small matrix (Wu 2023, section C.3).

Outputs z_1 … z_L of all layers are stacked, ``G = [G_1 … G_L]`` and ``M_full = E[Gᵀ A G]``. An eigenvector u of it,
with segments u⁽ᵖ⁾, gives ``w = concat_p(u⁽ᵖ⁾ ⊗ E[x̃_p])``, x̃ = [x; 1], as an approximate eigenvector of all parameters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.columns import to_flat
from layerwise.foundations.cotangents import HessianRoot
from layerwise.foundations.device import budget
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood, resolve
from layerwise.foundations.linalg import gram, guarded_eigh
from layerwise.foundations.progress import Progress
from layerwise.foundations.random import seed_of
from layerwise.foundations.types import trainable, unwrap
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.layers.capture.recorder import ModelRecorder
from layerwise.layers.capture.source import Source, Sweep
from layerwise.layers.io.layer_io import LayerIO, RecordedIO
from layerwise.layers.table import LayerSpec, LayerTable
from layerwise.structure.eigenpairs import Eigenpairs, check_count
from layerwise.structure.one_layer import require_finite_parameters


@dataclass(eq=False)
class FullNetwork(OwnArithmetic):
    """``M_full`` of all layers' outputs and the mean input of each layer."""

    table: LayerTable
    M: Float[Tensor, "m m"]
    """E[Gᵀ A G] of the stacked outputs, float64."""
    means: Mapping[str, Float[Tensor, "I"]]
    """E[x̃] of each layer; with a bias the last entry is 1."""
    weighted: bool

    @property
    def layers(self) -> list[str]:
        """Which layers take part, in the order of M."""
        return self.table.names()

    def numel(self) -> int:
        """How many parameters take part."""
        return self.table.numel()

    def eigenpairs(self, k: int) -> Eigenpairs:
        """The k leading approximate eigenvalues, orthonormal vectors [parameters, k], and how oblique they were.

        Vectors are ordered as ``model.named_parameters()``. In the place of residuals, which would need the matrix
        itself, is what Gram–Schmidt took from each vector, ``‖w − q‖`` of unit vectors: 0 for all where `weighted`.
        """
        check_count(k, len(self.M))
        norms = torch.cat([self._norm(spec).expand(spec.form.outputs) for spec in self.table.layers])
        matrix = self.M * norms.unsqueeze(0) * norms.unsqueeze(1) if self.weighted else self.M
        values, vectors = guarded_eigh(matrix, name="output Hessian of all layers")
        squares = (norms > 0).to(norms) if self.weighted else norms.square()
        values = values * (squares @ vectors.square())  # σ ‖w‖²; not in the order of σ where layers' means differ
        order = values.argsort(descending=True)[:k]
        values, vectors = values[order], vectors[:, order]
        blocks, start = {}, 0
        for spec in self.table.layers:
            mean = self.means[spec.name]
            mean = mean / self._norm(spec).clamp_min(torch.finfo(mean.dtype).tiny) if self.weighted else mean
            part = vectors[start : start + spec.form.outputs]
            blocks[spec.name] = torch.einsum("ok,i->koi", part, mean).unsqueeze(1)
            start += spec.form.outputs
        w = to_flat(self.table.to_params(blocks), self.table.shapes).mT
        w = w / torch.linalg.vector_norm(w, dim=0).clamp_min(torch.finfo(w.dtype).tiny)
        Q, R = torch.linalg.qr(w)
        Q = torch.where(R.diagonal() < 0, -Q, Q)
        return Eigenpairs(values, Q, torch.linalg.vector_norm(w - Q, dim=0))

    def _norm(self, spec: LayerSpec) -> Tensor:
        return torch.linalg.vector_norm(self.means[spec.name])


@in_own_arithmetic
def full_network(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood = "categorical",
    *,
    weighted: bool = False,
    select: str | Iterable[str] = "*",
    example_axis: int | None = None,
    seed: int | torch.Generator = 0,
    memory: int | float | None = None,
    progress: bool | Progress | None = None,
    **likelihood_options: Any,
) -> FullNetwork:
    """Approximate leading eigenpairs of the Gauss–Newton matrix of all layers together.

    As the thesis has it, ``λ ≈ σ ‖w‖²``. That is exact for constant inputs only where all ``‖E x̃_p‖`` are equal;
    ``weighted=True`` decomposes ``D M_full D`` with ``D = blockdiag(‖E x̃_p‖ I)`` instead, which is exact for constant
    inputs. Weight and bias of a layer take part together, as they are trained.

    >>> import torch, layerwise as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> found = lw.structure.full_network(net, (torch.rand(20, 4), torch.randint(3, (20,))), weighted=True)
    >>> found.layers, found.M.shape, found.eigenpairs(2).vectors.shape
    (['0', '2'], torch.Size([9, 9]), torch.Size([51, 2]))

    Args:
        model: its layers with a weight matrix and a rule take part; norms, embeddings and grouped convolutions do not,
            and `select` can leave out others. Where positions share a weight, inputs are averaged and gradients added
            up over them.
        data: gone over once.
        likelihood: as for `layer_hessian`.
        weighted: see above.
        select: patterns of the layers that take part.
        example_axis: as for `lw.fisher`.
        seed: as for `lw.fisher`.
        memory: as for `lw.fisher`.
        progress: as for `lw.fisher`.
        likelihood_options: of the likelihood.
    """
    law = resolve(likelihood, **likelihood_options)
    model = unwrap(model)
    require_finite_parameters(model)
    whole = LayerTable.from_model(model, select)
    names = [spec.name for spec in whole.layers if _takes_part(spec)]
    if not names:
        raise InputError(
            describe(
                "a model without layers that have a weight matrix", "linear layers or convolutions", "see lw.layers"
            )
        )
    recorder = ModelRecorder(model, whole.selected(names), example_axis, seed=seed_of(seed))
    allowed = budget(memory, next(iter(trainable(model).values())).device)
    sweep = Sweep(recorder, Source(data, progress, model), law, HessianRoot(law), allowed)
    sums: dict[str, Tensor] = {}
    total: list[Tensor] = []

    def observe(ios: dict[str, LayerIO]) -> None:
        columns = []
        for spec in recorder.table.layers:
            io = ios.get(spec.name)
            if not isinstance(io, RecordedIO):
                raise InputError(
                    describe(
                        f"layer {spec.name!r}, which falls back or takes no part ({spec.reason or 'not called'})",
                        "layers with a rule, called for every batch",
                        "leave it out with select=",
                    )
                )
            reduced = list(io.reduced_chunks())
            columns.append(torch.cat([g[:, :, 0] for _, g in reduced], 1))
            a = torch.stack([a[:, 0].sum(0, dtype=torch.float64) for a, _ in reduced]).sum(0)
            sums[spec.name] = sums[spec.name] + a * io.vectors if spec.name in sums else a * io.vectors
        stacked = torch.cat(columns, -1).flatten(0, 1)
        moment = gram(stacked).double()
        total[:] = [total[0] + moment] if total else [moment]
        rows[0] += next(iter(ios.values())).examples * next(iter(ios.values())).vectors

    rows = [0]
    totals = sweep.all_layers(observe, "output Hessian of all layers")
    means = {name: s / rows[0] for name, s in sums.items()}
    return FullNetwork(recorder.table, total[0] / totals.examples, means, weighted)


def _takes_part(spec: LayerSpec) -> bool:
    form = spec.form
    return bool(spec.sites) and form.kronecker and form.weight is not None and form.groups == 1 and not form.one_hot
