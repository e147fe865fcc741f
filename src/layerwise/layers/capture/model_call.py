"""Calling a model the way its input asks for, and finding the output in what it returns."""

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layerwise.foundations.device import Readback
from layerwise.foundations.errors import InputError, InteractionError, describe
from layerwise.foundations.held_together import HeldTogether
from layerwise.foundations.sharded import in_graph, is_sharded
from layerwise.foundations.types import Tree, leaves, map_leaves, statistics_dtype

P = ParamSpec("P")
R = TypeVar("R")
_AUTOCAST: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar("autocast", default=())
"""Devices and dtypes for which the caller has autocast on."""
_OWN: ContextVar[bool] = ContextVar("own", default=False)
"""Whether the library itself is running a model."""


def in_own_forward() -> bool:
    """Whether the model is being run by the library, to look at it, rather than by the user, to train it."""
    return _OWN.get()


_OWNERS: dict[int, list[object]] = {}
"""The objects on whose behalf the library runs a backward at present, by thread; the innermost last."""


def _owner() -> object | None:
    """The object on whose behalf the library runs the present backward; None for a backward of the user's."""
    if not _OWNERS:
        return None
    mine = _OWNERS.get(threading.get_ident())
    if mine is None and isinstance(threading.current_thread(), threading._DummyThread):
        # A thread of autograd's own, for a device: the backward was begun in another, most likely the last that did.
        mine = next(reversed(_OWNERS.values()), None)
    return mine[-1] if mine else None


@contextmanager
def own_backward(owner: object) -> Iterator[None]:
    """Mark a backward as the library's own, so that other tapes with hooks on this graph do not take it for the user's.

    By thread: other threads have backwards of their own. Not a context variable: on a GPU hooks run in threads of the
    device. Not torch's thread-local objects, which it brings along there: torch 2.11 frees them too early.
    """
    thread = threading.get_ident()
    _OWNERS.setdefault(thread, []).append(owner)
    try:
        yield
    finally:
        _OWNERS[thread].pop()
        if not _OWNERS[thread]:
            del _OWNERS[thread]


def backward_of_another(listener: object) -> bool:
    """Whether the present backward is the library's, run on behalf of another object than `listener`."""
    owner = _owner()
    return owner is not None and owner is not listener


def in_own_arithmetic(fn: Callable[P, R]) -> Callable[P, R]:
    """Statistics are made outside ``torch.autocast`` and ``torch.inference_mode``, whatever the caller is in.

    `call` puts autocast back for the model alone.
    """

    @wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        on = tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
        token = _AUTOCAST.set(on or _AUTOCAST.get())
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(False))
                for device, _ in on:
                    stack.enter_context(torch.autocast(device, enabled=False))
                return fn(*args, **kwargs)
        finally:
            _AUTOCAST.reset(token)

    return wrapped


def autocast_of_the_caller() -> tuple[tuple[str, torch.dtype], ...]:
    """Devices and dtypes for which `call` puts autocast back."""
    return _AUTOCAST.get()


def call(model: nn.Module, x: Tree) -> Tensor:
    """``model(x)``, ``model(*x)`` for a tuple or list, ``model(**x)`` for a mapping; the output as a tensor."""
    with ExitStack() as stack:
        for device, dtype in _AUTOCAST.get():
            stack.enter_context(torch.autocast(device, dtype))
        if isinstance(x, Mapping):
            out = model(**x)
        elif isinstance(x, tuple | list):
            out = model(*x)
        else:
            out = model(x)
    return out if isinstance(out, Tensor) else _chosen(model, out)


_CHOSEN: "WeakKeyDictionary[nn.Module, tuple[int, int]]" = WeakKeyDictionary()
"""How many tensors each model returned when it last had a graph, and which of them was the output."""


