"""The other libraries, each behind the interface of `System`.

An adapter calls the public API of its package, with the options that make the quantity the same as ours
(expand sharing, weight and bias joint where the package can) and the call as fast as the package allows:
sizes it would otherwise infer are given, self-checks are off, nothing is written to disk.
"""

import torch
from models import Problem
from systems import DAMPING, Layerwise, LayerwiseAll, Named, System
from torch import Tensor, nn


class WholeBatch(torch.utils.data.Dataset):
    """Hands a DataLoader its batch in one piece, so that no time goes into collating single examples."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.x.detach(), self.y  # detached: nngeometry sets requires_grad on what it gets


class NNGeometry(System):
    name = package = distribution = "nngeometry"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from nngeometry.layercollection import LayerCollection

        self.collection = LayerCollection()
        for module in self.layers.values():
            self.collection.add_layer_from_model(self.model, module)
        batch = WholeBatch(problem.x, problem.y)
        self.loader = torch.utils.data.DataLoader(batch, batch_size=len(batch), collate_fn=lambda b: b)

    def fisher(self, structure: str, estimator: str):
        from nngeometry.object import pspace

        matrix = {"kfac": pspace.PMatKFAC, "ekfac": pspace.PMatEKFAC}[structure]
        F = self._estimate(matrix, estimator)
        if structure == "ekfac":  # until then its eigenvalues are those of plain KFAC
            F.update_diag(self.loader)
        return F

    def _estimate(self, matrix: type, estimator: str):
        import nngeometry
        from nngeometry.backend import TorchHooksJacobianBackend

        def model(*batch: Tensor) -> Tensor:
            return self.model(batch[0])

        options = {"function": model, "layer_collection": self.collection}
        categorical = self.problem.likelihood == "categorical"
        if estimator == "exact":
            variant = "classif_logits" if categorical else "regression"
            return nngeometry.FIM(self.model, self.loader, matrix, variant=variant, **options)
        if estimator == "sampled" and categorical:
            return nngeometry.FIM_MonteCarlo(self.model, self.loader, matrix, trials=1, **options)
        backend = TorchHooksJacobianBackend(
            model=self.model, function=self._log_likelihood(estimator), layer_collection=self.collection
        )
        return matrix(generator=backend, examples=self.loader)

    def _log_likelihood(self, estimator: str):
        """log p(y | x) of each example, [N, 1]: the package has no empirical nor sampled Gaussian Fisher."""

        def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
            f = self.model(x)
            y = self.problem.sample_labels(f) if estimator == "sampled" else y
            if self.problem.likelihood == "gaussian":
                return -0.5 * (f - y).square().sum(1, keepdim=True)
            return f.log_softmax(1).gather(1, y.unsqueeze(1))

        return log_likelihood

    def vector(self, named: Named):
        from nngeometry.object.vector import PVector

        parts = {
            layer: tuple(named[f"{layer}.{p}"] for p, _ in module.named_parameters())
            for layer, module in self.layers.items()
        }
        return PVector(self.collection, dict_repr=parts)

    def named(self, vector) -> Named:
        parts = vector.to_dict()
        return {
            f"{layer}.{p}": t
            for layer, module in self.layers.items()
            for (p, _), t in zip(module.named_parameters(), parts[layer], strict=True)
        }

    def product(self, F, v):
        return F.mv(v)

    def inverse(self, F):
        return F.inverse(regul=DAMPING)  # solve() would factor anew at every call

    def solve(self, inverse, v):
        return inverse.mv(v)


class FlatOutput(nn.Module):
    """A model whose output [N, T, C] is given as [N·T, C], the form curvlinops wants for an EKFAC."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).flatten(0, -2)


class Curvlinops(System):
    name = package = "curvlinops"
    distribution = "curvlinops-for-pytorch"

    def fisher(self, structure: str, estimator: str):
        import curvlinops

        gaussian = self.problem.likelihood == "gaussian"
        kind = {"sampled": "mc", "empirical": "empirical", "exact": "type-2"}[estimator]
        cls = {"kfac": curvlinops.KFACLinearOperator, "ekfac": curvlinops.EKFACLinearOperator}[structure]
        F = cls(
            FlatOutput(self.model),
            nn.MSELoss() if gaussian else nn.CrossEntropyLoss(),
            list(self.parameters().values()),
            [(self.problem.x, self.problem.y if gaussian else self.problem.y.flatten())],
            fisher_type=kind,
            separate_weight_and_bias=False,
            check_deterministic=False,
            num_data=self.problem.examples(),
            num_per_example_loss_terms=self.problem.terms() // self.problem.examples(),
        )
        F.compute_kronecker_factors()
        if structure == "ekfac":
            F.compute_eigenvalue_correction()
        return F

    def vector(self, named: Named):
        return [named[name] for name in self.parameters()]

    def named(self, vector) -> Named:
        return dict(zip(self.parameters(), vector, strict=True))

    def product(self, F, v):
        return F @ v

    def inverse(self, F):
        from curvlinops import KFACInverseLinearOperator

        return KFACInverseLinearOperator(F, damping=DAMPING, use_heuristic_damping=True)

    def solve(self, inverse, v):
        return inverse @ v


