"""Layers that ranks divide among them (`ColwiseParallel`, `RowwiseParallel`): what optimizers of statistics can do."""

from collections.abc import Iterable, Mapping

from torch import nn

from layerwise.foundations.errors import UnsupportedError, describe
from layerwise.foundations.sharded import Division, offloaded, tensor_parallel
from layerwise.layers.rules.linear import LinearRule
from layerwise.layers.table import LayerSpec, LayerTable
from layerwise.optim.rule import Requirements
from layerwise.optim.sharding.plan import Blocks


def divisions(model: nn.Module, requires: Requirements, member: str) -> dict[str, Division]:
    """How parameters are divided among ranks, by name.

    Refused are rules that solve for all examples at once (second moments can be put together from ranks, examples
    cannot), and parameters on another device than the activations, whose second moments are taken there.
    """
    if away := offloaded(model):
        raise UnsupportedError(
            describe(
                f"{member} of parameters that CPUOffloadPolicy keeps on the host ({away[0]!r} and {len(away) - 1} "
                "more)",
                "parameters on the device of the activations, whose second moments are taken there",
                "shard the model without offload_policy, or take a member of gradients (Shampoo, SOAP, Muon, Adam, "
                "SGD), which steps on the host",
            )
        )
    divided = tensor_parallel(model)
    if divided and requires.examples and not requires.moments:
        raise UnsupportedError(
            describe(
                f"{member} of a model with tensor parallelism ({next(iter(divided))!r} and {len(divided) - 1} more "
                "parameters)",
                "examples of whole layers, which tensor parallelism divides among ranks",
                "shard the model by fully_shard alone, or take another member: KFAC, EKFAC and FOOF gather what "
                "they need, Shampoo, SOAP, Muon, Adam and SGD need gradients only",
            )
        )
    return divided


def without_statistics(table: LayerTable, divided: Mapping[str, Division]) -> dict[str, str]:
    """Layers that ranks divide among them and whose statistics cannot be put together, and why."""
    cut = {name for name, division in divided.items() if division.axis is not None}
    return {
        spec.name: "tensor parallelism divides it, and it is no nn.Linear"
        for spec in table.layers
        if spec.sites and cut & set(spec.parameters) and not all(isinstance(s.rule, LinearRule) for s in spec.sites)
    }


def blocks_of(layers: Iterable[LayerSpec], divided: Mapping[str, Division]) -> dict[str, Blocks]:
    """Of layers that ranks divide, where the blocks of A and of G are, for ``tensor_parallel="blocks"``."""
    found: dict[str, Blocks] = {}
    for spec in layers:
        weight, form = spec.form.weight, spec.form
        division = None if weight is None else divided.get(weight.name)
        if division is not None and division.axis == 0:
            found[spec.name] = None, division.bounds(form.outputs)
        elif division is not None and division.axis == 1:
            bias = [(form.weight_inputs, form.inputs)] if form.bias is not None else []
            found[spec.name] = [*division.bounds(form.weight_inputs), *bias], None
    return found
