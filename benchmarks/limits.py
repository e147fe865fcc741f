"""What no method can avoid, in plain torch: passes through the network, factor products, decompositions.

`Bare(problem)` records layer inputs a and output gradients g once. Every method of it is then one bare
operation to time, without the bookkeeping of a library; unfolding the inputs of convolutions is not counted.
"""

import torch
import torch.nn.functional as F
from models import Problem
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

FORWARD, TRAINING = "forward", "forward+backward"
TO_OUTPUTS = "forward + backward to layer outputs"
INPUT_PRODUCTS, GRADIENT_PRODUCTS = "products aᵀa", "products gᵀg"
EIGH, PRODUCT, CHOLESKY_SOLVE = "eigh of the factors", "two products a layer", "Cholesky + solve"
INVERSE_PREPARED = "two products with inverses"


def positions_first(layer: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [N, S, I] (with a column of ones for the bias) and output gradients [N, S, O] of one layer."""
    if isinstance(layer, nn.Conv2d):
        a = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
        g = g.flatten(2).transpose(1, 2)
    a, g = (t.reshape(len(t), -1, t.shape[-1]) for t in (a, g))
    if layer.bias is not None:
        a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], dim=2)
    return a, g


class Recorder:
    """Layer inputs, and the places in the graph where the gradients of layer outputs pass."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        self.layers = layers
        self.inputs: dict[str, Tensor] = {}
        self.edges: dict = {}

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        handles = [m.register_forward_hook(self._keep(name)) for name, m in self.layers.items()]
        try:
            return model(x)
        finally:
            for handle in handles:
                handle.remove()

    def output_gradients(self, loss: Tensor, retain_graph: bool = False) -> dict[str, Tensor]:
        """∂loss/∂(layer output) for every layer; weight gradients are not computed."""
        g = torch.autograd.grad(loss, list(self.edges.values()), retain_graph=retain_graph)
        return dict(zip(self.edges, g, strict=True))

    def _keep(self, name: str):
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.inputs[name] = args[0].detach()
            self.edges[name] = get_gradient_edge(output)

        return hook


class Bare:
    """The bare operations on one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = problem.copy()
        self.layers = problem.layers(self.model)
        self.parameters = list(self.model.parameters())
        self._inputs_and_gradients: list[tuple[Tensor, Tensor]] = []
        self._factors: list[tuple[Tensor, Tensor]] = []

    def operations(self) -> dict:
        """Each operation by its name in the tables: a function that prepares and returns the call to time."""
        return {
            FORWARD: lambda: self.forward,
            TRAINING: lambda: self.forward_backward,
            TO_OUTPUTS: lambda: self.backward_to_outputs,
            INPUT_PRODUCTS: self.input_products,
            GRADIENT_PRODUCTS: self.gradient_products,
            EIGH: self.eigendecompositions,
            PRODUCT: self.products,
            INVERSE_PREPARED: self.products,
            CHOLESKY_SOLVE: self.cholesky_solves,
        }

    def forward(self):
        return self.model(self.problem.x)

    def forward_backward(self):
        """The yardstick: the gradient of the training loss for all parameters."""
        return torch.autograd.grad(self.problem.loss(self.model(self.problem.x)), self.parameters)

    def backward_to_outputs(self):
        recorder = Recorder(self.layers)
        f = recorder.forward(self.model, self.problem.x)
        return recorder.output_gradients(self.problem.loss(f))

    def inputs_and_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """[N·S, I] and [N·S, O] for each layer, unfolded and contiguous."""
        if not self._inputs_and_gradients:
            recorder = Recorder(self.layers)
            f = recorder.forward(self.model, self.problem.x)
            g = recorder.output_gradients(self.problem.example_loss_sum(f))
            for name, layer in self.layers.items():
                pair = positions_first(layer, recorder.inputs[name], g[name])
                self._inputs_and_gradients.append(tuple(t.flatten(0, 1).contiguous() for t in pair))
        return self._inputs_and_gradients

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """A (mean over examples and positions) and G (sum over positions, mean over examples)."""
        if not self._factors:
            n = self.problem.examples()
            self._factors = [(a.T @ a / len(a), g.T @ g / n) for a, g in self.inputs_and_gradients()]
        return self._factors

    def input_products(self):
        inputs = [a for a, _ in self.inputs_and_gradients()]
        return lambda: [a.T @ a for a in inputs]

    def gradient_products(self):
        gradients = [g for _, g in self.inputs_and_gradients()]
        return lambda: [g.T @ g for g in gradients]

    def eigendecompositions(self):
        factors = self.factors()
        return lambda: [torch.linalg.eigh(M) for pair in factors for M in pair]

    def products(self):
        """V ↦ G V A. Inverse factors take the same time, so this is the limit of a prepared solve too."""
        triples = self._with_vectors()
        return lambda: [G @ V @ A for A, G, V in triples]

    def cholesky_solves(self):
        """V ↦ (G + γI)⁻¹ V (A + αI)⁻¹ from the factors: two decompositions and two solves a layer."""
        triples = [(_damped(A), _damped(G), V) for A, G, V in self._with_vectors()]

        def solve():
            for A, G, V in triples:
                left = torch.cholesky_solve(V, torch.linalg.cholesky(G))
                torch.cholesky_solve(left.T, torch.linalg.cholesky(A))

        return solve

    def _with_vectors(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(A, G, torch.randn(len(G), len(A), device=A.device)) for A, G in self.factors()]


def _damped(M: Tensor) -> Tensor:
    """A shift relative to the mean eigenvalue: any that makes the matrix safely positive definite will do."""
    return M + 0.03 * M.diagonal().mean() * torch.eye(len(M), device=M.device)


def unavoidable(task: str, outputs: int) -> dict[str, float]:
    """The limit of a task as a sum of bare operations, each with its multiplicity.

    `outputs` is the number of output directions of an exact Fisher, here pulled back one at a time: at a
    small batch, where a pass does not fill the cores, stacking directions can be faster than this sum.
    """
    one_pass = {TO_OUTPUTS: 1, INPUT_PRODUCTS: 1, GRADIENT_PRODUCTS: 1}
    if task == "kfac-exact":  # one forward pass, then `outputs` backward passes over the same graph
        backward = {TO_OUTPUTS: outputs, FORWARD: 1 - outputs}
        return backward | {INPUT_PRODUCTS: 1, GRADIENT_PRODUCTS: outputs}
    if task.startswith("kfac-"):
        return one_pass
    if task.startswith("ekfac-"):
        return {name: 2 * count for name, count in one_pass.items()} | {EIGH: 1}
    return {{"product": PRODUCT, "solve": INVERSE_PREPARED, "solve-first": CHOLESKY_SOLVE}[task]: 1}