class BackPACK(System):
    name = package = "backpack"
    distribution = "backpack-for-pytorch"
    joint_bias = False
    missing = {"kfac-empirical": "no empirical Fisher", "ekfac": "no EKFAC"}  # noqa: RUF012

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from backpack import extend

        loss = nn.MSELoss() if problem.likelihood == "gaussian" else nn.CrossEntropyLoss()
        # A Sequential of modules it knows needs no conversion; the converter refuses what it cannot trace.
        self.model = extend(self.model, use_converter=not isinstance(self.model, nn.Sequential))
        self.loss = extend(loss)

    def fisher(self, structure: str, estimator: str):
        from backpack import backpack, extensions

        extension = extensions.KFLR() if estimator == "exact" else extensions.KFAC(mc_samples=1)
        f = self.model(self.problem.x)
        with backpack(extension):
            self.loss(f, self.problem.y).backward()
        factors = {}
        for name, p in self.model.named_parameters():
            factors[name] = getattr(p, extension.savefield)
            delattr(p, extension.savefield)
            p.grad = None
        return factors

    def product(self, F, v):
        from backpack.utils.kroneckers import apply_kfac_mat_prod

        return {name: apply_kfac_mat_prod(F[name], t.reshape(-1)).view_as(t) for name, t in v.items()}

    def inverse(self, F):
        from backpack.utils.kroneckers import inv_kfac_mat_prod

        return {name: inv_kfac_mat_prod(factors, shift=DAMPING**0.5) for name, factors in F.items()}

    def solve(self, inverse, v):
        return {name: inverse[name](t.reshape(-1)).view_as(t) for name, t in v.items()}


class Kronfluence(System):
    name = package = distribution = "kronfluence"
    missing = {  # noqa: RUF012
        "kfac-exact": "no exact Fisher",
        "product": "no product outside its scores",
        "solve": "no solve outside its scores",
    }

    @classmethod
    def supports(cls, model_name: str, task: str) -> str:
        if model_name == "autoencoder" and task.startswith("ekfac"):
            return "slow: rotates each example's gradient, a minute or more a call (--slow)"
        return super().supports(model_name, task)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from kronfluence.analyzer import prepare_model
        from kronfluence.utils.state import State

        self.task = _kronfluence_task(problem)
        self.model = prepare_model(self.model, self.task).to(problem.x.device)  # it adds tensors of its own
        self.state = State(cpu=problem.x.device.type == "cpu")

    def fisher(self, structure: str, estimator: str):
        from kronfluence.arguments import FactorArguments
        from kronfluence.factor import covariance, eigen

        # float32 like everybody else; its own default decomposes in float64
        arguments = FactorArguments(
            use_empirical_fisher=estimator == "empirical", eigendecomposition_dtype=torch.float32
        )
        where = {"model": self.model, "state": self.state, "factor_args": arguments, "disable_tqdm": True}
        loader = [(self.problem.x, self.problem.y)]
        _, F = covariance.fit_covariance_matrices_with_loader(task=self.task, loader=loader, **where)
        if structure == "ekfac":
            Q = eigen.perform_eigendecomposition(covariance_factors=F, **where)
            _, eigenvalues = eigen.fit_lambda_matrices_with_loader(
                task=self.task, loader=loader, eigen_factors=Q, **where
            )
            F = Q | eigenvalues
        return F

    def product(self, F, v):
        """For the comparison of results only: the package has no such call."""
        out = {}
        for layer, module in self.layers.items():
            V = v[f"{layer}.weight"].flatten(1)
            if module.bias is not None:
                V = torch.cat([V, v[f"{layer}.bias"].unsqueeze(1)], dim=1)
            W = _kronfluence_product(F, layer, V.cpu()).to(V.device)  # it hands its factors over on the CPU
            n = v[f"{layer}.weight"].flatten(1).shape[1]
            out[f"{layer}.weight"] = W[:, :n].view_as(v[f"{layer}.weight"])
            if module.bias is not None:
                out[f"{layer}.bias"] = W[:, n]
        return out


def _kronfluence_task(problem: Problem):
    from kronfluence.task import Task

    class NegativeLogLikelihood(Task):
        def compute_train_loss(self, batch, model: nn.Module, sample: bool = False) -> Tensor:
            f = model(batch[0])
            return problem.example_loss_sum(f, problem.sample_labels(f) if sample else batch[1])

        def compute_measurement(self, batch, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    return NegativeLogLikelihood()


def _kronfluence_product(F: dict, layer: str, V: Tensor) -> Tensor:
    if "lambda_matrix" in F:
        Q_A, Q_G = F["activation_eigenvectors"][layer], F["gradient_eigenvectors"][layer]
        eigenvalues = F["lambda_matrix"][layer] / F["num_lambda_processed"][layer]
        return Q_G @ (eigenvalues * (Q_G.T @ V @ Q_A)) @ Q_A.T
    A = F["activation_covariance"][layer] / F["num_activation_covariance_processed"][layer]
    G = F["gradient_covariance"][layer] / F["num_gradient_covariance_processed"][layer]
    return G @ V @ A


SYSTEMS: dict[str, type[System]] = {
    "layerwise": Layerwise,
    "layerwise-all": LayerwiseAll,
    "nngeometry": NNGeometry,
    "curvlinops": Curvlinops,
    "backpack": BackPACK,
    "kronfluence": Kronfluence,
}
PEERS = ("nngeometry", "curvlinops", "backpack", "kronfluence")
