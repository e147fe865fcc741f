"""Runs a case's plan on the library and compares every answer with the oracle."""

import copy
import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import Batch, Case, arguments_of, fill, output_of, outputs, trainable
from factors import joined, moments_of
from oracle import Oracle
from plans import CALLS
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import what_is_wrong

TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "autocast": 5e-2, "bfloat16": 5e-2}
ORDER = ("right", "loud", "crash", "silent", "oracle")
"""From best to worst; "oracle" is a case that should not have been made."""


@dataclass
class Verdict:
    """Of one call, or of a case: its worst call."""

    word: str
    step: tuple[Any, ...] = ()
    error: float = 0.0
    message: str = ""

    @property
    def rank(self) -> int:
        return ORDER.index(self.word)

    def __str__(self) -> str:
        size = f" {self.error:.1e}" if self.word == "silent" else ""
        return f"{self.word}{size} {self.step} {self.message}".rstrip()


ROUNDING = {"float64": 1e-8, "float32": 1e-3, "autocast": 3e-2, "bfloat16": 3e-2}
"""Of what a result is a difference of: where a softmax is saturated, little else is left of the Fisher matrix."""


def gap(found: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """‖found − expected‖ / ‖expected‖; infinite where shapes differ or something is not finite.

    `scale` is below what a result may be rounding alone.
    """
    found, expected = found.detach().double(), expected.detach().double()
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return math.inf
    return float((found - expected).norm() / expected.norm().clamp_min(scale + 1e-12))


def judge(case: Case, stop: bool = False) -> list[Verdict]:
    """One verdict a call; `stop` at the first that is silent or a crash."""
    oracle, verdicts = Oracle(case), []
    tolerance = TOLERANCE[case.spec.precision]
    for step in case.spec.plan:
        if step[0] not in CALLS:
            change(case, step)
            oracle.changed()
            continue
        for number in range(len(case.batches)):
            apart = oracle.alone(number)
            if case.spec.precision != "float64":
                tolerance = max(tolerance, 10 * apart)  # as much as rounding is worth in this case
            elif apart > tolerance:
                return [Verdict("oracle", step, apart, "examples interact")]
        verdicts.append(_judged(case, oracle, step, tolerance))
        if stop and verdicts[-1].word in ("silent", "crash"):
            break
    return verdicts


def worst(verdicts: list[Verdict]) -> Verdict:
    """The one that the case has."""
    return max(verdicts, key=lambda v: (v.rank, v.error), default=Verdict("right"))


def _judged(case: Case, oracle: Oracle, step: tuple[Any, ...], tolerance: float) -> Verdict:
    checks = _CHECKS[step[0]](case, oracle, *step[1:])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error, what = checks()
    except lw.LayerwiseError as problem:
        return Verdict("loud", step, message=first_sentence(problem))
    except Exception as problem:
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return Verdict("crash", step, message=f"{type(problem).__name__} in {place}: {first_sentence(problem)}")
    return Verdict("right", step, error) if error <= tolerance else Verdict("silent", step, error, what)


def first_sentence(problem: BaseException) -> str:
    """A message without the advice that differs between cases: what is wrong, in one line."""
    lines = what_is_wrong(problem).strip().splitlines() or [""]
    return lines[0][:140]


# --- changes -----------------------------------------------------------------------------------------------


def change(case: Case, step: tuple[Any, ...]) -> None:
    """Between two calls."""
    model = case.model
    if step[0] == "do":
        step[1](case)
    elif step[0] == "perturb":
        gates = [float(p.detach().abs().max()) for name, p in model.named_parameters() if name.endswith("zero")]
        fill(model, case.spec.seed + 17, gates=max(gates, default=0.0))
    elif step[0] == "gates":
        fill(model, case.spec.seed, gates=0.8)
    elif step[0] == "freeze":
        parameters = list(model.parameters())
        p = parameters[step[1] % len(parameters)]
        p.requires_grad_(not p.requires_grad)
        if not any(True for _ in trainable(model)):
            p.requires_grad_(True)
    elif step[0] == "flag":
        for batch in case.batches:
            if "flag" in batch.x:
                batch.x["flag"] = not batch.x["flag"]
    elif step[0] == "config":
        model.config.double = not model.config.double
    elif step[0] == "mode":
        model.train(not model.training)
    else:
        raise ValueError(f"{step} is no step of a plan")


# --- calls -------------------------------------------------------------------------------------------------

Check = Callable[[], tuple[float, str]]
"""Runs the library; the error relative to the truth, and what was compared."""


def _fisher(case: Case, oracle: Oracle, structure: str, estimator: str, batch: int) -> Check:
    numbers = list(range(len(case.batches))) if batch < 0 else [batch]
    expected = oracle.fisher(estimator, numbers)
    pairs = [(case.batches[i].given(), case.batches[i].y) for i in numbers]
    plain = _plain(case, oracle, estimator, numbers) if structure == "kfac" else {}
    axis = next((case.batches[i].example_axis for i in numbers if case.batches[i].example_axis), None)
    scale = max(float(oracle.batch(i).J.square().sum()) / case.batches[i].n for i in numbers)
    scale *= ROUNDING[case.spec.precision]

    def check() -> tuple[float, str]:
        law = lw.likelihoods.resolve(case.spec.likelihood, **case.options)
        M = lw.fisher(case.model, pairs if len(pairs) > 1 else pairs[0], law, structure, estimator, example_axis=axis)
        return _compared(M, structure, expected, plain, scale)

    return check


def _compared(
    M: Any, structure: str, expected: Tensor, plain: dict[str, tuple[Tensor, Tensor, float]], scale: float
) -> tuple[float, str]:
    v = torch.randn(len(expected), 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if structure in ("implicit", "lowrank"):  # v may be nearly orthogonal to all gradients: J v is what is left of J
        product = gap(M @ v.to(M.dtype), expected @ v, scale * float(v.norm())), "F @ v"
        if structure == "implicit":
            return product
        return max((gap(M.to_dense(), expected, scale), "to_dense"), product)
    if structure == "diag":
        return gap(M.diagonal().flat(), expected.diagonal(), scale), "diagonal"
    if structure in ("ekfac", "quasidiag"):
        return gap(M.trace(), expected.trace(), scale), "trace"
    found = M.to_dense().double()
    if structure == "dense":
        return gap(found, expected, scale), "to_dense"
    errors = []
    for spec in M.table.layers:
        order = _order(M, spec)
        block, exact = found[order.unsqueeze(1), order], expected[order.unsqueeze(1), order]
        if structure == "block" or spec.structure("kfac") == "block":
            errors.append((gap(block, exact, scale), spec.name))
            continue
        eigenvalues = torch.linalg.eigvalsh(block)
        negative = float(eigenvalues.min()) < -1e-3 * float(eigenvalues.max().clamp_min(1e-9))
        odd = negative or not bool(block.isfinite().all())
        errors.append((math.inf if odd else 0.0, f"{spec.name} is not positive"))
        by_use = any(site.used for site in spec.sites)  # other products with the weight count too: another formula
        if spec.name in plain and spec.structure("kfac") == "kfac" and not by_use:
            A, G, size = plain[spec.name]
            errors.append(
                (
                    gap(
                        block, torch.kron(G.contiguous(), A.contiguous()), ROUNDING["float64"] * size * float(A.norm())
                    ),
                    f"G ⊗ A of {spec.name}",
                )
            )
    return max(errors)


def _order(M: Any, spec: Any) -> Tensor:
    """Flat positions of a layer's entries, in the order of its block."""
    sizes = [math.prod(shape) for shape in M.shapes.values()]
    pieces = torch.arange(sum(sizes)).split(sizes)
    numbered = {k: p.reshape(shape) for (k, shape), p in zip(M.shapes.items(), pieces, strict=True)}
    return spec.form.join(numbered).flatten()


def _jacobian(case: Case, oracle: Oracle, way: str, batch: int) -> Check:
    expected = oracle.batch(batch).flat()
    scale = ROUNDING[case.spec.precision] * float(oracle.batch(batch).z.norm())  # of what a gradient of zero consists
    generator = torch.Generator().manual_seed(6)

    def check() -> tuple[float, str]:
        of = case.batches[batch]
        J = lw.jacobian(case.model, of.given(), example_axis=of.axis or None)
        if way == "dense":
            return gap(J.to_dense(), expected, scale), "J.to_dense()"
        shape = expected.shape[1 if way == "push" else 0]
        v = torch.randn(shape, generator=generator, dtype=torch.float64)
        if way == "push":
            return gap(J @ v.to(J.dtype), expected @ v, scale), "J @ v"
        found = J.T @ v.to(J.dtype)
        return gap(found if isinstance(found, Tensor) else found.flat(), expected.T @ v, scale), "J.T @ u"

    return check


def _ntk(case: Case, oracle: Oracle, way: str, batch: int) -> Check:
    J = oracle.batch(batch).flat()
    first = oracle.batch(0).flat()
    u = torch.randn(len(J), generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def check() -> tuple[float, str]:
        of = case.batches[batch]
        K = lw.ntk(case.model, of.given(), example_axis=of.axis or None)
        if way == "cross":
            cross = lw.ntk(case.model, case.batches[0].given(), of.given(), example_axis=of.axis or None)
            return gap(cross.matrix(), first @ J.T), "K of two batches"
        return (gap(K.matrix(), J @ J.T), "K") if way == "matrix" else (gap(K @ u.to(K.dtype), J @ (J.T @ u)), "K @ u")

    return check


def _plain(case: Case, oracle: Oracle, estimator: str, numbers: list[int]) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Factors of plain layers; of none where positions are masked, which is another formula for some layers."""
    if case.spec.precision != "float64" or "ignore" in case.spec.options:
        return {}
    found = joined([moments_of(case.model, case.batches[i], oracle.batch(i), estimator) for i in numbers])
    return {name: f for name, f in found.items() if case.plain is None or name in case.plain}


def _moment(case: Case, oracle: Oracle, structure: str, centered: bool, batch: int) -> Check:
    numbers = list(range(len(case.batches))) if batch < 0 else [batch]
    g = torch.cat([oracle.batch(i).gradients() for i in numbers])
    scale = ROUNDING[case.spec.precision] * float(g.square().sum())
    g = g - g.mean(0) if centered else g
    pairs = [(case.batches[i].given(), case.batches[i].y) for i in numbers]
    axis = next((case.batches[i].example_axis for i in numbers if case.batches[i].example_axis), None)

    def check() -> tuple[float, str]:
        data = pairs if len(pairs) > 1 else pairs[0]
        law = lw.likelihoods.resolve(case.spec.likelihood, **case.options)
        M = lw.gradient_moment(case.model, data, law, structure, centered, example_axis=axis)
        return _compared(M, structure, g.T @ g / len(g), {}, scale)

    return check


def _optimizer(case: Case, oracle: Oracle, estimator: str, batch: int) -> Check:
    steps = list(range(len(case.batches))) if batch < 0 else [batch]

    def check() -> tuple[float, str]:
        return max(((error, what) for what, error in statistics_of(case, steps, estimator)), default=(0.0, ""))

    return check if all(b.axis == 0 for b in case.batches) else lambda: (0.0, "")


def statistics_of(
    case: Case, steps: Sequence[int | Callable[[Case], None]], estimator: str = "empirical"
) -> list[tuple[str, float]]:
    """Errors of K-FAC's factors after steps of rate 0 on a copy, without an average: Q = A and P = G of each batch.

    A step is the number of a batch, or a change of the case.
    """
    case = copy.deepcopy(case)
    model, errors = case.model, []
    for module in model.modules():  # statistics are those of training forwards
        module.train(not isinstance(module, nn.modules.batchnorm._BatchNorm))
    model.training = True
    twin = copy.deepcopy(case)  # for the truth: no hook of the optimizer has seen it
    oracle = Oracle(twin)
    opt = lw.optim.KFAC(model, lr=0.0, factor_decay=0.0, scale="formula")
    for step in steps:
        if not isinstance(step, int):
            step(case)
            step(twin)
            oracle.changed()
            continue
        given, plain = case.batches[step], _plain(twin, oracle, estimator, [step])
        _look_aside(model, twin.model, given)
        args, kwargs = arguments_of(given.given())
        f = output_of(model, model(*args, **kwargs))
        if not f.requires_grad:
            continue  # all that this batch uses is frozen
        opt.zero_grad()
        (_loss(case, f, given.y) / given.n).backward()
        opt.step()
        by_use = {spec.name for spec in opt.table.layers if any(site.used for site in spec.sites)}
        errors += _errors_of(opt, {name: factors for name, factors in plain.items() if name not in by_use})
    return errors


def _look_aside(model: nn.Module, twin: nn.Module, batch: Batch) -> None:
    """Gradients that a user may take before a step, of one cotangent and of several: none of the step's business."""
    for of in (twin, model):  # torch has no rule for several of some operations: then the twin has none either
        f, parameters = outputs(of, batch.x), [p for _, p in trainable(of)]
        if not f.requires_grad:
            return
        torch.autograd.grad(f, parameters, torch.ones_like(f), retain_graph=True, allow_unused=True)
        v = torch.stack([f.detach(), f.detach().cos()])
        try:
            torch.autograd.grad(f, parameters, v, allow_unused=True, is_grads_batched=True)
        except RuntimeError:
            if of is model:
                raise
            return


def _errors_of(opt: Any, plain: dict[str, tuple[Tensor, Tensor, float]]) -> list[tuple[str, float]]:
    found = {layer: kept for of in opt.state_dict()["state"].values() for layer, kept in of.items()}
    errors = []
    for name, (A, G, size) in plain.items():
        kept = found.get(name)
        kept = kept if isinstance(kept, dict) else {}
        for side, truth, scale in (("Q", A, 0.0), ("P", G, ROUNDING["float64"] * size)):
            if side in kept and kept[side].numel() == truth.numel():
                errors.append((f"{side} of {name}", gap(kept[side].reshape(truth.shape), truth, scale)))
    return errors


def _loss(case: Case, f: Tensor, y: Tensor) -> Tensor:
    """Σ_n ℓ_n by torch's own losses."""
    if case.spec.likelihood == "categorical":
        weight = case.options.get("weight")
        weight = None if weight is None else weight.to(f.dtype)
        return F.cross_entropy(f.flatten(0, -2), y.flatten(), weight=weight, reduction="sum")
    if case.spec.likelihood == "gaussian":
        return 0.5 * F.mse_loss(f, y.to(f.dtype), reduction="sum")
    return F.binary_cross_entropy_with_logits(f, y.to(f.dtype), reduction="sum")


_CHECKS: dict[str, Callable[..., Check]] = {
    "fisher": _fisher,
    "jacobian": _jacobian,
    "ntk": _ntk,
    "moment": _moment,
    "optimizer": _optimizer,
}
