"""Groups of examples: noisy labels, deciles, spurious features, C-scores; and yin-yang points."""

import pytest
import torch
from torch import nn

from error_sentences import WORDED
from layerwise.foundations.errors import InputError, NameLookupError
from layerwise.regimes import (
    balanced,
    deciles,
    estimate_cscores,
    label_noise,
    with_spurious,
    yin_yang,
    yin_yang_grid,
    yin_yang_labels,
)
from layerwise.regimes.yin_yang import easy


def test_noise_is_wrong_and_even_over_the_other_classes():
    y = torch.arange(9000) % 3
    labels, noisy = label_noise(y, classes=5, fraction=0.5, seed=1)
    assert int(noisy.sum()) == 4500
    assert torch.equal(labels != y, noisy)
    counts = torch.bincount((labels - y)[noisy] % 5, minlength=5)
    assert counts[0] == 0
    assert counts[1:].min() > 1000  # 1125 expected, deviation 29
    assert torch.equal(label_noise(y, 5, 0.5, 1).labels, labels)
    assert not torch.equal(label_noise(y, 5, 0.5, 2).labels, labels)


def test_deciles_are_equal_parts_by_rank():
    scores = torch.rand(100, generator=torch.Generator().manual_seed(0))
    part = deciles(scores)
    assert torch.bincount(part).tolist() == [10] * 10
    assert all(scores[part == k].max() < scores[part == k + 1].min() for k in range(9))
    assert torch.bincount(deciles(torch.ones(23), 4)).tolist() == [6, 6, 6, 5]


def test_spurious_coordinates():
    y = torch.arange(200) % 2
    x, attribute = with_spurious(torch.zeros(200, 3), y, agreement=0.9, coordinates=2, amplitude=0.5, seed=3)
    assert int((attribute == y).sum()) == 180
    assert torch.equal(x[:, 3], attribute - 0.5)
    assert torch.equal(x[:, 3], x[:, 4])
    assert torch.equal(with_spurious(x, y, 1).attribute, y)
    assert torch.equal(with_spurious(x, y, 0).attribute, 1 - y)


def test_balanced_sets_take_what_the_rarest_pair_has():
    """Waterbirds has 56 training images of one pair, so that 180 of each are impossible: correction 16."""
    label = torch.tensor([0] * 300 + [1] * 256)
    attribute = torch.tensor([0] * 200 + [1] * 100 + [0] * 56 + [1] * 200)
    chosen = balanced(label, attribute, each=180, seed=1)
    assert torch.bincount((2 * label + attribute)[chosen]).tolist() == [56] * 4
    assert len(set(chosen.tolist())) == len(chosen)
    assert torch.bincount((2 * label + attribute)[balanced(label, attribute, 20)]).tolist() == [20] * 4


def blobs(n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    centres = torch.tensor([[2.0, 0], [-2.0, 0], [0, 2.0]])
    return centres[y] + 0.4 * torch.randn(n, 2, generator=generator), y


def small(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def test_a_wrong_label_has_a_low_score():
    x, y = blobs()
    y = y.clone()
    y[5] = (y[5] + 1) % 3
    scores, left_out = estimate_cscores(
        lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), (x, y), (0.3, 0.6), 8, steps=40, lr=0.05
    )
    assert scores[5] < 0.2
    assert scores.sort().values[3:].mean() > 0.9
    assert left_out.float().mean() == pytest.approx(8 * (0.7 + 0.4), abs=0.01)


@pytest.mark.parametrize("batch", [None, 7])
def test_one_program_and_one_network_after_the_other_agree(batch: int | None):
    options = {"fractions": (0.3,), "repeats": 8, "steps": 20, "lr": 0.05, "batch": batch, "seed": 2}

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))

    stacked = estimate_cscores(plain, blobs(), stacked=True, **options)
    alone = estimate_cscores(plain, blobs(), stacked=False, **options)
    assert torch.equal(stacked.left_out, alone.left_out)
    assert torch.equal(stacked.scores, alone.scores)


