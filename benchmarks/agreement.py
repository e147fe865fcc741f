"""Do all systems compute the same matrix? Each against factors made by hand, in float64, on tiny models.

Conventions differ by a constant a layer (mean or sum over positions and outputs, ½ or not in the squared
error), so the direction of F v is compared layer by layer and the constant is shown.
"""

import torch
from limits import Recorder, positions_first
from measure import reason
from models import MODELS, Problem, problem
from peers import SYSTEMS
from systems import System
from torch import Tensor

TOLERANCE = {"kfac": 1e-4, "ekfac": 1e-2}  # float32; an eigenbasis is determined less well than its matrix


def check(names: list[str], device: str) -> bool:
    """Print the table; True if every system that runs agrees in direction."""
    print(f"{'model':13s}{'matrix':17s}{'system':27s}{'direction error':>16s}{'constant, by layer':>28s}")
    agree = True
    for model_name in MODELS:
        for structure, estimator in (("kfac", "empirical"), ("kfac", "exact"), ("ekfac", "empirical")):
            if (model_name, estimator) == ("gpt", "exact"):
                continue  # the peers sum over classes for all tokens at once, which is not the exact Fisher
            agree &= _check_matrix(names, problem(model_name, device, tiny=True), structure, estimator)
    return agree


def _check_matrix(names: list[str], p: Problem, structure: str, estimator: str) -> bool:
    layers = by_hand(p, estimator)
    V = {name: torch.randn(len(G), len(A)) for name, (A, G, _) in layers.items()}
    agree = True
    for name in names:
        cls = SYSTEMS[name]
        why = cls.supports(p.name, f"{structure}-{estimator}")
        if not cls.available() or (why and not why.startswith("slow")):  # nothing is slow at this size
            continue
        try:
            error, constants = _compare(cls(p), layers, V, structure, estimator)
            text = f"{error:16.1e}{min(constants):>18.4g} to {max(constants):.4g}"
            agree &= error < TOLERANCE[structure]
        except Exception as failure:
            text = f"  fails: {reason(failure)}"
        print(f"{p.name:13s}{structure + '-' + estimator:17s}{cls.name:27s}{text}")
    return agree


def _compare(system: System, layers: dict, V: dict[str, Tensor], structure: str, estimator: str):
    """Largest distance between unit vectors, and all ratios of norms, over the layers."""
    F = system.fisher(structure, estimator)
    W = system.named(system.product(F, system.vector(_split(system, V))))
    errors, constants = [], []
    for name, (A, G, eigenvalues) in layers.items():
        expected = _product(A, G, eigenvalues if structure == "ekfac" else None, _without_bias(system, name, V))
        columns = W[f"{name}.weight"].flatten(1).shape[1]  # the bias is compared through the weights it acts on
        w, e = W[f"{name}.weight"].flatten().double().cpu(), expected[:, :columns].flatten()
        errors.append(float((w / w.norm() - e / e.norm()).norm()))
        constants.append(float(w.norm() / e.norm()))
    return max(errors), constants


def _split(system: System, V: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices [O, I (+1)] as weight and bias tensors."""
    named = {}
    for name, module in system.layers.items():
        device, columns = module.weight.device, module.weight.flatten(1).shape[1]
        named[f"{name}.weight"] = V[name][:, :columns].reshape(module.weight.shape).to(device)
        if module.bias is not None:
            named[f"{name}.bias"] = V[name][:, columns].to(device)
    return named


def _without_bias(system: System, name: str, V: dict[str, Tensor]) -> Tensor:
    """Where bias and weight are separate blocks, the bias of v does not reach the weights of F v."""
    v = V[name].double()
    if system.layers[name].bias is not None and not system.joint_bias:
        v = torch.cat([v[:, :-1], torch.zeros_like(v[:, -1:])], dim=1)
    return v


def _product(A: Tensor, G: Tensor, eigenvalues: Tensor | None, V: Tensor) -> Tensor:
    if eigenvalues is None:
        return G @ V @ A
    Q_A, Q_G = torch.linalg.eigh(A)[1], torch.linalg.eigh(G)[1]
    return Q_G @ (eigenvalues * (Q_G.T @ V @ Q_A)) @ Q_A.T


def by_hand(p: Problem, estimator: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """A, G and the corrected eigenvalues of each layer.

    A = Σ aaᵀ / (N S), G = Σ gᵀg / N with g the gradient of one example's loss, eigenvalues = E (Q_Gᵀ ∇ Q_A)².
    """
    model = p.copy().double().cpu()
    recorder = Recorder(p.layers(model))
    x, y = ((t.double() if t.is_floating_point() else t).cpu() for t in (p.x, p.y))
    f = recorder.forward(model, x)
    scalars = [p.example_loss_sum(f, y)] if estimator == "empirical" else _output_directions(p, f)
    pulled_back = [recorder.output_gradients(s, retain_graph=True) for s in scalars]
    layers = {}
    for name, layer in recorder.layers.items():
        pairs = [positions_first(layer, recorder.inputs[name], g[name]) for g in pulled_back]
        layers[name] = _factors(pairs)
    return layers


def _factors(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    a = pairs[0][0]
    N, S, _ = a.shape
    A = torch.einsum("nsi,nsj->ij", a, a) / (N * S)
    G = sum(torch.einsum("nso,nsp->op", g, g) for _, g in pairs) / N
    Q_A, Q_G = torch.linalg.eigh(A)[1], torch.linalg.eigh(G)[1]
    rotated = [torch.einsum("nso,nsi->noi", g @ Q_G, a @ Q_A) for _, g in pairs]
    return A, G, sum(R.square().sum(0) for R in rotated) / N


def _output_directions(p: Problem, f: Tensor) -> list[Tensor]:
    """Scalars ⟨f, s_k⟩ with Σ_k s_k s_kᵀ the Hessian of the loss in f: e_k, or √p_k (e_k − p)."""
    K = f.shape[-1]
    basis = torch.eye(K, dtype=f.dtype)
    if p.likelihood == "gaussian":
        return [(f * basis[k]).sum() for k in range(K)]
    probabilities = f.detach().softmax(-1)
    return [(f * probabilities[..., k : k + 1].sqrt() * (basis[k] - probabilities)).sum() for k in range(K)]
