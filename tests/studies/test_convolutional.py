"""Convolutional networks at the start: scales of what goes forward and of what comes back, and their layers."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn

from layerwise.foundations.errors import NameLookupError
from layerwise.studies.fisher_geometry.convolutional import (
    BLOCKS,
    InBfloat16,
    ResNet,
    network,
    standardized,
    three_convolutions,
)

IMAGES = {
    "vgg11": (3, 32, 32),
    "vgg19": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "resnet34": (3, 32, 32),
    "three-convolutions": (1, 8, 8),
}


@pytest.fixture(autouse=True)
def drawn():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("seed", [0, 1])
def test_scales_stay_over_sixteen_blocks_without_batch_norm(seed: int):
    torch.manual_seed(seed)
    model = ResNet(BLOCKS[34])
    moments: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, out: moments.append(float(out.detach().square().mean())))
    x, y = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    first = float(model.first(x).detach().square().mean())
    nn.functional.cross_entropy(model(x), y).backward()
    assert len(moments) == 16
    assert all(first / 3 < moment < 3 * first for moment in moments)
    stages = pairwise(accumulate(BLOCKS[34], initial=0))
    norms = [
        float(torch.stack([p.grad.square().sum() for p in model.blocks[low:high].parameters()]).sum().sqrt())
        for low, high in stages
    ]
    assert max(norms) < 10 * min(norms)


def test_the_last_convolution_of_a_block_has_a_tenth_of_the_variance():
    for block in ResNet(BLOCKS[18]).blocks:
        first, _, last = block.inner
        for layer, gain in ((first, 2.0), (last, 0.2), *((layer, 1.0) for layer in block.past)):
            fan_in = layer.weight[0].numel()
            assert float(layer.weight.detach().var()) * fan_in == pytest.approx(gain, rel=0.05)
            assert not layer.bias.any()


@pytest.mark.parametrize("name", IMAGES)
def test_networks_have_batch_norm_if_asked_for(name: str):
    for batch_norm in (False, True):
        model = network(name, batch_norm, width=8)
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert len(norms) == (len(convolutions) if batch_norm else 0)
        assert all((layer.bias is None) == batch_norm for layer in convolutions)
        assert model(torch.randn(2, *IMAGES[name])).shape == (2, 10)


def test_sizes_are_those_of_the_architectures():
    layers = {"vgg11": (8, 1), "vgg19": (16, 1), "resnet18": (20, 1), "resnet34": (36, 1), "three-convolutions": (3, 1)}
    for name, (convolutions, linear) in layers.items():
        modules = list(network(name, width=4).modules())
        assert sum(isinstance(m, nn.Conv2d) for m in modules) == convolutions
        assert sum(isinstance(m, nn.Linear) for m in modules) == linear
    assert [m.out_channels for m in three_convolutions(5) if isinstance(m, nn.Conv2d)] == [5, 10, 10]


def test_unknown_networks_are_answered():
    with pytest.raises(NameLookupError, match="Did you mean 'resnet34'"):
        network("resnet43")


def test_images_are_standardized_by_others():
    x = torch.rand(50, 3, 4, 4) * torch.tensor([1.0, 2.0, 3.0])[:, None, None] + 1
    made = standardized(x)
    torch.testing.assert_close(made.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.std((0, 2, 3)), torch.ones(3))
    torch.testing.assert_close(standardized(x[:5], like=x), made[:5])
    assert standardized(torch.ones(2, 1, 4, 4)).isfinite().all()


def test_in_bfloat16_only_products_are_rounded():
    torch.manual_seed(0)
    plain = network("three-convolutions", width=16)
    x = torch.randn(5, 1, 8, 8)
    rounded = InBfloat16(plain)(x)
    assert rounded.dtype == torch.float32
    assert 1e-5 < float((rounded - plain(x)).detach().abs().max() / plain(x).detach().abs().max()) < 3e-2
    rounded.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in plain.parameters())
