"""Networks by hand with nothing wrong."""

import torch
from torch import nn
from torch.nn import functional as F

from doctor.case import Case
from doctor.data import channels_first, images, sequences, text, values, vectors
from doctor.zoo.networks import GPT, Encoder, Mixer, Recurrent, ResidualMLP, Vision, cnn, conv1d, mlp
from doctor.zoo.patient import patient


@patient(None, "MLP")
def healthy_mlp() -> Case:
    model = mlp()
    return Case(model, vectors(), torch.optim.SGD(model.parameters(), lr=0.05))


@patient(None, "CNN")
def healthy_cnn() -> Case:
    model = cnn()
    return Case(model, images(), torch.optim.Adam(model.parameters(), lr=1e-3))


@patient(None, "transformer")
def healthy_transformer() -> Case:
    model = GPT()
    return Case(model, text(), torch.optim.AdamW(model.parameters(), lr=1e-3))


@patient(None, "residual MLP")
def healthy_residual() -> Case:
    return Case(ResidualMLP(20, 48, 6, 5), vectors())


@patient(None, "GRU")
def healthy_gru() -> Case:
    model = Recurrent()
    return Case(model, sequences(), torch.optim.Adam(model.parameters(), lr=1e-3))


@patient(None, "regression MLP")
def healthy_regression() -> Case:
    return Case(mlp((16, 48, 48, 3), nn.Tanh), values())


@patient(None, "MLP, half trained")
def healthy_trained() -> Case:
    model, (x, y) = mlp(), vectors()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(100):
        rows = torch.arange(step * 96, step * 96 + 96) % len(x)
        opt.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        opt.step()
    return Case(model, (x, y), opt)


@patient(None, "CNN with batch norm", tuned=False)
def fresh_batch_norm() -> Case:
    model = cnn(norm=True)
    return Case(model, images(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


@patient(None, "MLP-mixer", tuned=False)
def fresh_mixer() -> Case:
    return Case(Mixer(), images())


@patient(None, "torch's transformer encoder", tuned=False)
def fresh_encoder() -> Case:
    model = Encoder()
    return Case(model, sequences(), torch.optim.AdamW(model.parameters(), lr=1e-3))


@patient(None, "1-d CNN", tuned=False)
def fresh_conv1d() -> Case:
    x, y = sequences()
    return Case(conv1d(), (channels_first(x), y))


@patient(None, "wide GELU MLP", tuned=False)
def fresh_gelu() -> Case:
    model = mlp((20, 160, 160, 5), nn.GELU)
    return Case(model, vectors(), torch.optim.Adam(model.parameters(), lr=1e-3))


@patient(None, "LSTM", tuned=False)
def fresh_lstm() -> Case:
    return Case(Recurrent(nn.LSTM), sequences())


@patient(None, "vision transformer", tuned=False)
def fresh_vision() -> Case:
    model = Vision()
    return Case(model, images(), torch.optim.AdamW(model.parameters(), lr=1e-3))
