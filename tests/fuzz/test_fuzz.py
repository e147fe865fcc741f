"""A few seconds of `make fuzz`, and the fuzzer's own parts: its oracle, its purity, its shrinker."""

import re
from dataclasses import replace

import pytest
import torch
from cases import Spec, make, outputs, random_case, random_spec
from factors import moments_of
from oracle import Oracle, Truth, at_once, jacobian_rows, one_by_one
from parts import BLOCKS
from shrink import shrunk
from torch.func import functional_call, jacrev
from verdicts import Verdict, gap, judge, worst

LOUD = (
    r"a model whose batch elements interact",  # rows of examples in an order of their own, such as sorted ones
    r"an output that no trainable parameter takes part in",  # of one batch, where a branch leaves them all out
    r"layer .* called on an input of shape",  # as many rows in one batch as examples of another would have
)
"""Errors that a case may end with; any other is a defect, be its message as good as it may."""


@pytest.mark.parametrize("seed", range(36))
def test_random_cases_are_right_or_say_why_not(seed: int):
    verdicts = judge(random_case(seed))
    bad = [v for v in verdicts if v.word != "right" and not (v.word == "loud" and _listed(v))]
    assert not bad, "; ".join(str(v) for v in bad) + f"; python tests/fuzz/fuzz.py --seed-of-case {seed} --shrink"


def _listed(verdict: Verdict) -> bool:
    return any(re.search(pattern, verdict.message) for pattern in LOUD)


# --- the fuzzer itself -------------------------------------------------------------------------------------


def test_a_seed_is_a_case_whatever_was_drawn_before():
    state = torch.random.get_rng_state()
    one = random_case(11)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.randn(3)
    two = random_case(11)
    assert one.spec == two.spec
    values = zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in values)
    assert all(torch.equal(a.x["x"], b.x["x"]) for a, b in zip(one.batches, two.batches, strict=True))


def test_a_printed_spec_is_the_case():
    spec = random_spec(3, frozen=True)
    assert eval(repr(spec), {"Spec": Spec}) == spec


def _of(name: str, kind: str) -> Spec:
    options = tuple(filter(None, [BLOCKS[name].wants]))
    return Spec(seed=4, kind=kind, blocks=(name,), D=3, sizes=((5, 4), (4, 4)), options=options)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, b in BLOCKS.items() for kind in b.kinds])
def test_no_block_lets_examples_interact(name: str, kind: str):
    """Also where its gate is open and its flags are set."""
    case = make(_of(name, kind))
    oracle = Oracle(case)
    for flag in (False, True):
        for batch in case.batches:
            if "flag" in batch.x:
                batch.x["flag"] = flag
        case.model.config.double = flag
        oracle.changed()
        for number in range(2):
            assert oracle.alone(number) < 1e-12
            assert oracle.batch(number).J.any()


PLAIN = ("linear", "mlp", "layer_norm", "conv1d", "twice", "einsum", "class_token", "attention_by_hand", "conv2d")


@pytest.mark.parametrize("name", PLAIN)
def test_the_oracle_agrees_with_a_jacobian_of_functions(name: str):
    case = make(replace(_of(name, BLOCKS[name].kinds[-1]), likelihood="bernoulli"))
    truth = Oracle(case).batch(0)
    parameters = {k: p.detach() for k, p in case.model.named_parameters()}
    rows = jacrev(lambda p: functional_call(case.model, p, kwargs=case.batches[0].x))(parameters)
    expected = torch.cat([r.flatten(2) for r in rows.values()], -1)
    assert gap(truth.J.squeeze(1), expected) < 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_rows_pulled_back_at_once_are_those_of_plain_backwards(seed: int):
    case = make(replace(random_spec(seed), precision="float64"))
    f, targets = outputs(case.model, case.batches[0].x), [p for p in case.model.parameters() if p.requires_grad]
    rows = at_once(f, targets)
    assert rows is not None
    assert max(gap(a, b) for a, b in zip(rows, one_by_one(f, targets), strict=True)) < 1e-12


