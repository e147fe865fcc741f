"""`LayerIO`: the inputs and output gradients of one layer in one batch, for all its calls.

Raw tensors are kept as the layer saw them; the standard form is made for a few examples at a time, so that an
unfolded convolution or per-example gradients never have to fit at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.columns import to_flat
from layerwise.foundations.errors import UnsupportedError, describe
from layerwise.foundations.linalg.symmetric_product import bordered, grouped_gram, linear_moment, row_gram
from layerwise.foundations.types import HALF, multiplied_in, statistics_dtype
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Chunk, Gradients, Standard
from layerwise.layers.rules.linear import LinearRule
from layerwise.layers.table import LayerSpec, LayerTable, Site

CHUNK_BYTES = 128 * 2**20
"""Scratch that one layer's standard form may take at a time."""
ON_A_GPU = 4
"""Times as much there: chunks of a few examples each would take longer to launch than to compute."""


@dataclass(frozen=True)
class Layout:
    """The axis that holds the examples, and whether positions are merged into it: found, not assumed.

    A layer sees leading axes (batch, time, …) before its own. The examples may be on any of them, or merged with
    positions into one (``x.flatten(0, 1)``).
    `merged` is "major" for (N·T) with the example index running slowest, "minor" for (T·N) with it fastest.
    """

    axis: int = 0
    merged: Literal["major", "minor"] | None = None

    def fits(self, lead: tuple[int, ...], examples: int) -> bool:
        """Whether leading axes of these sizes can hold that many examples this way."""
        if self.axis >= len(lead) or examples == 0:
            return False
        size = lead[self.axis]
        return size == examples if self.merged is None else size % examples == 0 and size > examples

    def front(self, t: Tensor, lead: int, examples: int, offset: int = 0) -> Tensor:
        """Examples first: ``[*head, *lead, *rest] -> [*head, N, *positions, *rest]``, head of `offset` axes."""
        axis = offset + self.axis
        if self.merged == "major":
            t = t.unflatten(axis, (examples, -1))
        elif self.merged == "minor":
            t = t.unflatten(axis, (-1, examples))
            axis += 1
        return t.movedim(axis, offset)

    def narrow(self, t: Tensor, start: int, stop: int, examples: int, offset: int = 0) -> Tensor:
        """Some examples of a tensor, which keeps its layout."""
        axis = offset + self.axis
        if self.merged is None:
            return t.narrow(axis, start, stop - start)
        if self.merged == "major":
            size = t.shape[axis] // examples
            return t.narrow(axis, start * size, (stop - start) * size)
        rows = t.unflatten(axis, (-1, examples)).narrow(axis + 1, start, stop - start)
        return rows.flatten(axis, axis + 1)

    def join(self, parts: Sequence[Tensor], examples: Sequence[int], offset: int = 0) -> Tensor:
        """The inverse of `narrow`: several sets of examples as one."""
        if len(parts) == 1:
            return parts[0]
        axis = offset + self.axis
        if self.merged != "minor":
            return torch.cat(list(parts), dim=axis)
        apart = [t.unflatten(axis, (-1, n)) for t, n in zip(parts, examples, strict=True)]
        return torch.cat(apart, dim=axis + 1).flatten(axis, axis + 1)


