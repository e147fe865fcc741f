"""`ntk`: the empirical tangent kernel ``Θ = J J′ᵀ`` of a model."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.cotangents import OutputBasis
from layerwise.foundations.device import Readback, not_finite
from layerwise.foundations.errors import MemoryBudgetError
from layerwise.foundations.linalg.checks import require_finite
from layerwise.foundations.progress import Progress
from layerwise.foundations.progress import resolve as resolve_progress
from layerwise.kernel.assemble import WHOLE, assemble
from layerwise.kernel.cost import LayerSizes
from layerwise.kernel.examples import Examples, recording_sizes
from layerwise.kernel.jacobian import Jacobian, prepare
from layerwise.kernel.kernel import Kernel, MatrixKernel
from layerwise.kernel.outputs import Selection
from layerwise.kernel.plan import Algorithm, Plan, Request, check_algorithm, make_plan
from layerwise.kernel.probe import probe_model, record_as_probed
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.layers.capture.recorder import Check
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.rules.generic import is_random
from layerwise.layers.table import LayerSpec, OnUnsupported, TableChanged


@dataclass(frozen=True, eq=False, repr=False)
class TangentKernel(Kernel):
    """``Θ[np, mq] = ⟨∂f_p(x_n)/∂θ, ∂f_q(x′_m)/∂θ⟩``, computed when asked for."""

    first: Jacobian
    second: Jacobian | None
    request: Request
    _formed: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def n(self) -> int:  # type: ignore[override]
        """N."""
        return self.request.n

    @property
    def m(self) -> int:  # type: ignore[override]
        """M."""
        return self.request.n if self.request.m is None else self.request.m

    @property
    def out_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of the functions."""
        return self.first.out_shape

    @property
    def is_square(self) -> bool:  # type: ignore[override]
        """Whether there is one set of examples."""
        return self.second is None

    @property
    def dtype(self) -> torch.dtype:
        """Of the statistics: float32 or better."""
        return self.request.dtype

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.request.device

    def plan(self) -> Plan:
        """Which algorithm each layer gets, in how many tiles, and what that will cost; print it."""
        return self._plan

    @cached_property
    def _plan(self) -> Plan:
        return make_plan(self.request)

    def _block(self) -> int:
        """Examples recorded together, by the matrix and by products alike: a random forward is seeded by block."""
        try:
            return self.plan().block
        except MemoryBudgetError:  # no room for the matrix; products need none
            r = self.request
            return recording_sizes(r.memory // 4, r.device, r.graph_bytes, r.gradient_bytes, r.functions)[0]

    def has_matrix(self) -> bool:
        """Whether the matrix has been formed."""
        return bool(self._formed)

    def matrix(self) -> Float[Tensor, "NP MP"]:
        """The whole matrix, example-major; computed once."""
        if not self._formed:
            self._formed.append(self._assemble(self.plan())[WHOLE])
        return self._formed[0]

    def per_layer(self) -> dict[str, Kernel]:
        """One kernel a layer, all from one pass; they add up to the whole."""
        matrices = self._assemble(make_plan(replace(self.request, apart=True)))
        return {name: MatrixKernel(K, self.out_shape, self.is_square) for name, K in matrices.items()}

    def _assemble(self, plan: Plan) -> dict[str, Tensor]:
        while True:  # each time with one layer fewer, at least, that does not fall back
            try:
                return self._assembled(plan)
            except TableChanged:
                plan = make_plan(replace(plan.request, layers=self._layers_anew()))

    @in_own_arithmetic
    def _layers_anew(self) -> tuple[tuple[LayerSpec, LayerSizes], ...]:
        """The layers as they are now that a batch has shown which of them fall back."""
        J = self.first
        J.recorder.prepare(J.examples.first(2)).more.clear()
        return probe_model(J.recorder, J.examples, J.outputs).layers(J.recorder.table)

    @in_own_arithmetic
    def _assembled(self, plan: Plan) -> dict[str, Tensor]:
        J, second = self.first, self.second
        for examples in (J.examples, second.examples if second is not None else None):
            if examples is not None and not is_random(J.recorder.model):  # a random forward is seeded by block
                examples.cut(plan.block)
        with J.session():
            found = assemble(
                J.recorder, J.examples, None if second is None else second.examples, J.outputs, plan, J.progress
            )
        bad = Readback(torch.stack([not_finite(K) for K in found.values()])).read()  # one readback for all layers
        for (name, K), odd in zip(found.items(), bad, strict=True):
            if odd:
                require_finite(K, f"tangent kernel of layer {name!r}" if name else "tangent kernel")
        return found

    def apply(self, u: Float[Tensor, "B MP"]) -> Float[Tensor, "B NP"]:
        """``J (J′ᵀ u)``: one backward and one forward derivative, whatever the size of the matrix."""
        if self.has_matrix():
            return u @ self.matrix().mT
        return self.first.push((self.second or self.first).pull(u))

    def diag(self) -> Float[Tensor, "NP"]:
        """Squared norms of the features, without the matrix."""
        self.require_square("the diagonal")
        return self.matrix().diagonal() if self.has_matrix() else squared_norms(self.first)

    def diagonals(self) -> tuple[Float[Tensor, "NP"], Float[Tensor, "MP"]]:
        """Squared norms of the features of both sets."""
        first = squared_norms(self.first) if self.second is not None else self.diag()
        return first, first if self.second is None else squared_norms(self.second)

    def __repr__(self) -> str:
        tiles = self.plan().tiles if not self.has_matrix() and self.fits() else 1
        return super().__repr__()[:-1] + (f", formed in {tiles} tiles)" if tiles > 1 else ")")

    def fits(self) -> bool:
        """Whether the matrix can be formed within the memory allowed."""
        try:
            self.plan()
        except MemoryBudgetError:
            return False
        return True

    def cross(self, x: Any) -> "TangentKernel":
        """The kernel between new examples and the second set of this one."""
        known = self.second or self.first
        new = replace(known, examples=Examples(x, known.recorder))
        new.examples.cut(known.examples.size)
        request = replace(self.request, n=new.examples.count, m=known.examples.count)
        return TangentKernel(new, known, request)


@in_own_arithmetic
def squared_norms(J: Jacobian) -> Float[Tensor, "NP"]:
    """``Σ_θ (∂f_p(x_n)/∂θ)²``, layer by layer in one pass, without per-example gradients where they can be avoided."""
    total = torch.zeros(J.examples.count, J.functions, dtype=J.dtype, device=J.device)
    with J.session():
        for block in J._blocks("diagonal of the tangent kernel"):
            recorded = record_as_probed(J.recorder, block.batch, J.outputs, J.functions)
            step = J.cotangents_at_once(recorded.output_bytes())
            for first in range(0, J.functions, step):
                last = min(first + step, J.functions)

                def consume(
                    _: LayerSpec, io: LayerIO, start: int = block.start, first: int = first, last: int = last
                ) -> None:
                    place = start
                    for chunk in io.chunks():
                        norms = chunk.squared_norms()
                        total[place : place + norms.shape[1], first:last] += norms.mT
                        place += norms.shape[1]

                v = OutputBasis().slice(recorded.terms, first, last, block.batch.number).detach()
                recorded.each_layer(v, consume, last == J.functions)
    return total.flatten()


@in_own_arithmetic
def ntk(
    model: nn.Module,
    x: Any,
    x2: Any = None,
    outputs: Selection = "all",
    *,
    algorithm: Algorithm = "auto",
    select: str | Iterable[str] = "*",
    on_unsupported: OnUnsupported = "elementwise",
    example_axis: int | None = None,
    seed: int | torch.Generator = 0,
    memory: int | float | None = None,
    progress: bool | Progress | None = None,
    check: Check = "first",
) -> TangentKernel:
    """The empirical tangent kernel of a model, ``Θ = J(x) J(x2)ᵀ``, not divided by anything.

        Θ[(n,p), (m,q)] = Σ_θ ∂f_p(x_n)/∂θ · ∂f_q(x2_m)/∂θ

    Nothing is computed yet: `K.matrix()` forms ``[N·P, M·P]`` (example-major), ``K @ u`` needs no matrix, and
    ``print(K.plan())`` says what forming it will do and cost. Each layer's part is contracted in the order that
    counts the fewest operations and fits the memory; examples are tiled where they must be.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> x = torch.randn(16, 4)
    >>> K = lw.ntk(model, x)
    >>> K.matrix().shape, (K @ torch.randn(16, 3)).shape
    (torch.Size([48, 48]), torch.Size([16, 3]))
    >>> margin = lw.ntk(model, x, outputs=lambda f: f[:, 2] - f[:, 0])
    >>> margin.matrix().shape
    torch.Size([16, 16])

    Args:
        model: any module; it is left exactly as it was.
        x: inputs as the model takes them: a tensor, a tuple (``model(*x)``) or a mapping (``model(**x)``); or a list
            or loader of batches, of which labels are ignored.
        x2: a second set of inputs; by default the first, and the kernel is symmetric.
        outputs: "all"; "sum" (of all outputs of an example); an index, or a list of them, into the last axis; or a
            function ``[N, *out] -> [N, *functions]``, such as ``lambda f: f[:, 8] - f[:, 3]``.
        algorithm: "auto", or an order of contraction for all layers ("gram", "chain", "product", "rows"), or for
            patterns of layer names (``{"conv*": "rows"}``). All give the same kernel.
        select: patterns of the layers that take part.
        on_unsupported: what happens to parameters without a layer rule.
        example_axis: axis of the examples in the input, where it should not be found.
        seed: of a random forward (dropout in train mode).
        memory: bytes this may use; default half of what is free.
        progress: True, False, or an object with `track`; by default a bar on a terminal for long work.
        check: when what is recorded is compared with autograd: "first", "always" or "never", see `lw.fisher`.
    """
    start = prepare(model, outputs, select, on_unsupported, example_axis, seed, memory, check)
    recorder, reading, device, allowed = start
    examples = Examples(x, recorder)
    second = None if x2 is None else Examples(x2, recorder)
    probe = probe_model(recorder, examples, reading)
    first = Jacobian(recorder, examples, reading, probe.out_shape, allowed, resolve_progress(progress))
    layers, findings = probe.layers(recorder.table), recorder.findings
    assert findings is not None
    request = Request(
        layers,
        examples.count,
        None if second is None else second.count,
        first.functions,
        findings.bytes_per_example,
        probe.gradient_bytes,
        first.dtype,
        device,
        allowed,
        algorithm,
    )
    check_algorithm(algorithm, [spec for spec, _ in layers])
    K = TangentKernel(first, None if second is None else replace(first, examples=second), request)
    block = K._block()
    examples.cut(block)
    if second is not None:
        second.cut(block)
    return K
