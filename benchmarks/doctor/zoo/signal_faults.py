"""Networks by hand whose units or signals are at fault: dead, saturated, equal, vanishing, exploding.

`sharp-encoder` and `zero-kernels` were written after thresholds were chosen and missed at first; what they showed was
mended, and they count as seen (`tuned`) since.
"""

import torch
from torch import nn
from torch.nn import functional as F

from doctor.case import Case, parameter
from doctor.data import channels_first, images, sequences, text, vectors
from doctor.zoo.networks import GPT, Encoder, Recurrent, ResidualMLP, Vision, cnn, conv1d, he, mlp
from doctor.zoo.patient import patient


@patient("dead-units", "MLP")
def dead_relus() -> Case:
    model = mlp()
    parameter(model, "2.bias")[torch.rand(64) < 0.8] -= 12
    return Case(model, vectors())


@patient("dead-units", "CNN")
def dead_channels() -> Case:
    model = cnn()
    parameter(model, "3.bias")[torch.rand(16) < 0.7] -= 20
    return Case(model, images())


@patient("dead-units", "transformer")
def dead_feed_forward() -> Case:
    model = GPT(nonlinearity=F.relu)
    for block in model.blocks:
        parameter(block, "up.bias")[torch.rand(128) < 0.9] -= 10
    return Case(model, text())


@patient("dead-units", "1-d CNN", tuned=False)
def dead_1d_channels() -> Case:
    x, y = sequences()
    model = conv1d()
    parameter(model, "2.bias")[torch.rand(24) < 0.75] -= 15
    return Case(model, (channels_first(x), y))


@patient("dead-units", "vision transformer", tuned=False)
def dead_vision() -> Case:
    model = Vision(nonlinearity=nn.ReLU)
    parameter(model, "perceptron.0.bias")[torch.rand(96) < 0.6] -= 8
    return Case(model, images())


@patient("saturated-units", "MLP")
def saturated_sigmoids() -> Case:
    model = mlp((20, 64, 64, 5), nn.Sigmoid)
    parameter(model, "0.weight").mul_(30)
    parameter(model, "2.weight").mul_(30)
    return Case(model, vectors())


@patient("saturated-units", "CNN")
def saturated_tanh() -> Case:
    model = cnn(nonlinearity=nn.Tanh)
    parameter(model, "3.weight").mul_(40)
    return Case(model, images())


@patient("saturated-units", "RNN", tuned=False)
def saturated_rnn() -> Case:
    model = Recurrent(nn.RNN)
    for name, _ in model.rnn.named_parameters():
        parameter(model.rnn, name).mul_(12)
    return Case(model, sequences())


@patient("vanishing-gradients", "deep MLP")
def deep_sigmoids() -> Case:
    return Case(mlp((20, *[48] * 9, 5), nn.Sigmoid), vectors())


@patient("vanishing-gradients", "deep CNN", tuned=False)
def deep_sigmoid_cnn() -> Case:
    layers: list[nn.Module] = [nn.Conv2d(1, 12, 3, padding=1), nn.Sigmoid()]
    for _ in range(7):
        layers += [nn.Conv2d(12, 12, 3, padding=1), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(108, 4))
    return Case(he(model, 1.0), images())


@patient("vanishing-activations", "deep MLP")
def small_weights() -> Case:
    model = mlp((20, *[64] * 6, 5))
    for place in (2, 4, 6, 8, 10):
        parameter(model[place], "weight").mul_(0.2)
    return Case(model, vectors())


@patient("vanishing-activations", "CNN", tuned=False)
def faint_kernels() -> Case:
    model = cnn()
    parameter(model, "3.weight").mul_(0.02)
    parameter(model, "6.weight").mul_(0.02)
    return Case(model, images())


@patient("exploding-activations", "residual MLP")
def exploding_residuals() -> Case:
    return Case(ResidualMLP(20, 48, 10, 5, norm=False, gain=2.5), vectors())


@patient("exploding-activations", "transformer")
def residual_stream_without_norms() -> Case:
    model = GPT(norm=False, depth=8)
    for block in model.blocks:
        parameter(block, "down.weight").mul_(3.5)
        parameter(block, "proj.weight").mul_(3.5)
    return Case(model, text())


@patient("exploding-activations", "deep MLP", tuned=False)
def large_weights() -> Case:
    model = mlp((20, *[64] * 5, 5))
    for place in range(2, len(model) - 1, 2):
        parameter(model[place], "weight").mul_(4)
    return Case(model, vectors())


@patient("exploding-gradients", "deep MLP")
def chaotic_tanh() -> Case:
    model = mlp((20, *[32] * 30, 5), nn.Tanh)
    for place in range(2, len(model) - 1, 2):
        parameter(model[place], "weight").mul_(3.2)
    return Case(model, vectors())


@patient("identical-units", "MLP")
def constant_initialisation() -> Case:
    model = mlp()
    parameter(model, "2.weight").fill_(0.03)
    return Case(model, vectors())


@patient("identical-units", "1-d CNN")
def zero_kernels() -> Case:
    x, y = sequences()
    model = conv1d()
    parameter(model, "2.weight").zero_()
    return Case(model, (channels_first(x), y))


@patient("collapsed-attention", "transformer")
def attention_without_scaling() -> Case:
    model = GPT()
    for block in model.blocks:
        parameter(block, "qkv.weight")[:64].mul_(12)
    return Case(model, text())


@patient("collapsed-attention", "torch's transformer encoder")
def sharp_encoder() -> Case:
    model = Encoder()
    for layer in model.encoder.layers:
        parameter(layer, "self_attn.in_proj_weight")[:64].mul_(15)
    return Case(model, sequences())


@patient("collapsed-attention", "vision transformer", tuned=False)
def sharp_vision() -> Case:
    model = Vision()
    parameter(model, "q.weight").mul_(25)
    parameter(model, "k.weight").mul_(25)
    return Case(model, images())


@patient("output-scale", "CNN")
def large_last_layer() -> Case:
    model = cnn()
    parameter(model[-1], "weight").mul_(60)
    return Case(model, images())


@patient("output-scale", "wide GELU MLP", tuned=False)
def gelu_with_large_head() -> Case:
    model = mlp((20, 160, 160, 5), nn.GELU)
    parameter(model[-1], "weight").mul_(50)
    return Case(model, vectors())


@patient("not-finite", "MLP")
def overflow() -> Case:
    model = mlp()
    parameter(model, "4.weight")[5, 5] = float("nan")
    return Case(model, vectors())