def candidates(lead: tuple[int, ...], examples: int, first: int = 0) -> Iterator[Layout]:
    """Layouts that the sizes allow, likely ones first."""
    order = sorted(range(len(lead)), key=lambda axis: (axis != first, axis))
    for axis in order:
        if Layout(axis).fits(lead, examples):
            yield Layout(axis)
    for axis in order:
        for merged in ("major", "minor"):
            if Layout(axis, merged).fits(lead, examples):
                yield Layout(axis, merged)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: raw input, raw output gradient ``[V, *out]``, and where the examples are."""

    site: Site
    x: Tensor
    dy: Tensor | None
    layout: Layout
    lent: bool = False
    """Whether x is (a view of) the user's own tensor, who may write over it once the backward is over."""
    aligned: bool = True
    """Whether its rows are the output's positions, one by one, so that a mask of those holds for them."""

    def narrow(self, start: int, stop: int, examples: int) -> "LayerCall":
        """Some examples."""
        dy = None if self.dy is None else self.layout.narrow(self.dy, start, stop, examples, offset=1)
        x = self.layout.narrow(self.x, start, stop, examples)
        return LayerCall(self.site, x, dy, self.layout, aligned=self.aligned)

    @staticmethod
    def join(calls: Sequence["LayerCall"], examples: Sequence[int]) -> "LayerCall":
        """The same call of several batches as one."""
        first, layout = calls[0], calls[0].layout
        x = layout.join([call.x for call in calls], examples)
        dy = [call.dy for call in calls if call.dy is not None]
        joined = layout.join(dy, examples, offset=1) if dy else None
        return LayerCall(first.site, x, joined, layout, aligned=all(call.aligned for call in calls))

    @staticmethod
    def stack(calls: Sequence["LayerCall"]) -> "LayerCall":
        """The same call with several sets of cotangents as one."""
        dy = [call.dy for call in calls if call.dy is not None]
        joined = dy[0] if len(dy) == 1 else torch.cat(dy)
        return LayerCall(calls[0].site, calls[0].x, joined, calls[0].layout, aligned=calls[0].aligned)

    def sharing(self, examples: int) -> int:
        """S: positions of one example that share the weight."""
        assert self.dy is not None
        one = self.narrow(0, 1, examples)
        return one.outgrads(1, one.dy.dtype).shape[2]  # type: ignore[union-attr]

    def inputs(self, examples: int, dtype: torch.dtype) -> Tensor | OneHot:
        """``[N, S, K, I]`` without the bias column."""
        lead = self.site.rule.lead(self.site.module, self.site.key, self.x)
        x = self.x.to(dtype) if self.x.is_floating_point() else self.x
        a = self.site.rule.inputs(self.site.module, self.site.key, x)
        if isinstance(a, OneHot):
            index = self.layout.front(a.index, lead, examples)
            return OneHot(index.reshape(examples, -1), a.size)
        front = self.layout.front(a, lead, examples)
        return front.reshape(examples, -1, *a.shape[-2:])

    def outgrads(self, examples: int, dtype: torch.dtype) -> Float[Tensor, "V N S K O"]:
        """``[V, N, S, K, O]``."""
        assert self.dy is not None
        lead = self.site.rule.lead(self.site.module, self.site.key, self.x)
        g = self.site.rule.outgrads(self.site.module, self.site.key, self.dy.to(dtype))
        front = self.layout.front(g, lead, examples, offset=1)
        return front.reshape(g.shape[0], examples, -1, *g.shape[-2:])


class LayerIO(ABC):
    """What one layer did in one batch."""

    spec: LayerSpec
    examples: int
    vectors: int

    @abstractmethod
    def chunks(self, gradients: bool = True) -> Iterator[Chunk]:
        """The standard form, some examples at a time; `gradients` says that per-example gradients will be made."""

    @abstractmethod
    def rows(self) -> Float[Tensor, "V N K O I"]:
        """Per-example gradients of all examples."""

    @abstractmethod
    def narrow(self, start: int, stop: int) -> "LayerIO":
        """Some examples."""


