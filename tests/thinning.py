"""Products of parameters of which `make test` runs a part, and `make test-slow` the rest.

Where axes do not touch one another in the code, a product of them repeats what its parts have shown. What is left out
is marked ``slow`` and nothing else, so that a run without ``-m`` has the product whole.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], ids: Callable[[Any], str] | None = None) -> list[Any]:
    """Their product, kept where the place in the last axis is the sum of the other places.

    Of two axes every value is there, of three also every pair, as long as the last axis is not the longest.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    last = len(numbered[-1])
    found = []
    for chosen in itertools.product(*numbered):
        *others, own = (place for place, _ in chosen)
        found.append(_param([value for _, value in chosen], sum(others) % last == own, ids))
    return found


def mostly_slow(values: Iterable[Any], kept: Sequence[str], name: Callable[[Any], str] = str) -> list[Any]:
    """All of them by name; `make test` runs those that are ``kept``."""
    values = list(values)
    missing = set(kept) - {name(value) for value in values}
    assert not missing, f"no such value: {sorted(missing)}"
    return [_param([value], name(value) in kept, name) for value in values]


def _param(values: list[Any], kept: bool, ids: Callable[[Any], str] | None) -> Any:
    named = None if ids is None else "-".join(ids(value) for value in values)
    return pytest.param(*values, marks=() if kept else pytest.mark.slow, id=named)


KEPT = {
    "test_padding.py::test_training_is_the_same": r"^(KFAC|EKFAC|Shampoo|SOAP)-words|SOAP-images|Shampoo-images",
    "test_padding.py::test_a_checkpoint_goes_from_one_to_the_other_and_back": r"plain, packed, plain",
    "test_padding.py::test_what_is_saved_has_no_padding": r"^(KFAC|EKFAC|SOAP)$",
    "test_defaults_train.py::test_defaults_train": r"^(KFAC|EKFAC|SOAP|Muon|Sign|NGD)-dense|KFAC-conv|Shampoo-conv",
    "test_defaults_train.py::test_clipping_makes_a_wide_range_of_rates_work": r"^KFAC",
    "test_robustness.py::test_long_runs_leave_no_objects_behind": r"KFAC sampled",
    "test_loop.py::test_every_optimizer_learns_and_repeats_itself": r"L-BFGS|adaptive|EKFAC|Muon",
    "test_networks.py::test_every_member_learns": r"^(sgd|soap|kfac|ngd)$",
    "test_samples.py::test_every_member_runs_and_is_reproducible": r"^(sgd|soap|kfac|ngd)$",
    "test_linear_experiments.py::test_a_seed_is_the_same_alone_and_beside_others": r"contraction|transfer",
    "test_linalg_stochastic.py::test_standard_errors_are_calibrated": r"indefinite|logdet",
    "test_fast_accuracy.py::test_factors_of_a_training": r"-6-",
    "test_masks_contract.py::test_masked_positions_are_as_if_deleted_contract": r"exact-expand|empirical-reduce",
    "test_example_squares.py::test_the_same_as_layer_by_layer": r"True",
    "test_statistics_in_turn.py::test_layers_without_a_gradient": r"5-",
    "test_listed.py::test_missing_gradients": r"^(KFAC|Shampoo|Adam)$",
    "test_listed.py::test_every_kind_of_parameter": r"^(KFAC by products|Shampoo|fallback sgd)$",
    "test_compiled.py::test_hooks_of_the_user_on_a_compiled_model_act_once": r"inputs|later",
}
"""Tests whose cases take long and exercise the same code: a pattern of the cases that `make test` runs. The others are
slow."""


def is_left_out(item: pytest.Item) -> bool:
    """Whether an item is a case of `KEPT` that `make test` does without."""
    spec = getattr(item, "callspec", None)
    kept = KEPT.get(f"{item.path.name}::{getattr(item, 'originalname', item.name)}")
    return spec is not None and kept is not None and not re.search(kept, spec.id)
