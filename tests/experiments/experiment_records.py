"""Records of an experiment without a runner."""

from functools import cache

import jaxtyping
import pytest
import torch

from layerwise.experiments.catalog import find


def records(experiment, config, seeds):
    """What the runner would have written, for some seeds of every cell."""
    return [
        {"cell": cell.key, "seed": row.seed, "values": dict(row.values), "series": dict(row.series)}
        for cell in experiment.cells_of(config)
        for row in experiment.run(config, cell, seeds)
    ]


@cache
def smoke(name: str) -> list[dict]:
    """Those of a smoke preset: once a process, without checks of types, which cost most of the time there."""
    experiment, threads = find(name), torch.get_num_threads()
    config = experiment.preset("smoke")
    torch.set_num_threads(1)  # in steps of a millisecond a second thread costs more than it gives
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
            return records(experiment, config, list(range(config.seeds)))
    finally:
        torch.set_num_threads(threads)