def test_a_wrong_rule_for_batches_of_cotangents_is_no_truth(monkeypatch: pytest.MonkeyPatch):
    """Also one that is wrong for a single cotangent of many."""
    grad = torch.autograd.grad

    def wrong(*args, is_grads_batched=False, **options):
        found = grad(*args, is_grads_batched=is_grads_batched, **options)
        return [g.index_fill(0, torch.tensor([1]), 0.0) for g in found] if is_grads_batched else found

    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    f = (w * torch.arange(1.0, 4.0, dtype=torch.float64)).square()
    expected = torch.diag(torch.tensor([2.0, 8.0, 18.0], dtype=torch.float64))
    (rows,) = jacobian_rows(f, [w])
    assert torch.equal(rows, expected)
    monkeypatch.setattr(torch.autograd, "grad", wrong)
    assert at_once(f, [w]) is None
    (rows,) = jacobian_rows(f, [w])
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "bernoulli"])
def test_slopes_are_those_of_the_losses_of_torch(likelihood: str):
    options = ("ignore", "weights") if likelihood == "categorical" else ()
    spec = Spec(seed=2, kind="sequence", blocks=("linear",), head="positions", likelihood=likelihood, options=options)
    case = make(spec)
    truth = Oracle(case).batch(0)
    z = truth.z.clone().requires_grad_()
    y = case.batches[0].y
    losses = {
        "categorical": lambda: torch.nn.functional.cross_entropy(
            z.flatten(0, 1), y.flatten(), weight=case.options.get("weight"), reduction="sum"
        ),
        "gaussian": lambda: 0.5 * (z - y).square().sum(),
        "bernoulli": lambda: torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="sum"),
    }
    (slopes,) = torch.autograd.grad(losses[likelihood](), z)
    assert gap(truth.slopes(), slopes) < 1e-12


def test_the_output_fisher_is_the_hessian_of_the_loss():
    z = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor(1)
    H = torch.autograd.functional.hessian(lambda f: torch.nn.functional.cross_entropy(f, y), z)
    truth = Truth(z[None, None], torch.zeros(1, 1, 3, 1), y[None], "categorical", {})
    assert gap(truth.output_fisher()[0, 0], H) < 1e-12


def test_factors_of_a_lone_layer_are_its_fisher_where_outputs_are_values():
    """With a Gaussian likelihood F = I ⊗ Σ a aᵀ / N, which is G ⊗ A."""
    case = make(Spec(seed=1, likelihood="gaussian", sizes=((5, 2),)))
    truth = Oracle(case).batch(0)
    (moments,) = moments_of(case.model, case.batches[0], truth, "exact").values()
    F = torch.kron(moments.G / 5, moments.A / 5)
    order = torch.tensor([0, 1, 4, 2, 3, 5])  # weight and bias apart, against the bias as last column
    expected = Oracle(case).fisher("exact", [0])
    assert gap(F, expected[order.unsqueeze(1), order]) < 1e-12


def test_calls_that_do_not_reach_the_loss_are_no_layer_s_own():
    case = make(_of("target_detached", "vector"))
    found = moments_of(case.model, case.batches[0], Oracle(case).batch(0), "exact")
    seen = []
    handle = case.model.blocks[0].l.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    outputs(case.model, case.batches[0].x)
    handle.remove()
    a = torch.nn.functional.pad(seen[0], (0, 1), value=1.0)
    assert len(seen) == 2
    assert gap(found["blocks.0.l"].A, a.T @ a) < 1e-12


def test_a_case_is_made_as_small_as_it_fails(monkeypatch: pytest.MonkeyPatch):
    def fails(case, stop=False):
        wrong = "twice" in case.spec.blocks and any(step[0] == "ntk" for step in case.spec.plan)
        return [Verdict("silent" if wrong else "right")]

    monkeypatch.setattr("shrink.judge", fails)
    plan = (("fisher", "dense", "exact", -1), ("perturb",), ("ntk", "matrix", 1))
    spec = Spec(blocks=("linear", "twice"), D=3, sizes=((4, 3), (3, 3)), options=("shared",), frozen=(1,), plan=plan)
    small, verdict = shrunk(spec, worst(fails(make(spec))))
    assert (small.blocks, small.plan) == (("twice",), (("ntk", "matrix", 0),))
    assert (small.sizes, small.options, small.frozen) == (((1, 2),), (), ())
    assert verdict.word == "silent"