def test_scores_of_a_model_with_noise_leave_the_random_state():
    state = torch.get_rng_state()
    scores, _ = estimate_cscores(lambda: small(0.2), blobs(), (0.3,), 8, steps=30, lr=0.05)
    assert torch.equal(torch.get_rng_state(), state)
    assert scores.mean() > 0.8


def test_a_score_is_of_networks_that_did_not_see_the_example():
    """A network that only remembers what it saw gets everything right that it saw, and has a score of zero."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(20, 2))
            with torch.no_grad():
                self.table[:, 1] = 1e-3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table[x[:, 0].long()]

    x, y = torch.arange(20.0).unsqueeze(1), torch.zeros(20, dtype=torch.int64)
    scores, _ = estimate_cscores(Memory, (x, y), (0.4,), 8, steps=30, lr=0.1, stacked=False)
    assert scores.max() == 0


def test_yin_yang_labels_and_regions():
    points = torch.tensor([[0.9, 0.9], [0.9, -0.9], [0.5, -0.5], [-0.5, 0.5], [-0.5, -0.5], [0.5, -0.75], [0.0, 0.0]])
    assert yin_yang_labels(points).tolist() == [-1, 1, -1, 1, 1, -1, 1]
    assert yin_yang_labels(points, "left").tolist() == [-1, 1, 1, 1, -1, 1, 1]
    assert easy(points).tolist() == [True, False, False, False, True, False, False]
    assert easy(points, "left").tolist() == [True, True, True, False, False, True, False]
    grid = yin_yang_grid(100)
    assert grid.x.abs().max() < 1
    assert float((grid.y != torch.where(grid.x[:, 1] <= 0, 1.0, -1.0)).double().mean()) == pytest.approx(
        2 * torch.pi * 0.3**2 / 4, rel=0.02
    )
    x, y = yin_yang(500, seed=3)
    assert torch.equal(y, yin_yang_labels(x))
    assert x.abs().max() <= 1
    assert x.std(0).min() > 0.5
    assert torch.equal(yin_yang(500, 3).x, x)
    assert not torch.equal(yin_yang(500, 4).x, x)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: label_noise(torch.tensor([0, 5]), classes=3),
        lambda: label_noise(torch.tensor([0, 1]), classes=2, fraction=1.5),
        lambda: deciles(torch.rand(5)),
        lambda: deciles(torch.tensor([1.0, float("nan")]), 2),
        lambda: with_spurious(torch.zeros(3, 2), torch.tensor([0, 1, 2]), 0.9),
        lambda: balanced(torch.tensor([0, 1]), torch.tensor([0, 1])),
        lambda: estimate_cscores(small, blobs(), (1.0,), 3),
        lambda: estimate_cscores(small, blobs(), (0.9,), 1),
        lambda: estimate_cscores(small, (blobs()[0], blobs()[1].float()), (0.5,), 3),
        lambda: yin_yang(0, 0),
    ],
)
def test_bad_input(wrong):
    with pytest.raises(InputError, match=WORDED):
        wrong()


def test_unknown_variant():
    with pytest.raises(NameLookupError, match="diagonal"):
        yin_yang(10, 0, "right")


def test_a_number_that_is_no_number_of_classes():
    with pytest.raises(InputError, match=r"label_noise\(labels, classes=10, fraction=0.15\)"):
        label_noise(torch.zeros(4, dtype=torch.int64), classes=1)


def test_a_model_in_the_place_of_what_makes_it():
    with pytest.raises(InputError, match="a function that makes one"):
        estimate_cscores(nn.Linear(2, 2), (torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)))


def test_whole_numbers_get_no_spurious_coordinates():
    with pytest.raises(InputError, match="floating-point"):
        with_spurious.__wrapped__(torch.zeros(4, 2, dtype=torch.uint8), torch.arange(4) % 2, agreement=1)
