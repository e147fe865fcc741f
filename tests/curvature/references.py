"""What the tests of this folder compare with: computed from the model by plain hooks, loops and dense algebra."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.cotangents import SampledLabels
from layerwise.layers.table import LayerSpec
from layerwise.testing import oracles
from layerwise.testing.cases import Case

SAMPLES, SEED = 3, 5


def name_of(c: Case) -> str:
    return c.name


def call(model: nn.Module, x: Any) -> Tensor:
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def relative(found: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """‖found − expected‖ / max(‖expected‖, scale), and infinite where shapes differ or something is not finite."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return math.inf
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(max(scale, 1e-300)))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9, scale: float = 0.0) -> None:
    error = relative(torch.as_tensor(found), torch.as_tensor(expected), scale)
    assert error <= tolerance, f"relative error {error:.2e}, shapes {tuple(found.shape)} and {tuple(expected.shape)}"


# --- cases ------------------------------------------------------------------------------------------------


def law_of(c: Case) -> lw.likelihoods.Likelihood:
    """The library's likelihood of a case."""
    options = {k: v for k, v in c.options.items() if k not in ("mask", "examples") and v is not None}
    return lw.likelihoods.resolve(c.likelihood, **options)


def data_of(c: Case, x: Any, y: Tensor) -> tuple:
    """A batch, with its mask as the third entry where the case has one."""
    mask = c.options.get("mask")
    return (x, y) if mask is None else (x, y, mask)


def with_likelihood(c: Case, likelihood: str) -> Case:
    """The same model under another likelihood, with targets of the output's shape."""
    kept = {k: v for k, v in c.options.items() if k == "examples"}

    def build() -> Any:
        model, x, _ = c.build()
        f = oracles.outputs(model, x)
        return model, x, torch.randn_like(f) if likelihood == "gaussian" else torch.randint_like(f, 2)

    tags = (c.tags - {"categorical", "gaussian", "bernoulli"}) | {likelihood}
    return replace(c, build=build, likelihood=likelihood, options=MappingProxyType(kept), tags=tags)


def counts(c: Case, model: nn.Module, x: Any, y: Tensor) -> tuple[int, float]:
    """N, and Σ m w."""
    law = oracles._Likelihood(**c.oracle_options)
    coefficients = law.coefficients(y, law.arrange(oracles.outputs(model, x)))
    return coefficients.shape[0], float(coefficients.sum())


def _as_output(v: Tensor, f: Tensor, class_axis: int) -> Tensor:
    """``[V, N, S, C]`` in the shape of V outputs."""
    if f.ndim == 1:
        return v.reshape(len(v), *f.shape)
    by_class = f.movedim(class_axis, -1)
    return v.reshape(len(v), *by_class.shape).movedim(-1, class_axis + (class_axis >= 0))


def root_cotangents(c: Case, model: nn.Module, x: Any, y: Tensor) -> Tensor:
    """``[V, *out]`` with ``Σ_v v vᵀ`` the exact output Fisher: symmetric roots, one position at a time."""
    law = oracles._Likelihood(**c.oracle_options)
    f = oracles.outputs(model, x)
    z = law.arrange(f)
    values, vectors = torch.linalg.eigh(law.coefficients(y, z)[..., None, None] * law.output_fisher(z))
    roots = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)  # N S C R
    n, s, classes = z.shape
    v = torch.einsum("nscr,st->srntc", roots, torch.eye(s, dtype=z.dtype)).reshape(-1, n, s, classes)
    return _as_output(v, f, c.options.get("class_axis", -1))


def label_cotangent(c: Case, model: nn.Module, x: Any, y: Tensor) -> Tensor:
    """``[1, *out]``: gradients of the examples' losses at the data's own labels, by torch's losses."""
    f = call(model, x).detach().requires_grad_()
    n = c.options.get("examples") or f.shape[0]
    return n * torch.autograd.grad(c.loss(f, y), f)[0].unsqueeze(0)


def sampled_cotangents(c: Case, model: nn.Module, x: Any, y: Tensor, samples: int, seed: int) -> Tensor:
    """The labels that ``estimator="sampled"`` draws for a single batch, as ``[V, *out]``."""
    law, f = law_of(c), oracles.outputs(model, x)
    n = c.options.get("examples") or f.shape[0]
    terms = law.standardize(f, y, c.options.get("mask"), lambda t: t if len(t) == n else t.unflatten(0, (n, -1)))
    v = SampledLabels(law, samples, seed).slice(terms, 0, samples, 0)
    return _as_output(v, f, c.options.get("class_axis", -1))


