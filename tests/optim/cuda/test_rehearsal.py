"""Rehearsals list the kernels of steps, and change nothing; kernels are compiled ahead, and waited for. On any machine:
kernels are stood in for, so that neither a GPU nor Triton is needed."""

import copy
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import layerwise as lw
from gpt_block import Block
from layerwise.optim.cuda.deferred_statistics import PendingRows
from layerwise.optim.cuda.rehearsal import kind_of, rehearse
from layerwise.optim.cuda.rows import StackRows
from layerwise.optim.cuda.triton import ahead, cache_key, compile_processes, device
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Context, Observation, State, UpdateRule, tensors

META = torch.device("meta")
MEMBERS: dict[str, Callable[[nn.Module], Layerwise]] = {
    "Muon": lw.optim.Muon,
    "KFAC": lambda m: lw.optim.KFAC(m, estimator="empirical"),
    "EKFAC": lambda m: lw.optim.EKFAC(m, scaling="running"),
    "Shampoo": lw.optim.Shampoo,
    "SOAP": lw.optim.SOAP,
    "Adam": lw.optim.Adam,
}
EXPECTED = {
    "Muon": {"momentum_update_kernel", "adam_norm_kernel", "norm_of_all_kernel"},
    "KFAC": {"leaf_kernel", "column_kernel", "border_kernel", "gram_kernel", "put_kernel"},
    "EKFAC": {"column_kernel", "rotation_kernel", "damped_quotient_kernel", "quotient_again_kernel"},
    "Shampoo": {"ema_kernel", "rotation_kernel", "scaled_kernel", "scaled_again_kernel"},
    "SOAP": {"ema_kernel", "rotation_kernel", "squared_rows_kernel", "adam_kernel"},
    "Adam": set(),
}
"""Some that only show that all parts of the step are passed through."""


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are compiled from now on, each variant once."""
    found = list[str]()

    def imported(module: str) -> Any:
        source = importlib.import_module(f"layerwise.optim.cuda.triton.{module}")
        return SimpleNamespace(**{name: kernel(name, module) for name in vars(source) if name.endswith("_kernel")})

    def kernel(name: str, module: str) -> Any:
        return SimpleNamespace(params=[], fn=SimpleNamespace(__module__=name), name=name, module=module)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(device, "_has_triton", lambda: True)
    monkeypatch.setattr(device, "_imported", imported)
    monkeypatch.setattr(ahead, "_KNOWN", set())
    monkeypatch.setattr(ahead, "_THREADS", {})
    monkeypatch.setattr(ahead, "_PREPARING", {META: []})
    monkeypatch.setattr(ahead, "_compile", lambda kernel, *_: found.append(kernel.name))
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    device.available.cache_clear()
    yield found
    ahead.wait()
    device.available.cache_clear()


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = (256, 512, 512, 512, 16)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(*(layer for linear in layers for layer in (linear, nn.LayerNorm(linear.out_features))))


def rehearsed(opt: Layerwise, precision: str = "half") -> Exception | None:
    found = rehearse(lambda: opt._builder.stand_in(precision), lambda stack: opt._context(stack, 1), META)
    ahead.wait()
    return found


@pytest.mark.parametrize("precision", ["half", "high"])
@pytest.mark.parametrize("name", MEMBERS)
def test_every_part_of_a_step_is_passed_through(name: str, precision: str, listed: list[str]):
    opt = MEMBERS[name](model())
    assert rehearsed(opt, precision) is None
    always = {"magnitude_kernel", "adamw_kernel", "corrections_kernel"}
    always |= set() if name == "Adam" else {"gather_kernel", "finish_kernel"}
    assert EXPECTED[name] | always <= {*listed}
    before = len(listed)
    assert rehearsed(opt, precision) is None
    assert len(listed) == before  # all are known


@pytest.mark.parametrize("name", MEMBERS)
def test_kinds_of_stacks_stand_for_all(name: str, listed: list[str], monkeypatch: pytest.MonkeyPatch):
    """Of stacks that look alike one is rehearsed, and no kernel is missed by that."""
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in ((256, 512), (512, 256), (256, 272), (272, 256), (256, 256))))
    assert rehearsed(MEMBERS[name](net)) is None
    few = sorted(listed)
    listed.clear()
    ahead._KNOWN.clear()
    monkeypatch.setattr("layerwise.optim.cuda.rehearsal.kind_of", id)
    assert rehearsed(MEMBERS[name](net)) is None
    assert sorted(listed) == few


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("groups", [slice(0, 5), slice(1, 2), slice(3, 5)], ids=str)
@pytest.mark.parametrize("precision", ["half", "high"])
@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "Shampoo", "SOAP"])
def test_some_groups_need_no_other_kernels_than_all(
    name: str, precision: str, groups: slice, listed: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Of refreshes and deferred statistics: tensors that begin at any of their numbers are known to, else another
    kernel would be compiled in mid-training."""
    opt, missed = MEMBERS[name](nn.Sequential(*(nn.Linear(256, 512) for _ in range(5)))), list[tuple[str, str]]()
    rule = type(opt.rule)
    refresh, observe = rule.refresh, rule.observe

    def begin(name: str, kernel: Any, device: torch.device, *args: Any, **options: Any) -> None:
        source = importlib.import_module(f"layerwise.optim.cuda.triton.{kernel.module}")
        function = getattr(source, name)
        anywhere = getattr(function, "by_group", ())
        names = inspect.signature(getattr(function, "fn", function)).parameters
        for param, arg in zip(names, args, strict=False):
            tensors = [x for x in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(x, torch.Tensor)]
            if any(x.storage_offset() * x.element_size() % ahead.ALIGNED for x in tensors) and param not in anywhere:
                missed.append((name, param))

    monkeypatch.setattr(ahead, "_begin", begin)

    def observe_some(self: UpdateRule, state: State, seen: Observation, context: Context) -> None:
        if not isinstance(seen.G, StackRows):
            observe(self, state, seen, context)
            return
        own = SimpleNamespace(observe=partial(observe, self))
        stack: Any = SimpleNamespace(state=state, rule=own, memory={})
        PendingRows.of(groups, (), 1, seen, context).take_in(stack)

    monkeypatch.setattr(rule, "refresh", lambda self, state, _, context: refresh(self, state, groups, context))
    monkeypatch.setattr(rule, "observe", observe_some)
    assert rehearsed(opt, precision) is None
    assert {*missed} == set()


