"""neural-tangents on the same models: their forward passes in JAX, with the weights of the torch modules.

    pip install --no-deps neural-tangents==0.6.5 jax==0.4.30 jaxlib==0.4.30 ml_dtypes opt_einsum frozendict

Its last release does not run with later versions of JAX, and asks for tensorflow, which this does not need.
"""

import importlib
import importlib.util
import math
import sys
import types

import torch
from models import GPT, BasicBlock, Problem, ResNet, TransformerBlock
from ntk_models import NextToken
from ntk_systems import KernelSystem
from torch import Tensor, nn


def import_neural_tangents():
    """The package without its part for tensorflow, and with two names that JAX has moved since."""
    import jax
    from jax._src import source_info_util
    from jax.interpreters import ad

    ad.source_info_util, ad.config = source_info_util, jax.config
    sys.modules.setdefault("neural_tangents.experimental", types.ModuleType("neural_tangents.experimental"))
    return importlib.import_module("neural_tangents")


class Forward:
    """The forward pass of a torch module in JAX: `run(module, name, x)` with parameters and buffers by full name."""

    def __init__(self, tensors: dict) -> None:
        self.tensors = tensors

    def run(self, module: nn.Module, name: str, x):
        kind = next((t for t in type(module).__mro__ if t in FORWARD), None)
        if kind is None:
            raise NotImplementedError(f"no JAX version of {type(module).__name__}")
        return FORWARD[kind](self, module, name, x)

    def child(self, module: nn.Module, name: str, child: str, x):
        return self.run(getattr(module, child), f"{name}{child}.", x)

    def affine(self, name: str, x):
        y = x @ self.tensors[name + "weight"]  # [in, out]: its rules do not see through a transposition
        return y + self.tensors[name + "bias"] if name + "bias" in self.tensors else y


def _sequential(f: Forward, module: nn.Sequential, name: str, x):
    for child, part in module.named_children():
        x = f.run(part, f"{name}{child}.", x)
    return x


def _convolution(f: Forward, module: nn.Conv2d, name: str, x):
    from jax import lax

    padding = [(p, p) for p in module.padding]
    return lax.conv_general_dilated(x, f.tensors[name + "weight"], module.stride, padding)


def _relu(f: Forward, module: nn.Module, name: str, x):
    import jax.numpy as jnp

    return jnp.maximum(x, 0)


def _batch_norm(f: Forward, module: nn.BatchNorm2d, name: str, x):
    def per_channel(key: str):
        return f.tensors[name + key].reshape(1, -1, 1, 1)

    normal = (x - per_channel("running_mean")) / (per_channel("running_var") + module.eps) ** 0.5
    return normal * per_channel("weight") + per_channel("bias")


def _basic_block(f: Forward, module: BasicBlock, name: str, x):
    h = _relu(f, module, name, f.child(module, name, "bn1", f.child(module, name, "conv1", x)))
    h = f.child(module, name, "bn2", f.child(module, name, "conv2", h))
    return _relu(f, module, name, h + f.child(module, name, "shortcut", x))


def _resnet(f: Forward, module: ResNet, name: str, x):
    h = f.child(module, name, "blocks", f.child(module, name, "stem", x))
    return f.child(module, name, "head", h.mean((2, 3)))


def _layer_norm(f: Forward, module: nn.LayerNorm, name: str, x):
    centered = x - x.mean(-1, keepdims=True)
    normal = centered / ((centered**2).mean(-1, keepdims=True) + module.eps) ** 0.5
    return normal * f.tensors[name + "weight"] + f.tensors[name + "bias"]


