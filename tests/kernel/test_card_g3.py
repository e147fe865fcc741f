"""Cards G3 and G4: what training does to the tangent kernel of a network on digits, and identities of kernels.

The network, the data and the measures of G3 are those of `examples/tangent_kernel.py`, at the card's full size: it is
small. What the card leaves open was settled by what comes closest to its numbers over seeds 0 to 19:

- Images have their mean taken off. Without that, contrasts at the end are smaller (3 vs 8: .140, 1 vs 8: .086), and the
  card's thresholds hold on 9 of 20 seeds.
- The *Fisher ratio* is ``‖m_a − m_b‖² / (tr S_a + tr S_b)`` in the plane of the two components, covariances over
  N. The other reading, the ratio along the discriminant, is 5.8 → 13.4 for 3 vs 8 where the card has 1.07 → 2.61.
- The *accuracy* is that of the linear discriminant with pooled covariance, on the points it was made from. Logistic
  regression and nearest means differ from it by at most .013 on the mean over seeds.
- The *contrast* leaves out the diagonal, which is 1 whatever the network does. With it the numbers are
  about as close to the card's, but 1 vs 8 grows by less than 1.5 on 6 of 20 seeds (least 1.39): the diagonal adds .01
  before and after.

Means and deviations over the 20 seeds:

| pair | contrast | card | accuracy | card | Fisher ratio | card |
|---|---|---|---|---|---|---|
| 3 vs 8 | .095 ± .016 → .202 ± .022 | .092 → .206 | .93 → .99 | .88 → .94 | 1.65 ± .45 → 3.81 ± .71 | 1.07 → 2.61 |
| 4 vs 9 | .166 ± .033 → .388 ± .032 | .166 → .359 | .97 → .99 | .96 → 1.00 | 2.87 ± .80 → 7.07 ± 1.43 | 2.29 → 5.96 |
| 1 vs 8 | .068 ± .011 → .124 ± .013 | .076 → .139 | .86 → .96 | .92 → .97 | .78 ± .20 → 1.46 ± .25 | .93 → 1.45 |

The card's thresholds hold on 19 of the 20 seeds; on seed 2 the contrast of 1 vs 8 grows by 1.47 instead of 1.5. The
seeds tested, 0 and 1, are the first two: there the least factors are 1.76 (contrast) and 1.71 (Fisher ratio).
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import layerwise as lw

EXAMPLE = Path(__file__).parents[2] / "examples" / "tangent_kernel.py"
pytest.importorskip("sklearn")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tangent_kernel", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = _load()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Training in steps of a millisecond waits for its threads more than it computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)], ids=["seed0", "seed1"])
def views(request: pytest.FixtureRequest, one_thread: None) -> dict:
    """``{pair: (at initialization, after 600 steps)}``."""
    x, y, held_out, labels = demo.digits(request.param)
    seen: list = []
    for step, _, model in demo.train(x, y, (0, 600), request.param):
        seen += [demo.measure(model, held_out, labels, pair, step) for pair in demo.PAIRS]
    return {pair: tuple(view for view in seen if view.pair == pair) for pair in demo.PAIRS}


@pytest.mark.parametrize("pair", demo.PAIRS, ids=lambda pair: f"{pair[0]}vs{pair[1]}")
def test_training_separates_the_classes(views, pair):
    before, after = views[pair]
    assert len(before.plane) == len(after.plane) == 2 * demo.HELD_OUT
    assert after.contrast >= 1.5 * before.contrast
    assert after.fisher >= 1.3 * before.fisher
    assert after.accuracy >= before.accuracy - 0.01 - 1e-9


def test_the_table_and_the_figure(views, tmp_path):
    seen = [view for pair in demo.PAIRS for view in views[pair]]
    assert "3 vs 8" in demo.table(seen)
    pytest.importorskip("matplotlib")
    demo.draw(seen, tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000


def test_separation_of_points_that_can_be_counted():
    a = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]], dtype=torch.float64)
    accuracy, fisher = demo.separation(a, a + torch.tensor([4.0, 0.0]))
    assert accuracy == 1
    assert fisher == pytest.approx(16 / 4)  # each class has variance 1 along both axes


# --- card G4 -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3, generator=generator)
    return model, demo.digits()[2][:30].double()


def test_the_l2_metric_times_n_has_the_spectrum_of_the_kernel(small):
    """The Gauss-Newton matrix of a Gaussian is ``1/N Σ JᵀJ``; K is ``J Jᵀ``."""
    model, x = small
    metric = lw.ggn(model, (x, torch.zeros(len(x), 10, dtype=x.dtype)), likelihood="gaussian", structure="dense")
    K = lw.ntk(model, x)
    rank = min(metric.numel(), K.shape[0])
    both = metric.eigenvalues()[-rank:] * len(x), K.eigenvalues()[-rank:]
    torch.testing.assert_close(*both, rtol=1e-8, atol=1e-8 * float(both[1].max()))


def test_kernels_of_layers_add_up(small):
    model, x = small
    K = lw.ntk(model, x)
    parts = [part.matrix() for part in K.per_layer().values()]
    torch.testing.assert_close(sum(parts), K.matrix(), rtol=1e-10, atol=1e-10)