@pytest.mark.parametrize("precision", ["half", "high"])
@pytest.mark.parametrize("estimator", [None, "empirical"])
def test_statistics_that_come_layer_by_layer_are_rehearsed(estimator: str | None, precision: str, listed: list[str]):
    """Of drawn labels they are deferred: sums over the rows of one layer are divided among programs, by kernels of
    their own. No step before the eleventh launches these."""
    net = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(8)))
    assert rehearsed(lw.optim.KFAC(net, factor_every=10, estimator=estimator), precision) is None
    assert ("gram_finish_kernel" in listed) == (estimator is None)


def test_a_first_step_without_direction_needs_no_kernels_of_its_own(listed: list[str]):
    assert rehearsed(lw.optim.SOAP(model())) is None
    assert listed.count("cut_kernel") == 1


def test_a_rehearsal_changes_nothing(listed: list[str]):
    net = model()
    opt = lw.optim.SOAP(net)
    state, random = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    assert rehearsed(opt) is None
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in net.parameters())
    assert opt._stacks is None
    assert not opt._health._pending


def test_a_copy_is_rehearsed_by_itself():
    opt = lw.optim.Muon(model())
    opt._rehearsed = "half"
    assert copy.deepcopy(opt)._rehearsed is None


def test_a_rule_that_asks_for_values_stops_it_without_harm(listed: list[str], monkeypatch: pytest.MonkeyPatch):
    opt = lw.optim.Muon(model())
    monkeypatch.setattr(type(opt.rule), "direction", lambda self, state, grad, context: grad * float(grad.sum()))
    assert isinstance(rehearsed(opt), RuntimeError)
    assert not ahead._THREADS
    assert getattr(ahead._STATE, "device", None) is None  # launches are launches again


STATE = {"Muon": 0.80, "KFAC": 1.53, "EKFAC": 1.81, "Shampoo": 1.78, "SOAP": 1.94}
"""At most, over AdamW's two moments of all parameters: docs/performance.md."""


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("name", STATE)
def test_state_of_a_gpt(name: str, monkeypatch: pytest.MonkeyPatch):
    """Twelve blocks of width 768, by one of them; half of the parameters are in embedding and head, AdamW's."""
    monkeypatch.setattr("layerwise.optim.cuda.rehearsal.kind_of", id)  # every stack
    block = Block(768, 12)
    with ahead.listing(META):
        executor = MEMBERS[name](block)._builder.stand_in("half")
        for stack in executor.stacks:
            stack.memory["fresh"] = [False] * stack.groups  # of which there is no data
        executor.begin_moments()
    of_block = sum(X.nbytes for stack in executor.stacks for X in tensors(stack.state).values())
    blocks, rest = (8 * n for n in (sum(p.numel() for p in block.parameters()), (2 * 50304 + 1024) * 768))
    ratio = (12 * of_block + rest) / (12 * blocks + rest)
    assert STATE[name] - 0.02 < ratio <= STATE[name]


