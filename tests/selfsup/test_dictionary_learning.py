"""Training by steps one can follow, masks, losses against their definitions, the learner and its conventions."""

import math
import pickle
import subprocess
import sys

import jaxtyping
import numpy as np
import pytest
import torch

from layerwise import selfsup
from layerwise.foundations.errors import InputError, LayerwiseError
from layerwise.selfsup import DictionaryLearner, heldout_masked_loss, masked_omp_loss, omp, reconstruction_loss
from layerwise.selfsup.sparse_coding.data import start_dictionary
from layerwise.selfsup.sparse_coding.losses import represented
from layerwise.selfsup.sparse_coding.stopping import stopped
from layerwise.selfsup.sparse_coding.training import sums_by_index, sums_by_product, train_dictionaries


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What users meet: annotations are checked in tests alone."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def small(n=60, d=20, p=30, k=3, sigma=0.1, held_out=40, seed=0):
    return selfsup.sample_sparse_data(d, p, k, n, sigma, held_out=held_out, generator=seed)


# --- data and recovery ----------------------------------------------------------------------------------------


def test_samples_are_of_the_model():
    data = small(n=4000, sigma=0.2)
    torch.testing.assert_close(data.A.norm(dim=0), torch.ones(30, dtype=torch.float64))
    torch.testing.assert_close(data.codes.values.norm(dim=1), torch.ones(4000, dtype=torch.float64))
    assert all(len(set(row)) == 3 for row in data.codes.indices[:50].tolist())
    noise = data.Y - represented(data.codes, data.A)
    assert float(noise.std()) == pytest.approx(0.2, rel=0.03)  # of 80,000 numbers: some five deviations
    counts = torch.bincount(data.codes.indices.flatten(), minlength=30) / 400
    assert float((counts - 1).abs().max()) < 0.25  # each atom in one sample of ten: 400 ± 19
    loud = selfsup.sample_sparse_data(20, 30, 3, 4000, 0.0, signal=5.0, generator=1)
    assert float(loud.codes.values.std()) == pytest.approx(5, rel=0.05)
    assert not torch.equal(small(seed=1).Y, small(seed=2).Y)
    assert torch.equal(small(seed=1).Y, small(seed=1).Y)


def test_recovery_error_by_its_definition():
    A, B = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 12, dtype=torch.float64)
    unit = [part / part.norm(dim=0) for part in (A, B)]
    least = [min(float((a - c * b).square().sum()) for b in unit[1].T for c in (1, -1)) for a in unit[0].T]
    assert float(selfsup.recovery_error(A, B, "sqeuclidean")) == pytest.approx(sum(least) / 5)
    assert float(selfsup.recovery_error(A, B)) == pytest.approx(sum(least) / 10)
    assert float(selfsup.recovery_error(A, -3 * A[:, torch.randperm(5)])) == pytest.approx(0, abs=1e-12)
    double = torch.cat([A[:, :1], A[:, :1], A[:, 2:]], 1)  # one atom twice, one missing
    assert float(selfsup.recovery_error(A, double, matched=True)) > 0.01
    swapped = A[:, [1, 0, 3, 4, 2]]
    assert float(selfsup.recovery_error(A, swapped, matched=True)) == pytest.approx(0, abs=1e-12)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("B", "options", "says"),
    [
        (torch.randn(5, 8), {}, "Transpose"),
        (torch.zeros(8, 5), {}, "zero or not finite"),
        (torch.zeros(8), {}, "atoms as columns"),
        (torch.zeros(8, 5).double(), {}, "one type"),
        (torch.randn(8, 3), {"matched": True}, "at least as many"),
        (torch.randn(8, 5), {"metric": "cosin"}, "Did you mean 'cosine'"),
    ],
)
def test_bad_dictionaries_to_compare(B, options, says):
    with pytest.raises(LayerwiseError, match=says):
        selfsup.recovery_error(torch.randn(8, 5), B, **options)


# --- losses ---------------------------------------------------------------------------------------------------


