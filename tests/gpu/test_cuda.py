"""The same numbers on a GPU: run with `make test-gpu` on a machine that has one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.layers.rules.conv import ConvRule
from layerwise.testing.cases import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALWAYS, IN_TURN = ("dense", "kfac", "ekfac"), ("block", "diag", "quasidiag", "lowrank")
"""Structures that a case is tried with: on a CPU all of them are; of the second kind, each case takes one here."""


def likelihood_of(case: Case) -> tuple[lw.likelihoods.Likelihood, torch.Tensor | None]:
    options = {k: v for k, v in case.options.items() if v is not None and k not in ("mask", "examples")}
    if case.likelihood != "categorical":
        options.pop("class_axis", None)
    return lw.likelihoods.resolve(case.likelihood, **options), case.options.get("mask")


def moved(tree, device):
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {k: moved(v, device) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(moved(v, device) for v in tree)
    return tree


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda_equals_cpu(case: Case) -> None:
    model, x, y = case.make(0)
    law, mask = likelihood_of(case)
    structures = (*ALWAYS, IN_TURN[CASES.index(case) % len(IN_TURN)])
    v = lw.ParamVector.randn(model, generator=0).flat()
    expected = {}
    for structure in structures:
        matrix = lw.fisher(model, (x, y, mask), law, structure=structure, estimator="exact")
        expected[structure] = matrix.solve(v, damping=1e-2), matrix.trace()
    model, batch = model.cuda(), moved((x, y, mask), "cuda")
    for structure in structures:
        matrix = lw.fisher(model, batch, law, structure=structure, estimator="exact")
        assert matrix.device.type == "cuda"
        step, trace = matrix.solve(v.cuda(), damping=1e-2), matrix.trace()
        torch.testing.assert_close(step.cpu(), expected[structure][0], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(trace.cpu(), expected[structure][1], rtol=1e-8, atol=0)


class Cell(nn.Module):
    """A recurrent cell, whose biases a CPU takes one for each example; a GPU's kernel does not."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


def test_what_was_found_on_a_cpu_does_not_hold_on_a_gpu() -> None:
    """`model.cuda()` keeps modules and parameters: the device alone tells that it must be examined again."""
    torch.manual_seed(0)
    model, x, y = Cell().double(), torch.randn(3, 5, 3, dtype=torch.float64), torch.randint(3, (3,))
    expected = lw.fisher(model, (x, y), structure="dense", estimator="exact").trace()
    found = lw.fisher(model.cuda(), (x.cuda(), y.cuda()), structure="dense", estimator="exact").trace()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=0)


def small_net() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10)).cuda()
    return model, torch.randn(64, 16, device="cuda"), torch.randint(10, (64,), device="cuda")


def test_same_labels_on_both_devices() -> None:
    model, x, y = small_net()
    on_gpu = lw.fisher(model, (x, y), structure="kfac", seed=3).trace()
    on_cpu = lw.fisher(model.cpu(), (x.cpu(), y.cpu()), structure="kfac", seed=3).trace()
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-4, atol=0)


def test_bf16_and_autocast_keep_factors_in_float32() -> None:
    model, x, y = small_net()
    reference = lw.fisher(model, (x, y), structure="kfac", seed=0).trace()
    with torch.autocast("cuda", torch.bfloat16):
        cast = lw.fisher(model, (x, y), structure="kfac", seed=0)
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast.trace(), reference, rtol=5e-2, atol=0)
    half = lw.fisher(model.bfloat16(), (x.bfloat16(), y), structure="ekfac", seed=0)
    assert half.dtype == torch.float32
    assert bool(torch.isfinite(half.solve(lw.ParamVector.randn(model), damping=1e-3).flat()).all())


def test_batch_on_another_device_is_refused() -> None:
    model, x, y = small_net()
    with pytest.raises(lw.LayerwiseError, match=r"Got a batch on cpu.*cuda"):
        lw.fisher(model, (x.cpu(), y.cpu()))


def test_hessian_and_implicit_through_attention() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().cuda().eval()
    x, y = torch.randn(3, 5, 8, dtype=torch.float64, device="cuda"), torch.randint(8, (3, 5), device="cuda")

    def loss(f, t):
        return F.cross_entropy(f.flatten(0, 1), t.flatten())

    v = lw.ParamVector.randn(layer, generator=0)
    H = lw.hessian(layer, (x, y), loss=loss)
    cpu = lw.hessian(layer.cpu(), (x.cpu(), y.cpu()), loss=loss)
    expected = (cpu @ v.to("cpu")).flat()
    layer.cuda()
    torch.testing.assert_close((H @ v).flat().cpu(), expected, rtol=1e-8, atol=1e-12)


def test_random_state_of_the_device_is_left_alone() -> None:
    model, x, y = small_net()
    model.insert(1, torch.nn.Dropout(0.5))
    model.train()
    before = torch.cuda.get_rng_state()
    lw.fisher(model, (x, y), structure="ekfac")
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_patches_of_half_precision(half: torch.dtype, stride: int, groups: int) -> None:
    """Multiplied as they are, summed in float32."""
    x = torch.randn(32, 16, 9, 9, device="cuda").to(half)
    conv = nn.Conv2d(16, 8, 3, stride=stride, padding=1, groups=groups).cuda()
    rule = ConvRule()
    for found, exact in (
        (rule.input_moment(conv, "", x), rule.input_moment(conv, "", x.double())),
        (rule.channel_moment(conv, "", x), rule.channel_moment(conv, "", x.double())),
    ):
        assert found is not None
        assert exact is not None
        for one, expected in zip(found[:2], exact[:2], strict=True):
            assert one.dtype == torch.float32
            # Tensor cores cut off what they add in float32, 2⁻²³ at each of some hundred additions.
            torch.testing.assert_close(one.double(), expected, rtol=5e-5, atol=1e-3)
        assert found[2] == exact[2]
