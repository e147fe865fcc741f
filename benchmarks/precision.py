"""How far fp16 moves a direction, beside how far autocast has moved it already, with the state of a real training.

    LAYERWISE_DATA=… python benchmarks/precision.py                # text/tinyshakespeare.txt in that folder
    python benchmarks/precision.py --members KFAC --steps 600 --json precision.json
    python benchmarks/precision.py --small --device cpu            # 2 × 48, minutes on a CPU
    python benchmarks/precision.py --tiny --device cpu             # seconds, to see that all runs

The character GPT of `shakespeare.py`, without dropout, is trained under bfloat16 autocast, at a rate of 2e-3 after 100
steps of warm-up; K-FAC and EKFAC take statistics every ten steps, Shampoo and SOAP at every step. Then gradients of one
new batch are taken at the weights that it has reached, and turned into directions by the optimizer's state of that
moment. A direction is what the rule makes of a gradient without momentum from before. Since steps take their size from
AdamW's, each layer's is divided by its norm. Errors are ``‖D − D′‖``, over hidden layers:

    autocast        the formula in float64, of the gradient under autocast; beside that of the one in float32
    rounded         the same of the float32 gradient rounded to bfloat16: without the rounding of activations
    half, high      the library's direction with this `precision`; beside the formula, of the gradient under autocast
    another batch   the formula, of another batch's gradient

The formula in float64 has K-FAC's factors, whose inverse it finds anew as the library does, or the basis with what is
divided by: arithmetic differs, not how near a basis is to that of its factor. Trainings have `precision="high"`, so
that "half" rounds what the state has of 22 bits; EKFAC and SOAP keep a basis of fp16 in both. On a CPU the code of the
GPU runs, by plain torch; but EKFAC's scalings are of float32 there, and of bfloat16 on a GPU.
"""

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from shakespeare.members import RATES, own
from shakespeare.model import cross_entropy
from shakespeare.runs import Race
from shakespeare.without_dropout import as_asked, parser, training
from torch import Tensor, nn

from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.members.soap import NO_SIGNAL, RotatedAdam
from layerwise.optim.rule import Context, Health
from layerwise.optim.step.stack import Stack

STEPS, TINY_STEPS = 200, 10
MEMBERS = ("KFAC", "Shampoo", "EKFAC", "SOAP")
PRECISIONS = ("half", "high")
COLUMNS = ("autocast", "rounded", *PRECISIONS, "another batch")
OfLayer = Mapping[str, Tensor]
"""A layer's state by name, ``[1, …]``."""
Gradients = dict[str, Tensor]
"""By parameter."""


# --- a training ----------------------------------------------------------------------------------------------


def autocast(race: Race, enabled: bool = True) -> torch.autocast:
    """On a CPU too, where `Race` has none."""
    return torch.autocast(torch.device(race.device).type, torch.bfloat16, enabled=enabled)


def train(race: Race, member: str, seed: int) -> tuple[nn.Module, Layerwise, dict[int, Context], float]:
    """The model, its optimizer, what its last step knew of each stack, and the last loss."""
    model = race.model(seed)
    (opt,) = own(member, solver="products", precision="high")(model, RATES[0])
    assert isinstance(opt, Layerwise)
    known, losses = contexts_of(opt) if race.size.steps == 1 else dict[int, Context](), list[Tensor]()
    for step, loss in training(race, model, opt, seed, autocast(race)):
        losses.append(loss)
        if step == race.size.steps - 2:  # for the last one
            known = contexts_of(opt)
    return model, opt, known, float(losses[-1])


def contexts_of(opt: Layerwise) -> dict[int, Context]:
    """A dictionary by stack, which the next `opt.step()` fills: damping, ε and examples as a step has them."""
    executor, found = opt._executor, dict[int, Context]()
    run = executor.run

    def noting(contexts: Any, seen: Any, scale: float, together: Any) -> None:
        assert scale == 1.0  # the loss is a mean, and drops out
        found.update({id(stack): replace(c) for stack, c in zip(executor.stacks, contexts, strict=True)})
        run(contexts, seen, scale, together)

    executor.run = noting
    return found


def gradients(race: Race, model: nn.Module, batch: tuple[Tensor, Tensor], under_autocast: bool) -> Gradients:
    """Of one batch, clipped; in float32 without autocast.

    To a norm of 1 as in the training, or to 0.99 of its norm where that is less: an unscaled bfloat16 gradient may be
    exact in fp16, and SOAP would not round it at all.
    """
    x, y = batch
    model.zero_grad()
    with autocast(race, under_autocast):
        loss = cross_entropy(model(x), y)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(nn.utils.get_total_norm(grads))
    nn.utils.clip_grad_norm_(model.parameters(), min(1.0, 0.99 * norm), foreach=True)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- formulas, in float64 --------------------------------------------------------------------------------------