def test_losses_by_their_definitions():
    data, visible = small(), torch.arange(20) >= 2
    B = start_dictionary("sample", 40, data)
    z = omp(data.Y[:, visible], B[visible], 3).dense(40)
    expected = (data.Y - z @ B.mT)[:, ~visible].square().sum(1).mean()
    torch.testing.assert_close(masked_omp_loss(data.Y, B, 3, visible), expected)
    everything = (data.Y - omp(data.Y, B, 3).dense(40) @ B.mT).square().sum(1).mean()
    torch.testing.assert_close(reconstruction_loss(data.Y, B, 3), everything)


def test_the_held_out_loss_hides_every_coordinate_once():
    data = small()
    B = start_dictionary("sample", 40, data)
    parts = torch.randperm(20, generator=torch.Generator().manual_seed(3)).view(10, 2)
    hidden = [masked_omp_loss(data.Y, B, 3, ~torch.isin(torch.arange(20), part)) for part in parts]
    found = heldout_masked_loss(data.Y, B, 3, 0.1, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, torch.stack(hidden).mean())
    stacked = heldout_masked_loss(
        torch.stack([data.Y] * 2), torch.stack([B, B.flip(1)]), 3, generator=torch.Generator().manual_seed(3)
    )
    torch.testing.assert_close(stacked, found.expand(2))


@pytest.mark.usefixtures("unchecked")
def test_nothing_hidden_and_too_much_hidden():
    data = small()
    with pytest.raises(InputError, match=r"torch\.bool"):
        masked_omp_loss(data.Y, data.A, 3, (torch.arange(20) > 3).long())  # ~1 is −2
    with pytest.raises(InputError, match="no hidden row"):
        masked_omp_loss(data.Y, data.A, 3, torch.ones(20, dtype=torch.bool))
    with pytest.raises(InputError, match="at least k visible rows"):
        heldout_masked_loss(data.Y, data.A, 3, 0.9)
    with pytest.raises(InputError, match=r"in \(0, 1\)"):
        heldout_masked_loss(data.Y, data.A, 3, 1.5)


# --- training -------------------------------------------------------------------------------------------------


def by_hand(Y, B, k, batches, masks, lr=1e-3):
    """Autograd on one batch after the other; the code is a constant."""
    B = B.clone().requires_grad_()
    opt = torch.optim.Adam([B], lr=lr)
    for batch, hidden in zip(batches, masks, strict=True):
        y, visible = Y[batch], torch.ones(len(B), dtype=torch.bool)
        visible[hidden] = False
        z = omp(y[:, visible], B.detach()[visible], k).dense(B.shape[1])
        rows = ~visible if len(hidden) else visible
        opt.zero_grad()
        (y - z @ B.T)[:, rows].square().sum(1).mean().backward()
        opt.step()
        with torch.no_grad():
            B /= B.norm(dim=0)
    return B.detach()


def test_steps_by_hand_standard_and_masked_in_one_program():
    data = small()
    B, batches = start_dictionary("sample", 40, data), [slice(0, 25), slice(25, 50), slice(50, 60)] * 2
    drawn = torch.Generator().manual_seed(4)
    masks = [torch.rand(3, 20, generator=drawn).topk(2, -1).indices for _ in range(2)]
    masks = [row for epoch in masks for row in epoch]
    random = [torch.Generator(), torch.Generator().manual_seed(4)]
    found = train_dictionaries(
        torch.stack([data.Y] * 2), torch.stack([B] * 2), 3, hidden=[0, 2], generators=random, batch_size=25, epochs=2
    )
    for one, hidden in zip(found, ([torch.tensor([], dtype=torch.long)] * 6, masks), strict=True):
        torch.testing.assert_close(one, by_hand(data.Y, B, 3, batches, hidden))
    assert not torch.allclose(found[0], found[1])


def test_a_fixed_mask_leaves_visible_rows_alone(monkeypatch):
    """Up to the division of columns by their norms: ratios within the visible rows stay."""
    data = small()
    B, visible = start_dictionary("sample", 40, data), torch.ones(1, 20, dtype=torch.float64)
    visible[:, :2] = 0
    from layerwise.selfsup.sparse_coding import training

    monkeypatch.setattr(training, "_masks", lambda hidden, generators, batches, like: [visible] * batches)
    found = train_dictionaries(data.Y[None], B[None], 3, hidden=[2], generators=[torch.Generator()], epochs=5)[0]
    before, after = B[2:], found[2:]
    torch.testing.assert_close(after / after.norm(dim=0), before / before.norm(dim=0))
    assert not torch.allclose(found[:2], B[:2], atol=1e-4)


