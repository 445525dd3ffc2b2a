"""C modules of one name, as Triton's launchers are."""

import importlib.util
import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path
from types import ModuleType

import pytest

from specdec.ops.compiling.launchers import separate_launchers

build = pytest.importorskip("triton.runtime.build")
NAME = "__triton_launcher"
SOURCE = """\
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""
COMPILER = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
INCLUDED = Path(sysconfig.get_paths()["include"])


def from_path(name: str, path: str) -> ModuleType:
    """Triton's own way, before it is changed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    if COMPILER is None or not (INCLUDED / "Python.h").exists():
        pytest.skip("no C compiler, or Python's headers are not installed")
    found = []
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        source, path = tmp_path / str(number) / "module.c", tmp_path / str(number) / f"{NAME}.so"
        source.write_text(SOURCE.replace("NUMBER", str(number)))
        subprocess.run([COMPILER, "-shared", "-fPIC", f"-I{INCLUDED}", str(source), "-o", str(path)], check=True)
        found.append(str(path))
    return found


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_module_from_path", from_path)
    separate_launchers()


def test_a_launcher_stays_that_of_its_kernel(paths: list[str], load: None) -> None:
    """Keeps out: a launcher that changes when another one is loaded a second time."""
    modules = [build._load_module_from_path(NAME, path) for path in paths]
    again = build._load_module_from_path(NAME, paths[0])
    assert [module.launch() for module in modules] == [0, 1, 2, 3] and again.launch() == 0


def test_threads_get_the_launchers_that_they_asked_for(paths: list[str], load: None) -> None:
    """Keeps out: two threads that load at one time, one of which reads the other one's functions."""
    wrong: list[tuple[int, int]] = []

    def loads(number: int) -> None:
        for _ in range(300):
            got = build._load_module_from_path(NAME, paths[number]).launch()
            if got != number:
                wrong.append((number, got))

    threads = [threading.Thread(target=loads, args=(number,)) for number in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_triton_s_own_function_is_changed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a chain of copies that grows with each decoder, and a name that Triton no longer asks for."""
    monkeypatch.setattr(build, "_load_module_from_path", from_path)
    separate_launchers()
    first = build._load_module_from_path
    separate_launchers()
    assert build._load_module_from_path is first is not from_path
    assert "_load_module_from_path" in build.compile_module_from_src.__code__.co_names