def mean_eigenvalue(M: Tensor) -> Tensor:
    return M.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]


def inverses(rule: KroneckerRoots, of: OfLayer, G: Tensor, context: Context) -> Tensor:
    """``(P + √λ tr P/O)⁻¹ G (Q + √λ tr Q/I)⁻¹``."""
    d = context.damping**0.5
    P, Q = (M + torch.diag_embed((d * mean_eigenvalue(M)).expand(M.shape[:2])) for M in (of["P"], of["Q"]))
    return torch.linalg.solve(P, torch.linalg.solve(Q, G.mT).mT)


def roots(rule: KroneckerRoots, of: OfLayer, G: Tensor, context: Context) -> Tensor:
    """``U_P [(s_P + λ tr P/O)⁻ᵖ (s_Q + λ tr Q/I)⁻ᑫ ⊙ U_Pᵀ G U_Q] U_Qᵀ``."""
    a, b = (
        (of[f"s_{side}"] + context.damping * mean_eigenvalue(of[side])).pow(-power)
        for side, power in zip("PQ", rule.power, strict=True)
    )
    return of["U_P"] @ (a[:, :, None] * (of["U_P"].mT @ G @ of["U_Q"]) * b[:, None, :]) @ of["U_Q"].mT


def corrected(rule: CorrectedEigenvalues, of: OfLayer, G: Tensor, context: Context) -> Tensor:
    """``U_P [R / (s + (s_P + left)(s_Q + right) − s_P s_Q)] U_Qᵀ``, s averaged with ``N R²`` before."""
    R = of["U_P"].mT @ G @ of["U_Q"]
    s = torch.lerp(context.examples * R.square(), of["s"], rule.scaling_decay)
    left, right = (context.damping**0.5 * of[name].mean(-1)[:, None, None] for name in ("s_P", "s_Q"))
    added = of["s_P"][:, :, None] * right + left * of["s_Q"][:, None, :] + left * right
    return of["U_P"] @ (R / (s + added)) @ of["U_Q"].mT


def rotated_adam(rule: RotatedAdam, of: OfLayer, G: Tensor, context: Context) -> Tensor:
    """``U_P [R / (√V + ε)] U_Qᵀ``, V averaged with R² before; less of it where V is rounding (`RotatedAdam.floor`)."""
    beta2 = context.option("betas", rule.betas)[1]
    R = of["U_P"].mT @ G @ of["U_Q"]
    V = torch.lerp(R.square(), of["V"], beta2)
    seen, trace = 1 - beta2 ** of["P_count"], of["P"].diagonal(dim1=-2, dim2=-1).sum(-1)
    share = torch.finfo(torch.float32).eps ** (2 * NO_SIGNAL) / min(G.shape[-2:])
    least = share * (trace / seen) * (1 - beta2 ** (of["steps"] + 1))
    Y = R / (V.sqrt() + rule.eps * context.unit) * (1 - least.view(-1, 1, 1) / V).clamp_min(0)
    return of["U_P"] @ Y @ of["U_Q"].mT


FORMULAS: dict[str, Callable[[Any, OfLayer, Tensor, Context], Tensor]] = {
    "KFAC": inverses,
    "Shampoo": roots,
    "EKFAC": corrected,
    "SOAP": rotated_adam,
}


# --- directions ------------------------------------------------------------------------------------------------


def exact(member: str, stack: Stack, saved: Mapping[str, OfLayer], G: Tensor, context: Context) -> Tensor:
    """By the formula, layer by layer."""
    assert context.relative
    found = []
    for spec, groups in stack.layers:
        of = {name: X.to(G.device).double() for name, X in saved[spec.name].items()}
        found.append(FORMULAS[member](stack.rule, of, G[groups].double(), context))
    return torch.cat(found)


def by_library(
    member: str, stack: Stack, saved: Mapping[str, OfLayer], G: Tensor, context: Context, precision: str
) -> Tensor:
    """As a step finds it, in another stack with the same state.

    The rule gets what an average that was zero has of G, as in a step of AdamW's size; SOAP has its own.
    """
    backend = CudaBackend("products", precision)
    twin = Stack(stack.rule, stack.specs, stack.group, stack.params, backend)
    twin.ensure_state(saved)
    assert twin.shape == stack.shape
    whole = torch.zeros(len(G), twin.shape.outputs, twin.shape.inputs, device=G.device)
    whole[:, : G.shape[1], : G.shape[2]] = G
    m = whole if twin.requires.own_momentum else (1 - stack.group["momentum"]) * whole
    now = DeviceStep(torch.ones((), dtype=torch.bool, device=G.device), whole, whole.abs().amax((1, 2)))
    now.bound_m(m, m.abs().amax((1, 2)))
    # As after a first step: SOAP has its basis, and no group waits for a first refresh.
    memory, health = {"begun": True, "fresh": [True] * len(G)}, Health()
    context = replace(context, backend=backend, device_step=now, gradient=whole, memory=memory, health=health)
    if member == "KFAC":
        twin.rule.refresh(twin.state, slice(0, len(G)), context)
        assert health.fallbacks == 0
    return twin.own(backend.tensor(twin.rule.direction(twin.state, m, context)))


