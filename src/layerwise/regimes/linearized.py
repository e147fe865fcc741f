"""``f₀ + α (f − f₀)``: a network whose training becomes that of its linear model as α grows."""

import copy
import math
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.foundations.errors import InputError, describe
from layerwise.regimes.passes import frozen_copy, plain_kernels, random_state, rounding, same_noise, slow_path, works
from layerwise.regimes.rescaled import rescaled_by

LOST = 1e-3
"""An output may lose this much to rounding, times α, before it is refused."""


def linearized(model: nn.Module, alpha: float | int, keep_initial: bool = True, *, remind: bool = True) -> "Linearized":
    """The model as ``f₀ + α (f − f₀)``, where f₀ is a frozen copy of it as it is now.

    Train it in any loop with the learning rate divided by α², which `lw.regimes.rescaled` does. Weights then move by
    1/α as much while outputs move as before, so that a large α is lazy training: the model stays where it is linear in
    its weights. ``alpha=float("inf")`` is that limit itself, ``f₀ + ∂f₀ (w − w₀)``, with the plain learning rate.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> net = lw.linearized(model, alpha=100)
    >>> opt = lw.regimes.rescaled(torch.optim.SGD(net.parameters(), lr=0.1), alpha=100)
    >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     torch.nn.functional.cross_entropy(net(x), y).backward()
    ...     opt.step()
    >>> lw.regimes.sign_similarity(net, x) > 0.9
    True

    The parameters are those of `model`, which is trained itself; the copy is among the buffers, so that a checkpoint
    has it. Both passes see the same dropout noise, and torch's random stream goes on as after one pass. Batch norm in
    train mode is refused; put it into eval mode, where its statistics are frozen.

    Where the data are fixed, f₀ need be computed once:

    >>> start = net.at_start(x)
    >>> torch.allclose(net(x[:5], at_start=start[:5]), net(x[:5]), atol=1e-4)  # α magnifies rounding
    True

    Args:
        model: any module; outputs may be a tensor, or tuples, lists and dictionaries of them.
        alpha: above 0; 1 is the plain model, less than 1 makes it adapt more, infinity is the exact linear model.
        keep_initial: False leaves the first f₀ out, so that outputs begin at zero.
        remind: warn at the first backward pass if no optimizer was rescaled for this α; False for a loop that divides
            the rate itself, or that does not train.
    """
    return Linearized(model, alpha, keep_initial, remind=remind)


