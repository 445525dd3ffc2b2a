"""The layout's rules: which way imports run, what is packaged, how light the door is, how long files may get."""

import ast
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from toolkit.paths import ROOT
from toolkit.rules.class_names import shared_class_names
from toolkit.rules.imports import MAY_IMPORT, ROOMS, layer, module_name, package_files, wrong_imports
from toolkit.rules.patches import patches
from toolkit.rules.private_names import borrowed_names
from toolkit.rules.source import nodes, parsed, source_is_forgotten  # noqa: F401

OPTIONAL = (
    "triton",
    "flash_attn",
    "flash_attn_interface",
    "flash_mla",
    "llguidance",
    "matplotlib",
    "scipy",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "ray",
)
MAX_FILE, MAX_FUNCTION, MAX_KERNEL, MAX_FOLDER, MAX_RESULTS, MAX_PATCHES = 400, 60, 150, 12, 24, 136
DRIVER = "tests/toolkit/driver.py"
INTERNALS = {"engine", "owner", "_request", "_start"}  # of a decoder


def all_files(root: Path) -> list[Path]:
    scripts = [p for p in (root / "scripts").glob("*") if p.is_file() and is_python(p)]
    others = [p for folder in ("benchmarks", "examples", ".ci", "tests") for p in sorted((root / folder).rglob("*.py"))]
    return [*package_files(root), *sorted(scripts), *others]


def is_python(path: Path) -> bool:
    first = path.read_bytes().split(b"\n", 1)[0]
    return path.suffix == ".py" or (first.startswith(b"#!") and b"python" in first)


def oversized(root: Path) -> list[str]:
    found = []
    for path in all_files(root):
        text, name = path.read_text(), path.relative_to(root)
        if (lines := len(text.splitlines())) > MAX_FILE:
            found.append(f"{name}: {lines} lines, at most {MAX_FILE}")
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                lines, most = node.end_lineno - node.lineno + 1, MAX_KERNEL if kernel else MAX_FUNCTION
                if lines > most:
                    found.append(f"{name}:{node.lineno} {node.name}: {lines} lines, at most {most}")
    return found


def crowded(root: Path) -> list[str]:
    """Folders with too many modules, of which __init__.py does not count, or with too many results of benchmarks."""
    files = [*package_files(root), *(root / "tests").rglob("*.py"), *(root / "benchmarks").rglob("*.py")]
    held = {MAX_FOLDER: [p for p in files if p.stem != "__init__"], MAX_RESULTS: [*(root / "benchmarks").rglob("*.json")]}
    counts = [(folder, n, most) for most, paths in held.items() for folder, n in Counter(p.parent for p in paths).items()]
    return [f"{f.relative_to(root)}: {n} files, at most {most}" for f, n, most in sorted(counts) if n > most]


def entangled(root: Path) -> list[str]:
    """Tests that import other tests, or that touch what only the driver may."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        name = path.relative_to(root)
        for node in nodes(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else modules
            if any(part.startswith(("test_", "conftest")) for module in modules for part in module.split(".")):
                found.append(f"{name}:{node.lineno} imports a test: what both need belongs into tests/toolkit")
            if isinstance(node, ast.Attribute) and node.attr in INTERNALS and str(name) != DRIVER:
                found.append(f"{name}:{node.lineno} touches .{node.attr}: only {DRIVER} does")
    return found


def undocumented(root: Path) -> list[str]:
    return [str(p.relative_to(root)) for p in all_files(root) if not ast.get_docstring(parsed(p))]


def packaging_faults(root: Path) -> list[str]:
    """Differences between the packages that pyproject.toml lists and the folders that hold modules."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    moved = settings["package-dir"]
    listed = {root / moved.get(p, p.replace(".", "/")) for p in settings["packages"]}
    held = {path.parent for path in package_files(root)}
    bare = sorted(folder for folder in held | listed if not (folder / "__init__.py").is_file())
    return [
        *(f"{folder.relative_to(root)}: not in pyproject's packages" for folder in sorted(held - listed)),
        *(f"{folder.relative_to(root)}: listed in pyproject, holds no module" for folder in sorted(listed - held)),
        *(f"{folder.relative_to(root)}: no __init__.py" for folder in bare),
        *(f"{room}: not in pyproject's package-dir" for room in ROOMS if moved.get(f"specdec.{room}") != room),
    ]


