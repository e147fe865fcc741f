"""Kernels are compiled by processes first, and by whoever asked if those fail: with a stand-in for Triton, whose
compiler notes which process it runs in."""

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerwise.optim.cuda.triton import compile_processes
from layerwise.optim.cuda.triton.compile_processes import asked, in_processes

TRITON = {
    "__init__": "",
    "compiler": """
        import os, sys, time
        from pathlib import Path
        class ASTSource:
            def __init__(self, fn, signature, constexprs, attrs):
                self.fn, self.name, self.signature = fn, fn.__name__, signature
                self.constants, self.attrs = constexprs, attrs
            def parse_options(self):
                return {}
        def make_backend(target):
            from types import SimpleNamespace
            return SimpleNamespace(parse_options=lambda options: options)
        def compile(src, target=None, options=None):
            print("compilers print")
            from triton.runtime import cache
            here = Path(__file__).parent
            with open(here / "log", "a") as log:
                log.write(f"{os.getpid()} {src.name} {src.signature} {target} {options} {cache.triton_key()}\\n")
            if options.get("process") and "torch" not in sys.modules:
                faults = {"raises": lambda: 1 / 0, "dies": lambda: os._exit(3), "hangs": lambda: time.sleep(60)}
                faults[options["process"]]()
            (here / src.name).touch()
            from types import SimpleNamespace
            return SimpleNamespace(src=src, metadata=None)
        """,
    "runtime/__init__": "",
    "runtime/cache": """
        from pathlib import Path
        from types import SimpleNamespace
        def triton_key():
            return "computed" if "torch" not in __import__("sys").modules else "the caller's"
        def get_cache_key(src, backend, options, env_vars):
            return src.name
        def get_cache_manager(key):
            here = Path(__file__).parents[1]
            return SimpleNamespace(get_group=lambda name: {name: ""} if (here / name[:-5]).exists() else None)
        """,
    "runtime/build": """
        import subprocess
        def build(source):
            command = ["sh", "-c", f"echo gcc $0 $1 > {source}", "-O3", "-shared"]
            subprocess.check_call(command, stdout=subprocess.DEVNULL)
        """,
    "backends/__init__": "",
    "backends/nvidia/__init__": "",
    "backends/nvidia/driver": """
        from pathlib import Path
        from triton.runtime.build import build
        class CudaLauncher:
            def __init__(self, src, metadata):
                build(Path(__file__).parents[2] / "launcher")
        """,
    "_C/__init__": "",
    "_C/libtriton": """
        def get_cache_invalidating_env_vars():
            return {}
        """,
}
KERNELS = """
def a_kernel(): ...
def b_kernel(): ...
"""


