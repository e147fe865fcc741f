"""The models whose tangent kernels are measured, each with its examples; kernels of 1000 to 2560 rows.

`kernel_problem(name)` gives the size that is timed; `kernel_problem(name, tiny=True)` the same architecture in a
size at which the kernel can be computed one gradient at a time.
"""

import itertools

import torch
from models import GPT, Problem, problem
from torch import Tensor, nn

DEFAULT_MODELS = ("mlp", "resnet", "transformer")
ON_REQUEST = ("transformer-tokens", "vgg19", "vgg19-plain")
"""A kernel over all tokens; VGG-19 with batch norm and without, for a GPU."""
VGG_STAGES = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))  # convolutions, channels


class NextToken(GPT):
    """The logits that follow the last position, [N, vocabulary]."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h))[:, -1])


def vgg(stages: tuple[tuple[int, int], ...], classes: int, batch_norm: bool) -> nn.Sequential:
    """3×3 convolutions, a 2×2 maximum after each stage, one linear layer; eval mode, so no examples are mixed."""
    modules: list[nn.Module] = []
    c_in = 3
    for count, c in stages:
        for _ in range(count):
            modules.append(nn.Conv2d(c_in, c, 3, padding=1))
            modules += [nn.BatchNorm2d(c), nn.ReLU()] if batch_norm else [nn.ReLU()]
            c_in = c
        modules.append(nn.MaxPool2d(2))
    for module in modules:
        if isinstance(module, nn.Conv2d):  # or the signal dies out over sixteen layers without batch norm
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(c_in, classes)).eval()


def _mlp_problem(tiny: bool) -> Problem:
    d, width, n = (6, 5, 7) if tiny else (784, 512, 256)
    sizes = (d, width, width, 10)
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    return Problem("mlp", model, torch.randn(n, d), torch.randint(10, (n,)), "categorical")


def _transformer_problem(tiny: bool) -> Problem:
    width, heads, vocabulary, n, length = (8, 2, 5, 4, 6) if tiny else (64, 4, 16, 64, 32)
    model = NextToken(2, width, heads, vocabulary, length)
    x = torch.randint(vocabulary, (n, length))
    return Problem("transformer", model, x, torch.randint(vocabulary, (n,)), "categorical")


def _tokens_problem(tiny: bool) -> Problem:
    width, heads, vocabulary, n, length = (8, 2, 5, 3, 4) if tiny else (64, 4, 8, 8, 16)
    model = GPT(2, width, heads, vocabulary, length)
    x = torch.randint(vocabulary, (n, length))
    return Problem("transformer-tokens", model, x, torch.randint(vocabulary, (n, length)), "categorical")


def _vgg_problem(tiny: bool, name: str) -> Problem:
    stages, side, n = (((1, 3), (2, 4)), 8, 4) if tiny else (VGG_STAGES, 32, 100)
    model = vgg(stages, 10, batch_norm=name == "vgg19")
    if tiny:
        model[-1] = nn.Linear(4 * (side // 4) ** 2, 10)
    return Problem(name, model, torch.randn(n, 3, side, side), torch.randint(10, (n,)), "categorical")


def kernel_problem(name: str, device: str = "cpu", tiny: bool = False) -> Problem:
    """The named problem, the same at every call."""
    if name == "resnet":
        return problem("resnet", device, tiny).first(100, "resnet")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name.startswith("vgg19"):
            return _vgg_problem(tiny, name).to(device)
        make = {"mlp": _mlp_problem, "transformer": _transformer_problem, "transformer-tokens": _tokens_problem}
        return make[name](tiny).to(device)
