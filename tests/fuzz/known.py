"""Models that once gave wrong numbers, each with what made them do so.

A `Known` makes a case; `change`, if there is one, happens between a first and a second call: the answer to the second
must not know of the first. Sizes are chosen so that coincidences hold: that is what went wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import Batch, Case, Spec, outputs
from parts import Apply, bare
from torch import Tensor, nn

D = 2


@dataclass(frozen=True, kw_only=True)
class Known:
    """A case written by hand."""

    build: Callable[[], Case]
    change: Callable[[Case], None] | None = None
    plain: tuple[str, ...] = ()
    """Linear layers whose factors an optimizer must have, and which must be those of the formula."""


KNOWN: dict[str, Known] = {}


def known(change: Callable[[Case], None] | None = None, plain: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Add the decorated function, which makes the case, under its name."""

    def add(build: Callable[[], Case]) -> Callable[[], Case]:
        KNOWN[build.__name__] = Known(build=build, change=change, plain=plain)
        return build

    return add


def case_of(model: nn.Module, inputs: list[Any], likelihood: str = "gaussian", place: int = 0, **options: Any) -> Case:
    """Parameters and labels from a seed, and everything in float64; the output's place among several."""
    model.output_place = place
    generator = torch.Generator().manual_seed(0)
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
            if name.endswith("zero"):
                p.zero_()
    batches = []
    for x in inputs:
        named = x if isinstance(x, dict) else {"x": x}
        with torch.no_grad():
            f = outputs(model, named)
        y = torch.randn(f.shape, generator=generator, dtype=torch.float64)
        batches.append(Batch(named, y, len(f)))
    return Case(Spec(likelihood=likelihood), model, batches, options)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _linear() -> nn.Linear:
    return nn.Linear(D, D)


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    """Layers draw their first values, which are then replaced, from the global generator: it is left alone."""
    with torch.random.fork_rng(devices=[]):
        return make()


# --- attention whose projections fall back -----------------------------------------------------------------


def _attention(forward: Callable[..., Tensor]) -> nn.Module:
    return _built(lambda: Apply(forward, mix=nn.MultiheadAttention(D, 1, batch_first=True), head=_linear()))


def _attend(m: Any, x: Tensor) -> Tensor:
    return m.head((x + m.mix(x, x, x)[0]).mean(1))


def _attention_inputs() -> list[Tensor]:
    """The bias of the keys has no gradient but its rounding error, which fits the rule or does not: several sizes."""
    return [normal(3, 3, D), normal(2, 3, D), normal(1, 4, D)]


@known()
def attention_with_only_biases_trained() -> Case:
    model = _attention(_attend)
    for name, p in model.mix.named_parameters():
        p.requires_grad_("bias" in name)
    return case_of(model, _attention_inputs())


@known()
def attention_with_frozen_projections() -> Case:
    model = _attention(_attend)
    model.mix.in_proj_weight.requires_grad_(False)
    return case_of(model, _attention_inputs())


@known()
def attention_whose_projections_are_used_elsewhere() -> Case:
    model = _attention(lambda m, x: _attend(m, x) + F.linear(x, m.mix.in_proj_weight[:D]).mean(1))
    return case_of(model, [normal(4, 3, D)])


@known()
def two_attentions_with_one_weight() -> Case:
    def make() -> nn.Module:
        a, b = (nn.MultiheadAttention(D, 1, batch_first=True) for _ in range(2))
        b.in_proj_weight = a.in_proj_weight
        return Apply(lambda m, x: m.head((m.a(x, x, x)[0] + m.b(x.cos(), x, x)[0]).mean(1)), a=a, b=b, head=_linear())

    return case_of(_built(make), [normal(4, 3, D)])


# --- what was true at the first call -----------------------------------------------------------------------


def _two(forward: Callable[..., Tensor], **parts: Any) -> nn.Module:
    return _built(lambda: Apply(forward, l=_linear(), head=_linear(), **{k: make() for k, make in parts.items()}))


