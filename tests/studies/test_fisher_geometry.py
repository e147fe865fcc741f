"""The eigenbasis of K-FAC against per-example gradients by autograd, with nothing of the library."""

import pytest
import torch
from torch import nn

from error_sentences import NAMED
from layerwise.experiments.george2023.autoencoder import LABELS
from layerwise.foundations.errors import InputError
from layerwise.studies.fisher_geometry.along_training import AlongTraining
from layerwise.studies.fisher_geometry.autoencoder import autoencoder, method, problem
from layerwise.studies.fisher_geometry.classifiers import Classifier
from layerwise.studies.fisher_geometry.kronecker_basis import (
    KroneckerBasis,
    empirical_fisher,
    mean_correlation,
    relative_error,
    spectral_distance,
)
from layerwise.studies.fisher_geometry.theorems import of_convolution, of_linear, random_layer
from layerwise.training import search


def plain(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Second moment of the gradients of layer 2 and its two factors, example by example."""
    layer, rows, inputs, outgrads = model[2], [], [], []
    for xn, yn in zip(x, y, strict=True):
        a = model[:2](xn)
        z = layer(a)
        (g,) = torch.autograd.grad(nn.functional.cross_entropy(model[3:](z), yn), z)
        a = a.detach() if layer.bias is None else torch.cat([a.detach(), torch.ones(1, dtype=a.dtype)])
        rows.append(g.outer(a).flatten())
        inputs.append(a)
        outgrads.append(g)
    moments = [torch.stack(of) for of in (rows, inputs, outgrads)]
    F, A, G = (m.T @ m / len(x) for m in moments)
    return F, A, G


@pytest.mark.parametrize("number", range(6))
def test_matrices_are_those_of_the_formulas(number: int):
    model, x, y = random_layer(5, number)
    F, A, G = plain(model, x, y)
    basis = KroneckerBasis.of(model, "2", x, y)
    torch.testing.assert_close(empirical_fisher(model, "2", x, y), F)
    torch.testing.assert_close(basis.kfac(), torch.kron(G, A))
    torch.testing.assert_close(basis.Q.T @ basis.Q, torch.eye(len(F), dtype=F.dtype))
    U = torch.kron(torch.linalg.eigh(G)[1], torch.linalg.eigh(A)[1])
    torch.testing.assert_close(basis.scalings(F).sort()[0], (U.T @ F @ U).diagonal().sort()[0])


def test_measures():
    M = torch.diag(torch.tensor([4.0, 1.0, 0.0]))
    assert mean_correlation(M) == 0
    assert mean_correlation(torch.ones(3, 3)) == pytest.approx(1)
    assert relative_error(2 * M, M) == pytest.approx(1)
    assert spectral_distance(torch.tensor([0.0, 1.0, 4.0]), M) == pytest.approx(0)
    assert spectral_distance(torch.zeros(3), M) == pytest.approx(1)


def test_theorems_notice_what_is_no_eigenbasis(monkeypatch: pytest.MonkeyPatch):
    """With scalings that are not those of F the lemma fails, and with factors swapped the library's matrix differs."""
    monkeypatch.setattr(KroneckerBasis, "scalings", lambda self, F: self.spectrum)
    worst = [of_linear(0, number) for number in range(6)]
    assert min(of["nearer than others"] for of in worst) < 0
    assert max(of["trace"] for of in worst) > 1e-3
    assert max(of["library"] for of in worst) > 1e-3


def test_a_training_is_repeated_by_its_seed_and_snapshots_stay():
    classifier = Classifier(hidden=(5,))
    x, y = torch.randn(40, 6, dtype=torch.float64), torch.randint(10, (40,))
    runs = [dict(classifier.trained(x, y, (0, 3), seed)) for seed in (1, 1, 2)]
    weights = [[run[step][0].weight for step in (0, 3)] for run in runs]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not torch.equal(weights[0][0], weights[2][0])
    assert not torch.equal(weights[0][0], weights[0][1])


def test_convolutions():
    assert max(value for number in range(4) for value in of_convolution(1, number).values()) < 1e-10


@pytest.mark.parametrize("wrong", [{"images": "minst"}, {"activation": "sigmod"}])
def test_unknown_words_are_answered(wrong: dict):
    with pytest.raises(InputError, match=NAMED):
        Classifier(**wrong)


def test_refreshes_must_be_measured():
    with pytest.raises(InputError, match="multiple"):
        AlongTraining(every=30)


@pytest.mark.parametrize("name", LABELS)
def test_every_method_trains_the_auto_encoder(name: str):
    given = problem("digits", batch=600, epochs=2, batch_norm=name.endswith("-bn"))
    (trial,) = search(given, method(name, (0.3,), (0.1,), refresh=2), trials=1, seeds=(0,)).require().trials
    assert trial.score < trial.series["train/loss"][0]


def test_auto_encoders_mirror_their_encoders():
    sizes = [tuple(p.shape) for p in autoencoder((6, 4, 2)).parameters() if p.ndim == 2]
    assert sizes == [(4, 6), (2, 4), (4, 2), (6, 4)]
    assert not any(isinstance(m, nn.Sigmoid) for m in list(autoencoder((6, 4, 2)))[-1:])
    assert sum(isinstance(m, nn.BatchNorm1d) for m in autoencoder((6, 4, 2), batch_norm=True)) == 3