def test_problems_do_not_mix_and_watching_can_stop():
    one, two = small(), small(seed=1)
    starts = [start_dictionary("local", 40, data) for data in (one, two)]
    make = lambda *seeds: [torch.Generator().manual_seed(seed) for seed in seeds]  # noqa: E731
    both = train_dictionaries(
        torch.stack([one.Y, two.Y]), torch.stack(starts), 3, hidden=[2, 2], generators=make(1, 2), epochs=3
    )
    alone = train_dictionaries(two.Y[None], starts[1][None], 3, hidden=[2], generators=make(2), epochs=3)
    torch.testing.assert_close(both[1:], alone)
    seen: list[int] = []
    train_dictionaries(
        two.Y[None],
        starts[1][None],
        3,
        hidden=[0],
        generators=make(2),
        epochs=9,
        every=2,
        watch=lambda epoch, B: seen.append(epoch) or epoch == 6,
    )
    assert seen == [0, 2, 4, 6]


def test_dictionaries_that_are_watched_are_kept_and_norms_of_the_start_do_not_matter():
    data, kept = small(n=30), []
    learner = DictionaryLearner(40, 3, epochs=2, callback=lambda epoch, B: kept.append(B)).fit(data.Y)
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(kept[1], learner.dictionary_)
    options = {"hidden": [0], "generators": [torch.Generator()], "epochs": 1}
    one, three = (train_dictionaries(data.Y[None], size * data.A[None], 3, **options) for size in (1, 3))
    torch.testing.assert_close(one, three)


def test_normalized_scores_train_choose_and_stop():
    """With a mask, each atom's visible part has a norm of its own; without one, norms are 1."""
    data, seen = small(n=100), torch.arange(20) >= 2
    visible = data.A[seen] / data.A[seen].norm(dim=0)
    z = omp(data.Y[:, seen], visible, 3).dense(30) / data.A[seen].norm(dim=0)
    expected = (data.Y - z @ data.A.mT)[:, ~seen].square().sum(1).mean()
    torch.testing.assert_close(masked_omp_loss(data.Y, data.A, 3, seen, normalize=True), expected)
    parts = torch.randperm(20, generator=torch.Generator().manual_seed(3)).view(10, 2)
    masks = [~torch.isin(torch.arange(20), part) for part in parts]
    losses = torch.stack([masked_omp_loss(data.Y, data.A, 3, mask, normalize=True) for mask in masks])
    random = torch.Generator().manual_seed(3)
    torch.testing.assert_close(
        heldout_masked_loss(data.Y, data.A, 3, 0.1, generator=random, normalize=True), losses.mean()
    )
    plain, other = (
        DictionaryLearner(30, 3, epochs=1, normalize=on, early_stopping=True, init=data.A).fit(data.Y)
        for on in (False, True)
    )
    assert plain.history_["heldout_loss"][0] != other.history_["heldout_loss"][0]
    trained = [
        DictionaryLearner(30, 3, epochs=1, normalize=on, init=data.A).fit(data.Y).dictionary_ for on in (False, True)
    ]
    assert not torch.allclose(*trained)
    other.dictionary_ = plain.dictionary_
    assert plain.score(data.Y) != other.score(data.Y)


def test_scores_are_of_one_kind_for_all_fractions():
    data = small(n=100)
    learner = DictionaryLearner(30, 3, epochs=1).fit(data.Y)
    expected = -float(heldout_masked_loss(data.Y, learner.dictionary_, 3, 0.1)) / 2  # a coordinate of the two
    for fraction in (0, 0.1, 0.4):
        assert learner.set_params(hidden_fraction=fraction).score(data.Y) == pytest.approx(expected)
    assert learner.set_params(k=19).score(data.Y) < 0  # one can be hidden
    with pytest.raises(InputError, match="Take a smaller k"):
        learner.set_params(k=20).score(data.Y)