def _attention(f: Forward, module: TransformerBlock, name: str, x):
    import jax.numpy as jnp
    from jax import lax

    N, T, D = x.shape
    qkv = f.child(module, name, "qkv", x).reshape(N, T, 3, module.heads, D // module.heads)
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(D // module.heads)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    attended = (weights / weights.sum(-1, keepdims=True)) @ v
    return f.child(module, name, "projection", attended.transpose(0, 2, 1, 3).reshape(N, T, D))


def _transformer_block(f: Forward, module: TransformerBlock, name: str, x):
    from jax import lax

    x = x + _attention(f, module, name, f.child(module, name, "norm1", x))
    h = f.child(module, name, "up", f.child(module, name, "norm2", x))
    return x + f.child(module, name, "down", 0.5 * h * (1 + lax.erf(h / math.sqrt(2))))


def _gpt(f: Forward, module: GPT, name: str, x):
    h = f.tensors[name + "tokens.weight"][x] + f.tensors[name + "positions.weight"][: x.shape[1]]
    h = f.child(module, name, "norm", f.child(module, name, "blocks", h))
    return f.child(module, name, "head", h[:, -1] if isinstance(module, NextToken) else h)


FORWARD = {
    nn.Sequential: _sequential,
    nn.Linear: lambda f, module, name, x: f.affine(name, x),
    nn.Conv2d: _convolution,
    nn.BatchNorm2d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.ReLU: _relu,
    nn.Identity: lambda f, module, name, x: x,
    BasicBlock: _basic_block,
    ResNet: _resnet,
    TransformerBlock: _transformer_block,
    GPT: _gpt,
}


class NeuralTangents(KernelSystem):
    """`empirical_ntk_fn`, compiled before the clock starts."""

    package, distribution = "neural_tangents", "neural-tangents"
    implementation = ""

    @classmethod
    def available(cls) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in (cls.package, "jax"))

    @classmethod
    def why_not(cls, problem: Problem) -> str:
        return super().why_not(problem) if problem.x.device.type == "cpu" else "on the CPU only"

    def prepare(self):
        import jax

        nt = import_neural_tangents()
        kernel = nt.empirical_ntk_fn(
            self.forward, trace_axes=(), vmap_axes=0, implementation=nt.NtkImplementation[self.implementation]
        )
        parameters = {name: jax.numpy.asarray(p.numpy()) for name, p in self.parameters().items()}
        x = jax.numpy.asarray(self.problem.x.numpy())
        compiled = jax.jit(lambda x, parameters: kernel(x, None, parameters)).lower(x, parameters).compile()
        return lambda: compiled(x, parameters).block_until_ready()

    def parameters(self) -> dict[str, Tensor]:
        """By full name; the weights of linear layers as [in, out], which only permutes the gradient's entries."""
        linear = {f"{name}.weight" for name, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        named = self.model.named_parameters()
        return {name: p.detach().T.contiguous() if name in linear else p.detach() for name, p in named}

    def forward(self, parameters, x):
        import jax.numpy as jnp

        buffers = {name: jnp.asarray(b.numpy()) for name, b in self.model.named_buffers() if b.ndim}
        f = Forward(buffers | parameters).run(self.model, "", x)
        return f.reshape(len(f), -1)

    def as_tensor(self, kernel) -> Tensor:
        K = torch.from_dlpack(kernel)  # N, M, P, Q
        return K.transpose(1, 2).flatten(0, 1).flatten(1)


class NeuralTangentsStructured(NeuralTangents):
    name, implementation = "neural-tangents, structured derivatives", "STRUCTURED_DERIVATIVES"
    missing = {"resnet": "slow: minutes (--slow)"}  # noqa: RUF012


class NeuralTangentsJacobian(NeuralTangents):
    name, implementation = "neural-tangents, Jacobian contraction", "JACOBIAN_CONTRACTION"
    missing = {"mlp": "slow: minutes, and 7 GB (--slow)", "resnet": "slow: minutes (--slow)"}  # noqa: RUF012
    keeps_jacobian = compiles_for_long = True


class NeuralTangentsProducts(NeuralTangents):
    name, implementation = "neural-tangents, NTK-vector products", "NTK_VECTOR_PRODUCTS"
    few = {"mlp": 16, "resnet": 4, "transformer": 4, "transformer-tokens": 2}  # noqa: RUF012
    compiles_for_long = True
