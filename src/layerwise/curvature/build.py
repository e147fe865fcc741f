"""What users call: `fisher`, `ggn`, `hessian`, `gradient_moment`."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from layerwise.curvature.approximation import Options
from layerwise.curvature.estimate import LAYER_STRUCTURES, STRUCTURES, Structure, check_structure, estimate
from layerwise.curvature.hessian import HessianProducts, ImplicitHessian
from layerwise.curvature.hessian import by_layer as hessian_by_layer
from layerwise.curvature.hessian import dense as hessian_dense
from layerwise.curvature.implicit import Implicit
from layerwise.curvature.matrix import ParamMatrix
from layerwise.curvature.moment import MomentLikelihood, batch_loss
from layerwise.foundations import likelihoods
from layerwise.foundations.cotangents import (
    Cotangent,
    GivenGradient,
    HessianRoot,
    LossGradient,
    SampledLabels,
)
from layerwise.foundations.device import budget
from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.kronecker import check_split
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.progress import Progress
from layerwise.foundations.random import seed_of
from layerwise.foundations.types import unwrap
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.layers.capture.recorder import Check, ModelRecorder
from layerwise.layers.capture.source import Source, Sweep
from layerwise.layers.matrices import Matrices
from layerwise.layers.table import LayerTable, OnUnsupported

Estimator = Literal["exact", "sampled", "empirical"]
Loss = Callable[[Tensor, Any], Tensor]
HESSIAN_STRUCTURES = ("dense", "block", "diag", "implicit")
CENTERED_STRUCTURES = ("dense", "block", "diag", "lowrank", "implicit")


@in_own_arithmetic
def fisher(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood = "categorical",
    structure: Structure = "kfac",
    estimator: Estimator = "sampled",
    samples: int = 1,
    *,
    sharing: Literal["expand", "reduce"] = "expand",
    conv: Literal["kfc", "sua"] = "kfc",
    damping_split: Literal["exact", "trace", "equal"] | None = None,
    completion: Literal["psd", "arrow"] | None = None,
    normalize: Literal["examples", "terms"] = "examples",
    select: str | Iterable[str] = "*",
    on_unsupported: OnUnsupported = "elementwise",
    example_axis: int | None = None,
    seed: int | torch.Generator = 0,
    memory: int | float | None = None,
    progress: bool | Progress | None = None,
    check: Check = "first",
    matrices: Matrices | None = None,
    **likelihood_options: Any,
) -> ParamMatrix:
    """The Fisher information matrix of a model on data, in any structure.

        F = 1/N Σ_n Σ_s m_ns w_ns J_nsᵀ H(f_ns) J_ns

    over the N examples of *all* the data and the positions s of each one's output; m is the mask (`ignore_index`),
    w the weight of the data's own label, H the Fisher matrix of the likelihood at the output
    (``diag p − ppᵀ`` for categorical). ``normalize="terms"`` divides by ``Σ m·w`` instead of N, as torch's mean
    reduction does. The estimator "sampled" draws labels from the model (an unbiased estimate), "exact" pulls back
    every output direction, and "empirical" is ``1/N Σ_n ∇ℓ_n ∇ℓ_nᵀ`` at the data's labels, which is another matrix.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
    >>> F = lw.fisher(model, (x, y), structure="kfac")
    >>> v = lw.ParamVector.randn(model, generator=0)
    >>> step = F.solve(v, damping=1e-3)

    Args:
        model: any module; it is left exactly as it was. Dropout in train mode draws from `seed`.
        data: a batch ``(x, y)`` or ``(x, y, mask)``, or any iterable of batches. x may be a tuple (``model(*x)``)
            or a mapping (``model(**x)``).
        likelihood: "categorical", "gaussian", "bernoulli" (options as further arguments, e.g. ``weight=``), or an
            object of `lw.likelihoods`.
        structure: "dense", "block", "diag", "quasidiag", "kfac", "ekfac", "lowrank", "implicit", or a mapping from
            patterns of layer names to structures of single layers.
        estimator: "exact", "sampled" or "empirical".
        samples: labels drawn an example, for "sampled".
        sharing: how K-FAC treats positions that share a weight.
        conv: "kfc", or "sua" (kernel offsets uncorrelated) for K-FAC of convolutions.
        damping_split: how a K-FAC solve adds damping by default: to the factors ("trace", the default, or
            "equal"), or to their product ("exact", EKFAC's default).
        completion: which matrix "quasidiag" means; None uses each where it is defined (see the guide).
        normalize: see above.
        select: patterns of the layers that take part.
        on_unsupported: what happens to parameters without a layer rule.
        example_axis: axis of the examples in the input, where it should not be found.
        seed: of the labels that are drawn; or a generator, from which a seed is drawn.
        memory: bytes this call may use; default half of what is free.
        progress: True, False, or an object with `track`; by default a bar on a terminal for long work.
        check: when what is recorded of the model is compared with autograd's gradient: "first", example by example for
            every new graph of operations (and always where rows move by the data); "always", beside that at every
            batch, in the backward that is made anyway (a quarter more time with one cotangent, a twentieth with many;
            two backwards more where positions are masked); "never". What does not agree falls back, with the reason in
            ``lw.layers``' words; on a graph that was right before it is an error.
        matrices: parameters that hold several matrices, by pattern: ``{"*.qkv": lw.split(3, heads=12)}``.
        likelihood_options: `weight`, `ignore_index`, `label_smoothing`, … of the likelihood named.
    """
    law = likelihoods.resolve(likelihood, **likelihood_options)
    check_structure(structure, STRUCTURES, "the Fisher matrix")
    options = _options(sharing, conv, damping_split, completion)
    sweep = _sweep(
        model,
        data,
        law,
        _cotangent(law, estimator, samples, seed_of(seed)),
        normalize,
        select,
        on_unsupported,
        example_axis,
        seed_of(seed),
        memory,
        progress,
        conv,
        check,
        matrices,
    )
    if structure == "implicit":
        sweep.source.require_passes(2, 'structure "implicit"')
        return Implicit(sweep)
    return estimate(sweep, structure, options)


def ggn(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood = "categorical",
    structure: Structure = "kfac",
    estimator: Literal["exact", "sampled"] = "exact",
    samples: int = 1,
    **options: Any,
) -> ParamMatrix:
    """The generalized Gauss-Newton matrix ``1/N Σ_n J_nᵀ (∂²ℓ/∂f²) J_n``.

    For the likelihoods here it equals the exact Fisher matrix; `estimator` "exact" is the default. All other
    arguments are those of `fisher`.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Linear(3, 2)
    >>> G = lw.ggn(model, (torch.randn(8, 3), torch.randn(8, 2)), likelihood="gaussian", structure="dense")
    >>> G.shape
    (8, 8)
    """
    if estimator not in ("exact", "sampled"):
        raise InputError(describe(f"estimator={estimator!r}", '"exact" or "sampled" for the GGN', "see lw.fisher"))
    return fisher(model, data, likelihood, structure, estimator, samples, **options)


@in_own_arithmetic
def hessian(
    model: nn.Module,
    data: Any,
    loss: Loss | str | Likelihood | None = None,
    structure: Literal["dense", "block", "diag", "implicit"] = "implicit",
    *,
    likelihood: str | Likelihood | None = None,
    select: str | Iterable[str] = "*",
    example_axis: int | None = None,
    seed: int | torch.Generator = 0,
    memory: int | float | None = None,
    progress: bool | Progress | None = None,
    **likelihood_options: Any,
) -> ParamMatrix:
    """The Hessian of the mean loss, ``1/N Σ_b N_b ∇² loss(f_b, y_b)`` over batches b.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Linear(3, 2)
    >>> batch = torch.randn(8, 3), torch.randint(2, (8,))
    >>> H = lw.hessian(model, batch, loss=torch.nn.functional.cross_entropy)
    >>> Hv = H @ lw.ParamVector.randn(model, generator=0)

    Args:
        model: any module whose operations can be differentiated twice (attention included).
        data: as for `fisher`.
        loss: ``loss(output, target)``, mean-reduced as torch's are by default (a module with
            ``reduction="sum"`` is divided by the batch's examples); or a likelihood, whose loss is
            ``1/N Σ_n Σ_s m w ℓ``.
        structure: "implicit" (products only), "dense", "block", "diag". The diagonal is exact for up to 2048
            parameters and a random estimate with its standard error above.
        likelihood: the same as `loss`, for a likelihood.
        select: patterns of the layers that take part.
        example_axis: axis of the examples in the input; by default the one that has as many as the target.
        seed: of a random forward.
        memory: bytes this call may use.
        progress: as for `fisher`.
        likelihood_options: of the likelihood named.
    """
    check_structure(structure, HESSIAN_STRUCTURES, "the Hessian")
    model = unwrap(model)
    table = LayerTable.from_model(model, select)
    source = Source(data, progress, model)
    source.require_passes(2, "the Hessian")
    recorder = ModelRecorder(model, table, example_axis, seed=seed_of(seed))
    per_batch = batch_loss(_loss(loss, likelihood, likelihood_options), recorder)
    allowed = budget(memory, _device(model))
    implicit = ImplicitHessian(HessianProducts(model, recorder, source, per_batch), table, allowed)
    if structure == "implicit":
        return implicit
    return hessian_dense(implicit) if structure == "dense" else hessian_by_layer(implicit, structure, allowed)


@in_own_arithmetic
def gradient_moment(
    model: nn.Module,
    data: Any,
    loss: Loss | str | Likelihood | None = None,
    structure: Structure = "block",
    centered: bool = False,
    *,
    likelihood: str | Likelihood | None = None,
    sharing: Literal["expand", "reduce"] = "expand",
    conv: Literal["kfc", "sua"] = "kfc",
    damping_split: Literal["exact", "trace", "equal"] | None = None,
    completion: Literal["psd", "arrow"] | None = None,
    normalize: Literal["examples", "terms"] = "examples",
    select: str | Iterable[str] = "*",
    on_unsupported: OnUnsupported = "elementwise",
    example_axis: int | None = None,
    seed: int | torch.Generator = 0,
    memory: int | float | None = None,
    progress: bool | Progress | None = None,
    check: Check = "first",
    matrices: Matrices | None = None,
    **likelihood_options: Any,
) -> ParamMatrix:
    """Second moment of per-example gradients, ``C = 1/N Σ_n g_n g_nᵀ``; centered, minus ``ḡ ḡᵀ``.

    ``g_n`` is the gradient of the loss on example n alone.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Linear(3, 2)
    >>> batch = torch.randn(8, 3), torch.randint(2, (8,))
    >>> C = lw.gradient_moment(model, batch, loss=torch.nn.functional.cross_entropy, centered=True)

    Args:
        model: as for `fisher`.
        data: as for `fisher`.
        loss: ``loss(output, target)`` of a batch of one example, or a likelihood.
        structure: as for `fisher`; centered moments exist as dense, block, diag, lowrank and implicit.
        centered: subtract the mean gradient.
        likelihood: the same as `loss`, for a likelihood.
        sharing: as for `fisher`.
        conv: as for `fisher`.
        damping_split: as for `fisher`.
        completion: as for `fisher`.
        normalize: as for `fisher`.
        select: as for `fisher`.
        on_unsupported: as for `fisher`.
        example_axis: as for `fisher`.
        seed: of a random forward.
        memory: as for `fisher`.
        progress: as for `fisher`.
        check: as for `fisher`.
        matrices: as for `fisher`.
        likelihood_options: of the likelihood named.
    """
    allowed = CENTERED_STRUCTURES if centered else STRUCTURES
    check_structure(structure, allowed, "the centered moment" if centered else "the gradient moment")
    if centered and normalize != "examples":
        raise InputError(
            describe('normalize="terms" and centered=True', 'normalize="examples"', "leave one of them out")
        )
    given = _loss(loss, likelihood, likelihood_options)
    cotangent: Cotangent
    if isinstance(given, Likelihood):
        law, cotangent = given, LossGradient(given)
    else:
        law = MomentLikelihood(loss_fn=given)
        cotangent = GivenGradient(law.gradient)
    sweep = _sweep(
        model,
        data,
        law,
        cotangent,
        normalize,
        select,
        on_unsupported,
        example_axis,
        seed_of(seed),
        memory,
        progress,
        conv,
        check,
        matrices,
    )
    if structure == "implicit":
        sweep.source.require_passes(2, 'structure "implicit"')
        return Implicit(sweep, centered)
    return estimate(sweep, structure, _options(sharing, conv, damping_split, completion), centered)


def _loss(loss: Any, likelihood: Any, options: dict[str, Any]) -> Likelihood | Loss:
    given = loss if likelihood is None else likelihood
    if given is None or (loss is not None and likelihood is not None):
        raise InputError(
            describe(
                "no loss" if given is None else "a loss and a likelihood",
                "one of loss= and likelihood=",
                "pass e.g. loss=torch.nn.functional.cross_entropy",
            )
        )
    if isinstance(given, str | Likelihood):
        return likelihoods.resolve(given, **options)
    if options:
        raise InputError(
            describe(
                f"options {', '.join(options)} with a loss function",
                "options of a likelihood",
                "bind them inside the loss function",
            )
        )
    if not callable(given):
        raise InputError(describe(f"loss={given!r}", "a function loss(output, target)", "pass a callable"))
    return cast(Loss, given)


def _cotangent(law: Likelihood, estimator: str, samples: int, seed: int) -> Cotangent:
    if estimator == "exact":
        return HessianRoot(law)
    if estimator == "sampled":
        if samples < 1:
            raise InputError(describe(f"samples={samples}", "a number ≥ 1", "pass e.g. samples=1"))
        return SampledLabels(law, int(samples), seed)
    if estimator == "empirical":
        return LossGradient(law)
    raise InputError(not_one_of("estimator", estimator, ("exact", "sampled", "empirical")))


def _options(sharing: str, conv: str, split: str | None, completion: str | None) -> Options:
    for name, value, known in (
        ("sharing", sharing, ("expand", "reduce")),
        ("conv", conv, ("kfc", "sua")),
        ("completion", completion, (None, "psd", "arrow")),
    ):
        if value not in known:
            raise InputError(not_one_of(name, value, known))
    if split is not None:
        check_split(split, split)
    return Options(sharing, conv, split, completion)


def _device(model: nn.Module) -> torch.device:
    return next(p.device for p in model.parameters() if p.requires_grad)


def _sweep(
    model: nn.Module,
    data: Any,
    law: Likelihood,
    cotangent: Cotangent,
    normalize: str,
    select: str | Iterable[str],
    on_unsupported: OnUnsupported,
    example_axis: int | None,
    seed: int,
    memory: int | float | None,
    progress: bool | Progress | None,
    conv: str,
    check: Check,
    matrices: Matrices | None,
) -> Sweep:
    if normalize not in ("examples", "terms"):
        raise InputError(not_one_of("normalize", normalize, ("examples", "terms")))
    model = unwrap(model)
    # SUA makes kernel offsets independent; the bias has no offset, so it is a block of its own.
    separate = (nn.Conv1d, nn.Conv2d, nn.Conv3d) if conv == "sua" else ()
    table = LayerTable.from_model(model, select, on_unsupported, separate, matrices)
    recorder = ModelRecorder(model, table, example_axis, seed=seed, check=check)
    allowed = budget(memory, _device(model))
    return Sweep(recorder, Source(data, progress, model), law, cotangent, allowed, normalize)


__all__ = ["LAYER_STRUCTURES", "fisher", "ggn", "gradient_moment", "hessian"]
