"""Per-example gradients of all parameters at once, as rows of a matrix in flat order."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.columns import to_flat
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.table import LayerTable


def flat_rows(
    ios: Mapping[str, LayerIO], table: LayerTable, start: int, stop: int, vectors: int, like: Tensor
) -> Float[Tensor, "VN d"]:
    """``[V·n, d]`` of the examples start … stop; zero for layers that were not called."""
    blocks = {}
    for spec in table.layers:
        if spec.name in ios:
            blocks[spec.name] = ios[spec.name].narrow(start, stop).rows().to(like)
        else:
            blocks[spec.name] = like.new_zeros(vectors, stop - start, *spec.form.shape)
    params = table.to_params(blocks)
    return to_flat({k: t.flatten(0, 1) for k, t in params.items()}, table.shapes)
