"""Conventions of scikit-learn's estimators, kept without importing it: parameters, clones, pipelines, tags.

An estimator's constructor stores its arguments and nothing else, `fit` computes, and what it learned ends in ``_``.
scikit-learn is asked for its own classes only where it calls and so is there.
"""

import inspect
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.foundations.optional import require

Samples = Any
"""A tensor, or what NumPy makes a matrix of."""


# Wording in this file that scikit-learn's `check_estimator` looks for is kept as scikit-learn has it.
COMPLEX = "Complex data not supported. Expected real numbers. Give real and imaginary parts as features of their own."


class InputTypeError(InputError, TypeError):
    """Samples of a type that cannot be used."""


class Estimator:
    """Parameters by name, checked samples, and results of the kind that was given."""

    n_features_in_: int

    @classmethod
    def _names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> Any:
        """Change arguments of the constructor; what was learned stays until `fit`."""
        for name, value in params.items():
            if name not in self._names():
                raise InputError(unknown("parameter", name, self._names()))
            setattr(self, name, value)
        return self

    def set_output(self, *, transform: str | None = None) -> Any:
        """For pipelines, which ask for it: codes are arrays or tensors, as X was ("default"), and no data frames."""
        if transform not in (None, "default"):
            given = f"transform={transform!r}"
            raise InputError(describe(given, '"default"', "make a data frame with get_feature_names_out()"))
        return self

    def __repr__(self) -> str:
        usual = {name: p.default for name, p in inspect.signature(type(self).__init__).parameters.items()}
        changed = [
            f"{n}={v!r}" for n, v in self.get_params().items() if v is not usual[n] and repr(v) != repr(usual[n])
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_features_in_")

    def __sklearn_tags__(self) -> Any:
        tags = require("sklearn.utils", "scikit-learn", "tags of an estimator", extra="data")
        return tags.Tags(
            estimator_type=None,
            target_tags=tags.TargetTags(required=False),
            transformer_tags=tags.TransformerTags(preserves_dtype=["float64", "float32"]),
            input_tags=tags.InputTags(),
        )

    def _samples(self, X: Samples, *, fitting: bool, device: str | torch.device) -> Tensor:
        """Samples as rows, on a device, after one clear error for what cannot be used."""
        name = type(self).__name__
        if not fitting and not self.__sklearn_is_fitted__():
            raise _not_fitted(describe(f"a {name} that is not fitted yet", "one after fit", "call fit(X) first"))
        rows = X if isinstance(X, Tensor) else _matrix(X)
        if isinstance(rows, Tensor) and rows.is_complex():
            raise InputError(COMPLEX)
        if rows.ndim != 2:
            given, do = (
                f"samples of shape {tuple(rows.shape)}",
                "Reshape your data: X.reshape(-1, 1) or X.reshape(1, -1)",
            )
            raise InputError(describe(given, "one row a sample, [n, d]", do))
        n, d = rows.shape
        if n < 1 or d < 1:
            given = f"an array with {n} sample(s), {d} feature(s) (shape={(n, d)}) while a minimum of 1 is required"
            raise InputError(describe(given, "samples, with features", "look at what made them"))
        if not fitting and d != self.n_features_in_:
            message = f"X has {d} features, but {name} is expecting {self.n_features_in_} features as input"
            raise InputError(f"{message}. Give the coordinates that fit was given.")
        rows = rows.detach().to(device) if isinstance(rows, Tensor) else torch.as_tensor(rows, device=device)
        rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.to(torch.float64)
        if not bool(torch.isfinite(rows).all()):
            given = "an X that contains NaN or infinity"
            raise InputError(describe(given, "finite numbers", "leave such rows out, or fill them"))
        return rows

    def _like(self, found: Tensor, X: Samples) -> Any:
        """A tensor for a tensor, an array for everything else."""
        return found.to(X.device) if isinstance(X, Tensor) else found.cpu().numpy()


def _matrix(X: Samples) -> np.ndarray:
    if hasattr(X, "toarray"):
        raise InputTypeError(describe("a sparse matrix", "a dense one", "use X.toarray(), if it fits in memory"))
    found = np.asarray(X)
    if np.iscomplexobj(found):
        raise InputError(COMPLEX)
    if found.dtype.kind not in "fiub":
        try:
            found = found.astype(np.float64)
        except (TypeError, ValueError) as error:
            kind = InputTypeError if isinstance(error, TypeError) else InputError
            raise kind(describe(f"samples of type {found.dtype} ({error})", "numbers", "convert them")) from error
    kind = found.dtype if found.dtype in (np.float32, np.float64) else np.float64
    return np.require(found, kind, ["C", "W"])  # which tensors can share


def _not_fitted(message: str) -> InputError:
    """As scikit-learn's own error, too, where it is there to catch it."""
    theirs = getattr(sys.modules.get("sklearn.exceptions"), "NotFittedError", None)
    kinds = (InputError, theirs) if theirs else (InputError, AttributeError)
    again = {"__reduce__": lambda self: (_not_fitted, self.args)}  # a class made here cannot be pickled by its name
    return type("NotFittedError", kinds, again)(message)
