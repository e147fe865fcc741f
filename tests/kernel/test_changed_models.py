"""What runs its model later than it was made notices that the model has changed, however it was changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_tools import close, gaussian, mlp, refused
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.kernel.fingerprint import ALONE, Fingerprint, held_by

N, P = 5, 2
X, NEW = gaussian(N, 3), gaussian(2, 3)
U = gaussian(N * P)


def _model() -> nn.Sequential:
    return mlp(3, 4, P)


def _in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight[1, 2] += 1e-9


def _through_data(model: nn.Sequential) -> None:
    model[0].weight.data.add_(1.0)


def _one_entry_through_data(model: nn.Sequential) -> None:
    model[0].weight.data[0, 0] *= 1 + 1e-15


def _other_data(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data.flip(0)


def _detached(model: nn.Sequential) -> None:
    model[0].weight.detach().numpy()[2, 1] = 7.0


def _another_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def _loaded(model: nn.Sequential) -> None:
    state = {k: t.clone() for k, t in model.state_dict().items()}
    model.load_state_dict({**state, "0.weight": state["0.weight"] * 2})


def _assigned(model: nn.Sequential) -> None:
    state = {k: t.clone() for k, t in model.state_dict().items()}
    model.load_state_dict({**state, "0.weight": state["0.weight"] * 2}, assign=True)


def _optimized(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    model(X).sum().backward()
    optimizer.step()


CHANGES: tuple[Callable[[nn.Sequential], None], ...] = (
    _in_place,
    _through_data,
    _one_entry_through_data,
    _other_data,
    _detached,
    _another_parameter,
    _loaded,
    _assigned,
    _optimized,
)


def _formed(K: Any) -> Any:
    K.matrix()
    return K


def _layer(J: lw.Jacobian) -> Tensor:
    return J.layer("0") @ gaussian(16)


LATER: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any]]] = {
    "J v": (lambda m: lw.jacobian(m, X), lambda J: J @ gaussian(26)),
    "Jᵀ u": (lambda m: lw.jacobian(m, X).T, lambda T: T @ U),
    "J": (lambda m: lw.jacobian(m, X), lambda J: J.to_dense()),
    "blocks": (lambda m: lw.jacobian(m, X), lambda J: list(J.blocks())),
    "layer of J": (lambda m: lw.jacobian(m, X), _layer),
    "a layer's J": (lambda m: lw.jacobian(m, X).per_layer()["0"], lambda J: J.to_dense()),
    "K u": (lambda m: lw.ntk(m, X), lambda K: K @ U),
    "matrix": (lambda m: lw.ntk(m, X), lambda K: K.matrix()),
    "two sets": (lambda m: lw.ntk(m, X, NEW), lambda K: K.matrix()),
    "per_layer": (lambda m: lw.ntk(m, X), lambda K: K.per_layer()),
    "diag": (lambda m: lw.ntk(m, X), lambda K: K.diag()),
    "diagonals": (lambda m: lw.ntk(m, X, NEW), lambda K: K.diagonals()),
    "eigenvalues": (lambda m: lw.ntk(m, X), lambda K: K.eigenvalues(2)),
    "solve": (lambda m: lw.ntk(m, X), lambda K: K.solve(U, 0.1)),
    "centered": (lambda m: lw.ntk(m, X).centered(), lambda K: K.matrix()),
    "normalized": (lambda m: lw.ntk(m, X).normalized(), lambda K: K @ U),
    "cross": (lambda m: _formed(lw.ntk(m, X)), lambda K: K.cross(NEW).matrix()),
    "made cross": (lambda m: lw.ntk(m, X).cross(NEW), lambda K: K @ U),
    "predict": (lambda m: _formed(lw.ntk(m, X)), lambda K: K.predict(NEW, U)),
    "centered cross": (lambda m: _formed(lw.ntk(m, X)).centered(), lambda K: K.cross(NEW)),
    "normalized cross": (lambda m: _formed(_formed(lw.ntk(m, X)).normalized()), lambda K: K.cross(NEW).matrix()),
    "eigenfunctions": (lambda m: lw.ntk(m, X).eigenfunctions(2), lambda f: f(NEW)),
    "principal components": (lambda m: lw.ntk(m, X).kernel_pca(2), lambda pca: pca.project(NEW)),
    "alignment": (lambda m: lw.ntk(m, X), lambda K: lw.alignment(K, K)),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("kind", LATER)
def test_a_change_is_noticed(kind: str, change: Callable[[nn.Sequential], None], untyped: None):
    make, ask = LATER[kind]
    model = _model()
    made = make(model)
    change(model)
    with refused(InputError, "'0.weight' has been changed since", "build it again"):
        ask(made)


@pytest.mark.parametrize("kind", LATER)
def test_nothing_has_changed(kind: str, untyped: None):
    """Also where tensors were written over with what they held."""
    make, ask = LATER[kind]
    model = _model()
    made = make(model)
    model.load_state_dict({k: t.clone() for k, t in model.state_dict().items()})
    model(X).sum().backward()
    ask(made)
    ask(made)


def test_what_was_formed_is_kept():
    model = _model()
    K = lw.ntk(model, X)
    before = K.matrix().clone()
    product = K @ U
    _through_data(model)
    assert torch.equal(K.matrix(), before)
    close(K @ U, product)
    close(K.centered().matrix(), lw.ntk(_model(), X).centered().matrix())


def test_frozen_parameters_and_buffers_count():
    """The outputs depend on them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, P)).double().eval()
    model[0].requires_grad_(False)
    for name, tensor in (("0.bias", model[0].bias), ("1.running_mean", model[1].running_mean)):
        J = lw.jacobian(model, X)
        J @ gaussian(J.shape[1])
        tensor.data.add_(1.0)
        with refused(InputError, f"'{name}' has been changed since"):
            J @ gaussian(J.shape[1])