def _chosen(model: nn.Module, out: Any) -> Tensor:
    """The output among several tensors; under `no_grad`, where no graph tells them apart, the one chosen before."""
    tensors = output_tensors(out)
    if not any(t.grad_fn is not None for t in tensors):
        count, place = _CHOSEN.get(model, (0, 0))
        return tensors[place] if count == len(tensors) > 0 else output_tensor(out)
    found = output_tensor(out)
    place = next((i for i, t in enumerate(tensors) if t is found), None)
    if place is not None:
        _CHOSEN[model] = len(tensors), place
    return found


@contextmanager
def substituted(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """Other tensors in the place of some parameters, for a while.

    ``torch.func.functional_call`` does not put the parameters of a module back that is registered under two names,
    and leaves its substitutes in the second list of weights that recurrent layers keep.
    """
    if not params:
        yield
        return
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


def output_tensors(out: Any) -> list[Tensor]:
    """The floating-point tensors that a model returns."""
    if isinstance(out, Tensor):
        return [out]
    named = getattr(out, "logits", None)
    found = [t for t in leaves(out if not hasattr(out, "values") else dict(out)) if t.is_floating_point()]
    return found or ([named] if isinstance(named, Tensor) else [])


def output_tensor(out: Any) -> Tensor:
    """The tensor in a model's output: itself, ``logits``, or of several the first with two axes or more.

    So an auxiliary loss before it is no output, nor are hidden states after it. Of several without names it is another
    one where that is computed from it (by a head from features), or where it has one number for each row of the other
    (an entropy, an auxiliary loss of every position) and is of no parameter of its own.
    """
    if isinstance(out, Tensor):
        return out
    named = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(named, Tensor):
        return named
    tensors = output_tensors(out)
    found = next((t for t in tensors if t.ndim > 1), max(tensors, key=lambda t: t.ndim, default=None))
    if found is None:
        raise InputError(
            describe(
                f"a model that returns {type(out).__name__}",
                "a tensor, or a container with one",
                "wrap the model",
            )
        )
    if hasattr(out, "keys"):  # by name, as Hugging Face's: what matters comes first, hidden states after it
        return found
    for other in tensors:
        if other.ndim > found.ndim and other.shape[: found.ndim] == found.shape:
            found = other if _leaves_of(found) <= _leaves_of(other) else found
    for other in tensors:
        if other.ndim > 1 and other.shape != found.shape[: other.ndim] and found.grad_fn in _behind(other):
            found = other
    return found


def _behind(t: Tensor) -> set[Any]:
    """The nodes that a tensor was computed by, as far as there is a graph, and those of the leaves that they used."""
    seen, pending = set[Any](), [t.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending.extend(child for child, _ in node.next_functions)
    return seen


def _leaves_of(t: Tensor) -> set[Any]:
    return {node for node in _behind(t) if hasattr(node, "variable")}


def example_count(x: Tree, axis: int, shared: Collection[int] = ()) -> int:
    """N, from the first tensor of the input that is not `shared` by all examples."""
    first = next((t for place, t in enumerate(leaves(x)) if place not in shared), None)
    if first is None or first.ndim <= axis:
        raise InputError(describe("an input without a batch axis", "a tensor with examples on an axis", "add one"))
    return first.shape[axis]


def refuse_empty(n: int) -> None:
    """A batch must have an example."""
    if n == 0:
        raise InputError(describe("a batch with 0 examples", "at least one example", "leave empty batches out"))


def holding(x: Tree, axis: int, shared: Collection[int] = ()) -> list[bool]:
    """For every tensor of an input, whether it has the examples on that axis.

    `shared` are the places of tensors that all examples use, though their size may be N by chance.
    """
    n = example_count(x, axis, shared)
    return [place not in shared and t.ndim > axis and t.shape[axis] == n for place, t in enumerate(leaves(x))]


def take(x: Tree, start: int, stop: int, axis: int, shared: Collection[int] = ()) -> Tree:
    """Some examples of an input; tensors that do not hold the examples are passed on whole."""
    held = iter(holding(x, axis, shared))
    return map_leaves(lambda t: t.narrow(axis, start, stop - start) if next(held) else t, x)


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The parameters of modules, as `model.parameters()` has them but for repetitions, at a tenth of its cost."""
    for module in modules:
        for p in module._parameters.values():
            if p is not None:
                yield p


def graph_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The same, as autograd's graph knows them: gathered ones in the place of sharded ones."""
    instead: dict[int, nn.Parameter] | None = None
    for p in own_tensors(model.modules()):
        if is_sharded(p):  # to look for the groups of FSDP takes longer than everything else here
            instead = in_graph(model) if instead is None else instead
            yield instead.get(id(p), p)
        else:
            yield p


def refuse_train_mode_batch_norm(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Batch norm in train mode makes the examples of a batch interact."""
    for name, module in modules:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise InteractionError(
                describe(
                    f"layer {name!r}, a {type(module).__name__} that uses the statistics of the batch",
                    "examples that do not influence one another (per-example gradients are undefined otherwise)",
                    "call model.eval(), or use a norm of single examples (GroupNorm, LayerNorm)",
                )
            )


def check_devices(modules: Iterable[nn.Module], batch: Tree) -> None:
    """Model and batch must be on one device."""
    of_model = {p.device for p in own_tensors(modules)}
    of_batch = {t.device for t in leaves(batch)}
    if len(of_model) == 1 and of_batch and of_batch != of_model:
        given = ", ".join(sorted(map(str, of_batch)))
        expected = str(next(iter(of_model)))
        raise InputError(
            describe(f"a batch on {given}", f"the model's device, {expected}", f"move it: x.to({expected!r})")
        )


@contextmanager
def undisturbed(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Leave the model and the random state exactly as they were, also on an exception.

    `modules` are ``model.modules()``, where they are known already.

    Buffers and attributes are put back (a spectral norm changes its own in train mode, a stateful model keeps its
    last hidden state) and random draws of the forward (dropout) do not move torch's global generators. Nor does a
    forward leave casts of parameters in autocast's cache.
    """
    modules = list(model.modules()) if modules is None else modules
    held = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
    before = Snapshot([t for t in (*held.values(), *renormed(modules)) if t.device.type != "meta"])
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    places = {p.device for p in own_tensors(modules)}
    devices = sorted({place.index or 0 for place in places if place.type == "cuda"})
    token = _OWN.set(True)
    forked = torch.random.fork_rng(devices=devices)
    with forked, uncompiled(), without_fast_path(), _own_casts(), _recurrent_backward(modules):
        copies = dict(zip(held, duplicates(list(held.values())), strict=True))
        try:
            for module, _, buffers in attributes:  # the graph of a forward may need the values that it has seen
                if buffers:
                    module._buffers.update({k: None if b is None else copies[id(b)] for k, b in buffers.items()})
            yield
        finally:
            _OWN.reset(token)
            for module, own, buffers in attributes:
                _put_back(vars(module), own)
                _put_back(module._buffers, buffers)
            before.put_back()


@contextmanager
def _own_casts() -> Iterator[None]:
    """Under autocast, casts of parameters that no other forward shares: the cache is left alone.

    A cast belongs to the graph of the forward that made it. A forward of the user's that found one of ours in the cache
    would have gradients that arrive late: autograd runs older nodes after younger ones, and FSDP has reduced the
    gradients of a block by then. A forward that is decorated with `torch.autocast` turns the cache on again: it is
    emptied afterwards.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@contextmanager
def _recurrent_backward(modules: Iterable[nn.Module]) -> Iterator[None]:
    """cuDNN's recurrent layers have a backward in train mode only; torch's own have one in both."""
    if not any(isinstance(module, nn.RNNBase) and not module.training for module in modules):
        yield
        return
    with torch.backends.cudnn.flags(enabled=False):
        yield


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether modules inside a model were compiled on their own, so that hooks of their layers may not be called."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or "_orig_mod" in module._modules
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


@contextmanager
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _fast_path_off() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_force_eager = HeldTogether(_eager)
without_fast_path = HeldTogether(_fast_path_off)
"""The fused encoder layer calls no submodule, and under vmap it silently drops gradients."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled parts of a model may run without the hooks that record it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _force_eager():
        yield


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    if now.keys() != before.keys() or any(now[k] is not before[k] for k in before):
        now.clear()
        now.update(before)


def renormed(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Weights that the forward itself rescales in place."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield module.weight


def as_statistics(f: Tensor) -> Tensor:
    """The output in float32 or better."""
    return f.to(statistics_dtype(f.dtype))


# --- values of tensors, taken and put back ---------------------------------------------------------------------------
# In a few operations however many tensors there are: a ResNet has three buffers a batch norm, and with an operation for
# each of them a GPU would be idle between launches.

LARGE = 2**20
"""Bytes."""
Kind = tuple[torch.Size, torch.dtype, torch.device]


class Snapshot:
    """What tensors hold now, to be put back into those that have changed.

    >>> a, b = torch.zeros(2), torch.ones(3)
    >>> before = Snapshot([a, b])
    >>> _ = a.add_(1)
    >>> before.put_back(), a.tolist()
    (None, [0.0, 0.0])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._groups: list[tuple[list[Tensor], list[Kind], Tensor]] = []
        by_device: dict[torch.device, list[Tensor]] = {}
        for t in tensors:
            if _is_small(t):
                by_device.setdefault(t.device, []).append(t)
        for group in by_device.values():
            self._groups.append((group, _kinds(group), _bytes(group)))
        self._alone = [(t, t.detach().clone()) for t in tensors if not _is_small(t)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo every change; a tensor that has kept its value is not written to, since a graph may need it."""
        for group, kinds, before in self._groups:
            if _kinds(group) != kinds or Readback((_bytes(group) != before).any()).read():
                _restore(group, kinds, before)
        for t, before in self._alone:
            if not bool(((t == before) | ((t != t) & (before != before))).all()):
                t.copy_(before)


def duplicates(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, with a memory of its own: one may be written to while a graph needs another."""
    together = [_is_plain(t) and not t.requires_grad for t in tensors]
    copies = [torch.empty_like(t) if ok else t.clone() for t, ok in zip(tensors, together, strict=True)]
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for copy, t, ok in zip(copies, tensors, together, strict=True):
        if ok:
            alike.setdefault((t.device, t.dtype), []).append((copy, t))
    for pairs in alike.values():
        torch._foreach_copy_([copy for copy, _ in pairs], [t for _, t in pairs])  # pyright: ignore[reportPrivateImportUsage]
    return copies


def _is_plain(t: Tensor) -> bool:
    odd = t.is_quantized or t.is_conj() or t.is_neg() or t.device.type == "meta"
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not odd


def _is_small(t: Tensor) -> bool:
    """Whether it goes with the others: a large one is compared in its own memory."""
    return _is_plain(t) and t.numel() * t.element_size() <= LARGE


def _kinds(tensors: Sequence[Tensor]) -> list[Kind]:
    return [(t.shape, t.dtype, t.device) for t in tensors]


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    """All in one; as bytes, so that types mix and NaN equals itself."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def _restore(tensors: Sequence[Tensor], kinds: Sequence[Kind], before: Tensor) -> None:
    start = 0
    for t, (shape, dtype, device) in zip(tensors, kinds, strict=True):
        stop = start + shape.numel() * dtype.itemsize
        former = before[start:stop]
        if (t.shape, t.dtype, t.device) != (shape, dtype, device) or not torch.equal(_bytes([t]), former):
            t.copy_(former.clone().view(dtype).view(shape))  # cloned: a part need not be aligned
        start = stop
