"""``scale="adam"``: updates of AdamW's size, at AdamW's rate, whatever the loss was multiplied by."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError, LayerwiseError
from layerwise.optim.step.update import MOST_CHANGE

pytestmark = [
    pytest.mark.usefixtures("untyped"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
    pytest.mark.filterwarnings("ignore:.*the empirical Fisher matrix"),
]
MEMBERS: dict[str, dict[str, Any]] = {
    "KFAC": {}, "EKFAC": {}, "FOOF": {}, "Shampoo": {}, "SOAP": {"skip_first": False},
    "Muon": {"orthogonalize": "polar"}, "MahalanobisSpectral": {"orthogonalize": "polar"},
}  # fmt: skip
LR, DECAY, WORDS = 3e-3, 0.1, 11


class Tokens(nn.Module):
    """An embedding, a norm layer, matrices with biases, and a head; [N, T] to [N, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 12), nn.LayerNorm(12)
        self.up, self.down, self.head = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


def tokens(seed: int = 0) -> Tokens:
    torch.manual_seed(seed)
    return Tokens().double()


def make(name: str, model: nn.Module, **options: Any) -> lw.optim.Layerwise:
    return getattr(lw.optim, name)(model, **{"lr": LR, "weight_decay": DECAY, **MEMBERS[name], **options})


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(WORDS, (16, 5), generator=torch.Generator().manual_seed(step))
    return x, (3 * x + 1) % WORDS


def mean_loss(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.flatten(0, 1), y.flatten())


def square_loss(f: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(f, F.one_hot(y, WORDS).to(f.dtype))


def pixel_loss(f: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, F.one_hot(y, WORDS).to(f.dtype))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(
    name: str,
    loss: Callable[[Tensor, Tensor], Tensor],
    times: float = 1.0,
    parts: int = 1,
    steps: int = 8,
    **options: Any,
) -> Tensor:
    """Weights after some steps of a loss times a number, in accumulated parts of a batch."""
    model = tokens()
    opt = make(name, model, **options)
    for step in range(steps):
        opt.zero_grad()
        for x, y in zip(*(t.chunk(parts) for t in batch(step)), strict=True):
            (times * loss(model(x), y) / parts).backward()
        opt.step()
    return flat(model)


# --- the size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in MEMBERS), *((name, {"betas": (0.8, 0.95)}) for name in ("KFAC", "Muon"))],
)
def test_matrices_move_as_far_as_adamw_moves_them_and_the_rest_just_so(name: str, options: dict[str, Any]):
    """The same gradients for both, five steps; a clip, if there is one, is for matrices."""
    models = [tokens(), tokens()]
    own = make(name, models[0], **options)
    adamw = torch.optim.AdamW(models[1].parameters(), lr=LR, weight_decay=DECAY, eps=1e-12, **options)
    own.fallback.eps = 1e-12  # type: ignore[attr-defined]
    matrices = {"up.weight", "down.weight", "head.weight"}
    for step in range(5):
        x, y = batch(step)
        before = {k: p.detach().clone() for k, p in models[1].named_parameters()}
        with torch.no_grad():
            for p, q in zip(*(m.parameters() for m in models), strict=True):
                p.copy_(q)
        for model, opt in zip(models, (own, adamw), strict=True):
            opt.zero_grad()
            mean_loss(model(x), y).backward()
            opt.step()
        for (key, p), q in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
            kept = before[key] * (1 - LR * DECAY)
            if key in matrices:
                assert float((p - kept).norm()) == pytest.approx(
                    float((q - kept).norm()), rel=2e-3
                )  # ε is larger: relative
                assert float((p - q).norm()) > 0.1 * float((q - kept).norm())
            else:
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


def test_a_clip_leaves_norms_biases_and_embeddings_alone():
    models = [tokens(), tokens()]
    for model, clip in zip(models, (None, 1e-12), strict=True):
        opt = make("KFAC", model, clip=clip, weight_decay=0.0)
        mean_loss(model(batch(0)[0]), batch(0)[1]).backward()
        opt.step()
    start = tokens().state_dict()
    for (key, p), q in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        if key in ("up.weight", "down.weight", "head.weight"):
            assert float((q - start[key]).norm()) < 1e-2 * float((p - start[key]).norm())
        else:
            assert torch.equal(p, q)


@pytest.mark.parametrize("name", MEMBERS)
def test_no_step_changes_a_matrix_by_more_than_a_fifth(name: str):
    """At a rate of 10; one that begins at zero counts as one that torch initialises."""
    model = tokens()
    with torch.no_grad():
        model.down.weight.zero_()
        model.up.weight.mul_(100)
    opt = make(name, model, lr=10.0, weight_decay=0.0)
    for step in range(3):
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        opt.zero_grad()
        mean_loss(model(batch(step)[0]), batch(step)[1]).backward()
        opt.step()
        for key in ("up.weight", "down.weight", "head.weight"):
            p, old = model.get_parameter(key).detach(), before[key]
            bound = MOST_CHANGE * max(float(old.norm()), (len(old) / 3) ** 0.5)
            assert float((p - old).norm()) <= bound * (1 + 1e-6)
    assert model.down.weight.abs().max() > 0


