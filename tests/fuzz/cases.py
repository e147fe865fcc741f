"""Random cases: a `Spec` is plain data that says all of a case, `make` turns it into a model with data.

>>> case = random_case(7)
>>> print(case.spec)         # can be pasted: make(Spec(...)) is the same case
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import blocks_any  # noqa: F401  importing them fills BLOCKS
import blocks_image  # noqa: F401
import blocks_sequence  # noqa: F401
import torch
from parts import BLOCKS, Apply, Context, Sizes, bare
from torch import Tensor, nn

VOCABULARY = 5
SIDE = 3
"""Of an image."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "autocast": torch.float32, "bfloat16": torch.bfloat16}
Step = tuple[Any, ...]
"""A call of the library, or a change of the model between two calls: see `plans`."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All of a case. Every field can be made smaller on its own, which is what shrinking does."""

    seed: int = 0
    """Of parameters and data alone."""
    kind: str = "vector"
    """What the blocks work on: "vector" [N, D], "sequence" [N, T, D] or "image" [N, D, H, W]."""
    stem: str = "none"
    """For sequences: "none", "embedding" or "padded" (an embedding with a padding index)."""
    blocks: tuple[str, ...] = ()
    head: str = "linear"
    """ "linear" on one vector an example (the mean over positions), "last" on the last position, "positions" on every
    one, "tied" on every one with the embedding's weight, "tied layer" the same as a layer."""
    D: int = 2
    C: int = 2
    sizes: tuple[tuple[int, int], ...] = ((3, 3),)
    """N and T of every batch."""
    likelihood: str = "categorical"
    precision: str = "float64"
    options: tuple[str, ...] = ()
    """Of "flag", "config", "kept", "two signs", "mask", "shared", "tuple", "zero head", "ignore", "weights", "train",
    "no padding first", "time first"."""
    frozen: tuple[int, ...] = ()
    """Places of frozen parameters, as `named_parameters` counts."""
    plan: tuple[Step, ...] = ()


