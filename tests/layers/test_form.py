"""`Form`: join and split are inverse, whatever takes part."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerwise.layers.form import Form, Part, flat_form

SIZES = st.integers(1, 3)


def _params(form: Form, *lead: int) -> dict[str, Tensor]:
    return {part.name: torch.randn(*lead, *part.shape) for part in form.parts}


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    parts=st.sampled_from(["weight", "bias", "both"]),
    transposed=st.booleans(),
    lead=st.lists(st.integers(1, 2), max_size=2),
)
def test_join_and_split_are_inverse(sizes, parts, transposed, lead):
    k, o, i = sizes
    weight = Part("w", (k * i, o) if transposed else (k * o, i)) if parts != "bias" else None
    bias = Part("b", (k * o,)) if parts != "weight" else None
    form = Form(k, o, i if weight else 0, weight, bias, transposed=transposed)
    params = _params(form, *lead)
    W = form.join(params)
    assert W.shape == (*lead, *form.shape)
    assert form.numel() == sum(part.numel() for part in form.parts)
    for part, piece in form.split(W):
        assert torch.equal(piece, params[part.name])
    again = form.join({part.name: piece for part, piece in form.split(W)})
    assert torch.equal(again, W)


def test_entries_go_where_the_letters_say():
    """``W[k, o, i]`` is row k·O + o of a plain weight, and entry [k·I + i, o] of a transposed one."""
    plain = torch.arange(12.0).view(4, 3)
    W = Form(2, 2, 3, Part("w", (4, 3)), Part("b", (4,))).join({"w": plain, "b": torch.arange(4.0)})
    assert W[1, 0, 2] == plain[2, 2]
    assert W[1, 0, 3] == 2
    stored = torch.arange(12.0).view(6, 2)
    W = Form(2, 2, 3, Part("w", (6, 2)), None, transposed=True).join({"w": stored})
    assert W[1, 0, 2] == stored[5, 0]


def test_rows_of_a_packed_parameter():
    packed = torch.randn(2, 6, 3)  # a column axis first
    part = Part("w", (6, 3), (2, 4))
    assert part.part_shape() == (2, 3)
    assert part.numel() == 6
    assert torch.equal(part.of({"w": packed}), packed[:, 2:4])
    form = Form(1, 2, 3, part, Part("b", (6,), (2, 4)))
    W = form.join({"w": packed, "b": torch.randn(2, 6)})
    assert W.shape == (2, 1, 2, 4)
    pieces = dict(form.split(W))
    assert torch.equal(pieces[part], packed[:, 2:4])


@pytest.mark.parametrize(
    "form",
    [
        Form(2, 3, 4, Part("w", (6, 2, 2)), Part("b", (6,)), taps=2),
        Form(1, 3, 5, Part("w", (5, 3)), None, transposed=True, one_hot=True),
        Form(1, 2, 3, Part("w", (6, 3), (2, 4)), None),
        flat_form(Part("scale", (2, 3))),
    ],
)
def test_a_form_survives_json(form: Form):
    assert Form.from_json(json.loads(json.dumps(form.to_json()))) == form


def test_a_parameter_without_a_rule_is_groups_of_one():
    form = flat_form(Part("p", (2, 3, 2)))
    value = torch.randn(4, 2, 3, 2)
    assert form.shape == (12, 1, 1)
    assert not form.kronecker
    assert math.prod(form.shape) == form.numel()
    assert torch.equal(form.join({"p": value}), value.view(4, 12, 1, 1))
