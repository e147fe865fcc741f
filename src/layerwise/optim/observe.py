"""From recorded layers to the means that rules observe."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerwise.foundations.linalg import gram
from layerwise.layers.io import RecordedIO
from layerwise.layers.table import LayerSpec
from layerwise.optim.rule import Observation, UpdateRule
from layerwise.optim.stack import Stack


@dataclass
class Sums:
    """One layer's sums over the forwards of a step."""

    A: Tensor | None = None
    rows: int = 0
    """Positions (or examples, reduced) that A sums over."""
    G: Tensor | None = None
    examples: int = 0
    recorded: list[tuple[RecordedIO, float]] = field(default_factory=list)


class Collector:
    """Adds up what a step's forwards and backwards give."""

    def __init__(self, rule: UpdateRule, sharing: str) -> None:
        self.rule, self.sharing = rule, sharing
        self._sums: dict[str, Sums] = {}

    @torch.no_grad()
    def add(self, spec: LayerSpec, io: RecordedIO, factor: float, first: bool) -> None:
        """One layer of one forward; `factor` makes its gradients those of a sum over examples.

        `first` is False for further cotangents of a forward that was counted already.
        """
        if self.rule.kronecker_only and (not spec.form.kronecker or spec.form.weight is None):
            return
        sums = self._sums.setdefault(spec.name, Sums())
        if first:
            sums.examples += io.examples
        if self.rule.keeps_recorded:
            sums.recorded.append((io, factor))
        if not self.rule.averages:
            return
        if self.sharing == "reduce" and not spec.form.one_hot:
            self._add_reduced(sums, io, factor, first)
            return
        if self.rule.needs_inputs and first:
            A, rows = io.input_moment()
            sums.A, sums.rows = A if sums.A is None else sums.A + A, sums.rows + rows
        if self.rule.needs_outgrads:
            G = io.output_moment() * factor**2
            sums.G = G if sums.G is None else sums.G + G

    def _add_reduced(self, sums: Sums, io: RecordedIO, factor: float, first: bool) -> None:
        """Mean of inputs and sum of gradients over positions, then as for single positions."""
        for a, g in io.reduced_chunks():  # [N, K, I], [V, N, K, O]
            if self.rule.needs_inputs and first:
                A = gram(a.movedim(1, 0))
                sums.A, sums.rows = A if sums.A is None else sums.A + A, sums.rows + a.shape[0]
            if self.rule.needs_outgrads:
                G = gram(g.flatten(0, 1).movedim(1, 0)) * factor**2
                sums.G = G if sums.G is None else sums.G + G

    def take(self) -> dict[str, Sums]:
        """What came since the last call."""
        sums, self._sums = self._sums, {}
        return sums

    @staticmethod
    def observation(stack: Stack, sums: dict[str, Sums]) -> Observation | None:
        """The means of a stack's layers; None where none was seen."""
        known = [sums.get(spec.name) for spec in stack.specs]
        if not any(s is not None for s in known):
            return None
        first = next(s for s in known if s is not None)
        shape = stack.shape
        A, G, seen, recorded = [], [], [], []
        for spec, s in zip(stack.specs, known, strict=True):
            k = spec.form.groups
            seen += [s is not None] * k
            recorded.append([] if s is None else s.recorded)
            if first.A is not None:
                empty = shape.zeros(*first.A.shape[1:])[:1].expand(k, *first.A.shape[1:])
                A.append(empty if s is None or s.A is None else s.A.to(shape.dtype) / max(s.rows, 1))
            if first.G is not None:
                empty = shape.zeros(*first.G.shape[1:])[:1].expand(k, *first.G.shape[1:])
                G.append(empty if s is None or s.G is None else s.G.to(shape.dtype) / max(s.examples, 1))
        return Observation(
            torch.cat(A) if A else None,
            torch.cat(G) if G else None,
            torch.tensor(seen, device=shape.device),
            recorded,
            max(s.examples for s in known if s is not None),
        )
