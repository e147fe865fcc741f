"""`drawn`: the networks of a set, whose number everything in it comes from.

Family, width, depth, nonlinearity, data, whether the network was trained for some steps before, which fault, where in
the network and how large: all are drawn. Written, and its ranges fixed, without looking at the doctor's rules; a set
counts as blind the first time that it is run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from doctor.case import Case, seeded
from doctor.drawn import faults as plant
from doctor.drawn.draw import choice, coin, log_uniform, whole
from doctor.drawn.families import (
    ALL,
    CLASSES,
    HIDDEN,
    REAL_INPUTS,
    VALUES,
    VECTORS,
    Family,
    auto_encoder,
    dense_net,
    dilated,
    llama,
    multi_label,
    perceiver,
    plain_deep,
    plain_time,
    recurrent,
    separable_cnn,
    tabular,
)
from doctor.drawn.network import Net, maybe_trained


@dataclass(frozen=True)
class Fault:
    kind: str
    plant: Callable[[Net], Case]
    networks: Callable[[], Net]
    """Draws a family, width, depth, data."""


def of(
    families: Sequence[Family],
    trained_before: bool = False,
    nonlinearities: Sequence[type[nn.Module]] = (),
    **options: int,
) -> Callable[[], Net]:
    """Draws one of some families, with one of some nonlinearities where they matter."""

    def draw() -> Net:
        act = {"nonlinearity": choice(nonlinearities)} if nonlinearities else {}
        net = choice(families)(**act, **options)
        return maybe_trained(net) if trained_before else net

    return draw


def deep_residual() -> Net:
    return dilated(nn.ReLU, depth=whole(7, 10)) if coin() else plain_deep(depth=whole(7, 10))


def deep_plain() -> Net:
    return plain_deep(depth=whole(6, 10)) if coin() else plain_time(depth=whole(5, 8))


def deep_sigmoid() -> Net:
    kind = choice((plain_deep, plain_time))
    return kind(nn.Sigmoid, depth=whole(8, 12), gain=1.0)


def chaotic() -> Net:
    return plain_deep(nn.Tanh, depth=whole(20, 30), gain=log_uniform(8, 12))


BOUNDED = (nn.Tanh, nn.Sigmoid, nn.Hardtanh)
SATURATING = tuple(family for family in HIDDEN if family not in (auto_encoder, separable_cnn))


FAULTS = (
    Fault("input-scale", plant.input_scale, of(REAL_INPUTS)),
    Fault("input-offset", plant.input_offset, of(REAL_INPUTS)),
    Fault("constant-features", plant.constant_features, of(VECTORS)),
    Fault("class-imbalance", plant.class_imbalance, of(CLASSES, n=2400)),
    Fault("unrelated-labels", plant.unrelated_labels, of(CLASSES)),
    Fault("target-scale", plant.target_scale, of(VALUES)),
    Fault("output-scale", plant.output_scale, of((*CLASSES, llama, multi_label), True)),
    Fault("dead-units", plant.dead_units, of(HIDDEN, True, (nn.ReLU,))),
    Fault("saturated-units", plant.saturated_units, of((*SATURATING, recurrent), False, BOUNDED)),
    Fault("collapsed-attention", plant.collapsed_attention, of((llama, perceiver), True)),
    Fault("identical-units", plant.identical_units, of(HIDDEN, False, (nn.ReLU, nn.GELU, nn.Tanh))),
    Fault("exploding-activations", plant.exploding_activations, deep_residual),
    Fault("vanishing-activations", plant.vanishing_activations, deep_plain),
    Fault("vanishing-gradients", plant.nothing_else, deep_sigmoid),
    Fault("exploding-gradients", plant.nothing_else, chaotic),
    Fault("frozen", plant.frozen, of(ALL, True)),
    Fault("unused", plant.unused, of(ALL, True)),
    Fault("not-in-optimizer", plant.not_in_optimizer, of(ALL, True)),
    Fault("rate-too-high", plant.rate_too_high, of(ALL, True)),
    Fault("rate-too-low", plant.rate_too_low, of(ALL)),
    Fault("not-finite", plant.not_finite, of(REAL_INPUTS, True)),
    Fault("anisotropic-inputs", plant.anisotropic_inputs, of((tabular, dense_net))),
)


HEALTHY = tuple(of((family,), True) for family in ALL)


@dataclass(frozen=True)
class Drawn:
    name: str
    fault: str | None
    family: str
    case: Case


def drawn(number: int, repeats: int = 3) -> Iterator[Drawn]:
    """The patients of a set: every fault `repeats` times on networks drawn anew, every family once without a fault."""
    for place, fault in enumerate(FAULTS):
        for repeat in range(repeats):
            with seeded(100_000 * number + 100 * place + repeat):
                net = fault.networks()
                yield Drawn(f"{fault.kind}-{repeat}", fault.kind, net.family, fault.plant(net))
    for place, draw in enumerate(HEALTHY):
        with seeded(100_000 * number + 50_000 + place):
            net = draw()
            yield Drawn(f"healthy-{place}", None, net.family, plant.case(net))
