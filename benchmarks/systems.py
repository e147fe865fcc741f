"""What a measured system answers, and layerwise behind that interface."""

import importlib
import importlib.util
from collections.abc import Mapping

from models import Problem
from torch import Tensor, nn

DAMPING = 1e-3
Named = Mapping[str, Tensor]


class System:
    """One package on one problem, with its own copy of the model."""

    name = ""
    package = ""
    distribution = ""  # name on the package index
    joint_bias = True
    remembers_inverse = False  # F keeps what a solve has prepared, so a first solve needs a new F
    missing: Mapping[str, str] = {}  # task, or prefix of tasks, to why it is not offered

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = problem.copy()
        self.layers = problem.layers(self.model)

    @classmethod
    def available(cls) -> bool:
        return importlib.util.find_spec(cls.package) is not None

    @classmethod
    def supports(cls, model_name: str, task: str) -> str:
        """Empty, or why this is not measured; "slow" in front if --slow overrules it.

        What is not known beforehand fails in the run and is caught there.
        """
        return next((why for prefix, why in cls.missing.items() if task.startswith(prefix)), "")

    def fisher(self, structure: str, estimator: str):
        """All that F consists of, computed (nothing left for later)."""
        raise NotImplementedError

    def vector(self, named: Named):
        """A parameter-space vector in the package's own form."""
        return dict(named)

    def named(self, vector) -> Named:
        return vector

    def product(self, F, v):
        raise NotImplementedError

    def inverse(self, F):
        """What (F + λI)⁻¹ v needs beside v."""
        raise NotImplementedError

    def solve(self, inverse, v):
        raise NotImplementedError

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the Linear and Conv2d layers by their full name."""
        named = self.model.named_parameters()
        return {name: p for name, p in named if name.rpartition(".")[0] in self.layers}


class Layerwise(System):
    """Ours, on the same layers as the peers: the other parameters are frozen, so they take no part."""

    name = package = distribution = "layerwise"
    remembers_inverse = True
    every_parameter = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        import layerwise

        self.lw = layerwise
        if not self.every_parameter:
            measured = self.parameters()
            for name, p in self.model.named_parameters():
                p.requires_grad_(name in measured)

    @classmethod
    def available(cls) -> bool:
        try:
            return hasattr(importlib.import_module(cls.package), "fisher")
        except ImportError:
            return False

    def fisher(self, structure: str, estimator: str):
        data = (self.problem.x, self.problem.y)
        options = {"likelihood": self.problem.likelihood, "structure": structure, "estimator": estimator}
        F = self.lw.fisher(self.model, data, seed=0, **options)
        F.trace()  # costs next to nothing, and leaves no lazy work outside the clock
        return F

    def vector(self, named: Named):
        drawn = self.lw.ParamVector.randn(self.model, 0).dict()
        return self.lw.ParamVector(drawn | dict(named))

    def named(self, vector) -> Named:
        return vector.dict()

    def product(self, F, v):
        return F @ v

    def inverse(self, F):
        return F

    def solve(self, inverse, v):
        return inverse.solve(v, damping=DAMPING)


class LayerwiseAll(Layerwise):
    """Ours as a user calls it: norms and embeddings too, which the peers leave out."""

    name = "layerwise, all parameters"
    every_parameter = True

    @classmethod
    def supports(cls, model_name: str, task: str) -> str:
        if model_name.startswith("autoencoder"):
            return "every parameter is in a Linear layer"
        return "" if task.endswith("-sampled") else "only kfac-sampled and ekfac-sampled"