class Model(nn.Module):
    """Stem, blocks, head."""

    def __init__(self, spec: Spec, stem: nn.Module | None, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.how, self.tuple, self.autocast = spec.head, "tuple" in spec.options, spec.precision == "autocast"
        self.time_first = "time first" in spec.options
        self.config = SimpleNamespace(double=False)

    def forward(
        self,
        x: Tensor,
        kept: Tensor | None = None,
        mask: Tensor | None = None,
        shared: Tensor | None = None,
        flag: bool = False,
    ) -> Any:
        x = x.transpose(0, 1) if self.time_first else x
        context = Context(x, flag, self.config, kept, [])
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            h = x if self.stem is None else self.stem(x)
            h = h if shared is None else h * shared.to(h.dtype).sum().cos()
            for each in self.blocks:
                h = each(h, context)
            h = h if mask is None else mask.to(h.dtype) @ h
            f = self._headed(h)
        return (f, context.hidden) if self.tuple else f

    def _headed(self, h: Tensor) -> Tensor:
        if self.how == "tied":
            return h @ self.stem.weight.T  # type: ignore[union-attr]
        if self.how in ("positions", "tied layer"):
            return self.head(h)
        if self.how == "last":
            return self.head(h[:, -1])
        axes = {2: (), 3: (1,), 4: (2, 3)}[h.ndim]
        return self.head(h.mean(axes) if axes else h)


@dataclass
class Batch:
    """Arguments of a model by name, and labels."""

    x: dict[str, Any]
    y: Tensor
    n: int
    axis: int = 0
    """Of the examples in x."""

    def given(self) -> Any:
        """The input as a user would give it: one tensor if it is one."""
        return self.x["x"] if list(self.x) == ["x"] else dict(self.x)

    def alone(self, example: int) -> dict[str, Any]:
        """One example's arguments: what all examples share stays whole."""
        axes = {"x": self.axis, "kept": 0}
        return {k: v.narrow(axes[k], example, 1) if k in axes else v for k, v in self.x.items()}

    @property
    def example_axis(self) -> int | None:
        """To be said where N = T leaves it open, or N = 1; else labels tell. Function space has no labels."""
        return self.axis if self.axis and self.n in (1, self.x["x"].shape[0]) else None


@dataclass
class Case:
    """A model with batches."""

    spec: Spec
    model: nn.Module
    batches: list[Batch]
    options: dict[str, Any] = field(default_factory=dict)
    """Of the likelihood."""
    plain: tuple[str, ...] | None = None
    """Linear layers whose Kronecker factors are compared with the formula; None: all that are plain."""


def random_case(seed: int, frozen: bool = False) -> Case:
    """The case of a seed; `frozen` freezes some of its parameters too."""
    return make(random_spec(seed, frozen))


# --- specs -------------------------------------------------------------------------------------------------


def random_spec(seed: int, frozen: bool = False) -> Spec:
    """What the case of a seed is."""
    from plans import random_plan

    rng = random.Random(seed * 2 + frozen)
    kind = rng.choices(("vector", "sequence", "image"), (3, 6, 2))[0]
    precision = rng.choices(("float64", "float32", "autocast", "bfloat16"), (20, 2, 1, 1))[0]
    known = [name for name, b in BLOCKS.items() if kind in b.kinds]
    blocks = tuple(rng.choices(known, k=rng.choice((1, 1, 2, 2, 3)) if precision in ("float64", "float32") else 1))
    if "lstm" in blocks and precision == "autocast":
        precision = "float32"  # oneDNN has no such LSTM on every processor: the model itself would not run
    stem = rng.choice(("none", "none", "embedding", "padded")) if kind == "sequence" else "none"
    heads = {"sequence": ["linear", "last", "positions"] + ["tied", "tied layer"] * (stem != "none")}
    head = rng.choice(heads.get(kind, ["linear"]))
    T = rng.choice((2, 3, 4))
    D = rng.choice((2, 3, T)) if kind != "image" else 2
    fixed = any(BLOCKS[b].fixed for b in blocks)
    options = {BLOCKS[b].wants for b in blocks} - {""}
    options |= {o for o in ("tuple", "zero head", "shared", "train") if rng.random() < 0.12}
    if kind == "sequence":
        options |= {o for o in ("mask", "kept", "no padding first") if rng.random() < 0.15}
        fixed = fixed or "mask" in options  # its size is T × T
        if rng.random() < 0.1 and not options & {"mask", "kept", "shared"}:  # other inputs have their examples first
            options.add("time first")
    likelihood = rng.choice(("categorical", "categorical", "gaussian", "bernoulli"))
    if likelihood == "categorical":
        options |= {o for o in ("ignore", "weights") if rng.random() < 0.15}
    if any(not BLOCKS[b].train for b in blocks):
        options -= {"train"}
    count = 2 if "two signs" in options else rng.choice((1, 1, 2, 3))
    sizes = tuple((rng.choice((1, 2, 3, 4, 4, 5, T)), T if fixed else rng.choice((T, 2, 3, 4))) for _ in range(count))
    spec = Spec(
        seed=seed,
        kind=kind,
        stem=stem,
        blocks=blocks,
        head=head,
        D=D,
        C=2 if rng.random() < 0.8 else 3,
        sizes=sizes,
        likelihood=likelihood,
        precision=precision,
        options=tuple(sorted(options)),
    )
    if frozen:
        count = len(list(make(spec).model.parameters()))
        share = rng.choice((0.2, 0.5, 0.8))
        spec = replace(spec, frozen=tuple(i for i in range(count) if rng.random() < share)[: count - 1])
    return replace(spec, plan=random_plan(spec, rng))


# --- models and data ---------------------------------------------------------------------------------------


def make(spec: Spec) -> Case:
    """Model and data of a spec: values come from generators of their own, and global state is left alone."""
    with torch.random.fork_rng(devices=[]):
        model = _model(spec)
    batches = [_batch(spec, number, n, t) for number, (n, t) in enumerate(spec.sizes)]
    options: dict[str, Any] = {"class_axis": -1} if spec.likelihood == "categorical" else {}
    if "ignore" in spec.options and spec.likelihood == "categorical":
        options["ignore_index"] = -100
    if "weights" in spec.options and spec.likelihood == "categorical":
        options["weight"] = torch.linspace(0.5, 1.5, classes(spec), dtype=torch.float64)
    return Case(spec, model, batches, options)


def classes(spec: Spec) -> int:
    """C, which is the vocabulary where the head is the embedding."""
    return VOCABULARY if spec.head.startswith("tied") else spec.C


def _model(spec: Spec) -> nn.Module:
    T = max(t for _, t in spec.sizes)
    stem = None
    if spec.stem != "none":
        stem = nn.Embedding(VOCABULARY, spec.D, padding_idx=0 if spec.stem == "padded" else None)
    blocks = [BLOCKS[name].build(Sizes(spec.D, T, number)) for number, name in enumerate(spec.blocks)]
    head: nn.Module = nn.Identity() if spec.head == "tied" else nn.Linear(spec.D, classes(spec))
    if spec.head == "tied layer":
        head.weight = stem.weight  # type: ignore[union-attr]
    if spec.head == "tied" and spec.seed % 2:
        head = Apply(lambda m, h: h, unused=bare(1))
    model = Model(spec, stem, blocks, head)
    model.to(DTYPES[spec.precision]).train("train" in spec.options)
    fill(model, spec.seed)
    if "zero head" in spec.options and isinstance(head, nn.Linear):
        nn.init.zeros_(head.weight)
    for place, p in enumerate(model.parameters()):
        if place in spec.frozen:
            p.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        next(model.parameters()).requires_grad_(True)
    return model


def fill(model: nn.Module, seed: int, gates: float = 0.0) -> None:
    """Values of all parameters and buffers, each from its own name; gates that start at zero have the value given."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point():
                continue
            generator = torch.Generator().manual_seed(hash_of(name) + seed)
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if name.endswith("zero"):
                value.fill_(gates)
            elif name.endswith(("running_var", "original0")):  # a variance, and the norm of a normed weight
                value.copy_(0.5 + drawn.abs())
            else:
                value.copy_(0.7 * drawn)
        if isinstance(getattr(model, "stem", None), nn.Embedding) and model.stem.padding_idx is not None:
            model.stem.weight[model.stem.padding_idx] = 0.3  # it takes part in the output, and is not trained


def hash_of(text: str) -> int:
    """The same in every process, unlike `hash`."""
    return sum((i + 1) * 31 * ord(c) for i, c in enumerate(text))


def _batch(spec: Spec, number: int, n: int, t: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * spec.seed + number)
    dtype = DTYPES[spec.precision]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    positive = bool(number % 2) or "two signs" not in spec.options
    if spec.stem != "none":
        lowest = 1 if "no padding first" in spec.options and number == 0 else 0
        x = torch.randint(lowest, VOCABULARY, (n, t), generator=generator)
        if "two signs" in spec.options:
            x[:, 0] = VOCABULARY - 1 if positive else lowest
    else:
        x = normal(n, *{"vector": (spec.D,), "sequence": (t, spec.D), "image": (spec.D, SIDE, SIDE)}[spec.kind])
        flat = x.view(n, -1)
        flat[:, 0] = flat[:, 0].abs() + 0.1 if positive else -flat[:, 0].abs() - 0.1
        flat[:, 1].clamp_(-1.5, 1.5)
        if n > 3 and spec.seed % 3:
            flat[0, 1] = 2.5  # `Context.rare`
    arguments: dict[str, Any] = {"x": x}
    if "kept" in spec.options:
        kept = torch.rand((n, t), generator=generator) < 0.6
        kept[:, 0] = True
        arguments["kept"] = kept
    if "mask" in spec.options:
        arguments["mask"] = normal(t, t).tril()
    if "shared" in spec.options:
        arguments["shared"] = normal(n if spec.seed % 2 else 3)
    if "flag" in spec.options:
        arguments["flag"] = False
    y = _labels(spec, (n,) if spec.head in ("linear", "last") else (n, t), generator)
    if "time first" in spec.options:
        arguments["x"] = x.transpose(0, 1).contiguous()
    axis = int("time first" in spec.options)
    return Batch(arguments, y if spec.likelihood == "categorical" else y.to(dtype), n, axis)


def _labels(spec: Spec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    C = classes(spec)
    if spec.likelihood == "categorical":
        y = torch.randint(C, shape, generator=generator)
        if "ignore" in spec.options and len(shape) > 1:
            y[torch.rand(shape, generator=generator) < 0.3] = -100
        return y
    y = torch.randn(*shape, C, generator=generator, dtype=torch.float64)
    return y if spec.likelihood == "gaussian" else (y > 0).double()


def arguments_of(x: Any) -> tuple[tuple, Mapping[str, Any]]:
    """Positional and named arguments of a model's input."""
    return ((), x) if isinstance(x, Mapping) else ((x,), {})


def outputs(model: nn.Module, x: Mapping[str, Any]) -> Tensor:
    """The output that the loss sees."""
    return output_of(model, model(**x))


def output_of(model: nn.Module, f: Any) -> Tensor:
    """The output among others: the first, unless the model says its place."""
    return f[getattr(model, "output_place", 0)] if isinstance(f, tuple) else f


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """In flat order."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
