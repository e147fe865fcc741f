"""`benchmarks/scaling.py`: what it says of the busiest rank, and docs/scaling.md against the plan that there is now."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

import layerwise as lw

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling_benchmark", ROOT / "benchmarks" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ranks", [3, 7, 50])
def test_some_ranks_stand_for_all(scaling: ModuleType, ranks: int, untyped: None):
    with FakeTensorMode():
        plan = lw.optim.KFAC(scaling.Decoder(scaling.Size("small", 2, 12, 31)), **scaling.HEAD).plan_for(ranks)
    some = scaling.representatives(plan)
    assert len(some) < ranks or ranks == 3
    of_rank = (plan.step_bytes, plan.state, plan.work, lambda rank: scaling.local_entries(plan, rank))
    for quantity in of_rank:
        assert {quantity(rank) for rank in some} == {quantity(rank) for rank in range(ranks)}


def test_others_deal_out_what_there_is(scaling: ModuleType):
    """Where everything divides all are alike; else padding costs."""
    even = [(8, 8)] * 16
    assert scaling.padded_stacks(even, 8) == scaling.Dealt(2 * 7 / 8, 1.0)
    assert scaling.whole_layers(even, 8).work == 1.0
    odd = [(8, 8)] * 9
    assert scaling.padded_stacks(odd, 8).work == pytest.approx(16 / 9)
    assert scaling.padded_stacks(odd, 8).sent == pytest.approx(2 * 7 / 8 * 16 / 9)


def test_the_page_has_what_the_plan_says(scaling: ModuleType, untyped: None):
    """Its first lines, anew; `python benchmarks/scaling.py --write docs/scaling.md` mends it."""
    members, ranks = list(scaling.MEMBERS), [8, 64]
    found = list(scaling.rows(members, scaling.SIZES[:1], ranks))
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    lines = [line for line in scaling.page(found) if line.startswith("| 125M")]
    assert len(lines) == 2 * (len(scaling.TABLES) + 1)
    missing = [line for line in lines if line not in text]
    assert not missing