def test_rows_that_are_atoms_at_the_start_are_not_trained_on(monkeypatch):
    Y, seen = small(n=40).Y, []
    Y[::2] = 0
    from layerwise.selfsup.sparse_coding import learner

    monkeypatch.setattr(learner, "train_dictionaries", lambda Y, B, k, **options: seen.append((Y, B)) or B)
    DictionaryLearner(10, 3).fit(Y)
    ((trained, B),) = seen
    assert trained.shape[1] == 30
    rows = trained[0][trained[0].norm(dim=1) > 0]
    assert float((rows / rows.norm(dim=1, keepdim=True) @ B[0]).max()) < 1 - 1e-6


def test_both_ways_to_sum_codes_and_errors():
    """That of a GPU, too, wherever this runs."""
    indices = torch.stack([torch.randperm(7)[:3] for _ in range(10)]).view(2, 5, 3)
    values, error = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    expected = torch.zeros(2, 5, 7, dtype=torch.float64).scatter_(-1, indices, values).mT @ error
    for total in (sums_by_index, sums_by_product):
        total(indices, values, error, found := torch.full((2, 7, 4), 9.0, dtype=torch.float64))
        torch.testing.assert_close(found, expected)


def test_starts():
    data = small()
    local = start_dictionary("local", 40, data)
    assert torch.equal(local[:, :30], data.A)
    torch.testing.assert_close(local[:, 30:] * data.held_out[:10].norm(dim=1), data.held_out[:10].T)
    zero = data._replace(held_out=0 * data.held_out)
    with pytest.raises(InputError, match="that are zero"):
        start_dictionary("sample", 3, zero)
    with pytest.raises(InputError, match="signal=nan"):
        selfsup.sample_sparse_data(5, 5, 2, 3, 0.1, signal=math.nan)
    with pytest.raises(InputError, match="A with NaN"):
        selfsup.sample_sparse_data(5, 5, 2, 3, 0.1, A=torch.full((5, 5), math.nan))
    for name, atoms, says in (
        ("sample", 41, "one for each atom"),
        ("samples", 10, "Unknown start='samples'. Did you mean 'sample'"),
        ("local", -1, "at least one"),
    ):
        with pytest.raises(InputError, match=says):
            start_dictionary(name, atoms, data)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden": [18]}, "so that k can be seen"),
        ({"hidden": [0, 0]}, "one of each a problem"),
        ({"batch_size": 0}, "at least one of each"),
        ({"k": 21}, "1 ≤ k ≤ 20"),
    ],
)
def test_trainings_that_cannot_be(options, says):
    data = small()
    given = {"k": 3, "hidden": [2], "generators": [torch.Generator()]} | options
    with pytest.raises(InputError, match=says):
        train_dictionaries(data.Y[None], data.A[None], given.pop("k"), **given)


# --- the learner ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_masks_beat_the_standard_objective_with_too_many_atoms():
    """On six draws of data the errors are .21 to .23 against .17 to .19, at least .034 apart."""
    data = selfsup.sample_sparse_data(30, 40, 2, 500, 30**-0.5, dtype=torch.float32)
    options = {"n_atoms": 150, "k": 2, "epochs": 80, "batch_size": 100, "lr": 5e-3}
    errors = {
        hidden: float(
            selfsup.recovery_error(data.A, DictionaryLearner(hidden_fraction=hidden, **options).fit(data.Y).dictionary_)
        )
        for hidden in (0.0, 0.1)
    }
    assert errors[0.1] < errors[0.0] - 0.02


def test_early_stopping_keeps_the_least_held_out_loss():
    data = small(n=200, sigma=0.05)
    learner = DictionaryLearner(40, 3, lr=0.02, epochs=60, early_stopping=True, check_every=1, patience=3).fit(data.Y)
    losses = learner.history_["heldout_loss"]
    best = losses.index(min(losses))
    assert learner.n_iter_ == learner.history_["epoch"][best]
    assert best > 0
    assert len(losses) == best + 4 < 60
    assert stopped(losses, 3) == best + 3
    longer = DictionaryLearner(40, 3, lr=0.02, epochs=learner.n_iter_, early_stopping=True, patience=99).fit(data.Y)
    torch.testing.assert_close(longer.dictionary_, learner.dictionary_)