@dataclass(frozen=True)
class RecordedIO(LayerIO):
    """A layer with a rule."""

    spec: LayerSpec
    calls: tuple[LayerCall, ...]
    examples: int
    mask: Bool[Tensor, "N S"] | None = None
    """Which output positions count; None: all."""
    chunk_bytes: int = CHUNK_BYTES
    kept: int | None = None
    """How many positions the mask keeps, where the host knows."""

    def owned(self) -> "RecordedIO":
        """The same, to be kept beyond the backward: what the user may write over is copied."""
        if not any(call.lent for call in self.calls):
            return self
        calls = [replace(call, x=call.x.clone(), lent=False) if call.lent else call for call in self.calls]
        return replace(self, calls=tuple(calls))

    @property
    def vectors(self) -> int:  # type: ignore[override]
        """V."""
        return next(call.dy.shape[0] for call in self.calls if call.dy is not None)

    @property
    def dtype(self) -> torch.dtype:
        """What statistics are computed in."""
        floats = [t.dtype for c in self.calls for t in (c.dy, c.x) if t is not None and t.is_floating_point()]
        return statistics_dtype(floats[0])

    def narrow(self, start: int, stop: int) -> "RecordedIO":
        """Some examples."""
        calls = tuple(call.narrow(start, stop, self.examples) for call in self.calls)
        mask = None if self.mask is None else self.mask[start:stop]
        return RecordedIO(self.spec, calls, stop - start, mask, self.chunk_bytes)

    @staticmethod
    def join(ios: Sequence["RecordedIO"]) -> "RecordedIO":
        """Several batches as one; every batch has the same calls, and no mask."""
        sizes = [io.examples for io in ios]
        calls = tuple(LayerCall.join(calls, sizes) for calls in zip(*(io.calls for io in ios), strict=True))
        return RecordedIO(ios[0].spec, calls, sum(sizes), None, ios[0].chunk_bytes)

    @staticmethod
    def stack(ios: Sequence["RecordedIO"]) -> "RecordedIO":
        """Several sets of cotangents of one batch as one."""
        calls = tuple(LayerCall.stack(calls) for calls in zip(*(io.calls for io in ios), strict=True))
        return RecordedIO(ios[0].spec, calls, ios[0].examples, ios[0].mask, ios[0].chunk_bytes, ios[0].kept)

    def parts(self, bytes_per_example: int | float) -> Iterator["RecordedIO"]:
        """The same, few enough examples at a time to fit the scratch."""
        scratch = self.chunk_bytes * (ON_A_GPU if self.calls[0].x.is_cuda else 1)
        size = int(max(1, min(self.examples, scratch // max(bytes_per_example, 1))))
        if size >= self.examples:
            yield self
            return
        for start in range(0, self.examples, size):
            yield self.narrow(start, min(start + size, self.examples))

    def standard(self) -> Standard:
        """All examples in standard form, calls joined along S."""
        g = [call.outgrads(self.examples, self.dtype) for call in self.calls]
        outgrads = g[0] if len(g) == 1 else torch.cat(g, dim=2)
        if self.spec.form.weight is None:
            n, s, k = outgrads.shape[1:4]
            return Standard(outgrads.new_ones(n, s, k, 1), outgrads)
        return Standard(self.inputs(), outgrads)

    def inputs(self) -> Tensor | OneHot:
        """``[N, S, K, I]``, the bias column included."""
        parts = [call.inputs(self.examples, self.dtype) for call in self.calls]
        if isinstance(parts[0], OneHot):
            return OneHot(torch.cat([p.index for p in parts if isinstance(p, OneHot)], dim=1), parts[0].size)
        a = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]  # type: ignore[arg-type]
        return torch.nn.functional.pad(a, (0, 1), value=1.0) if self.spec.form.bias is not None else a

    def chunks(self, gradients: bool = True) -> Iterator[Standard]:
        """The standard form, some examples at a time."""
        for part in self.parts(self._bytes_per_example(gradients)):
            yield part.standard()

    def _bytes_per_example(self, gradients: bool) -> int:
        k, o, i = self.spec.form.shape
        v, s = self.vectors, sum(call.sharing(self.examples) for call in self.calls)
        numbers = s * k * ((0 if self.spec.form.one_hot else i) + v * o)
        if gradients and s > 1:
            numbers += v * k * o * i
        return numbers * self.dtype.itemsize * 2

    def rows(self) -> Float[Tensor, "V N K O I"]:
        """Per-example gradients of all examples."""
        return torch.cat([chunk.per_example_grads() for chunk in self.chunks()], dim=1)

    def grad(self) -> Float[Tensor, "V K O I"]:
        """``Σ_n Σ_s g aᵀ``."""
        return torch.stack([chunk.grad() for chunk in self.chunks(gradients=False)]).sum(0)

    def grad_times(
        self, q: Float[Tensor, "K I"], mixture: Float[Tensor, "V"]
    ) -> tuple[Float[Tensor, "K O"], Float[Tensor, ""]]:
        """``Σ_v m_v grad_v q`` without the gradients themselves, and the norm of its terms."""
        parts = [chunk.grad_times(q, mixture.to(self.dtype)) for chunk in self.chunks(gradients=False)]
        return torch.stack([p[0] for p in parts]).sum(0), torch.stack([p[1] for p in parts]).norm()

    def reduced_chunks(self) -> Iterator[tuple[Float[Tensor, "N K I"], Float[Tensor, "V N K O"]]]:
        """Mean of a and sum of g over the positions that count, some examples at a time.

        An example none of whose positions count is left out of the means.
        """
        for part in self.parts(self._bytes_per_example(gradients=False)):
            chunk, keep = part.standard(), part._keep_all_calls()
            assert isinstance(chunk.a, Tensor)
            if keep is None:
                yield chunk.a.mean(1), chunk.g.sum(2)
                continue
            weight = keep.to(chunk.g.dtype)
            count = weight.sum(1)
            a = torch.einsum("nski,ns->nki", chunk.a, weight) / count.clamp_min(1).view(-1, 1, 1)
            yield a[count > 0], torch.einsum("vnsko,ns->vnko", chunk.g, weight)

    def _keep_all_calls(self) -> Bool[Tensor, "N S"] | None:
        keeps = [self._one_call(call)._keep() for call in self.calls]
        if any(keep is None for keep in keeps):
            return None
        return torch.cat([keep for keep in keeps if keep is not None], dim=1)

    def output_moment(self) -> Float[Tensor, "K O O"]:
        """``Σ_{v,n,s} g gᵀ`` over the positions that count."""
        if len(self.calls) == 1:
            return self._output_moment_of_call()
        return torch.stack([self._one_call(call)._output_moment_of_call() for call in self.calls]).sum(0)

    def input_moment(self) -> tuple[Tensor, int]:
        """``Σ_{n,s} a aᵀ`` over the positions that count, and how many there are.

        [K, I, I], or the diagonal [K, I] where inputs are one-hot. Inputs that autocast has rounded are taken as the
        layer saw them.
        """
        if len(self.calls) == 1:
            return self._input_moment_of_call()
        totals = [self._one_call(call)._input_moment_of_call() for call in self.calls]
        return torch.stack([t[0] for t in totals]).sum(0), sum(t[1] for t in totals)

    def channel_moment(self) -> tuple[Tensor, int]:
        """``Σ a aᵀ`` over input channels alone (SUA)."""
        total, count = None, 0
        for call in self.calls:
            module, site, rule = call.site.module, call.site.key, call.site.rule
            x = _rounded(call.x, self._one_call(call)._input_dtype())
            batched = x if rule.lead(module, site, x) else x.unsqueeze(0)
            found = rule.channel_moment(module, site, batched)
            if found is None:
                raise UnsupportedError(
                    describe(
                        f"{self.spec.name!r} ({self.spec.kind}), whose rule has no channel_moment",
                        "a rule that gives the second moment of its channels, for SUA",
                        f"write {type(rule).__name__}.channel_moment, or do without SUA",
                    )
                )
            total = found[0] if total is None else total + found[0]
            count += found[2]
        assert total is not None
        return total, count

    def _one_call(self, call: LayerCall) -> "RecordedIO":
        return RecordedIO(self.spec, (call,), self.examples, self.mask, self.chunk_bytes, self.kept)

    def _keep(self) -> Bool[Tensor, "N S"] | None:
        """The mask, where this call's positions are the mask's."""
        if self.mask is None:
            return None
        call, positions = self.calls[0], self.mask.shape[1]
        return self.mask if call.aligned and call.sharing(self.examples) == positions else None

    def _count(self, keep: Tensor) -> int:
        return int(keep.sum()) if self.kept is None else self.kept

    def _output_moment_of_call(self) -> Tensor:
        call, keep = self.calls[0], self._keep()
        assert call.dy is not None
        dtype = multiplied_in(call.dy, self.dtype)
        if keep is None and type(call.site.rule) is LinearRule:
            return row_gram(call.dy.to(dtype))
        g = call.outgrads(self.examples, dtype)
        return grouped_gram((g if keep is None else where_kept(g, keep, 1)).flatten(0, 2))

    def _input_dtype(self) -> torch.dtype:
        """What the entries of the inputs' moment are multiplied in: what the layer has rounded them to, if it has."""
        call = self.calls[0]
        rounded = call.site.rule.rounds_inputs and call.x.dtype == torch.float32
        if rounded and call.dy is not None and call.dy.dtype in HALF:
            return call.dy.dtype
        return multiplied_in(call.x, self.dtype)

    def _input_moment_of_call(self) -> tuple[Tensor, int]:
        call, form, keep = self.calls[0], self.spec.form, self._keep()
        if form.one_hot:
            a = call.inputs(self.examples, self.dtype)
            assert isinstance(a, OneHot)
            count = a.index.numel() if keep is None else self._count(keep)
            return a.counts(keep, self.dtype).unsqueeze(0), count
        dtype = self._input_dtype()
        plain = keep is None and type(call.site.rule) is LinearRule
        if plain and (call.x.dtype == dtype or call.x.numel() * dtype.itemsize <= self.chunk_bytes):
            return linear_moment(call.x.to(dtype), form.bias is not None)
        total, sums, count = self._moment_in_parts(keep, dtype)
        return (total if form.bias is None else bordered(total, sums, count)), count

    def _moment_in_parts(self, keep: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
        """By the rule's own route where it has one, else through the standard form, in chunks."""
        total = sums = None
        count = 0
        x, taps, site = self.calls[0].x, max(self.spec.form.taps, 1), self.calls[0].site
        copies = site.rule.copies_of_input(site.module) if keep is None else None
        if taps == 1 and dtype == x.dtype and keep is None:
            copies = 0  # it is multiplied as it is
        copies = 2 * taps if copies is None else copies
        for part in self.parts(x.numel() / self.examples * copies * dtype.itemsize):
            call = part.calls[0]
            found = None
            if keep is None:
                found = call.site.rule.input_moment(call.site.module, call.site.key, _rounded(call.x, dtype))
            if found is None:
                found = part._plain_moment(dtype)
            total = found[0] if total is None else total + found[0]
            sums = found[1] if sums is None else sums + found[1]
            count += found[2]
        assert total is not None
        assert sums is not None
        return total, sums, count

    def _plain_moment(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
        keep = self._keep()
        a = self.calls[0].inputs(self.examples, dtype)
        assert isinstance(a, Tensor)
        rows = (a if keep is None else where_kept(a, keep)).flatten(0, 1)
        moment = grouped_gram(rows)
        return moment, rows.sum(0, dtype=moment.dtype), len(rows) if keep is None else self._count(keep)


@dataclass(frozen=True)
class GradientIO(LayerIO):
    """A parameter without a rule: per-example gradients alone."""

    spec: LayerSpec
    gradients: Float[Tensor, "V N K O I"]

    @property
    def examples(self) -> int:  # type: ignore[override]
        """N."""
        return self.gradients.shape[1]

    @property
    def vectors(self) -> int:  # type: ignore[override]
        """V."""
        return self.gradients.shape[0]

    def narrow(self, start: int, stop: int) -> "GradientIO":
        """Some examples."""
        return GradientIO(self.spec, self.gradients[:, start:stop])

    def chunks(self, gradients: bool = True) -> Iterator[Gradients]:
        """All at once."""
        yield Gradients(self.gradients)

    def rows(self) -> Float[Tensor, "V N K O I"]:
        """As given."""
        return self.gradients


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs in the type that they are multiplied in; indices stay indices."""
    return x.to(dtype) if x.is_floating_point() else x


def where_kept(t: Tensor, keep: Bool[Tensor, "N S"], offset: int = 0) -> Tensor:
    """Rows ``[*offset, N, S, K, P]`` with zeros where positions do not count.

    Selecting those that do would synchronize, to find out how many they are.
    """
    shape = (*[1] * offset, *keep.shape, *[1] * (t.ndim - offset - 2))
    return torch.where(keep.view(shape), t, 0)


def flat_rows(
    ios: Mapping[str, LayerIO], table: LayerTable, start: int, stop: int, vectors: int, like: Tensor
) -> Float[Tensor, "VN d"]:
    """Per-example gradients of all parameters, ``[V·n, d]`` in flat order, of the examples start … stop.

    Zero for layers that were not called.
    """
    blocks = {}
    for spec in table.layers:
        if spec.name in ios:
            blocks[spec.name] = ios[spec.name].narrow(start, stop).rows().to(like)
        else:
            blocks[spec.name] = like.new_zeros(vectors, stop - start, *spec.form.shape)
    params = table.to_params(blocks)
    return to_flat({k: t.flatten(0, 1) for k, t in params.items()}, table.shapes)