def python(code: str, *args: str, cwd: Path) -> str:
    """Runs code in a fresh process that sees no GPU and no folder of the checkout."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-P", "-c", code, *args], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_imports_run_one_way():
    """Keeps out: a drafter that knows the verifier, attention that knows trees, and import cycles through the door."""
    assert {layer(module_name(path, ROOT)) for path in package_files(ROOT)} == MAY_IMPORT.keys(), "a room is empty"
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("draft/a.py", "from specdec.verify.accept import walk"),
        ("verify/a.py", "import specdec.draft.worker as w"),
        ("verify/a.py", "def f():\n    from specdec.draft import worker"),
        ("verify/a.py", "import importlib\nimportlib.import_module('specdec.draft.worker')"),
        ("attention/a.py", "from specdec.models.llama import Llama"),
        ("attention/a.py", "if TYPE_CHECKING:\n    from specdec.decoder import SpecDecoder"),
        ("specdec/config.py", "from specdec.attention.plan import causal"),
        ("specdec/config.py", "from specdec import SpecConfig"),
        ("specdec/ops/a.py", "import specdec"),
        ("specdec/limits.py", "from . import decoder"),
        ("specdec/models/a.py", "from specdec.draft.eagle import Eagle"),
        ("specdec/models/__init__.py", "from ..train.data import load"),
        ("draft/a.py", "from ..verify import accept"),
        ("specdec/batch/tree.py", "from ..draft import worker"),
        ("specdec/runner/a.py", "from specdec.engine.loop import Engine"),
        ("specdec/engine/a.py", "from specdec.runner.runner import DeviceRunner"),
        ("specdec/engine/a.py", "from specdec.batch.state import BatchState"),
        ("specdec/engine/a.py", "from specdec.ops.norm import rms_norm"),
        ("specdec/steps.py", "from specdec.parallel.group import Group"),
        ("draft/__init__.py", "from .. import verify"),
        ("draft/a.py", "from draft.worker import DraftWorker"),
        ("specdec/decoder.py", "import verify"),
        ("specdec/session.py", "from specdec.decoder import SpecDecoder"),
        ("specdec/lossless/a.py", "from specdec.bench.cell import measure_cell"),
        ("specdec/loading/a.py", "def f():\n    from specdec.lossless.verify import verify"),
        ("specdec/bench/a.py", "from specdec.serve.state import Door"),
        ("specdec/serve/a.py", "from specdec.cli.flags import add_sampling_flags"),
    ],
)
def test_an_import_against_the_order_is_seen(tmp_path, name, line):
    """Keeps out: a rule that passes because it looks away (nested, relative, dynamic or typing-only imports)."""
    assert len(wrong_imports(plant(tmp_path, {name: line}))) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("specdec/__init__.py", "import importlib\nimportlib.import_module('specdec.decoder')"),
        ("specdec/decoder.py", "from specdec.draft.worker import DraftWorker\nfrom specdec.verify import accept"),
        ("specdec/train/head.py", "from specdec import SpecDecoder\nfrom specdec.loading.load import load"),
        ("specdec/models/llama.py", "from specdec.attention.attend import attend\nfrom specdec.ops.norm import rms_norm"),
        ("draft/worker.py", "from specdec.models.llama import Llama\nfrom specdec.draft import expand, vocab"),
        ("attention/plan.py", "import torch\nfrom specdec.attention.segment import Segment"),
    ],
)
def test_an_import_along_the_order_is_allowed(tmp_path, name, line):
    """Keeps out: a rule so broad that the door could not see the rooms."""
    assert wrong_imports(plant(tmp_path, {name: line})) == []


def test_private_names_stay_at_home():
    """Keeps out: a helper that cannot be changed without reading every file, because others use it without being meant to."""
    assert borrowed_names(package_files(ROOT), ROOT) == []


def test_a_borrowed_private_name_is_seen(tmp_path):
    """Keeps out: a rule blind to modules' names, to parents' and to names in strings, or that forbids a named tuple's own."""
    owner = "def _f(): ...\nclass A:\n    def __init__(self): self._x = 0\n    def like(self, other): return other._x\n"
    taker = (
        "from specdec.a import A, _f\nimport specdec.a as a\na._f()\nA()._replace()\nself._x\ngetattr(a, '_f')\ntorch._C._f()"
    )
    plant(tmp_path, {"specdec/a.py": owner, "draft/b.py": taker, "verify/c.py": "def _f(): ...\nfrom specdec.a import A\n_f()"})
    assert borrowed_names(package_files(tmp_path), tmp_path) == ["draft/b.py takes _f", "draft/b.py takes _x"]