def oracle_of(c: Case, model: nn.Module, x: Any, y: Tensor, estimator: str) -> Tensor:
    """The dense matrix of an estimator, divided by the number of examples."""
    if estimator == "exact":
        return oracles.fisher(model, x, y, **c.oracle_options)
    if estimator == "empirical":
        return oracles.empirical_fisher(model, x, y, **c.oracle_options)
    v = sampled_cotangents(c, model, x, y, SAMPLES, SEED)
    return oracles.fisher_from_labels(model, x, v, examples=c.options.get("examples"))


# --- places in a flat vector ------------------------------------------------------------------------------


def block_order(shapes: Mapping[str, tuple[int, ...]], spec: LayerSpec) -> Tensor:
    """Flat positions of a layer's entries, in the row-major order of its block ``[K, O, I]``."""
    total = sum(math.prod(shape) for shape in shapes.values())
    pieces = torch.arange(total).split([math.prod(shape) for shape in shapes.values()])
    numbered = {k: p.view(shape) for (k, shape), p in zip(shapes.items(), pieces, strict=True)}
    return spec.form.join(numbered).flatten()


def layer_orders(F: Any) -> dict[str, Tensor]:
    """The same for every layer of a block-diagonal matrix."""
    return {spec.name: block_order(F.shapes, spec) for spec in F.table.layers}


def assembled(F: Any, blocks: Mapping[str, Tensor]) -> Tensor:
    """A dense matrix in flat order from one block a layer."""
    out = torch.zeros(F.numel(), F.numel(), dtype=torch.float64)
    for name, order in layer_orders(F).items():
        out[order.unsqueeze(1), order] = blocks[name].double()
    return out


# --- Kronecker factors by hooks ---------------------------------------------------------------------------


@dataclass
class Call:
    """What a hook saw: input, output."""

    module: nn.Module
    x: Tensor
    out: Tensor


def captured(model: nn.Module, x: Any) -> tuple[Tensor, dict[nn.Module, list[Call]]]:
    """The model's output, and every call of every module that has parameters of its own."""
    seen: dict[nn.Module, list[Call]] = {}

    def hook(module: nn.Module, args: tuple, out: Any) -> Any:
        if not isinstance(out, Tensor) or not args:
            return None
        seen.setdefault(module, []).append(Call(module, args[0].detach().clone(), out))
        return out.clone()  # so that an in-place activation does not change what was seen

    owners = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    handles = [m.register_forward_hook(hook) for m in owners]
    try:
        f = call(model, x)
    finally:
        for handle in handles:
            handle.remove()
    return f, seen


def _spatial_padding(module: Any) -> list[int]:
    """Pad sizes as `F.pad` takes them, last axis first."""
    pads = []
    for axis in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            pads += [total // 2, total - total // 2]
        else:
            pads += 2 * [0 if module.padding == "valid" else module.padding[axis]]
    return pads


def patches(module: Any, x: Tensor) -> Tensor:
    """``[N, S, K, I]`` by `F.unfold` (one and two axes) or a convolution with unit kernels (three)."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, _spatial_padding(module), mode=mode)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if len(kernel) == 3:
        size = x.shape[1] * math.prod(kernel)
        units = torch.eye(size, dtype=x.dtype).view(size, x.shape[1], *kernel)
        rows = F.conv3d(x, units, stride=stride, dilation=dilation).flatten(2)
    elif len(kernel) == 2:
        rows = F.unfold(x, kernel, dilation, 0, stride)
    else:
        rows = F.unfold(x.unsqueeze(2), (1, *kernel), (1, *dilation), 0, (1, *stride))
    return rows.mT.unflatten(-1, (module.groups, -1))


def _sent(module: Any, g: Tensor) -> Tensor:
    """``[N, S, K, O]``: what a transposed convolution's input pixels have sent into these output pixels."""
    kernel, stride, dilation, padding = module.kernel_size, module.stride, module.dilation, module.padding
    if len(kernel) == 1:
        g, kernel, stride, dilation, padding = g.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation), (0, *padding)
    return F.unfold(g, kernel, dilation, padding, stride).mT.unflatten(-1, (module.groups, -1))