def test_the_loss_that_stops_can_be_chosen():
    data = small(n=100)
    learner = DictionaryLearner(40, 3, epochs=1, early_stopping=True, stop_by="reconstruction", check_every=1).fit(
        data.Y
    )
    plain = learner.history_["heldout_loss"]
    masked = DictionaryLearner(40, 3, epochs=1, early_stopping=True, check_every=1).fit(data.Y).history_["heldout_loss"]
    assert plain[0] > 2 * masked[0]  # of twenty coordinates, and of two
    with pytest.raises(InputError, match="Available: masked, reconstruction"):
        DictionaryLearner(stop_by="standard").fit(data.Y)


def test_another_optimizer_gets_the_matrix():
    """Plain SGD at rate η is B − η ∇, by hand; and what it is given has the shape of a matrix."""
    data, given = small(n=30, held_out=40), []

    def sgd(parameters):
        given.extend(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    B = start_dictionary("sample", 40, data)
    options = {"hidden": [0], "generators": [torch.Generator()], "epochs": 1, "batch_size": 30, "optimizer": sgd}
    found = train_dictionaries(data.Y[None], B[None], 3, **options)[0]
    z = omp(data.Y, B, 3).dense(40)
    stepped = B - 0.1 * 2 / 30 * (z @ B.T - data.Y).T @ z
    torch.testing.assert_close(found, stepped / stepped.norm(dim=0))
    assert [tuple(one.shape) for one in given] == [(40, 20)]


def test_arrays_tensors_and_inverse():
    Y = small(n=90).Y
    learner = DictionaryLearner(25, 3, epochs=3)
    tensor, array = learner.fit_transform(Y), learner.fit_transform(Y.numpy())
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, tensor.numpy())
    assert learner.components_.shape == (25, 20)
    np.testing.assert_allclose(learner.inverse_transform(array), array @ learner.components_)
    single = learner.fit(Y.float()).transform(Y.float())
    assert single.dtype == torch.float32
    assert set(single.count_nonzero(1).tolist()) == {3}
    assert learner.score(Y) < 0
    again = DictionaryLearner(25, 3, epochs=1, init=learner.components_).fit(Y)  # atoms as rows are seen to be so
    assert float(selfsup.recovery_error(learner.dictionary_.double(), again.dictionary_)) < 1e-3