def _open_gate(case: Case) -> None:
    with torch.no_grad():
        case.model.zero.fill_(1.5)


@known(change=_open_gate)
def gate_that_leaves_zero() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(x + m.l(x) + m.zero * F.linear(x.cos(), m.l.weight))

    return case_of(_two(forward, zero=bare), [normal(4, D)])


def _raise_flag(case: Case) -> None:
    for batch in case.batches:
        batch.x["flag"] = True


@known(change=_raise_flag)
def flag_in_the_input() -> Case:
    def forward(m: Any, x: Tensor, flag: bool) -> Tensor:
        return m.head((m.l(x) + F.linear(x.cos(), m.l.weight) if flag else m.l(x)).tanh())

    return case_of(_two(forward), [{"x": normal(4, D), "flag": False}])


class Settings:
    """As libraries of pretrained models keep them."""

    double = False


def _change_settings(case: Case) -> None:
    case.model.settings.double = True


@known(change=_change_settings)
def flag_on_a_settings_object() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head((m.l(x) + F.linear(x.cos(), m.l.weight) if m.settings.double else m.l(x)).tanh())

    model = _two(forward)
    model.settings = Settings()
    return case_of(model, [normal(4, D)])


def _reuse_if(m: Any, x: Tensor, where: Tensor) -> Tensor:
    out = m.l(x)
    if bool(where.any()):
        out = out + where.unsqueeze(-1) * F.linear(x.cos(), m.l.weight)
    return m.head(out.tanh())


@known()
def branch_of_the_second_batch() -> Case:
    model = _two(lambda m, x: _reuse_if(m, x, x[:, 0] > 0))
    first, second = normal(4, D), normal(4, D, seed=2)
    first[:, 0], second[:, 0] = -first[:, 0].abs(), second[:, 0].abs()
    return case_of(model, [first, second])


def _nothing(case: Case) -> None:
    """The same call twice."""


@known(change=_nothing)
def branch_of_the_second_batch_and_another_length() -> Case:
    """Its graph is verified with a layer that is found by use, and met again with a module of the same name."""

    def forward(m: Any, x: Tensor) -> Tensor:
        reused = F.linear(x.cos(), m.l.weight) if bool(x[0, 0, 0] > 0) else 0.0
        return m.head((m.l(x) + reused).tanh().sum(1))

    model = _built(lambda: Apply(forward, l=nn.Linear(D, D, bias=False), head=_linear()))
    first, second = normal(1, 3, D), normal(1, 2, D, seed=2)
    first[:, 0, 0], second[:, 0, 0] = -1.0, 1.0
    return case_of(model, [first, second])


@known()
def weight_reused_by_the_first_example_alone() -> Case:
    x = normal(6, D).clamp(-1, 1)
    x[0, 0] = 3.0
    return case_of(_two(lambda m, x: _reuse_if(m, x, x[:, 0] > 2)), [x])


def _other_model(case: Case) -> None:
    """With the same operations on tensors of the same shapes; here the borrowed weight is the layer's own."""
    model = _two(lambda m, x: m.head(m.l(x) + F.linear(x.cos(), m.l.weight) + m.other.sum()), other=lambda: bare(D, D))
    case.model, case.batches = (other := case_of(model, [normal(4, D)])).model, other.batches


@known(change=_other_model)
def another_model_with_the_same_operations() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.l(x) + F.linear(x.cos(), m.other) + m.other.sum())

    return case_of(_two(forward, other=lambda: bare(D, D)), [normal(4, D)])


# --- layouts that sizes alone suggest ----------------------------------------------------------------------