def _input_rows(module: Any, x: Tensor) -> Tensor:
    """``[..., S, K, I]`` without a bias column."""
    if isinstance(module, nn.Embedding):
        hot = F.one_hot(x, module.num_embeddings).double()
        if module.padding_idx is not None:
            hot[..., module.padding_idx] = 0
        return hot.unsqueeze(-2)
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d):
        return x.flatten(2).mT.unflatten(-1, (module.groups, -1))
    return x.unsqueeze(-2) if isinstance(module, nn.Linear) else patches(module, x)


def _output_rows(module: Any, g: Tensor) -> Tensor:
    """``[..., S, K, O]``."""
    if isinstance(module, nn.Linear | nn.Embedding):
        return g.unsqueeze(-2)
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d):
        return _sent(module, g)
    return g.flatten(2).mT.unflatten(-1, (module.groups, -1))


KNOWN = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.Embedding,
)


@dataclass
class Rows:
    """Inputs ``[N, S, K, I]`` and output gradients ``[V, N, S, K, O]`` of one layer, all its calls as positions."""

    a: Tensor
    g: Tensor

    def factors(self, sharing: str = "expand", keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``A [K, I, I]`` and ``G [K, O, O]`` by the oracle's loops, group by group."""
        n, positions, groups = self.a.shape[:3]
        kept = torch.ones(n, positions, dtype=torch.bool) if keep is None else keep
        found = []
        for k in range(groups):
            a = [self.a[i, kept[i], k] for i in range(n)]
            g = [[v[i, kept[i], k] for i in range(n)] for v in self.g]
            if sharing == "reduce":
                a = [rows.mean(0, keepdim=True) for rows in a if len(rows)]
                g = [[rows.sum(0, keepdim=True) for rows in v] for v in g]
            A, G = oracles.kronecker_factors(a, g)
            found.append((A, G * len(a) / n))
        return torch.stack([A for A, _ in found]), torch.stack([G for _, G in found])


def rows_of(model: nn.Module, x: Any, cotangents: Tensor, specs: list[LayerSpec], examples: int) -> dict[str, Rows]:
    """Inputs and gradients of the layers that plain hooks can see, by layer name."""
    f, seen = captured(model, x)
    found = {}
    for spec in specs:
        calls = [c for module in {s.module: None for s in spec.sites} for c in seen.get(module, [])]
        if not calls or not isinstance(calls[0].module, KNOWN):
            continue
        a = [_input_rows(c.module, c.x).reshape(examples, -1, *spec_inputs(spec)) for c in calls]
        outs = [c.out for c in calls]
        g = []
        for v in cotangents:
            grads = torch.autograd.grad(f, outs, v.to(f), retain_graph=True)
            rows = [_output_rows(c.module, d) for c, d in zip(calls, grads, strict=True)]
            g.append(torch.cat([r.reshape(examples, -1, *r.shape[-2:]) for r in rows], 1))
        joined = torch.cat(a, 1)
        if spec.form.bias is not None:
            joined = F.pad(joined, (0, 1), value=1.0)
        found[spec.name] = Rows(joined.double(), torch.stack(g))
    return found


def spec_inputs(spec: LayerSpec) -> tuple[int, int]:
    """(K, I) without the bias column."""
    return spec.form.groups, spec.form.weight_inputs


# --- quasi-diagonal matrices ------------------------------------------------------------------------------


def psd_completion(F: Any, arrow: Tensor, damping: float = 0.0) -> Tensor:
    """Fill an arrow matrix in, unit by unit, after damping its statistics: adds (κκᵀ − diag κ²)/(f + λ)."""
    out = arrow + damping * torch.eye(len(arrow), dtype=arrow.dtype)
    for spec in F.table.layers:
        if len(spec.form.parts) < 2:
            continue
        order = block_order(F.shapes, spec).view(-1, spec.form.inputs)
        for unit in order:
            w, b = unit[:-1], unit[-1]
            row = arrow[b, w]
            outer = torch.outer(row, row)
            out[w.unsqueeze(1), w] += (outer - torch.diag(outer.diagonal())) / (arrow[b, b] + damping)
    return out
