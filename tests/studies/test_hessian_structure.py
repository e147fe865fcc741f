"""Networks whose Hessians are looked at: factor forms against dense matrices, stacks against plain loops."""

import dataclasses

import pytest
import torch
from torch import nn

from layerwise.foundations.errors import InputError, NameLookupError, NumericalError
from layerwise.studies.hessian_structure import initialisation, networks
from layerwise.studies.hessian_structure.initialisation import TwoLayers
from layerwise.studies.hessian_structure.networks import Task, trained

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
    weights = [SMALL.model(seed).get_submodule("fc1").weight for seed in (0, 1)]
    assert not torch.equal(*weights)
    spread = float(Task(hidden=(200,)).model(0).get_submodule("fc1").weight.detach().var())
    assert spread == pytest.approx(2 / 264, rel=0.1)  # Xavier's
    assert not any(p.any() for name, p in SMALL.model(0).named_parameters() if name.endswith("bias"))


def test_lenet5_has_the_layers_of_the_thesis():
    task = Task(images="cifar10", network="lenet5")
    model = task.model(0)
    assert task.layers == ("conv1", "conv2", "fc1", "fc2", "fc3")
    assert [tuple(model.get_submodule(name).weight.shape) for name in task.layers] == [
        (6, 3, 5, 5),
        (16, 6, 5, 5),
        (120, 400),
        (84, 120),
        (10, 84),
    ]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert task.non_negative == task.layers[1:]


def test_bad_tasks_are_refused():
    for wrong, error in (
        ({"images": "minst"}, NameLookupError),
        ({"network": "lenet5"}, InputError),
        ({"trained_on": 5000}, InputError),
        ({"hidden": ()}, InputError),
        ({"images": "cifar10", "network": "lenet5", "batch_norm": True}, InputError),
    ):
        with pytest.raises(error, match="expected"):
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