@known()
def packed_sequences_of_unequal_length() -> Case:
    """Two positions an example on the average, and exactly two for each of the last three."""

    def forward(m: Any, x: Tensor, kept: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[kept] = m.l(x[kept]).tanh()
        return m.head(out.sum(1))

    lengths = torch.tensor([3, 1, 2, 2, 2])
    kept = torch.arange(3) < lengths.unsqueeze(1)
    return case_of(_two(forward), [{"x": normal(5, 3, D), "kept": kept}])


@known()
def tokens_routed_to_experts() -> Case:
    """Each of the last three examples has one token for each expert; the first two have both for the same."""

    def forward(m: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = (rows[:, 0] > 0).long()
        out = torch.zeros_like(rows)
        for number, expert in enumerate((m.l, m.other)):
            where = (chosen == number).nonzero().squeeze(-1)
            out = out.index_copy(0, where, expert(rows.index_select(0, where)))
        return m.head(out.view(x.shape).tanh().sum(1))

    x = normal(5, 2, D)
    x[..., 0] = x[..., 0].abs() * torch.tensor([[1, 1], [-1, -1], [-1, 1], [-1, 1], [-1, 1]])
    return case_of(_two(forward, other=_linear), [x])


@known()
def examples_sorted_by_their_data() -> Case:
    """The last three are in order already."""

    def forward(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.head(m.l(x[order]).tanh()[order.argsort()])

    x = normal(5, D)
    x[:, 0] = torch.tensor([5.0, 1.0, 2.0, 3.0, 4.0])
    return case_of(_two(forward), [x])


@known()
def sequences_sorted_by_their_data() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return m.head(m.l(x[order]).tanh()[order.argsort()].sum(1))

    x = normal(5, 2, D)
    x[:, 0, 0] = torch.tensor([5.0, 1.0, 2.0, 3.0, 4.0])
    return case_of(_two(forward), [x])


# --- positions and padding ---------------------------------------------------------------------------------


def _positions(m: Any, x: Tensor) -> Tensor:
    return m.head(m.l((x + m.pos[: x.shape[1]]).tanh()).mean(1))


@known()
def position_parameter_and_two_lengths() -> Case:
    return case_of(_two(_positions, pos=lambda: bare(4, D)), [normal(3, 4, D), normal(3, 2, D, seed=2)])


@known()
def position_parameter_and_two_lengths_the_short_first() -> Case:
    return case_of(_two(_positions, pos=lambda: bare(4, D)), [normal(3, 2, D), normal(3, 4, D, seed=2)])


@known()
def position_parameter_of_all_positions_and_eight_examples() -> Case:
    return case_of(_two(_positions, pos=lambda: bare(4, D)), [normal(8, 4, D)])


def _padded() -> nn.Module:
    def make() -> nn.Module:
        return Apply(lambda m, x: m.head(m.e(x).mean(1)), e=nn.Embedding(4, D, padding_idx=0), head=_linear())

    return _built(make)


@known()
def padding_in_the_second_batch() -> Case:
    first, second = torch.tensor([[1, 2], [3, 1], [2, 2]]), torch.tensor([[1, 0], [0, 3], [2, 0]])
    return case_of(_padded(), [first, second])


def _pad(case: Case) -> None:
    case.batches[0].x["x"][:, 1] = 0


@known(change=_pad)
def padding_at_the_second_call() -> Case:
    return case_of(_padded(), [torch.tensor([[1, 2], [3, 1], [2, 2]])])


# --- PReLU, whose derivative vmap gets wrong ---------------------------------------------------------------


@known()
def prelu_of_several_cotangents() -> Case:
    return case_of(_two(lambda m, x: m.head(m.p(m.l(x))), p=nn.PReLU), [normal(4, D)])


@known()
def prelu_without_a_gradient_in_the_first_batch() -> Case:
    model = _two(lambda m, x: m.head(m.p(x)) + m.l(x), p=nn.PReLU)
    return case_of(model, [normal(4, D).abs(), normal(4, D, seed=2)])


def _both_signs(case: Case) -> None:
    case.batches[0].x["x"].copy_(normal(4, D, seed=2))


@known(change=_both_signs)
def prelu_without_a_gradient_at_the_first_call() -> Case:
    return case_of(_two(lambda m, x: m.head(m.p(x)) + m.l(x), p=nn.PReLU), [normal(4, D).abs()])


# --- Kronecker factors -------------------------------------------------------------------------------------


@known(plain=("mix",))
def token_mixing_with_a_mask_and_as_many_features_as_positions() -> Case:
    """The mask is of positions; the rows of the mixing layer are features, of which there are as many."""

    def make() -> nn.Module:
        return Apply(lambda m, x: m.head(x + m.mix(x.mT).mT), mix=nn.Linear(3, 3), head=nn.Linear(3, 2))

    case = case_of(_built(make), [normal(4, 3, 3)], "categorical", class_axis=-1, ignore_index=-100)
    y = torch.randint(2, (4, 3), generator=torch.Generator().manual_seed(3))
    y[:, 2], y[0, 1] = -100, -100
    case.batches[0].y = y
    return case


@known(plain=("l", "head"))
def target_without_gradient() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.l(x.cos())
        return m.head(m.l(x).tanh() - target)

    return case_of(_two(forward), [normal(4, D)])


@known(plain=("l", "head"))
def target_detached() -> Case:
    return case_of(_two(lambda m, x: m.head(m.l(x).tanh() - m.l(x.cos()).detach())), [normal(4, D)])


# --- an input that all examples share ----------------------------------------------------------------------


@known()
def shared_input_as_long_as_the_batch() -> Case:
    def forward(m: Any, x: Tensor, shared: Tensor) -> Tensor:
        return m.head(m.l(x).tanh() * shared.sum())

    return case_of(_two(forward), [{"x": normal(4, D), "shared": normal(4, seed=3)}])


@known()
def shared_input_as_long_as_the_batch_and_first() -> Case:
    def forward(m: Any, shared: Tensor, x: Tensor) -> Tensor:
        return m.head(m.l(x).tanh() * shared.sum())

    return case_of(_two(forward), [{"shared": normal(4, seed=3), "x": normal(4, D)}])


@known()
def shared_mask_as_large_as_the_batch() -> Case:
    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return m.head((mask @ m.l(x)).tanh().mean(1) * m.scale)

    return case_of(_two(forward, scale=lambda: bare(D)), [{"x": normal(3, 3, D), "mask": normal(3, 3, seed=3).tril()}])


@known()
def shared_input_as_long_as_the_batch_before_a_norm() -> Case:
    """The norm takes out all of the factor but its sign, which is the same for the last example alone."""

    def forward(m: Any, x: Tensor, shared: Tensor) -> Tensor:
        return m.head(m.norm(x * shared.sum()))

    model = _two(forward, norm=lambda: nn.RMSNorm(D))
    return case_of(model, [{"x": normal(3, 2, D), "shared": torch.tensor([5.0, -3.0, -1.0], dtype=torch.float64)}])


@known()
def mask_as_large_as_the_batch_before_the_last_position() -> Case:
    """The last row of the mask, which is what the last position needs, would be the last example's."""

    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return m.head((mask @ m.l(x)).tanh()[:, -1])

    mask = normal(3, 3, seed=3).tril()
    return case_of(_two(forward), [{"x": normal(n, 3, D, seed=n), "mask": mask} for n in (1, 3)])


# --- several outputs ---------------------------------------------------------------------------------------


@known()
def hidden_states_after_the_output() -> Case:
    """They have more axes, and the output is not made from them."""
    return case_of(_two(lambda m, x: (m.head(x.mean(1)), [m.l(x)])), [normal(3, 2, D)])


@known()
def features_before_the_output() -> Case:
    """Only the graph tells, which forward mode has not."""

    def forward(m: Any, x: Tensor) -> Any:
        h = m.l(x).tanh()
        return h, m.head(h).sum(-1, keepdim=True)

    return case_of(_two(forward), [normal(3, D)], place=1)