def written(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()), encoding="utf-8")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compiles a kernel by name; notes are lines of who compiled what."""
    for name, text in TRITON.items():
        written(tmp_path / "triton", name, text)
    written(tmp_path / "of_kernels", "__init__", "raise ImportError('only files of kernels are for processes')")
    written(tmp_path / "of_kernels", "some_kernels", KERNELS)
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = types.ModuleType("of_kernels")
    package.__path__ = [str(tmp_path / "of_kernels")]
    monkeypatch.setitem(sys.modules, "of_kernels", package)
    monkeypatch.setattr(compile_processes, "_IDLE", [])
    monkeypatch.setattr(compile_processes, "_LOST", threading.Event())
    import of_kernels.some_kernels as kernels  # pyright: ignore[reportMissingImports]
    import triton.compiler as stand_in  # pyright: ignore[reportMissingImports]

    compile = in_processes(stand_in.compile)

    def compiled(name: str, **options: Any) -> None:
        compile(stand_in.ASTSource(getattr(kernels, name), {"x": "*fp32"}, {(1,): 4}, {}), target=90, options=options)

    log = tmp_path / "triton" / "log"
    notes: Callable[[], list[str]] = lambda: log.read_text().splitlines() if log.exists() else []  # noqa: E731
    yield SimpleNamespace(compile=compiled, notes=notes, folder=tmp_path / "triton")
    compile_processes.end()
    for name in [name for name in sys.modules if name.split(".")[0] in ("triton", "of_kernels")]:
        del sys.modules[name]


@contextmanager
def asking() -> Iterator[threading.Lock]:
    """As a thread that compiles ahead."""
    lock = threading.Lock()
    with lock, asked(lock):
        yield lock
        assert lock.locked()


def processes(notes: list[str]) -> list[int]:
    return [int(line.split()[0]) for line in notes]


def test_a_process_compiles_first_and_is_kept(compiler: Any):
    with asking():
        compiler.compile("a_kernel", num_warps=4)
        (process,) = compile_processes._IDLE
        compiler.compile("b_kernel")
        compiler.compile("a_kernel", num_warps=4)
    mine, notes = os.getpid(), compiler.notes()
    others = process._process.pid
    assert processes(notes) == [others, mine, others, mine, mine]  # the last is in the cache
    assert notes[0].split(maxsplit=1)[1] == "a_kernel {'x': '*fp32'} 90 {'num_warps': 4} the caller's"
    assert [process] == compile_processes._IDLE
    compile_processes.end()
    assert process._process.returncode is not None
    assert compile_processes._IDLE == []


def test_c_is_compiled_too_and_not_optimized(compiler: Any):
    with asking():
        compiler.compile("a_kernel")
    assert (compiler.folder / "launcher").read_text() == "gcc -O0 -shared\n"


def test_only_what_is_asked_for(compiler: Any, monkeypatch: pytest.MonkeyPatch):
    compiler.compile("a_kernel")
    monkeypatch.setattr(sys, "executable", "/usr/bin/a_program_with_python_in_it")
    with asking():
        compiler.compile("b_kernel")
    (compiler.folder / "a_kernel").unlink()
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    with asking():
        compiler.compile("a_kernel")
    assert processes(compiler.notes()) == 3 * [os.getpid()]


def test_what_a_process_cannot_do_is_done_here(compiler: Any):
    with asking():
        compiler.compile("a_kernel", process="raises")
        compiler.compile("b_kernel")
    (process,) = compile_processes._IDLE
    others, mine = process._process.pid, os.getpid()
    assert processes(compiler.notes()) == [others, mine, others, mine]


@pytest.mark.parametrize("how", ["dies", "hangs", "cannot be sent"])
def test_after_one_that_does_not_answer_there_are_no_others(how: str, compiler: Any, monkeypatch: pytest.MonkeyPatch):
    with asking():
        compiler.compile("b_kernel")
        (process,) = compile_processes._IDLE
        monkeypatch.setattr(compile_processes, "LONGEST", 0.5)
        compiler.compile("a_kernel", process=(lambda: None) if how == "cannot be sent" else how)
        assert compile_processes._IDLE == []
        assert process._process.returncode is not None
        (compiler.folder / "a_kernel").unlink()
        compiler.compile("a_kernel")
    others, mine = process._process.pid, os.getpid()
    said = [] if how == "cannot be sent" else [others]
    assert processes(compiler.notes()) == [others, mine, *said, mine, mine]


@pytest.mark.parametrize("may_begin", [True, False])
def test_others_may_go_on_while_one_compiles(may_begin: bool, compiler: Any, monkeypatch: pytest.MonkeyPatch):
    """By a process or here; what is in the cache is read while nobody else reads."""
    held, lock_of = list[bool](), dict[str, threading.Lock]()

    def first(job: Any) -> bool:
        held.append(lock_of["lock"].locked())
        return False

    def compile(src: Any, **how: Any) -> None:
        held.append(lock_of["lock"].locked())

    monkeypatch.setattr(compile_processes, "_first", first)
    monkeypatch.setattr(compile_processes, "may_begin", lambda: may_begin)
    src = SimpleNamespace(name="a_kernel", fn=compile, signature={}, constants={}, attrs={}, parse_options=dict)
    with asking() as lock_of["lock"]:
        in_processes(compile)(src, target=90, options={})
        (compiler.folder / "a_kernel").touch()
        in_processes(compile)(src, target=90, options={})
    assert held == [*([False] if may_begin else []), False, True]


def test_processes_that_begin_before_there_is_a_job(compiler: Any):
    compile_processes.begin(2)
    first, second = compile_processes._IDLE
    with asking():
        compiler.compile("a_kernel")
    assert processes(compiler.notes()) == [second._process.pid, os.getpid()]
    compile_processes.end()
    assert all(process._process.returncode is not None for process in (first, second))


def test_none_begin_where_python_cannot_be_begun(compiler: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_processes, "may_begin", lambda: False)
    compile_processes.begin(2)
    assert compile_processes._IDLE == []


def test_an_interrupt_is_for_the_program(compiler: Any, capfd: pytest.CaptureFixture[str]):
    with asking():
        compiler.compile("a_kernel")
        (process,) = compile_processes._IDLE
        process._process.send_signal(signal.SIGINT)
        compiler.compile("b_kernel")
    assert [process] == compile_processes._IDLE
    process._process.communicate()  # its requests are closed, as when the program ends
    assert process._process.returncode == 0
    assert "Traceback" not in capfd.readouterr().err


def test_where_triton_is_another_nothing_is_gained_or_lost(compiler: Any):
    import triton.runtime.cache as cache  # pyright: ignore[reportMissingImports]

    del cache.get_cache_key
    with asking():
        compiler.compile("a_kernel")
    assert processes(compiler.notes()) == [os.getpid()]
