"""Calling a model the way its input asks for, and finding the output in what it returns."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, InteractionError, describe
from layerwise.foundations.types import Tree, leaves, map_leaves, statistics_dtype


def call(model: nn.Module, x: Tree) -> Tensor:
    """``model(x)``, ``model(*x)`` for a tuple or list, ``model(**x)`` for a mapping; the output as a tensor."""
    if isinstance(x, Mapping):
        out = model(**x)
    elif isinstance(x, tuple | list):
        out = model(*x)
    else:
        out = model(x)
    return output_tensor(out)


@contextmanager
def substituted(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """Other tensors in the place of some parameters, for a while.

    ``torch.func.functional_call`` does not put the parameters of a module back that is registered under two names,
    and leaves its substitutes in the second list of weights that recurrent layers keep.
    """
    instead = {id(p): params[name] for name, p in model.named_parameters() if name in params}
    replaced = [
        (module, local, p)
        for module in model.modules()
        for local, p in module._parameters.items()
        if p is not None and id(p) in instead
    ]
    lists = [
        (module, module._flat_weights) for module in {id(m): m for m, _, _ in replaced}.values() if _is_rnn(module)
    ]
    try:
        for module, local, p in replaced:
            module._parameters[local] = instead[id(p)]  # type: ignore[assignment]
        for module, weights in lists:
            module._flat_weights = [instead.get(id(w), w) for w in weights]  # type: ignore[assignment]
        yield
    finally:
        for module, local, p in replaced:
            module._parameters[local] = p
        for module, weights in lists:
            module._flat_weights = weights


def _is_rnn(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase)


def output_tensor(out: Any) -> Tensor:
    """The tensor in a model's output: itself, ``logits``, or the first floating-point tensor."""
    if isinstance(out, Tensor):
        return out
    named = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(named, Tensor):
        return named
    found = next((t for t in leaves(out if not hasattr(out, "values") else dict(out)) if t.is_floating_point()), None)
    if found is None:
        raise InputError(
            describe(
                f"a model that returns {type(out).__name__}",
                "a tensor, or a container with one",
                "wrap the model",
            )
        )
    return found


def example_count(x: Tree, axis: int) -> int:
    """N, from the first tensor of the input."""
    first = next(leaves(x), None)
    if first is None or first.ndim <= axis:
        raise InputError(describe("an input without a batch axis", "a tensor with examples on an axis", "add one"))
    return first.shape[axis]


def take(x: Tree, start: int, stop: int, axis: int) -> Tree:
    """Some examples of an input; tensors that do not hold the examples are passed on whole."""
    n = example_count(x, axis)

    def narrow(t: Tensor) -> Tensor:
        return t.narrow(axis, start, stop - start) if t.ndim > axis and t.shape[axis] == n else t

    return map_leaves(narrow, x)


def refuse_train_mode_batch_norm(model: nn.Module) -> None:
    """Batch norm in train mode makes the examples of a batch interact."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise InteractionError(
                describe(
                    f"layer {name!r}, a {type(module).__name__} that uses the statistics of the batch",
                    "examples that do not influence one another (per-example gradients are undefined otherwise)",
                    "call model.eval(), or use a norm of single examples (GroupNorm, LayerNorm)",
                )
            )


def check_devices(model: nn.Module, batch: Tree) -> None:
    """Model and batch must be on one device."""
    of_model = {p.device for p in model.parameters()}
    of_batch = {t.device for t in leaves(batch)}
    if len(of_model) == 1 and of_batch and of_batch != of_model:
        given = ", ".join(sorted(map(str, of_batch)))
        expected = str(next(iter(of_model)))
        raise InputError(
            describe(f"a batch on {given}", f"the model's device, {expected}", f"move it: x.to({expected!r})")
        )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave the model and the random state exactly as they were, also on an exception.

    Buffers are put back (a spectral norm changes its own in train mode) and random draws of the forward
    (dropout) do not move torch's global generators.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if buffer.device.type != "meta"]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices=devices):
        # The fused attention path calls no submodule, and under vmap it silently drops gradients.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            with torch.no_grad():
                for buffer, before in buffers:
                    if not _same(buffer, before):
                        buffer.copy_(before)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def as_statistics(f: Tensor) -> Tensor:
    """The output in float32 or better."""
    return f.to(statistics_dtype(f.dtype))