def apart(D: Tensor, other: Tensor) -> list[float]:
    """Of unit vectors, layer by layer."""
    a, b = (nn.functional.normalize(X.double().flatten(1), dim=1, eps=0.0) for X in (D, other))
    return torch.linalg.vector_norm(a - b, dim=1).tolist()


def saved_by_layer(opt: Layerwise) -> dict[str, dict[str, Tensor]]:
    """A checkpoint's state, SOAP's momentum forgotten."""
    found = {name: of for by_name in opt.state_dict()["state"].values() for name, of in by_name.items()}
    for of in found.values():
        if "M" in of:
            of["M"] = torch.zeros_like(of["M"])
    return found


def measured(race: Race, member: str, seed: int) -> dict:
    """Errors of all hidden layers of one member, by layer."""
    trained, opt, known, loss = train(race, member, seed)
    saved, model = saved_by_layer(opt), race.model(seed)  # this one without the hooks of statistics
    model.load_state_dict(trained.state_dict())
    stream = race.text.generator(1000 + seed)
    one, other = race.text.batch(stream), race.text.batch(stream)
    grads = {
        "float32": gradients(race, model, one, False),
        "autocast": gradients(race, model, one, True),
        "other": gradients(race, model, other, True),
    }
    layers: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for stack in opt._executor.stacks:
            if stack.rule is opt.rule:
                errors = of_stack(member, stack, saved, grads, known[id(stack)])
                for place, (spec, _) in enumerate(stack.layers):
                    layers[spec.name] = {name: errors[name][place] for name in COLUMNS}
    return {"member": member, "seed": seed, "loss": loss, "summary": summary(layers), "layers": layers}


def of_stack(
    member: str, stack: Stack, saved: Mapping[str, OfLayer], grads: Mapping[str, Gradients], context: Context
) -> dict[str, list[float]]:
    """Errors of each of its layers."""
    G = {kind: stack.own(stack.join({name: of[name] for name in stack.params})) for kind, of in grads.items()}
    G["rounded"] = G["float32"].bfloat16().float()
    D = {kind: exact(member, stack, saved, X, context) for kind, X in G.items()}
    found = {"autocast": apart(D["autocast"], D["float32"]), "rounded": apart(D["rounded"], D["float32"])}
    for precision in PRECISIONS:
        ours = by_library(member, stack, saved, G["autocast"], context, precision)
        found[precision] = apart(ours, D["autocast"])
    return found | {"another batch": apart(D["other"], D["autocast"])}


def summary(layers: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Over layers. Also how "half" compares with each of the two roundings to bfloat16, layer by layer."""
    found = {}
    for name in COLUMNS:
        errors = [of[name] for of in layers.values()]
        found[name] = {"median": statistics.median(errors), "largest": max(errors)}
    for name in ("autocast", "rounded"):
        ratios = [of["half"] / of[name] for of in layers.values()]
        found[f"half / {name}"] = {"median": statistics.median(ratios), "largest": max(ratios)}
    return found


# --- the table -------------------------------------------------------------------------------------------------


def print_member(run: dict) -> None:
    for of in ("median", "largest"):
        name = f"{run['member']}, {len(run['layers'])} layers" if of == "median" else ""
        columns = "".join(f"{run['summary'][column][of]:15.2e}" for column in COLUMNS)
        ratios = "".join(f"{run['summary'][f'half / {column}'][of]:17.2f}" for column in ("autocast", "rounded"))
        print(f"  {name:20s}{of:>8s}{columns}{ratios}", flush=True)


def main() -> None:
    asking = parser(__doc__)
    asking.add_argument("--members", nargs="+", default=list(MEMBERS), choices=MEMBERS)
    asking.add_argument("--seed", type=int, default=0)
    asked = asking.parse_args()
    torch.set_float32_matmul_precision("highest")
    race, runs = as_asked(asked, TINY_STEPS if asked.tiny else STEPS), []
    size = race.size
    ratios = "".join(f"{'half / ' + name:>17s}" for name in ("autocast", "rounded"))
    print(f"  {'':28s}{''.join(f'{name:>15s}' for name in COLUMNS)}{ratios}")
    for member in asked.members:
        runs.append(measured(race, member, asked.seed))
        print_member(runs[-1])
    shape = {"depth": size.depth, "width": size.width, "batch": size.batch, "length": size.length}
    record = json.dumps({"benchmark": "precision", "device": asked.device, "steps": size.steps, **shape, "runs": runs})
    print(record)
    if asked.json:
        asked.json.write_text(record, encoding="utf-8")


if __name__ == "__main__":
    main()
