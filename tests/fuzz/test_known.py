"""Models that once gave wrong numbers, in every structure and in every order that mattered."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from known import KNOWN, Known, case_of, normal
from oracle import Oracle
from plans import STRUCTURES
from verdicts import Verdict, gap, judge, statistics_of

import layerwise as lw

FISHER = [("fisher", structure, estimator, -1) for structure in STRUCTURES for estimator in ("exact", "empirical")]
SPACE = [("jacobian", "push"), ("jacobian", "dense"), ("jacobian", "pull"), ("ntk", "matrix"), ("ntk", "product")]
CALLS = [*FISHER, *SPACE]
ANOTHER = "another_model_with_the_same_operations"


def _plan(of: Known, case: Case, call: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """Function space batch by batch; where something changes, the call before the change and after it."""
    calls = (call,) if call[0] == "fisher" else tuple((*call, batch) for batch in range(len(case.batches)))
    return calls if of.change is None else (*calls, ("do", of.change), *calls)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join(str(part) for part in call[:3]))
@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str, call: tuple[Any, ...]):
    of = KNOWN[name]
    case = of.build()
    case.plain = of.plain or None
    case.spec = replace(case.spec, plan=_plan(of, case, call))
    verdicts = judge(case)
    assert [v for v in verdicts if v.word != "right"] == [], _told(verdicts)


def _told(verdicts: list[Verdict]) -> str:
    return "; ".join(str(v) for v in verdicts)


@pytest.mark.parametrize("name", [name for name, of in KNOWN.items() if of.plain])
def test_an_optimizer_has_the_factors_of_the_formula(name: str):
    of = KNOWN[name]
    case = of.build()
    case.plain = of.plain
    errors = dict(statistics_of(case, [0]))
    assert set(errors) == {f"{side} of {layer}" for layer in of.plain for side in "PQ"}
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("name", [name for name, of in KNOWN.items() if not of.plain and name != ANOTHER])
def test_an_optimizer_steps_through_every_batch(name: str):
    """Layers that are plain have the factors of the formula, also at the step after the change."""
    of = KNOWN[name]
    case = of.build()
    numbers = list(range(len(case.batches)))
    errors = statistics_of(case, numbers if of.change is None else [*numbers, of.change, *numbers])
    assert max((error for _, error in errors), default=0.0) < 1e-6, errors


def test_a_kernel_of_two_batches_cuts_no_mask():
    """Examples of the second are recorded one by one, as there is one in the first."""
    case = KNOWN["mask_as_large_as_the_batch_before_the_last_position"].build()
    case.spec = replace(case.spec, plan=(("ntk", "cross", 1),))
    assert [v.word for v in judge(case)] == ["right"]


@pytest.mark.parametrize("what", ["fisher", "jacobian"])
def test_a_first_vector_that_is_zero_for_the_padding(what: str):
    """Forward mode moves the padding's row, which has no derivative: looked for with the first vector alone."""
    case = KNOWN["padding_in_the_second_batch"].build()
    case = case_of(case.model, [case.batches[1].x])
    truth = Oracle(case)
    expected = truth.fisher("exact", [0]) if what == "fisher" else truth.batch(0).flat()
    batch = case.batches[0]
    if what == "fisher":
        M: Any = lw.fisher(case.model, (batch.given(), batch.y), "gaussian", "implicit", "exact")
    else:
        M = lw.jacobian(case.model, batch.given())
    v = normal(expected.shape[1])
    first = v.clone()
    first[:2] = 0  # the padding's row is the first of the first parameter
    for vector in (first, v, torch.ones_like(v)):
        assert gap(M @ vector, expected @ vector) < 1e-6


DIES = """
import sys
sys.path.insert(0, {folder!r})
from cases import Spec, make
from verdicts import judge
plan = (("fisher", "block", "empirical", 1), ("fisher", "diag", "empirical", -1))
for seed in range(95, 99):
    spec = Spec(seed=seed, blocks=("weight_norm", "rezero"), sizes=((4, 2), (5, 3)), options=("train",), plan=plan)
    assert all(verdict.word == "right" for verdict in judge(make(spec)))
"""


def test_a_weight_with_a_norm_of_its_own_does_not_end_the_process():
    """Its kernel in torch reads beyond the end of a parameter that has been given an axis: in another process."""
    code = DIES.format(folder=str(Path(__file__).parent))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"exit code {ran.returncode}: {ran.stderr[-500:]}"
