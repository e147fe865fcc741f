"""Networks by hand of which a part is not trained, or whose rate is wrong."""

import torch
from torch import nn

from doctor.case import Case
from doctor.data import images, sequences, text, values, vectors
from doctor.zoo.networks import GPT, Detached, Encoder, Gated, Recurrent, cnn, mlp
from doctor.zoo.patient import patient


@patient("frozen", "MLP")
def frozen_layer() -> Case:
    model = mlp()
    model[2].requires_grad_(False)
    return Case(model, vectors())


@patient("frozen", "transformer")
def frozen_block() -> Case:
    model = GPT()
    model.get_submodule("blocks.1").requires_grad_(False)
    return Case(model, text())


@patient("frozen", "torch's transformer encoder", tuned=False)
def frozen_encoder_layer() -> Case:
    model = Encoder()
    model.get_submodule("encoder.layers.0").requires_grad_(False)
    return Case(model, sequences())


@patient("frozen", "transformer", tuned=False)
def frozen_embeddings() -> Case:
    model = GPT()
    model.tokens.requires_grad_(False)
    return Case(model, text())


@patient("not-in-optimizer", "CNN")
def forgotten_head() -> Case:
    model = cnn()
    return Case(model, images(), torch.optim.Adam(model[:-1].parameters(), lr=1e-3))


@patient("not-in-optimizer", "LSTM", tuned=False)
def lstm_left_out() -> Case:
    model = Recurrent(nn.LSTM)
    return Case(model, sequences(), torch.optim.Adam(model.head.parameters(), lr=1e-3))


@patient("unused", "MLP")
def detached_body() -> Case:
    return Case(Detached(), vectors())


@patient("unused", "residual MLP", tuned=False)
def closed_gates() -> Case:
    return Case(Gated(20, 48, 4, 5), vectors())


@patient("rate-too-high", "MLP")
def sgd_too_fast() -> Case:
    model = mlp()
    return Case(model, vectors(), torch.optim.SGD(model.parameters(), lr=20.0))


@patient("rate-too-high", "transformer")
def adam_too_fast() -> Case:
    model = GPT()
    return Case(model, text(), torch.optim.AdamW(model.parameters(), lr=0.5))


@patient("rate-too-high", "GRU")
def gru_too_fast() -> Case:
    model = Recurrent()
    return Case(model, sequences(), torch.optim.Adam(model.parameters(), lr=1.0))


@patient("rate-too-high", "CNN with batch norm", tuned=False)
def momentum_too_fast() -> Case:
    model = cnn(norm=True)
    return Case(model, images(), torch.optim.SGD(model.parameters(), lr=30.0, momentum=0.9))


@patient("rate-too-high", "regression MLP", tuned=False)
def regression_too_fast() -> Case:
    model = mlp((16, 48, 48, 3), nn.Tanh)
    return Case(model, values(), torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9))
