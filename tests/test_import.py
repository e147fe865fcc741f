"""What `import layerwise` needs and what it offers."""

import subprocess
import sys
import textwrap
import types

import layerwise as lw

OPTIONAL = (
    "triton",
    "pyarrow",
    "PIL",
    "scipy",
    "sklearn",
    "rich",
    "matplotlib",
    "hypothesis",
    "beartype",
    "tyro",
    "jinja2",
    "pandas",
    "datasets",
    "ray",
    "tensorboard",
)

WITHOUT_OPTIONAL = """
import importlib.abc
import sys

BLOCKED = {blocked!r}


class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{{name}} is blocked in this test")


sys.meta_path.insert(0, Blocker())

import torch
import layerwise as lw

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
batch = torch.randn(16, 4), torch.randint(3, (16,))
v = lw.ParamVector.randn(model, generator=0)
for structure in ("dense", "block", "diag", "quasidiag", "kfac", "ekfac", "lowrank", "implicit"):
    F = lw.fisher(model, [batch, batch], structure=structure, progress=True)
    step = F.solve(v, damping=1e-2)
    assert float(step @ v) > 0, structure
print(lw.layers(model))
loaded = sorted(name for name in BLOCKED if name in sys.modules)
assert not loaded, loaded
"""

PUBLIC = {
    "doctor",
    "fisher",
    "ggn",
    "hessian",
    "gradient_moment",
    "layers",
    "load",
    "likelihoods",
    "ParamVector",
    "ParamMatrix",
    "split",
    "batched",
    "LayerTable",
    "LayerRule",
    "layer_rule",
    "LayerwiseError",
    "jacobian",
    "ntk",
    "alignment",
    "cka",
    "effective_rank",
    "trace_ratio",
    "spectrum",
    "Jacobian",
    "Kernel",
    "optim",
    "feature_learning",
    "theory",
    "bounds",
    "structure",
    "meta",
    "selfsup",
    "regimes",
    "linearized",
}


def test_works_with_the_four_dependencies_alone():
    code = textwrap.dedent(WITHOUT_OPTIONAL).format(blocked=OPTIONAL)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0.weight" in done.stdout


def test_public_names():
    """Exactly these: packages of the levels can be had by their name, and are not shown."""
    beside = {"foundations", "curvature", "kernel", "distributed", "data", "testing"}
    beside |= {"training", "studies", "experiments", "report", "cli"}
    beside.add("jaxtyping")  # put there by the suite's import hook
    names = {name for name in dir(lw) if not name.startswith("_")}
    assert names - beside == PUBLIC


def test_names_are_imported_when_they_are_used():
    """`import layerwise` alone takes no torch along; a function keeps its name where a submodule has the same."""
    code = """
import sys
import layerwise as lw
assert "torch" not in sys.modules and lw.__version__
assert not hasattr(lw, "no_such_name")
import layerwise.layers.table                       # would set `layers` of the package to the module
import layerwise.studies.feature_learning.simulate  # the same
from layerwise import feature_learning, fisher, layers, optim
assert callable(lw.layers) and lw.layers is layers
assert callable(feature_learning.simulate) and callable(feature_learning.members)
assert optim.KFAC.__name__ == "KFAC" and lw.curvature.build.fisher is fisher
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_what_they_seem():
    for name in ("fisher", "ggn", "hessian", "gradient_moment", "layers", "load", "layer_rule"):
        assert isinstance(getattr(lw, name), types.FunctionType)
    for name in ("ParamVector", "ParamMatrix", "LayerTable", "LayerRule", "LayerwiseError"):
        assert isinstance(getattr(lw, name), type)
    assert {"Categorical", "Gaussian", "Bernoulli"} <= set(vars(lw.likelihoods))
    assert all(getattr(lw, name).__doc__ for name in PUBLIC)


def test_version_is_that_of_the_package():
    from importlib.metadata import version

    assert lw.__version__ == version("layerwise")