@pytest.mark.parametrize(
    ("options", "X", "says"),
    [
        ({"k": 19}, torch.randn(50, 20), "1 ≤ k ≤ 18"),
        ({"n_atoms": 3, "k": 4}, torch.randn(50, 20), "1 ≤ k ≤ 3"),
        ({}, torch.full((5, 20), math.nan), "NaN"),
        ({}, torch.randn(20), "Reshape your data"),
        ({}, torch.randn(5, 1), "feature"),
        ({"hidden_fraction": 1.0}, torch.randn(5, 20), r"in \(0, 1\)"),
        ({"init": "samples"}, torch.randn(5, 20), "gauss, sample"),
        ({"init": torch.randn(4, 4)}, torch.randn(5, 20), "atoms as columns"),
        ({"lr": 0}, torch.randn(5, 20), "lr=0"),
        ({"early_stopping": True}, torch.randn(3, 20), "n_samples=3"),
        ({"early_stopping": True, "validation_fraction": math.nan}, torch.randn(9, 20), "validation_fraction=nan"),
        ({"lr": math.inf}, torch.randn(5, 20), "lr=inf"),
        ({"lr": "a"}, torch.randn(5, 20), "lr='a'"),
        ({"epochs": 2.5}, torch.randn(5, 20), "whole number"),
        ({"batch_size": 10.5}, torch.randn(5, 20), "whole number"),
        ({"n_atoms": 15.0}, torch.randn(5, 20), "whole number"),
        ({"k": 2.0}, torch.randn(5, 20), "whole number"),
        ({"init": None}, torch.randn(5, 20), "gauss, sample"),
        ({"init": torch.zeros(20, 20)}, torch.randn(5, 20), "zero or not finite"),
        ({"device": "foo"}, torch.randn(5, 20), "a device"),
        ({"random_state": "a"}, torch.randn(5, 20), "a seed"),
        ({}, torch.randn(5, 20) + 1j, "Complex"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input_of_the_learner(options, X, says):
    with pytest.raises(InputError, match=says):
        DictionaryLearner(**options).fit(X)


def test_an_unknown_parameter_and_one_that_is_not_fitted():
    with pytest.raises(LayerwiseError, match="Did you mean 'epochs'"):
        DictionaryLearner().set_params(epoch=3)
    with pytest.raises(InputError, match="not fitted"):
        DictionaryLearner().transform(torch.randn(3, 4))
    with pytest.raises(InputError) as error:
        DictionaryLearner().transform([[1.0]])
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), isinstance(again, InputError)) == (str(error.value), True)
    failed = DictionaryLearner(k=30)
    with pytest.raises(InputError, match="k=30"):
        failed.fit(torch.randn(9, 4))
    assert not failed.__sklearn_is_fitted__()
    assert repr(DictionaryLearner(5, lr=0.1)) == "DictionaryLearner(n_atoms=5, lr=0.1)"


def test_in_a_pipeline_and_a_grid_search():
    pytest.importorskip("sklearn")
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    Y = small(n=80).Y.numpy()
    pipe = make_pipeline(StandardScaler(), DictionaryLearner(epochs=2, k=2))
    assert pipe.set_output(transform="default").fit_transform(Y).shape == (80, 20)
    with pytest.raises(InputError, match="get_feature_names_out"):
        pipe.set_output(transform="pandas")
    seeds = (DictionaryLearner(k=2, epochs=1, random_state=np.random.default_rng(s)).fit(Y).components_ for s in (1, 2))
    assert not np.array_equal(*seeds)
    search = GridSearchCV(DictionaryLearner(k=2, epochs=2), {"n_atoms": [10, 25]}, cv=2).fit(Y)
    assert search.best_params_["n_atoms"] in (10, 25)


@pytest.mark.filterwarnings("ignore:Estimator DictionaryLearner does not inherit")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.slow
def test_scikit_learns_own_checks():
    """All pass; one is skipped unless SCIPY_ARRAY_API is set before SciPy is imported."""
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    found = checks.check_estimator(DictionaryLearner(epochs=3), on_fail=None, on_skip=None)
    assert [check["check_name"] for check in found if check["status"] == "failed"] == []
    assert {c["check_name"] for c in found if c["status"] == "skipped"} <= {"check_array_api_input"}
    assert sum(check["status"] == "passed" for check in found) > 40


@pytest.mark.slow  # a process that imports torch; that `import layerwise` takes nothing along is tests/test_import.py
def test_scikit_learn_is_not_imported():
    code = (
        "import sys, torch, layerwise; learner = layerwise.selfsup.DictionaryLearner(6, 1, epochs=1);"
        "learner.fit(torch.randn(20, 4)); sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- theorems -------------------------------------------------------------------------------------------------


def test_pair_dictionary_is_dense_in_planes_and_far_from_atoms():
    A = small(d=12, p=6).A
    B = selfsup.pair_dictionary(A, 8)
    torch.testing.assert_close(B.norm(dim=0), torch.ones(B.shape[1], dtype=torch.float64))
    assert float((A.T @ B).abs().max()) < math.cos(math.pi / 16) + 1e-6
    least = 1 - math.cos(math.pi / 16)
    assert least - 1e-6 < float(selfsup.recovery_error(A, B)) < 1.5 * least
    plane = A[:, 0] + 0.9 * A[:, 3]  # a random direction of a plane is near some atom
    assert float(((plane / plane.norm()) @ B).abs().max()) > math.cos(math.pi / 8)
    twice = torch.cat([A[:, :2], -3 * A[:, :1]], 1)  # two planes that are one, and a pair that has none
    basis = torch.linalg.qr(A[:, :2])[0]
    found = selfsup.pair_dictionary(twice)
    torch.testing.assert_close(basis @ (basis.T @ found), found)
    with pytest.raises(InputError, match="two or more"):
        selfsup.pair_dictionary(A, 1)


def test_exhaustive_loss_is_the_least():
    data = small(n=10, d=8, p=7, k=2)

    def left(y, columns):
        return float((y - columns @ torch.linalg.lstsq(columns, y[:, None]).solution[:, 0]).square().sum())

    by_lstsq = [min(left(y, data.A[:, [i, j]]) for i in range(7) for j in range(i)) for y in data.Y]
    assert float(selfsup.exhaustive_loss(data.Y, data.A, 2)) == pytest.approx(sum(by_lstsq) / 10)
    assert float(selfsup.exhaustive_loss(data.Y, data.A, 2)) <= float(reconstruction_loss(data.Y, data.A, 2))
    A = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert float(selfsup.exhaustive_loss(torch.tensor([[3.0, 4.0, 5.0]]), A, 3)) == pytest.approx(25)  # one atom twice
    assert float(selfsup.exhaustive_loss(torch.tensor([[3.0, 4.0, 5.0]]), A[:, :2], 2)) == pytest.approx(41)
    with pytest.raises(InputError, match="supports"):
        selfsup.exhaustive_loss(torch.randn(2, 60), torch.randn(60, 60), 6)


def test_the_oracle_is_the_conditional_mean():
    """By the joint covariance of seen and hidden coordinates, without the formula."""
    A, visible, sigma, signal = small(d=12, p=6).A, torch.arange(12) < 9, 0.3, 2.0
    support = torch.tensor([[1, 4]])
    y = torch.randn(1, 12, dtype=torch.float64)
    S = A[:, support[0]]
    covariance = signal**2 * S @ S.T + sigma**2 * torch.eye(12, dtype=torch.float64)
    expected = covariance[9:, :9] @ torch.linalg.solve(covariance[:9, :9], y[0, :9])
    options = {"sigma": sigma, "signal": signal}
    found = selfsup.oracle_prediction(y, A, support, visible, **options)
    torch.testing.assert_close(found[0], expected)
    assert not torch.allclose(selfsup.oracle_prediction(y, A, support, visible, printed=True, **options)[0], expected)
    twice = torch.cat([A[:, :1], A[:, :1]], 1)  # dependent, and no noise: least squares of least norm
    exact = selfsup.oracle_prediction(3 * A[:, :1].T, twice, torch.tensor([[0, 1]]), visible, sigma=0, signal=1.0)
    torch.testing.assert_close(exact[0], 3 * A[9:, 0])
    with pytest.raises(InputError, match="some of both"):
        selfsup.oracle_prediction(y, A, support, visible | True, **options)


def test_bounds_of_missed_supports_and_of_squares():
    """OMP on the truth misses no more supports than the bound says; the largest square is below its own."""
    mu, k, p, sigma = 0.1, 2, 20, 0.05
    loud = selfsup.sample_sparse_data(400, p, k, 2000, sigma, signal=3.0)
    assert selfsup.incoherence(loud.A) < 1 / 3
    found = omp(loud.Y, loud.A, k)
    missed = (found.indices.sort(1).values != loud.codes.indices.sort(1).values).any(1).double().mean()
    bound = selfsup.missed_support(sigma, 3.0, k, p, selfsup.incoherence(loud.A), eta=1.0)
    assert float(missed) <= bound < 1.01
    assert selfsup.least_coefficient(2 * sigma, k, p, mu) == pytest.approx(
        2 * selfsup.least_coefficient(sigma, k, p, mu)
    )
    with pytest.raises(InputError, match="less than"):
        selfsup.least_coefficient(sigma, k, p, 0.4)
    for options in ({"sigma": -0.1}, {"signal": 0.0}, {"p": 1}):
        with pytest.raises(InputError, match="Correct"):
            selfsup.missed_support(**{"sigma": 0.1, "signal": 1.0, "k": 1, "p": 9, "mu": 0.1} | options)
    largest = torch.randn(2000, 50).square().amax(1).mean()
    assert 4 < float(largest) <= selfsup.largest_chi_square(50)