def test_a_class_name_means_one_thing():
    """Keeps out: a class that is called as one of another room, so that nobody can tell which of them a page means."""
    product = package_files(ROOT)
    others = [path for path in all_files(ROOT) if path not in set(product)]
    assert shared_class_names(product, others, ROOT) == []


def test_a_shared_class_name_is_seen(tmp_path):
    """Keeps out: a rule blind to rooms beside specdec/, to tests, or to classes inside of functions and of other classes."""
    files = {
        "specdec/a.py": "class A: ...\nclass B: ...\nclass C: ...",
        "draft/b.py": "def f():\n    class A: ...",
        "verify/d.py": "class D:\n  class B: ...",
        "tests/e.py": "class C: ...\nclass E: ...",
        "tests/f.py": "class E: ...",
    }
    plant(tmp_path, files)
    found = shared_class_names(package_files(tmp_path), sorted((tmp_path / "tests").glob("*.py")), tmp_path)
    assert found == [
        "A: draft/b.py:2, specdec/a.py:1",
        "B: specdec/a.py:2, verify/d.py:2",
        "C: specdec/a.py:3, tests/e.py:1",
    ]


def test_few_tests_patch():
    """Keeps out: tests that hold how a function is written, where an argument would say what the test means."""
    found = patches(sorted((ROOT / "tests").rglob("*.py")))
    assert sum(found.values()) <= MAX_PATCHES, found


def test_every_way_to_patch_is_counted(tmp_path):
    """Keeps out: patches that only change their spelling."""
    ways = "m.setattr(a, 'b', 1)\nsetattr(a, 'b', 1)\nmock.patch('a.b')\nwith patch.object(a, 'b'): ...\npatch.dict(a)\n"
    free = "m.setenv('A', 'b')\nobject.__setattr__(a, 'b', 1)\nclient.patch\n"
    plant(tmp_path, {"tests/test_a.py": ways + "m.setitem(a, 'b', 1)\n" + free, "tests/test_b.py": free})
    assert patches([*tmp_path.rglob("*.py")]) == {tmp_path / "tests/test_a.py": 6}


def test_the_wheel_holds_every_package():
    """Keeps out: a package that works in the editable install and is missing from the wheel."""
    assert packaging_faults(ROOT) == []


def test_a_package_left_out_is_seen(tmp_path):
    """Keeps out: a comparison blind to nested packages, folders without __init__.py and unmapped rooms."""
    settings = (ROOT / "pyproject.toml").read_text().replace('"specdec.verify" = "verify"', "")
    inits = dict.fromkeys([f"{p}/__init__.py" for p in ("specdec", "specdec/models", *ROOMS, "attention/extra")], "")
    faults = packaging_faults(plant(tmp_path, {"pyproject.toml": settings, "specdec/train/data.py": "", **inits}))
    assert "attention/extra: not in pyproject's packages" in faults
    assert "specdec/train: no __init__.py" in faults
    assert "verify: not in pyproject's package-dir" in faults


def test_import_specdec_is_light(tmp_path):
    """Keeps out: a door that loads torch (seconds), or anything else that is not Python's own, before it is used."""
    code = """if True:
        import sys
        before = set(sys.modules)  # what the environment itself loads at every start
        import specdec
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
    """
    assert python(code, cwd=tmp_path).split() == ["specdec"]


def test_the_engine_knows_no_tensor(tmp_path):
    """Keeps out: a scheduler that decides by what a device says, and so differs from rank to rank."""
    code = "import sys, specdec.engine.loop, specdec.engine.scheduler; print('torch' in sys.modules)"
    assert python(code, cwd=tmp_path).split() == ["False"]