def test_another_dtype_or_shape():
    model = _model()
    J = lw.jacobian(model, X)
    model.float()
    with refused(InputError, "has been changed since"):
        J.to_dense()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("size", [1, 255, 256, 257, ALONE, ALONE + 3])
def test_single_bits(size: int, dtype: torch.dtype):
    """Each of them, in tensors that are summed alone or with others."""
    generator = torch.Generator().manual_seed(size)
    t = torch.randn(size, generator=generator).to(dtype)
    held = {"a": torch.ones(3), "t": t, "b": torch.ones(300)}
    before = Fingerprint(held)
    words = (torch.view_as_real(t) if t.is_complex() else t).view(-1).view(torch.uint8)
    for place in torch.randint(words.numel(), (8,), generator=generator).tolist():
        words[place] ^= 1 << place % 8
        flags, names = before.compare(held)
        assert [name for name, bad in zip(names, flags[0].tolist(), strict=True) if bad] == ["t"]
        words[place] ^= 1 << place % 8
    assert not before.compare(held)[0][0].any()


def test_entries_that_change_places():
    """Sums of entries would not tell."""
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(40, 512, generator=generator)
    before = Fingerprint({"t": t})
    for other in (t.flip(0), t.flip(1), t.roll(1, 0), t.roll(256, 1), t.roll(1, 1), t.view(512, 40).mT.contiguous()):
        flags, _ = before.compare({"t": other.reshape(40, 512)})
        assert flags[0].all()


def test_layouts_do_not_matter():
    t = gaussian(2, 3, 4, 4).float()
    before = Fingerprint({"t": t})
    assert not before.compare({"t": t.to(memory_format=torch.channels_last)})[0][0].any()


def test_not_what_a_forward_rescales():
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 2))
    assert list(held_by(model)) == ["1.weight", "1.bias"]
    K = lw.ntk(model, torch.tensor([0, 1]))
    model(torch.tensor([2, 3]))
    K.matrix()
