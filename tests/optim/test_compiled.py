"""Compiled and checkpointed models: the same statistics, or a clear error."""

import copy

import pytest
import torch
from optim_tools import batches, cross_entropy, flat, member, mlp, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerwise as lw
from layerwise.foundations.errors import LayerwiseError
from layerwise.layers.capture.model_call import has_compiled_parts

pytestmark = [
    pytest.mark.usefixtures("untyped"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of the tracing itself
]
DATA = batches(4, 5)


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.parametrize("name", ["KFAC", "KFAC sampled", "NGD"])
def test_a_model_compiled_after_the_optimizer_was_built(name: str, backend: str):
    a, b = mlp(), mlp()
    one, two = member(name, a), member(name, b)
    compiled = torch.compile(a, backend=backend)
    for batch in DATA:
        train_step(compiled, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
        assert (flat(a) - flat(b)).abs().max() < 1e-9


def test_a_compiled_model_is_not_compiled_anew_at_every_step():
    """Hooks that are new objects each time would be guarded on, traced again, and given up on after some tries."""
    model = mlp()
    opt = lw.optim.KFAC(model, lr=0.01, factor_every=1, scale="formula")
    compiled = torch.compile(model, backend="eager")
    frames = []
    for batch in batches(12, 5):
        train_step(compiled, opt, batch, cross_entropy)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert frames[-1] == frames[4]


class Viewed(nn.Module):
    """A layer whose input is a view, over which tracing a hook stumbled, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).view(len(x), 2, 3)
        return self.second(h).sum(1)


@pytest.mark.parametrize("name", ["KFAC", "KFAC sampled", "EKFAC", "FOOF"])
def test_statistics_at_some_steps_of_a_compiled_model(name: str):
    """Layers of a compiled model call no hooks: at these steps the model is run as it is, and buffers move once."""
    torch.manual_seed(0)
    a = Viewed().double()
    b = copy.deepcopy(a)
    one, two = (member(name, model, factor_every=3, refresh_every=2) for model in (a, b))
    compiled = torch.compile(a, backend="aot_eager")
    for batch in batches(8, 5):
        train_step(compiled, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
        assert (flat(a) - flat(b)).abs().max() < 1e-9
    torch.testing.assert_close(a.norm.state_dict(), b.norm.state_dict())
    counts = [stack.state["Q"].count.tolist() for stack in one._stacks or () if "Q" in stack.state]
    assert counts
    assert all(count == 3.0 for of_stack in counts for count in of_stack)


def test_an_optimizer_of_the_compiled_module():
    a, b = mlp(), mlp()
    compiled = torch.compile(a, backend="eager")
    one, two = lw.optim.KFAC(compiled, lr=0.01, scale="formula"), lw.optim.KFAC(b, lr=0.01, scale="formula")
    for batch in DATA:
        train_step(compiled, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
        assert (flat(a) - flat(b)).abs().max() < 1e-9


def test_an_optimizer_built_after_the_first_compiled_call_works_or_says_so():
    a, b = mlp(), mlp()
    compiled = torch.compile(a, backend="eager")
    cross_entropy(compiled(DATA[0][0]), DATA[0][1]).backward()
    one, two = lw.optim.KFAC(a, lr=0.01, scale="formula"), lw.optim.KFAC(b, lr=0.01, scale="formula")
    try:
        for batch in DATA:
            train_step(compiled, one, batch, cross_entropy)
            train_step(b, two, batch, cross_entropy)
    except LayerwiseError as error:
        assert "compile" in str(error)  # noqa: PT017
        return
    assert (flat(a) - flat(b)).abs().max() < 1e-9


def test_a_whole_graph_is_refused_with_the_reason():
    """The compiler raises its own error; what is in it is ours."""
    model = mlp()
    opt = lw.optim.KFAC(model, lr=0.01, scale="formula")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Leave fullgraph=True out"):
        train_step(compiled, opt, DATA[0], cross_entropy)


def test_a_whole_graph_is_no_obstacle_to_members_without_statistics():
    a, b = mlp(), mlp()
    one, two = lw.optim.Shampoo(a, lr=0.01, scale="formula"), lw.optim.Shampoo(b, lr=0.01, scale="formula")
    compiled = torch.compile(a, backend="eager", fullgraph=True)
    for batch in DATA:
        train_step(compiled, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
    assert (flat(a) - flat(b)).abs().max() < 1e-9


class Checkpointed(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.net, self.on = mlp(), on

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[:2](x)
        h = checkpoint(self.net[2:4], h, use_reentrant=False) if self.on else self.net[2:4](h)
        return self.net[4](h)


@pytest.mark.parametrize("name", ["KFAC", "KFAC sampled", "EKFAC", "FOOF", "NGD"])
def test_checkpoints_change_nothing(name: str):
    a, b = Checkpointed(True), Checkpointed(False)
    one, two = member(name, a), member(name, b)
    for batch in DATA:
        train_step(a, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
        assert (flat(a) - flat(b)).abs().max() < 1e-12


def test_a_checkpointed_attention_layer():
    """Whose forward is the rule's own while it is recorded: run again in the backward, it must be the same."""

    class Mixed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.mix, self.head, self.on = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3), on

        def block(self, x: Tensor) -> Tensor:
            return self.mix(x, x, x, need_weights=False)[0]

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            return self.head(checkpoint(self.block, x, use_reentrant=False) if self.on else self.block(x))

    torch.manual_seed(0)
    a = Mixed(True).double()
    b = copy.deepcopy(a)
    b.on = False
    one, two = lw.optim.KFAC(a, lr=0.01, scale="formula"), lw.optim.KFAC(b, lr=0.01, scale="formula")
    for batch in batches(3, 5, 4, positions=(5,)):
        train_step(a, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
    assert (flat(a) - flat(b)).abs().max() < 1e-9


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(len(x), 5)).tanh()


class Stages(nn.Module):
    """Layers whose inputs are views, in parts that can be compiled alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(Stage() for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


@pytest.mark.parametrize("whole", [False, True])
def test_parts_that_are_compiled(whole: bool):
    """A hook that is traced with a part either fails there or makes it be compiled anew at every step."""
    a, b = Stages(), Stages()
    one, two = (lw.optim.KFAC(model, lr=0.01, factor_every=2, scale="formula") for model in (a, b))
    if whole:
        a.forward = torch.compile(a.forward, backend="aot_eager")
    else:
        for stage in a.stages:
            stage.compile(backend="aot_eager")  # type: ignore[operator]
    frames = []
    for batch in batches(12, 5):
        train_step(a, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert (flat(a) - flat(b)).abs().max() < 1e-9
    assert 0 < frames[4] == frames[-1]
    assert all(stack.state["Q"].count.tolist() == [6.0] * stack.groups for stack in one._stacks or ())


@pytest.mark.parametrize("kind", ["inputs", "earlier", "later"])
def test_hooks_of_the_user_on_a_compiled_model_act_once(kind: str):
    models = mlp(), mlp()
    optimizers = []
    for model in models:
        if kind == "inputs":
            model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        if kind == "earlier":
            model.register_forward_hook(lambda _, args, out: 2 * out)
        optimizers.append(lw.optim.KFAC(model, lr=0.01, factor_every=2, scale="formula"))
        if kind == "later":
            model.register_forward_hook(lambda _, args, out: 2 * out)
    compiled = torch.compile(models[0], backend="aot_eager")
    for batch in DATA:
        train_step(compiled, optimizers[0], batch, cross_entropy)
        train_step(models[1], optimizers[1], batch, cross_entropy)
        assert (flat(models[0]) - flat(models[1])).abs().max() < 1e-9


def test_a_forward_that_is_interrupted_leaves_nothing_open():
    """Nobody calls hooks then; compiled functions elsewhere must be compiled functions again."""
    model, stops = mlp(), []

    def stop(*_: object) -> None:
        if stops:
            raise KeyboardInterrupt

    model[4].register_forward_hook(stop)
    opt = lw.optim.KFAC(model, lr=0.01, scale="formula")
    x, y = DATA[0]
    torch.compile(lambda x: x + 1, backend="eager")(x)  # the compiler is there
    train_step(model, opt, (x, y), cross_entropy)
    stops.append(True)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    stops.clear()
    train_step(model, opt, (x, y), cross_entropy)
    assert opt._capture is not None
    assert not opt._capture._open
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert all(len(layer._forward_hooks) == (layer is model[4]) for layer in model if isinstance(layer, nn.Linear))


class Nested(nn.Module):
    """A part that is a compiled module."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        inner = mlp(5, 6, 5)
        self.part, self.head = torch.compile(inner, backend="aot_eager") if on else inner, mlp(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def test_compiled_parts_are_known():
    assert has_compiled_parts(Nested(True))
    assert not has_compiled_parts(Nested(False))
    model = Nested(False)
    model.part.compile(backend="eager")  # type: ignore[operator]
    assert has_compiled_parts(model)
    model = Nested(False)
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    assert has_compiled_parts(model)


def test_a_model_without_compiled_parts_leaves_the_compiler_alone():
    """Its stance is everybody's: a forward that is interrupted, and never followed by a step, would change it."""
    model, stances = mlp(), []
    model[2].register_forward_hook(lambda *_: stances.append(torch._dynamo.eval_frame._stance.stance))
    opt = lw.optim.KFAC(model, lr=0.01, scale="formula")
    x, y = DATA[0]
    torch.compile(lambda x: x + 1, backend="eager")(x)  # the compiler is there
    train_step(model, opt, (x, y), cross_entropy)
    assert stances[-1] == "default"