def test_the_door_opens_without_optional_packages(tmp_path):
    """Keeps out: an unguarded import of triton, flash-attn or a plotting library, and CUDA work at import time."""
    code = """if True:
        import sys
        sys.modules.update(dict.fromkeys(sys.argv[1:]))  # None there: importing it raises ModuleNotFoundError
        from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder
        import torch
        print(torch.cuda.is_initialized(), SpecDecoder.__module__.split(".")[0])
    """
    assert python(code, *OPTIONAL, cwd=tmp_path).split() == ["False", "specdec"]


def test_every_public_name_exists():
    """Keeps out: a lazy door whose __all__ promises a name that was renamed, and one that answers to any name."""
    import specdec

    names = (
        "AsyncSpecDecoder Chunk EngineOptions Generation SamplingParams SpecConfig SpecDecoder Stats TokenLogprob Verification"
    )
    assert set(names.split()) == set(specdec.__all__)
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None, name
    assert set(specdec.__all__) <= set(dir(specdec))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = specdec.no_such_name


def test_files_and_functions_stay_short():
    """Keeps out: the 2,400-line backend file, which starts as one more branch in a long function."""
    assert oversized(ROOT) == []


def test_long_code_is_seen(tmp_path):
    """Keeps out: a limit that forgets methods, kernels, scripts or benchmarks, or gives every function a kernel's room."""
    line = "    x = 0\n"
    kernels = f"@triton.jit\ndef fits():\n{line * 149}\n@triton.autotune([])\n@triton.jit\ndef long():\n{line * 150}"
    files = {
        "attention/a.py": kernels,
        "draft/a.py": "class A:\n    def long(self):\n" + f"    {line}" * 60,
        "scripts/setup.sh": "#!/bin/sh\nthis is no Python\n",
        "scripts/train": "#!/usr/bin/env python3\n" + "x = 0\n" * 400,
        "benchmarks/a.py": "x = 0\n" * 401,
        "tests/test_a.py": "def fits():\n" + line * 59,
    }
    names = [fault.split(": ")[0] for fault in oversized(plant(tmp_path, files))]
    assert names == ["attention/a.py:155 long", "draft/a.py:2 long", "scripts/train", "benchmarks/a.py"]


def test_no_folder_is_crowded():
    """Keeps out: the folder of thirty files in which nobody finds anything."""
    assert crowded(ROOT) == []


def test_a_crowded_folder_is_seen(tmp_path):
    """Keeps out: a count that forgets nested folders, tests or benchmarks, or that counts __init__.py."""
    twelve = {f"attention/kernels/{n}.py": "" for n in range(12)} | {"attention/kernels/__init__.py": ""}
    many = {f"benchmarks/a/{n}.py": "" for n in range(13)} | {f"benchmarks/a/results/{n}.json": "" for n in range(25)}
    plant(tmp_path, twelve | many | {f"tests/door/test_{n}.py": "" for n in range(13)})
    modules = [f"{folder}: 13 files, at most 12" for folder in ("benchmarks/a", "tests/door")]
    assert crowded(tmp_path) == [modules[0], "benchmarks/a/results: 25 files, at most 24", modules[1]]


def test_tests_stand_alone():
    """Keeps out: a test that breaks with another test, and the engine's insides all over the suite."""
    assert entangled(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "from test_pause import Script",
        "def f():\n    import lossless.test_lossless",
        "from conftest import ROOT",
        "decoder.engine.step()",
        "def f(decoder):\n    decoder._start([], True)",
    ],
)
def test_an_entangled_test_is_seen(tmp_path, line):
    """Keeps out: a rule that looks at the top of a file alone; and the driver itself may do all of it but import tests."""
    files = {"tests/engine/test_a.py": line, DRIVER: "decoder.engine.step()", "tests/test_b.py": "from specdec.engine import x"}
    assert len(entangled(plant(tmp_path, files))) == 1


def test_every_module_says_what_it_is():
    """Keeps out: a file that a reader has to reverse-engineer to learn what it is for."""
    assert undocumented(ROOT) == []


def test_a_silent_module_is_seen(tmp_path):
    """Keeps out: a comment counted as a docstring, and an empty __init__.py passed over."""
    plant(tmp_path, {"draft/__init__.py": "", "verify/a.py": "# not a docstring\n", "specdec/a.py": '"""One."""\n'})
    assert undocumented(tmp_path) == ["draft/__init__.py", "verify/a.py"]