# --- the scale of the loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [mean_loss, pixel_loss, square_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", MEMBERS)
def test_the_scale_of_the_loss_is_of_no_account(name: str, loss: Callable[[Tensor, Tensor], Tensor]):
    """Times 1e-3 and 1e3, a sum over tokens, accumulated ×4: the same weights to rounding, nothing declared.

    SOAP's is larger: it divides what is left of a gradient in directions of which there is hardly any by its size.
    """
    expected = trained(name, loss)
    tolerance = 1e-6 if name == "SOAP" else 1e-9
    assert (expected - flat(tokens())).norm() > 0.1
    others: list[dict[str, Any]] = [{"times": 1e-3}, {"times": 1e3}, {"times": 80.0}, {"parts": 4}]
    for other in others:
        assert float((trained(name, loss, **other) - expected).abs().max()) < tolerance, other


@pytest.mark.parametrize("name", [*MEMBERS, "SOAP of the paper", "Muon by products"])
def test_a_power_of_two_changes_no_bit(name: str):
    options: dict[str, Any] = {
        "SOAP of the paper": {"skip_first": True}, "Muon by products": {"orthogonalize": "newton_schulz"}
    }.get(name, {})  # fmt: skip
    name = name.split()[0]
    assert torch.equal(trained(name, mean_loss, 2.0**-10, **options), trained(name, mean_loss, **options))


@pytest.mark.parametrize("loss", [mean_loss, square_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "Shampoo"])
def test_a_grad_scaler_need_not_be_declared(name: str, loss: Callable[[Tensor, Tensor], Tensor]):
    """Its scale doubles every other step, and is in the output gradients, though no longer in the gradients."""
    model = tokens()
    opt, scaler = make(name, model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(8):
        opt.zero_grad()
        x, y = batch(step)
        scaler.scale(loss(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() > 2.0**10
    assert float((flat(model) - trained(name, loss)).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"loss_average": "tokens"}, 1.0),
        ({"loss_average": None}, 80.0),
        ({"loss_average": "examples"}, 5.0),
        ({"accumulate": 4}, 0.25),
        ({"loss_average": "tokens", "accumulate": 2}, 0.5),
    ],
)
@pytest.mark.parametrize("scale", ["adam", "formula"])
def test_what_is_declared_and_so_is_accepted(options: dict[str, Any], times: float, scale: str):
    trained("KFAC", mean_loss, times, steps=2, scale=scale, likelihood="categorical", **options)


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"loss_average": "examples"}, 1.0),
        ({"loss_average": None}, 1.0),
        ({"loss_average": "tokens"}, 0.01),
        ({"accumulate": 4}, 1.0),
        ({"grad_scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "loss_average": "tokens"}, 1.0),
    ],
)
@pytest.mark.parametrize("scale", ["adam", "formula"])
def test_what_is_declared_and_contradicted_is_an_error(options: dict[str, Any], times: float, scale: str):
    said = next(iter(options))
    with pytest.raises(LayerwiseError, match=rf"{said}=.*gradient at the model's output \(16 examples, 80 positions\)"):
        trained("KFAC", mean_loss, times, steps=2, scale=scale, **options)


# --- options and state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEMBERS)
def test_a_run_that_is_resumed_goes_on_as_it_was(name: str):
    expected = trained(name, mean_loss)
    model = tokens()
    opt = make(name, model)
    for step in range(8):
        if step == 3:
            saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
            model = tokens(1)
            model.load_state_dict(weights)
            opt = make(name, model)
            opt.load_state_dict(saved)
        opt.zero_grad()
        mean_loss(model(batch(step)[0]), batch(step)[1]).backward()
        opt.step()
    assert torch.equal(flat(model), expected)


def test_options_that_do_not_go_together():
    for options, words in (
        ({"scale": "rms"}, "scale='rms'"),
        ({"graft": "adam"}, "graft='adam' with scale"),
        ({"loss_average": "words"}, "loss_average='words'"),
        ({"betas": (0.9, 0.95), "scale": "formula"}, "which has no moments of AdamW"),
        ({"betas": 0.9}, r"betas=0\.9\. Expected two numbers"),
        ({"betas": (0.9, 1.0)}, "betas=1.0"),
    ):
        with pytest.raises(InputError, match=words):
            make("KFAC", tokens(), **options)
    with pytest.raises(InputError, match='scale="adam" for sgd'):
        lw.optim.SGD(tokens(), scale="adam")


@pytest.mark.parametrize(
    ("option", "words"),
    [("fused", "Leave fused out: steps are"), ("wieght_decay", "mean 'weight_decay'"), ("zzz", "help")],
)
def test_options_of_others_and_misspelt_ones(option: str, words: str):
    with pytest.raises(TypeError, match=words):
        lw.optim.Muon(tokens(), **{option: True})


@pytest.mark.parametrize(("name", "rate"), [("KFAC", 3e-2), ("EKFAC", 3e-2), ("FOOF", 1e-2), ("SOAP", 3e-3)])
def test_the_bare_formula_is_one_word_away(name: str, rate: float):
    opt = getattr(lw.optim, name)(tokens(), scale="formula")
    assert opt.param_groups[0]["lr"] == rate
    assert getattr(lw.optim, name)(tokens()).param_groups[0]["lr"] == 1e-3
    if name in ("KFAC", "EKFAC"):
        assert "clip=kl 0.001" in repr(opt)
