"""Anchor vectors: the log partition function and its fits against plain computations, controls, refusals."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import layerwise as lw
from layerwise.foundations.errors import InputError, MemoryBudgetError, NameLookupError
from layerwise.selfsup.anchors.corpus import batches, token_ids, windows
from layerwise.selfsup.anchors.least_squares import nearest, several
from layerwise.selfsup.anchors.log_partition import Dictionary
from layerwise.studies.anchor_vectors.text import made_up
from layerwise.studies.anchor_vectors.word_model import Training


class Recurrent(nn.Module):
    """Embeddings, a GRU (so that states depend on what came before), a layer norm, a head."""

    def __init__(self, words: int = 60, width: int = 8, bias: bool = False, change=None):
        super().__init__()
        self.words, self.mix = nn.Embedding(words, width), nn.GRU(width, width, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=bias)
        self.change = change or (lambda z: z)

    def states(self, x):
        return self.norm(self.mix(self.words(x))[0])

    def forward(self, x):
        return self.change(self.head(self.states(x)))


@pytest.mark.parametrize("k", [(0,), (0, 1, 5), (3, 40), (59,)])  # 40 and 59 of 60 words are sorted, 5 are not
def test_log_bulk_partition_is_a_sum_over_sorted_words(k):
    z = 4 * torch.randn(7, 60)
    z[0] = 0  # ties
    sorted_ = z.double().sort(dim=1, descending=True).values
    plain = torch.stack([sorted_[:, each:].logsumexp(1) for each in k], dim=1)
    assert torch.allclose(lw.selfsup.log_bulk_partition(z, k), plain, rtol=0, atol=1e-12)


def test_no_digits_are_lost_where_one_word_is_certain():
    z = torch.zeros(1, 100)
    z[0, 7] = 90.0  # e⁹⁰ + 99 − e⁹⁰ would be 0
    assert float(lw.selfsup.log_bulk_partition(z, [1])) == pytest.approx(np.log(99), rel=1e-14)


def test_one_logit_that_is_nan_is_not_the_likeliest():
    z = torch.randn(2, 60)
    z[0, 3] = torch.nan
    for k in (1, 40):  # not sorted, sorted
        assert lw.selfsup.log_bulk_partition(z, [k]).isnan().flatten().tolist() == [True, False]


def test_fits_are_those_of_plain_least_squares():
    """Means and residuals over halves, from numpy on the whole matrix; one coordinate is very large."""
    h, atoms = torch.randn(300, 6), torch.randn(50, 6) + 0.5
    h[:, 2] *= 1e3
    atoms[:, 2] *= 1e-3
    report = lw.selfsup.anchors_of(h, atoms, k=(0, 4))
    H = h.double().numpy()
    logits = np.sort((h @ atoms.T).double().numpy(), axis=1)[:, ::-1]
    for k in (0, 4):
        y = np.log(np.exp(logits[:, k:]).sum(1))
        row = report.rows[k]
        for fit, X in ((row.anchor, H), (row.with_intercept, np.hstack([H, np.ones((300, 1))]))):
            everywhere = np.linalg.lstsq(X, y, rcond=None)[0]
            half = np.linalg.lstsq(X[:150], y[:150], rcond=None)[0]
            left = X[150:] @ half - y[150:]
            assert fit.mse == pytest.approx(np.mean((X @ everywhere - y) ** 2), rel=1e-5)
            assert fit.heldout_mse == pytest.approx(np.mean(left**2), rel=1e-5)
            assert fit.r2 == pytest.approx(1 - np.mean(left**2) / y[150:].var(), abs=1e-5)
            assert fit.max_error == pytest.approx(np.abs(left).max(), rel=1e-5)
        assert row.variance == pytest.approx(y.var(), rel=1e-6)
        assert row.bulk_probability == pytest.approx(np.exp(y - np.log(np.exp(logits).sum(1))).mean(), rel=1e-6)
        along = H @ atoms.double().mean(0).numpy()
        constant = (y - along)[:150].mean()
        assert row.mean_atom == pytest.approx(1 - np.mean((y - along - constant)[150:] ** 2) / y[150:].var(), abs=1e-4)
        line = np.polyfit(along[:150], y[:150], 1)
        assert row.mean_atom_slope == pytest.approx(line[0], rel=1e-4)
        mean = H @ H[:150].mean(0)
        line = np.polyfit(mean[:150], y[:150], 1)
        assert row.mean_state == pytest.approx(
            1 - np.mean((y - np.polyval(line, mean))[150:] ** 2) / y[150:].var(), abs=1e-4
        )
        assert row.shuffled_positions < 0.2
        whole = np.linalg.lstsq(H, y, rcond=None)[0]
        assert np.allclose(report.anchors[k][0].numpy() * H.std(0), whole * H.std(0), atol=1e-5)


def test_equal_atoms_are_their_own_anchor():
    u = torch.randn(5)
    report = lw.selfsup.anchors_of(torch.randn(200, 5), u.expand(30, 5).clone(), k=(0, 10), controls=False)
    row = report.rows[10]
    assert row.with_intercept.mse < 1e-10
    assert row.anchor.mse > 1  # log 20 is missing
    assert row.mean_atom == pytest.approx(1, abs=1e-6)
    assert row.mean_atom_slope == pytest.approx(1, abs=1e-5)


def test_states_are_what_the_head_sees_and_every_position_counts_once():
    model, ids = Recurrent(), torch.randint(60, (230,))
    report = lw.selfsup.anchors(model, ids, head="head", k=(0, 5), window=40, stride=15)
    parts = list(windows(ids, 40, 15, 230))
    counted = [part.batch[0, part.first :].tolist() for part in parts]
    assert list(itertools.chain(*counted)) == ids.tolist()
    assert all(part.first >= 25 for part in parts[1:])  # what precedes a position: at least 40 − 15 tokens
    h = torch.cat([model.states(part.batch)[0, part.first :] for part in parts]).detach()
    other = lw.selfsup.anchors_of(h, model.head.weight.detach(), k=(0, 5))
    assert report.rows[5].anchor.mse == pytest.approx(other.rows[5].anchor.mse, rel=1e-4)
    logits = torch.cat([model(part.batch)[0, part.first :] for part in parts])[:-1].detach()
    assert report.perplexity == pytest.approx(float(functional.cross_entropy(logits, ids[1:]).exp()), rel=1e-4)
    assert report.positions == 230


def test_windows_and_batches_are_the_same_as_ids():
    model, ids = Recurrent(), torch.randint(60, (20, 12))
    found = [
        lw.selfsup.anchors(model, corpus, head=model.head, k=(0, 5), controls=False).rows[5].anchor.mse
        for corpus in (ids, [(part,) for part in ids.split(7)], [ids[:5], ids[5:]])
    ]
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)
    rows = {"input_ids": ids.tolist()}  # as a tokenizer gives them; this model calls them x
    read = [token_ids(c, None, 60) for c in (ids.numpy().astype(np.uint16), ids.tolist(), list(ids))]
    assert all(each is not None and torch.equal(each, ids) for each in read)
    (window,) = batches(rows, 60)
    assert torch.equal(window.batch["input_ids"], ids)
    text = token_ids({"input_ids": [4, 5]}, None, 60)
    assert text is not None
    assert text.tolist() == [4, 5]


class Positions(Recurrent):
    """Says how long its context is."""

    config = type("Config", (), {"n_positions": 12})()


def test_a_bias_is_a_column_of_the_dictionary():
    model, ids = Recurrent(bias=True), torch.randint(60, (40, 12))
    report = lw.selfsup.anchors(model, ids, head="head", k=(0, 5), controls=False)
    assert report.width == 9
    row = report.rows[5]
    assert row.anchor.mse == pytest.approx(row.with_intercept.mse, rel=1e-5)  # the 1 of the bias is an intercept
    h = model.states(ids).flatten(0, 1).detach()
    wide, atoms = torch.cat([h, torch.ones(480, 1)], 1), torch.cat([model.head.weight, model.head.bias[:, None]], 1)
    other = lw.selfsup.anchors_of(wide, atoms.detach(), k=(0, 5), controls=False)
    assert row.anchor.mse == pytest.approx(other.rows[5].anchor.mse, rel=1e-4)


def test_controls_keep_what_they_should():
    atoms = torch.randn(80, 6) + 1
    own = Dictionary(atoms=atoms, bias=torch.randn(80))
    assert torch.allclose(own.gaussian().atoms.norm(dim=1), atoms.norm(dim=1))
    assert float(own.gaussian().atoms.mean().abs()) < 0.3
    shuffled = own.shuffled().atoms
    assert torch.equal(shuffled.sort(0).values, atoms.sort(0).values)
    assert not torch.equal(shuffled, atoms)
    assert not torch.equal(shuffled - shuffled.mean(0), (atoms - atoms.mean(0))[torch.randperm(80)])


def test_two_anchors_for_two_clusters():
    """States of two kinds, each with its own line; one anchor cannot have both."""
    h = torch.cat([torch.randn(400, 5).double(), torch.ones(400, 1)], 1)
    which = torch.rand(400) < 0.4
    v = torch.randn(2, 6).double()
    v[:, -1] = torch.tensor([0.0, 80.0])
    y = torch.where(which, h @ v[0], h @ v[1])
    found = several(h, y, 2)
    assert torch.allclose(found[found[:, -1].argsort()], v, atol=1e-9)
    assert nearest(h, y, found)[0].abs().max() < 1e-9
    report = lw.selfsup.anchors_of(h, torch.randn(30, 6).double(), k=(0, 3), n_anchors=2)
    row = report.rows[3]
    assert row.several is not None
    assert row.several.mse < row.anchor.mse
    assert report.anchors[3].shape == (2, 6)
    assert 0 < row.several_shuffled < 1  # the choice alone explains much
    assert "anchors leaves" in str(report)


def test_a_trained_model_has_something_to_find_and_an_untrained_one_has_not():
    """A transformer of one block on made-up text: the next word depends on a topic that lasts."""
    text, training = made_up(200, 8000, seed=0), Training(width=16, heads=2, depth=1, length=16, steps=80, lr=5e-3)
    windows = text.test[:1280].view(80, 16)
    options = {"head": "head", "k": (0, 50)}
    report = lw.selfsup.anchors(training.train(text, seed=0), windows, **options)
    row, random = report.rows[50], report.controls["gaussian"][50]
    assert row.variance > 4 * random.variance
    assert row.with_intercept.r2 > 0.9
    assert row.with_intercept.r2 > row.mean_state
    assert row.shuffled_positions < 0.1
    assert "nothing to find" not in report.verdict()
    nothing = lw.selfsup.anchors(training.start(200, seed=0), windows, **options)
    assert "nothing to find" in nothing.verdict()
    assert nothing.rows[50].variance < 0.1 * row.variance
    assert nothing.perplexity > 1.2 * report.perplexity
    printed = str(nothing)
    assert all(word in printed for word in ("variance", "mean atom", "gaussian", "shuffled", "perplexity"))
    assert "give more text" in str(dataclasses.replace(nothing, positions=50))


def test_a_model_is_measured_in_eval_mode_and_left_as_it_was():
    model, ids = Recurrent(), torch.randint(60, (20, 12))
    model.norm = nn.Sequential(model.norm, nn.Dropout(0.5))
    model.mix.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    report = lw.selfsup.anchors(model, ids, head="head", k=(0, 5))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not model.mix.training
    assert not model.head._forward_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    again = lw.selfsup.anchors(model.eval(), ids, head="head", k=(0, 5))
    assert report.rows[5].anchor.mse == pytest.approx(again.rows[5].anchor.mse, rel=1e-5)


def cap(z):
    return 0.5 * torch.tanh(z / 0.5)


def test_changed_logits_are_refused_unless_the_change_is_given():
    model, ids = Recurrent(change=cap), torch.randint(60, (40, 12))
    with pytest.raises(InputError, match="pass the same change as transform="):
        lw.selfsup.anchors(model, ids, head="head", k=(0, 5))
    with pytest.raises(InputError, match=r"transform\(h @ W.T\)"):
        lw.selfsup.anchors(model, ids, head="head", k=(0, 5), transform=lambda z: z * 2)
    report = lw.selfsup.anchors(model, ids, head="head", k=(0, 5), transform=cap, controls=False)
    capped = cap(model(ids).flatten(0, 1)).detach()  # once more: idempotent only if it was not applied
    z = model(ids).flatten(0, 1).detach()
    assert report.rows[0].mean == pytest.approx(float(z.double().logsumexp(1).mean()), abs=1e-5)
    assert report.rows[0].mean != pytest.approx(float(capped.double().logsumexp(1).mean()), abs=1e-5)


class Tokens(dict):
    """A tokenizer with more words than it uses."""

    def encode(self, text):
        return [self[word] for word in text.split()]


def test_a_tokenizer_that_does_not_fit_is_one_clear_error():
    model = Recurrent()
    words = Tokens({f"w{i}": i for i in range(60)})
    text = " ".join(f"w{i % 60}" for i in range(100))
    assert lw.selfsup.anchors(model, text, tokenizer=words, head="head", k=(0, 5)).positions == 100
    cases = {
        "a tokenizer of 61 tokens for an embedding of 60 rows": (text, Tokens({**words, "w60": 60})),
        "token ids from 0 to 60 for an embedding of 60 rows": (
            text,
            lambda t: [60 if w == "w3" else 0 for w in t.split()],
        ),
        "token ids from -1": (torch.arange(-1, 59), None),
        "text without a tokenizer": (text, None),
        "a corpus of shape": (torch.rand(40), None),
        "a corpus of type int": (3, None),
        "an empty corpus": ([], None),
        "the tokenizer made no tokens": (text, lambda t: []),
        "rows of 2 to 3 token ids": ([[1, 2, 3], [1, 2]], None),
        "token ids from 3 to 60": ([torch.tensor([[3, 60]])], None),
    }
    for words_of_error, (corpus, tokenizer) in cases.items():
        with pytest.raises(InputError, match=words_of_error):
            lw.selfsup.anchors(model, corpus, tokenizer=tokenizer, head="head", k=(0, 5))


def test_bad_options_are_refused(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    model, ids = Recurrent(), torch.randint(60, (40, 12))

    def broken(h=None, **options):
        h = torch.randn(100, 5) if h is None else h
        return lambda: lw.selfsup.anchors_of(h, torch.randn(30, 5), **{"k": (0, 3), **options})

    def of(corpus=ids, **options):
        return lambda: lw.selfsup.anchors(model, corpus, **{"head": "head", "k": (0, 5), **options})

    nan = torch.full((100, 5), torch.nan)
    cases = {
        "k=": [of(k=(0, 60)), of(k=(5, 5)), of(k=()), of(k=(-1,)), broken(k=(30,))],
        "positions for": [of(ids[:1]), broken(torch.randn(10, 5)), broken(n_anchors=9)],
        "n_anchors=0": [of(n_anchors=0)],
        "not finite": [broken(nan)],
        "what its output embedding is": [of(head=None)],
        "not a module of the model": [of(head=nn.Linear(8, 60))],
        "without a matrix": [of(head="norm")],
        "chunk=0": [of(chunk=0)],
        "positions=": [of(positions=1), of(positions=500.0)],
        "states of shape": [broken(torch.randn(100, 6)), broken(torch.randn(2, 50, 5))],
        "bias of shape": [broken(bias=torch.randn(29))],
        "following": [
            broken(following=torch.zeros(99, dtype=torch.long)),
            broken(following=torch.full((100,), 30)),
        ],
        "a context of 12": [
            lambda: lw.selfsup.anchors(Positions(), ids.view(20, 24), head="head"),
            lambda: lw.selfsup.anchors(Positions(), [ids.view(20, 24)], head="head"),
            lambda: lw.selfsup.anchors(Positions(), ids, head="head", window=13),
        ],
        "stride=": [of(ids.flatten(), window=10, stride=11)],
    }
    for message, calls in cases.items():
        for call in calls:
            with pytest.raises(InputError, match=message):
                call()
    assert list(broken(k=3)().rows) == [3]
    assert list(broken(k=None)().rows) == [0, 10]
    with pytest.raises(NameLookupError, match="Did you mean 'head'"):
        of(head="haed")()
    with torch.no_grad():
        model.head.weight[3, 2] = torch.nan
    with pytest.raises(InputError, match=r"differ from h @ W\.T by nan"):
        of()()


def test_states_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    model = Recurrent()
    monkeypatch.setattr(model, "forward", lambda x: pytest.fail("was called"))
    ids = torch.zeros(2**24, dtype=torch.long)  # half a gigabyte of states of width 8
    with pytest.raises(MemoryBudgetError, match="Pass fewer positions="):
        lw.selfsup.anchors(model, ids, head="head", k=(0, 5), positions=2**24, memory=2**20)