class Linearized(nn.Module):
    """See `linearized`."""

    def __init__(self, model: nn.Module, alpha: float | int, keep_initial: bool = True, *, remind: bool = True) -> None:
        super().__init__()
        if not isinstance(model, nn.Module) or isinstance(model, Linearized):
            given = f"a {type(model).__name__} as model"
            raise InputError(describe(given, "a torch module that is not linearized yet", "pass the module itself"))
        if isinstance(alpha, bool) or not isinstance(alpha, float | int) or not alpha > 0:
            raise InputError(describe(f"alpha={alpha!r}", "a number above 0, or float('inf')", "take e.g. alpha=100"))
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError(
                describe("a model without trainable parameters", "a model to train", "set requires_grad of some")
            )
        self.alpha, self.keep_initial = float(alpha), keep_initial
        self.start = frozen_copy(model)
        self.model = model
        self._remind, self._precise = remind, set[str]()
        self._called_at: tuple[str, int] = ("", 0)
        self._fused: bool | None = None  # whether its fused kernels have a forward mode

    def forward(self, *inputs: Any, at_start: Any = None, **named: Any) -> Any:
        """Outputs; `at_start` is what `at_start()` returned for these inputs, and spares its computation."""
        self._follow_modes()
        if math.isinf(self.alpha):
            return self._linear(inputs, named)
        if self.alpha == 1 and self.keep_initial:
            return self.model(*inputs, **named)  # f₀ + (f − f₀), without its rounding
        through = torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((inputs, named))
        )
        if at_start is not None and through:
            given = "at_start= for inputs that need a gradient"
            raise InputError(describe(given, "f₀ with its gradient in them", "leave at_start out"))
        initial = at_start if at_start is not None else self._initial(inputs, named, through)
        drawn = random_state(self.start)
        with slow_path():
            outputs = self.model(*inputs, **named)
        if at_start is not None and drawn != random_state(self.start):
            given = "at_start= for a model that draws random numbers, such as dropout in train mode"
            do = "leave at_start out, or call .eval()"
            raise InputError(describe(given, "outputs with the noise of this pass", do))
        self._check_precision(initial)
        return self._watched(tree_map(self._scaled, outputs, initial))

    def at_start(self, *inputs: Any, **named: Any) -> Any:
        """``f₀`` of some inputs, without a graph: what `forward` takes as `at_start`, where data are fixed."""
        self._follow_modes()
        return self._initial(inputs, named)

    def initial_model(self) -> nn.Module:
        """The model as it was at the start, to look at: a copy with parameters of its own."""
        copied = copy.deepcopy(self.start)
        trained = {name: p.requires_grad for name, p in self.model.named_parameters(remove_duplicate=False)}
        made: dict[int, nn.Parameter] = {}  # one for all places that share it
        for path, module in copied.named_modules():
            for name, buffer in list(module._buffers.items()):
                full = f"{path}.{name}" if path else name
                if full in trained and buffer is not None:
                    del module._buffers[name]
                    if id(buffer) not in made:
                        made[id(buffer)] = nn.Parameter(buffer, requires_grad=trained[full])
                    module.register_parameter(name, made[id(buffer)])
        return copied

    def extra_repr(self) -> str:
        """For print."""
        return f"alpha={self.alpha:g}, keep_initial={self.keep_initial}"

    def get_extra_state(self) -> dict[str, float | bool]:
        """What a checkpoint must agree in."""
        return {"alpha": self.alpha, "keep_initial": self.keep_initial}

    def set_extra_state(self, state: Any) -> None:
        """Refuse the checkpoint of another α."""
        if state != self.get_extra_state():
            given = f"a checkpoint of {state}"
            raise InputError(describe(given, str(self.get_extra_state()), "linearize with the α of the checkpoint"))

    # --- both passes ---------------------------------------------------------------------------------------

    def _initial(self, inputs: Sequence[Any], named: dict[str, Any], through: bool = False) -> Any:
        """f₀, with a graph where its inputs are to have a gradient `through` it."""
        before = [buffer._version for buffer in self.start.buffers()]
        with nullcontext() if through else torch.no_grad(), same_noise(inputs, named, self.start), slow_path():
            found = self.start(*inputs, **named)
        for (name, buffer), version in zip(self.start.named_buffers(), before, strict=True):
            if buffer._version != version:
                given = f"a model whose forward pass changes its buffer {name!r}"
                expected = "buffers that stay as they are: α would amplify how they change from batch to batch"
                raise InputError(describe(given, expected, "call .eval() on its module, or leave it out"))
        return found

    def _scaled(self, f: Any, f0: Any) -> Any:
        if not isinstance(f, Tensor):
            if f is None or isinstance(f, bool | int | float | complex | str):
                return f
            given = f"an output of type {type(f).__name__}"
            expected = "tensors, or tuples, lists and dictionaries of them"
            raise InputError(describe(given, expected, "return one of these, or register it with torch's pytree"))
        if not f.is_floating_point() and not f.is_complex():
            return f
        if f.shape != f0.shape:
            given = f"at_start of shape {tuple(f0.shape)} for outputs {tuple(f.shape)}"
            raise InputError(describe(given, "what at_start() returned for these inputs", "index both alike"))
        moved = self.alpha * (f - f0)
        return f0 + moved if self.keep_initial else moved

    def _linear(self, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        """``f₀ + ∂f₀ (w − w₀)`` in one forward-mode pass of the copy; its gradient is that in w."""
        frozen = dict(self.start.named_buffers(remove_duplicate=False))
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        at = {name: frozen[name] for name in weights}
        moved = {name: w - at[name] for name, w in weights.items()}

        def pushed() -> Any:
            return jvp(
                lambda w: functional_call(self.start, w, tuple(inputs), named, tie_weights=False), (at,), (moved,)
            )

        with (
            slow_path(),
            sdpa_kernel([SDPBackend.MATH]),
            warnings.catch_warnings(),
        ):  # fused attention has no forward mode
            for said in (".*torch.jit.script", ".*TF32 acceleration on top of oneDNN"):  # torch about itself
                warnings.filterwarnings("ignore", message=said)
            if self._fused is None:
                with same_noise(inputs, named, self.start):
                    self._fused = works(pushed)
            with nullcontext() if self._fused else plain_kernels():
                f0, change = pushed()
        return tree_map(torch.add, f0, change) if self.keep_initial else change

    # --- what would go wrong silently ----------------------------------------------------------------------

    def _follow_modes(self) -> None:
        """The copy is in the modes of the model, module by module; batch norm must not use the batch."""
        for ours, theirs in zip(self.start.modules(), self.model.modules(), strict=True):
            ours.training = theirs.training
            if isinstance(theirs, _BatchNorm) and (theirs.training or theirs.running_mean is None):
                raise InputError(
                    describe(
                        "batch norm that takes its statistics from the batch (train mode)",
                        "statistics that stay as they are: α would amplify how they change from batch to batch",
                        "call .eval() on the batch norm modules, or leave them out of the model",
                    )
                )

    def _check_precision(self, initial: Any) -> None:
        """Once for each kind of rounding: ``f − f₀`` is a small difference, and its rounding is multiplied by α."""
        if self.alpha <= 1:
            return
        convolves = any(isinstance(module, _ConvNd) for module in self.model.modules())
        for f0 in tree_leaves(initial):
            if isinstance(f0, Tensor) and f0.is_floating_point() and f0.numel():
                eps, kind = rounding(f0.dtype, f0.device.type, convolves)
                if kind in self._precise:
                    continue
                largest = float(f0.detach().abs().max())
                if self.alpha * eps * largest > LOST:
                    raise InputError(
                        describe(
                            f"alpha={self.alpha:g} with outputs up to {largest:.3g} in {kind}",
                            f"α · eps · |f₀| ≤ {LOST:g}, for f − f₀ is rounded to {eps:.1g} of f₀ before it is scaled",
                            'call model.double() before lw.linearized, or take the exact limit alpha=float("inf")'
                            + ("; or turn TF32 off: torch.backends.cudnn.allow_tf32 = False" if kind == "TF32" else ""),
                        )
                    )
                self._precise.add(kind)

    def _watched(self, outputs: Any) -> Any:
        """Outputs that, at the first backward pass, ask whether a learning rate was divided by α²."""
        if self._remind and self.alpha != 1:
            self._called_at = _users_line()
            for f in tree_leaves(outputs):
                if isinstance(f, Tensor) and f.requires_grad:
                    f.register_hook(self._ask)
                    break
        return outputs

    def _ask(self, _: Tensor) -> None:
        if not self._remind:
            return
        self._remind = False
        known = {rescaled_by(p) for p in self.model.parameters() if p.requires_grad}
        if self.alpha not in known:
            others = sorted(alpha for alpha in known if alpha is not None)
            said = f"for alpha={others[0]:g}" if others else "by no optimizer"
            # Without a registry, in which Python would note it and be silent about the next model.
            warnings.warn_explicit(
                f"lw.linearized with alpha={self.alpha:g}: its learning rate was divided by α² {said}. Make the "
                f"optimizer with lw.regimes.rescaled(torch.optim.SGD(…), alpha={self.alpha:g}), or say remind=False.",
                UserWarning,
                *self._called_at,
            )


def _users_line() -> tuple[str, int]:
    """File and line of the innermost call that is neither here nor in torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "layerwise"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
