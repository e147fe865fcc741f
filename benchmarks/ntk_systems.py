"""Packages that compute an empirical tangent kernel, each behind one call.

Every system gives the kernel of all parameters and all outputs as one matrix [N·P, N·P], example-major. An adapter
calls the public API of its package with the options that are fastest for it.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from models import Problem
from peers import WholeBatch
from torch import Tensor
from torch.func import functional_call, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

TILED_BYTES = 0.9e9


class KernelSystem:
    """One way to the kernel of one problem, with its own copy of the model."""

    name = ""
    package = "torch"
    distribution = "torch"  # name on the package index
    missing: Mapping[str, str] = {}  # model to why it is not measured; "slow" in front if --slow overrules it
    few: Mapping[str, int] = {}  # model to the examples it is measured on, where all would take too long
    keeps_jacobian = False  # all of it, so that its size decides where this can run at all
    compiles_for_long = False

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = problem.copy()

    @classmethod
    def available(cls) -> bool:
        return importlib.util.find_spec(cls.package) is not None

    @classmethod
    def why_not(cls, problem: Problem) -> str:
        """Empty, or why this is not measured; "slow" in front if --slow overrules it.

        What is not known beforehand fails in the run and is caught there.
        """
        needed = _jacobian_bytes(problem) if cls.keeps_jacobian else 0
        if needed > _free_bytes(problem.x.device):
            return f"its Jacobian takes {needed / 1e9:.0f} GB"
        return cls.missing.get(problem.name, "")

    def prepare(self) -> Callable[[], object]:
        """Untimed: whatever happens once. Returns the call to time."""
        return self.matrix

    def matrix(self) -> object:
        raise NotImplementedError

    def as_tensor(self, kernel) -> Tensor:
        """What the call returned as a matrix [N·P, N·P], example-major."""
        return kernel


def _jacobian_bytes(problem: Problem) -> int:
    with torch.no_grad():
        f = problem.model(problem.x[:1])
    return sum(p.numel() for p in problem.model.parameters()) * f.numel() * problem.examples() * f.itemsize


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    return int(available.split()[1]) * 1024


class LayerwiseKernel(KernelSystem):
    name = package = distribution = "layerwise"
    memory: float | None = None

    def matrix(self) -> Tensor:
        import layerwise as lw

        return lw.ntk(self.model, self.problem.x, memory=self.memory).matrix()


class LayerwiseTiled(LayerwiseKernel):
    name = "layerwise, memory=0.9e9"
    memory = TILED_BYTES


class NNGeometryKernel(KernelSystem):
    package = distribution = "nngeometry"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from nngeometry.layercollection import LayerCollection

        self.collection = LayerCollection.from_model(self.model)
        batch = WholeBatch(problem.x, problem.y)
        self.loader = torch.utils.data.DataLoader(batch, batch_size=len(batch), collate_fn=lambda b: b)


class NNGeometryGram(NNGeometryKernel):
    name = "nngeometry GramMatrix"
    missing = {"resnet": "slow: minutes (--slow)"}  # noqa: RUF012

    def matrix(self) -> Tensor:
        from nngeometry.gram import GramMatrix

        return GramMatrix(self.model, self.loader, layer_collection=self.collection).to_torch()

    def as_tensor(self, kernel: Tensor) -> Tensor:
        return _example_major(kernel)


class NNGeometryJacobian(NNGeometryKernel):
    name = "nngeometry Jacobian, JJᵀ"
    missing = {"mlp": "slow: minutes, and 7 GB (--slow)"}  # noqa: RUF012
    keeps_jacobian = True

    def matrix(self) -> Tensor:
        from nngeometry.jacobian import Jacobian

        J = Jacobian(self.model, self.loader, layer_collection=self.collection).to_torch().flatten(0, 1)
        return J @ J.mT

    def as_tensor(self, kernel: Tensor) -> Tensor:
        n = self.problem.examples()
        return _example_major(kernel.view(-1, n, len(kernel) // n, n))


def _example_major(K: Tensor) -> Tensor:
    """[P, N, P, N] as a matrix."""
    K = K.permute(1, 0, 3, 2)
    return K.reshape(K.shape[0] * K.shape[1], -1)


class TorchFunc(KernelSystem):
    """The model as a function of its parameters and one example."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        self.buffers = {name: b.detach() for name, b in self.model.named_buffers()}

    def outputs(self, parameters: dict[str, Tensor], example: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward derivative and no batching rule
            return functional_call(self.model, (parameters, self.buffers), (example.unsqueeze(0),)).flatten()


class TorchFuncJacobian(TorchFunc):
    """The whole Jacobian by vmap(jacrev), then one product a parameter."""

    name = "torch.func Jacobian, JJᵀ"
    missing = {"mlp": "slow: minutes, and 7 GB (--slow)"}  # noqa: RUF012
    keeps_jacobian = True
    chunk: int | None = None

    def matrix(self) -> Tensor:
        J = vmap(jacrev(self.outputs), (None, 0), chunk_size=self.chunk)(self.parameters, self.problem.x)
        rows = (j.flatten(2).flatten(0, 1) for j in J.values())
        return sum(R @ R.mT for R in rows)


class TorchFuncChunked(TorchFuncJacobian):
    name = "torch.func Jacobian, chunks of 10"
    chunk = 10


class TorchFuncProducts(TorchFunc):
    """Θ e_q for every output of a pair of examples: pulled back through one, pushed forward through the other."""

    name = "torch.func NTK-vector products"
    few = {"mlp": 8, "resnet": 4, "transformer": 4, "transformer-tokens": 2, "vgg19": 4, "vgg19-plain": 4}  # noqa: RUF012

    def pair(self, x1: Tensor, x2: Tensor) -> Tensor:
        f1, f2 = (partial(self.outputs, example=x) for x in (x1, x2))
        f, pull = vjp(f2, self.parameters)

        def column(u: Tensor) -> Tensor:
            return jvp(f1, (self.parameters,), pull(u))[1]

        return vmap(column, out_dims=1)(torch.eye(len(f), dtype=f.dtype, device=f.device))

    def matrix(self) -> Tensor:
        x = self.problem.x
        columns = vmap(self.pair, (None, 0))
        K = vmap(columns, (0, None), chunk_size=1)(x, x)  # N, M, P, Q; all at once takes N times the memory
        return K.transpose(1, 2).flatten(0, 1).flatten(1)