def test_stacks_of_one_kind():
    """Of about the same sizes; which side is the longer decides which is multiplied first, and 24 is no multiple of
    16."""
    sizes = ((256, 512), (272, 528), (512, 256), (256, 24))
    opt = lw.optim.Muon(nn.Sequential(*(nn.Linear(*size) for size in sizes)))
    kinds = [kind_of(stack) for stack in opt._build() if not stack.fallback]
    assert len({*kinds}) == len(kinds) - 1


# --- in the background --------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that takes a while to compile, and notes what is compiled and launched, in which thread."""
    notes = list[tuple[str, str]]()

    class Kernel:
        params = tuple(SimpleNamespace(do_not_specialize=varies) for varies in (False, False, True))
        fn = SimpleNamespace(__module__="here")
        run = None
        device_caches = (None,)

        def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
            time.sleep(0.05)
            if options.get("FAILS"):
                raise RuntimeError("no compiler")
            notes.append(("compiled", threading.current_thread().name))
            return self

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: notes.append(("launched", threading.current_thread().name))

    monkeypatch.setattr(ahead, "_KNOWN", set())
    monkeypatch.setattr(ahead, "_THREADS", {})
    monkeypatch.setattr(ahead, "_PREPARING", {})
    monkeypatch.setattr(cache_key, "recall", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return SimpleNamespace(module=SimpleNamespace(a_kernel=Kernel()), notes=notes)


def launch(kernel: Any, *args: Any, **options: Any) -> None:
    ahead.launched(kernel.module).a_kernel[(1,)](*args, **options)


def test_what_is_listed_is_compiled_by_processes(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    """What a launch compiles, because it was not listed, is not; and processes end with the last compilation."""
    notes = list[tuple[str, bool]]()
    listed = kernel.module.a_kernel
    listed.compile = lambda *_, **__: notes.append(("compiled", False))
    told = dict.fromkeys(("signature", "constants", "attrs"))
    src = SimpleNamespace(fn=SimpleNamespace(__module__="here", __name__="a_kernel"), **told)
    monkeypatch.setattr(type(listed), "warmup", lambda self, *args, **options: self.compile(src) or self)
    monkeypatch.setattr(compile_processes, "_is_cached", lambda *_: False)
    monkeypatch.setattr(compile_processes, "may_begin", lambda: True)
    monkeypatch.setattr(compile_processes, "_first", lambda job: notes.append(("asked", ahead._LOADING.locked())))
    monkeypatch.setattr(compile_processes, "end", lambda: notes.append(("ended", True)))
    with ahead.listing(META):
        launch(kernel, torch.empty(4, device="meta"), BLOCK=1)
    ahead.wait()
    listed.compile(src)
    assert notes == [("asked", False), ("compiled", False), ("ended", True), ("compiled", False)]


def test_kernels_are_read_one_at_a_time(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    """The one that a step needs first is there first, and its launch waits for no others."""
    names = list[str]()

    def warmup(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        assert ahead._LOADING.locked()
        names.append(self.name)
        time.sleep(0.02)
        return self

    for name in ("b_kernel", "c_kernel", "d_kernel"):
        setattr(kernel.module, name, type(kernel.module.a_kernel)())
    for name, one in vars(kernel.module).items():
        one.name = name
    monkeypatch.setattr(type(kernel.module.a_kernel), "warmup", warmup)
    with ahead.listing(META):
        for name in ("c_kernel", "a_kernel", "d_kernel", "b_kernel"):
            getattr(ahead.launched(kernel.module), name)[(1,)](torch.empty(4, device="meta"))
    assert ahead.launched(kernel.module).c_kernel is kernel.module.c_kernel
    waited = [*names]
    ahead.wait()
    assert waited[0] == names[0] == "c_kernel"
    assert len(waited) < 4 == len(names)


def test_where_a_tensor_begins_may_be_of_no_account(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    """Alone or in a list: then there is one kernel, which two threads would compile at once if it were listed twice."""
    param = SimpleNamespace(do_not_specialize=False, do_not_specialize_on_alignment=True)
    monkeypatch.setattr(type(kernel.module.a_kernel), "params", (param, param))
    x = torch.empty(8, device="meta")
    with ahead.listing(META):
        for a, b in ((x, (x, x)), (x[1:], (x, x)), (x, (x, x[1:])), (x[1:], (x[1:], x))):
            launch(kernel, a, b, BLOCK=1)
    ahead.wait()
    assert len(kernel.notes) == 1


def test_a_launch_waits_for_its_kernel_and_compiles_nothing(kernel: Any):
    x = torch.empty(4, device="meta")
    with ahead.listing(META):
        launch(kernel, x, 16, 3, BLOCK=1)
        launch(kernel, x, 32, 1, BLOCK=1)  # the same variant
        launch(kernel, x, 1, 3, BLOCK=1)
        launch(kernel, x[1:], 16, 3, BLOCK=1)
        launch(kernel, x.half(), 16, 3, BLOCK=1)
        launch(kernel, x, 16, 3, BLOCK=2)
    assert kernel.notes == []  # nothing was launched, and nothing waits
    launch(kernel, x, 16, 3, BLOCK=1)
    assert kernel.notes == [("compiled", "compile a_kernel")] * 5 + [("launched", "MainThread")]
    assert ahead.launched(kernel.module) is kernel.module  # once all are there, nothing is in between


@pytest.mark.parametrize("known", [True, False])
def test_kernels_wait_for_what_is_prepared_once(known: bool, kernel: Any, monkeypatch: pytest.MonkeyPatch):
    """Where this Triton is new, its key is made and processes begin meanwhile; and end, if there is nothing to do."""
    notes = kernel.notes
    monkeypatch.setattr(cache_key, "recall", lambda: notes.append("recalled") or known)
    monkeypatch.setattr(cache_key, "may_remember", lambda: True)
    monkeypatch.setattr(cache_key, "remember", lambda: (time.sleep(0.1), notes.append("remembered")))
    monkeypatch.setattr(ahead, "_load_driver", lambda device: notes.append(f"loaded for {device}"))
    monkeypatch.setattr(compile_processes, "begin", lambda count: notes.append(f"{count > 0} processes"))
    monkeypatch.setattr(compile_processes, "end", lambda: notes.append("ended"))
    ahead.prepare(META)
    with ahead.listing(META):
        pass
    assert [*notes] == ["loaded for meta", "recalled", *([] if known else ["True processes", "remembered"]), "ended"]
    notes.clear()
    with ahead.listing(META):
        launch(kernel, 16)
        launch(kernel, 1)
    launch(kernel, 16)
    assert notes == [("compiled", "compile a_kernel")] * 2 + ["ended", ("launched", "MainThread")]


def test_where_there_may_be_no_more_threads_launches_compile(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        ahead.prepare(META)
        with ahead.listing(META), pytest.raises(RuntimeError, match="can't start"):
            launch(kernel, 16)
    launch(kernel, 16)
    assert kernel.notes == [("launched", "MainThread")]
    with ahead.listing(META):
        launch(kernel, 1)
    launch(kernel, 1)
    assert kernel.notes[1:] == [("compiled", "compile a_kernel"), ("launched", "MainThread")]


def test_kernels_that_are_never_launched_are_forgotten(kernel: Any):
    other = SimpleNamespace(b_kernel=kernel.module.a_kernel)
    with ahead.listing(META):
        ahead.launched(other).b_kernel[(1,)](16)
        launch(kernel, 16)
    for threads in [*ahead._THREADS.values()]:
        threads[0].join()
    launch(kernel, 16)
    assert not ahead._THREADS


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_triton_that_cannot_be_imported_is_none(error: type[Exception], monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> None:
        raise error(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    assert not device._has_triton()


def test_what_cannot_be_compiled_ahead_is_left_to_the_launch(kernel: Any):
    with ahead.listing(META):
        launch(kernel, 16, FAILS=True)
    launch(kernel, 16, FAILS=True)
    assert kernel.notes == [("launched", "MainThread")]


def test_a_program_that_ends_begins_no_compilation(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    with ahead.listing(META):
        launch(kernel, 16)
    ahead.wait()
    assert kernel.notes == []
