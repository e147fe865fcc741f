"""`LayerTable`: which parameters get which form, and why not."""

import doctest

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError, NameLookupError, UnsupportedError
from layerwise.layers import table as table_module
from layerwise.layers.table import LayerTable
from layerwise.testing import CASES


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), Scale(), nn.Linear(3, 2))


def _shapes(model: nn.Module, **options) -> dict[str, tuple[int, int, int]]:
    return {spec.name: spec.form.shape for spec in LayerTable.from_model(model, **options)}


def test_the_examples_in_docstrings_run():
    assert doctest.testmod(table_module).failed == 0


@pytest.mark.parametrize("c", CASES, ids=lambda c: c.name)
def test_blocks_hold_every_trainable_parameter_once(c):
    model, _, _ = c.make()
    table = LayerTable.from_model(model)
    params = {name: torch.randn(2, *p.shape) for name, p in model.named_parameters() if p.requires_grad}
    blocks = table.to_blocks(params)
    assert sum(b[0].numel() for b in blocks.values()) == table.numel() == sum(p[0].numel() for p in params.values())
    back = table.to_params(blocks)
    assert list(back) == list(params)
    assert all(torch.equal(back[name], params[name]) for name in params)


def test_print_shows_every_parameter_and_the_reason():
    text = str(lw.layers(_net()))
    lines = text.splitlines()
    assert lines[0].split() == ["parameter", "layer", "type", "K×O×I", "kfac", "reason"]
    assert [line.split()[0] for line in lines[2:]] == ["0.weight", "0.bias", "1.scale", "2.weight", "2.bias"]
    assert "1×3×5" in lines[2]
    assert lines[4].split()[3:5] == ["3×1×1", "block"]
    assert "Scale has no layer rule" in lines[4]
    assert "diag" in lw.layers(_net()).describe("diag").splitlines()[0]


def test_a_large_parameter_without_a_rule_gets_its_diagonal():
    model = nn.Module()
    model.big = nn.Parameter(torch.zeros(2000))
    assert LayerTable.from_model(model).layers[0].structure("kfac") == "diag"


def test_unsupported_parameters_are_skipped_or_raise():
    skipped = LayerTable.from_model(_net(), on_unsupported="skip")
    assert skipped.untracked == {"1.scale": "Scale has no layer rule"}
    assert "1.scale" not in skipped.shapes
    assert "left out" in str(skipped)
    with pytest.raises(UnsupportedError, match=r"`1\.scale`: Scale has no layer rule\. Rules exist for .*Linear"):
        LayerTable.from_model(_net(), on_unsupported="raise")
    # With run-time type checks on, as in these tests, the annotation speaks before the library does.
    with pytest.raises((InputError, TypeCheckError), match="elementwise"):
        LayerTable.from_model(_net(), on_unsupported="ignore")  # type: ignore[arg-type]


def test_a_model_of_known_layers_alone_does_not_raise():
    assert LayerTable.from_model(nn.Sequential(nn.Linear(2, 2)), on_unsupported="raise").names() == ["0"]


def test_select_by_layer_by_parameter_and_by_several_patterns():
    assert list(_shapes(_net(), select="0")) == ["0"]
    assert list(_shapes(_net(), select="?.scale")) == ["1.scale"]
    assert list(_shapes(_net(), select=["2", "0"])) == ["0", "2"]
    assert list(_shapes(_net(), select="*")) == ["0", "1.scale", "2"]
    assert LayerTable.from_model(_net(), select="2").slices() == {"2.weight": slice(0, 6), "2.bias": slice(6, 8)}
    with pytest.raises(NameLookupError, match=r"Unknown layer 'head'\. Available: 0, 1\.scale, 2\."):
        LayerTable.from_model(_net(), select=["0", "head"])


def test_packed_projections_are_selected_together_or_not_at_all():
    model = nn.ModuleDict({"mix": nn.MultiheadAttention(4, 2)})
    assert list(_shapes(model, select="mix.in_proj_weight")) == ["mix.q", "mix.k", "mix.v"]
    with pytest.raises(InputError, match=r"some rows of 'mix\.in_proj"):
        LayerTable.from_model(model, select="mix.q")


def test_frozen_parameters_leave_the_form():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    assert _shapes(model) == {"0": (1, 3, 1), "1": (1, 2, 3)}
    assert list(LayerTable.from_model(model).shapes) == ["0.bias", "1.weight"]
    with pytest.raises(InputError, match="without trainable parameters"):
        LayerTable.from_model(model.requires_grad_(False))


def test_tied_layers_are_one_block_with_two_sites():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    table = LayerTable.from_model(model)
    assert table.names() == ["0"]
    assert [site.module_name for site in table.layers[0].sites] == ["0", "2"]


def test_a_tied_weight_with_biases_of_their_own_is_split():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    table = LayerTable.from_model(model)
    assert {spec.name: len(spec.sites) for spec in table} == {"0": 2, "0.bias": 1, "2.bias": 1}
    assert table.spec("0").form.bias is None


def test_a_weight_tied_in_different_roles_falls_back_and_its_peers_do_not():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    table = LayerTable.from_model(model)
    assert table.spec("0.weight").reason == "tied in different roles: 0 and 1"
    assert table.spec("1").form.shape == (1, 5, 1)
    assert table.spec("1").sites


def test_a_module_registered_twice_is_one_layer():
    shared = nn.Linear(3, 3)
    assert _shapes(nn.Sequential(shared, nn.Tanh(), shared)) == {"0": (1, 3, 4)}


def test_demotion_takes_the_rows_of_a_packed_parameter_together():
    model = nn.ModuleDict({"mix": nn.MultiheadAttention(4, 2), "head": nn.Linear(4, 2)})
    table = LayerTable.from_model(model).demote({"mix.q": "because"})
    assert set(table.names()) == {"mix.in_proj_weight", "mix.in_proj_bias", "mix.out_proj", "head"}
    assert table.spec("mix.in_proj_weight").reason == "because"
    assert table.spec("mix.in_proj_weight").form.shape == (48, 1, 1)
    assert table.spec("head").reason is None


def test_a_missing_layer_names_the_nearest():
    with pytest.raises(NameLookupError, match=r"Did you mean '1\.scale'"):
        LayerTable.from_model(_net()).spec("1.scal")


def test_biases_can_be_blocks_of_their_own():
    table = LayerTable.from_model(nn.Sequential(nn.Linear(4, 3)), separate_bias=(nn.Linear,))
    assert {spec.name: spec.form.shape for spec in table} == {"0": (1, 3, 4), "0.bias": (1, 3, 1)}
