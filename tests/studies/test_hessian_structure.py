"""Networks whose Hessians are looked at: factor forms against dense matrices, stacks against plain loops."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from error_sentences import WORDED
from layerwise.foundations.errors import InputError, NameLookupError, NumericalError
from layerwise.studies.hessian_structure import identity, initialisation, networks, optimizers
from layerwise.studies.hessian_structure.between_models import between
from layerwise.studies.hessian_structure.initialisation import TwoLayers
from layerwise.studies.hessian_structure.measures import columns, is_led_by_one, measure, measured
from layerwise.studies.hessian_structure.networks import Task, trained
from layerwise.studies.hessian_structure.transformer import Characters

pytest.importorskip("sklearn")
SMALL = Task(hidden=(6, 5), trained_on=100, epochs=2, batch=40)

# --- random two-layer networks -------------------------------------------------------------------------------------


def test_roots_are_of_the_hessian_by_autograd():
    torch.manual_seed(0)
    W1, W2, x = torch.randn(5, 7).double(), torch.randn(3, 5).double(), torch.rand(4, 7).double()
    Q, B = initialisation._roots(W1, W2, x)
    for k in range(4):

        def loss(z, k=k):
            return nn.functional.cross_entropy(z.relu() @ W2.T, torch.tensor(k % 3))

        M = torch.autograd.functional.hessian(loss, W1 @ x[k])
        torch.testing.assert_close(B[k].mT @ B[k], M, rtol=1e-9, atol=1e-12)
        A = torch.autograd.functional.hessian(
            lambda f: nn.functional.cross_entropy(f, torch.tensor(1)), W2 @ (W1 @ x[k]).relu()
        )
        torch.testing.assert_close(Q[k].mT @ Q[k], A, rtol=1e-9, atol=1e-12)


def test_the_gram_matrix_gives_the_eigenvectors_of_the_dense_hessian():
    torch.manual_seed(0)
    S, c, n, d = 30, 3, 5, 6
    B, x = torch.randn(S, c, n).double(), 1 + torch.rand(S, d).double()
    gap, decoupled = initialisation._hessian(B, x, torch.Generator().manual_seed(0))
    M = B.mT @ B
    H = torch.stack([torch.kron(M[s], torch.outer(x[s], x[s])) for s in range(S)]).mean(0)
    approximation = torch.kron(M.mean(0), x.mT @ x / S)
    values, vectors = torch.linalg.eigh(H)
    assert gap == pytest.approx(float(values[-c] / values[1 - c]), rel=1e-6)
    others = torch.linalg.eigh(approximation)[1]
    assert decoupled == pytest.approx(initialisation.overlap(vectors[:, 1 - c :], others[:, 1 - c :]), rel=1e-6)


def test_the_printed_space_is_right_for_centred_rows_alone():
    plain, centred = (TwoLayers(n=100, inputs=800, inputs_of_hessian=50, centred=c).measured(0) for c in (False, True))
    assert plain.printed < 0.92
    assert min(plain.corrected, centred.corrected, centred.printed) > 0.99
    assert min(plain.rows, centred.rows) > 0.98
    assert plain.active > 0.26
    assert centred.active == pytest.approx(0.25, abs=1e-9)


# --- trained networks ----------------------------------------------------------------------------------------------


def plain_loop(task: Task, seed: int) -> nn.Module:
    """Training as anyone would write it."""
    from layerwise.foundations.random import stream

    model, split, generator = task.model(seed).train(), task.split(seed), stream(seed, "batches")
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    for _ in range(task.epochs):
        for chosen in torch.randperm(len(split.x), generator=generator).split(task.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(split.x[chosen]), split.y[chosen]).backward()
            optimizer.step()
    return model.eval()


@pytest.mark.parametrize("options", [{}, {"batch_norm": True}, {"random_labels": True}], ids=str)
def test_stacks_train_as_a_plain_loop_does(options):
    task = dataclasses.replace(SMALL, **options)
    for seed, model in zip((3, 4), trained(task, [3, 4]), strict=True):
        other = plain_loop(task, seed)
        assert not model.training
        for (name, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)
    assert trained(task, [4])[0] is model  # what was trained is kept


def test_seeds_share_images_and_differ_in_weights_and_random_labels():
    one, other = SMALL.split(0), SMALL.split(1)
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.y, other.y)
    assert one.x.shape == (100, 64)
    assert one.x.dtype == torch.float64
    assert float(one.x.max()) == 1
    noisy = [dataclasses.replace(SMALL, random_labels=True).split(seed).y for seed in (0, 1)]
    assert not torch.equal(*noisy)
    weights = [SMALL.model(seed).get_parameter("fc1.weight") for seed in (0, 1)]
    assert not torch.equal(*weights)
    spread = float(Task(hidden=(200,)).model(0).get_parameter("fc1.weight").detach().var())
    assert spread == pytest.approx(2 / 264, rel=0.1)  # Xavier's
    assert not any(p.any() for name, p in SMALL.model(0).named_parameters() if name.endswith("bias"))


def test_pixels_are_centred_or_from_0_to_1(monkeypatch: pytest.MonkeyPatch):
    drawn = torch.rand(50, 1, 28, 28, generator=torch.Generator().manual_seed(0)) ** 4
    monkeypatch.setattr(networks.data, "mnist", lambda split: (drawn, torch.zeros(50, dtype=torch.long)))
    networks._split.cache_clear()
    task = Task(images="mnist", trained_on=50)
    x, plain = task.split().x, dataclasses.replace(task, centred=False).split().x
    networks._split.cache_clear()
    assert (float(x.mean()), float(x.std())) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-3))
    assert torch.equal(plain, drawn.flatten(1))


def test_lenet5_has_the_layers_of_the_thesis():
    task = Task(images="cifar10", network="lenet5")
    model = task.model(0)
    assert task.layers == ("conv1", "conv2", "fc1", "fc2", "fc3")
    assert [tuple(model.get_parameter(f"{name}.weight").shape) for name in task.layers] == [
        (6, 3, 5, 5),
        (16, 6, 5, 5),
        (120, 400),
        (84, 120),
        (10, 84),
    ]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_bad_tasks_are_refused():
    mistakes: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"images": "minst"}, NameLookupError),
        ({"network": "lenet5"}, InputError),
        ({"trained_on": 5000}, InputError),
        ({"hidden": ()}, InputError),
        ({"images": "cifar10", "network": "lenet5", "batch_norm": True}, InputError),
    ]
    for wrong, error in mistakes:
        with pytest.raises(error, match=WORDED):
            Task(**wrong)
    with pytest.raises(NumericalError, match="smaller lr"):
        trained(dataclasses.replace(SMALL, lr=1e200), [0])


def test_fit_counts_right_answers():
    model = trained(SMALL, [3])[0]
    split, found = SMALL.split(3), networks.fit(SMALL, model, 3)
    with torch.no_grad():
        right = (model(split.held_x).argmax(1) == split.held_y).double().mean()
    assert found["test"] == pytest.approx(float(right))
    assert len(split.held_x) == 1697


# --- measures ------------------------------------------------------------------------------------------------------


def test_measures_are_those_of_dense_matrices():
    """Against the Hessian by autograd, and Kronecker factors by plain sums."""
    torch.manual_seed(0)
    first, last = nn.Linear(5, 4), nn.Linear(4, 3)
    model = nn.Sequential(first, nn.ReLU(), last).double()
    x, y = 0.5 + torch.rand(40, 5).double(), torch.arange(40) % 3
    found = measure(model, (x, y), "0", classes=3, leading=6)
    H = identity.dense(model, x, y)[0][:20, :20]
    with torch.no_grad():
        z = first(x)
        p = model(x).softmax(1)
    A = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    G = last.weight.detach() * (z > 0).unsqueeze(1)
    M, S = torch.einsum("nia,nij,njb->ab", G, A, G) / 40, x.mT @ x / 40
    approximation = torch.kron(M, S)
    values, vectors = torch.linalg.eigh(H)
    h, k = vectors[:, -2:], torch.linalg.eigh(approximation)[1][:, -2:]
    mats = h.mT.reshape(2, 4, 5)
    v = torch.linalg.eigh(S)[1][:, -1]
    expected = {
        "spectral": torch.linalg.matrix_norm(approximation - H, 2) / values[-1],
        "frobenius": (approximation - H).norm() / H.norm(),
        "overlap@c-1": (h.mT @ k).square().sum() / 2,
        "rank_one": torch.linalg.matrix_norm(mats, 2).mean(),
        "along_mean": (mats @ v).square().sum(1).mean(),
        "fraction": values[-2:].sum() / values.sum(),
        "gap": values[-2] / values[-3],
        "outputs/fraction": torch.linalg.eigvalsh(M)[-2:].sum() / M.trace(),
        "alignment": (v @ x.mean(0) / x.mean(0).norm()) ** 2,
    }
    for name, value in expected.items():
        assert found.values[name] == pytest.approx(float(value), rel=1e-5), name
    torch.testing.assert_close(abs(found.direction @ v), torch.ones((), dtype=torch.float64))
    assert len(columns(found.spectra, ("hessian", "outputs"))["index"]) == 4


def test_networks_are_compared_pair_by_pair():
    found = between(SMALL, [3, 4, 5], "fc1", 12)
    spaces = [measured(SMALL, seed, "fc1", leading=12).vectors for seed in (3, 4, 5)]
    pairs = [(spaces[a][:, :4].mT @ spaces[b][:, :4]).square().sum() / 4 for a, b in ((0, 1), (0, 2), (1, 2))]
    assert float(found.overlap[3]) == pytest.approx(float(sum(pairs)) / 3, rel=1e-9)
    assert found.inputs == pytest.approx(1, abs=1e-9)  # the images are the same
    assert found.theory.tolist() == pytest.approx([min(k / 6, 1) for k in range(1, 13)])
    assert (found.outputs, found.entries) == (6, 384)
    assert 1 <= found.led <= 6
    assert all(is_led_by_one(measured(SMALL, seed, "fc1", leading=12), found.led) for seed in (3, 4, 5))


def test_training_ends_at_the_loss():
    task = dataclasses.replace(SMALL, hidden=(8,))
    end = optimizers.trained_to(task, "adam", 0.02, 1.0, 500, 0)
    assert end.stopped == ""
    assert end.loss <= 1.0
    assert networks.fit(task, end.model, 0)["loss"] == pytest.approx(end.loss)
    assert end.steps % optimizers.EVERY == 0
    missed = optimizers.trained_to(task, "sgd", 1e-6, 1.0, 7, 0)
    assert missed.steps == 7
    assert "after 7 steps" in missed.stopped


def test_a_transformer_on_text_that_is_always_there():
    study = Characters(text="python", width=4, length=2)
    windows, letters = study.windows()
    assert windows.shape[1] == 3
    assert int(windows.max()) == letters - 1
    assert study.layers() == ["blocks.0.qkv", "blocks.0.projection", "blocks.0.up", "blocks.0.down", "head"]
    with pytest.raises(NameLookupError, match="shakespeare"):
        Characters(text="shakespear")
    with pytest.raises(InputError, match="multiple"):
        Characters(heads=3)
