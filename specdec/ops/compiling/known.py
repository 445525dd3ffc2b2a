"""Knows which compiled kernels earlier starts needed, so that a start loads them at once.

Triton finds a compiled kernel in its cache by a digest of its own files, of the kernel's source and of all that this source
uses.  To compute these digests takes longer than to load the kernels.  So after a rehearsal a file beside Triton's cache says
which kernels were launched, by which key Triton knows each in memory, and where its files lie; the next start with the same
models and settings loads them, and its rehearsal finds them.  The file is good for one state of specdec's kernels, one Triton,
one Python, one kind of GPU and one set of Triton's variables in the environment.

A kernel that is missing here, or whose files are gone, is found or compiled as ever.  The file is read with pickle: whoever can
write to Triton's cache can run code here already, since compiled programs lie in it.

This module knows no kernel and no model.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.ops.launch import has_triton

MAX_KERNELS = 256  # kernels in one file; those that were launched last stay
MAX_FILES = 64  # in the folder, one for each purpose; those that were written last stay
ENDINGS = "_triton", "hopper"  # of modules with kernels, and of ops/hopper.py
FOLDER = "specdec"  # inside of Triton's cache


EntryKey = tuple[str, str, str]  # module, name and key of an entry


class KnownKernel(NamedTuple):
    """One compiled kernel.

    module, name: where the function lies that is the kernel's source.  key: of the kernel in this function's own table.
    signature, constants, attributes, digest, files: what Triton makes the kernel of again, all as it keeps them.
    """

    module: str
    name: str
    key: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    digest: str
    files: dict[str, str]


class KnownKernels:
    """The kernels of starts for one purpose, on one GPU.

    purpose: a text that is equal for starts that need the same kernels.
    """

    def __init__(self, device: torch.device, purpose: str) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._path = _folder() / f"{_digest(device, purpose)}.kernels"
        self._entries = _read(self._path)

    def loads(self) -> list[Callable[[], object]]:
        """One function for each known kernel, to be called in any thread, that loads it.  It raises nothing."""
        return [load for entry in self._entries.values() if (load := self._prepared(entry)) is not None]

    def _prepared(self, entry: KnownKernel) -> Callable[[], object] | None:
        """Makes the kernel of its files; what is left is to load it on the GPU.  None: it is there, or can't be made."""
        try:
            function = getattr(importlib.import_module(entry.module), entry.name)
            table = function.device_caches[self._index][0]
            if entry.key in table:
                return None
            source = function.ASTSource(function, entry.signature, entry.constants, entry.attributes)
            kernel = function.CompiledKernel(source, entry.files, entry.digest)
        except Exception:  # of any kind: files may be gone or broken, and a launch will do without
            return None

        def load() -> None:
            with suppress(Exception):  # as above
                _ = kernel.run
                table[entry.key] = kernel

        return load

    def add(self, functions: Iterable[Any]) -> None:
        """Writes down the compiled kernels of these functions, unless all of them are known.  It raises nothing."""
        with suppress(Exception):  # of any kind: a later start then does without
            found = {
                (function.__module__, function.__name__, key): entry
                for function in functions
                for key, kernel in list(function.device_caches[self._index][0].items())  # other threads may add some
                if (entry := _entry(function, key, kernel)) is not None
            }
            if found.keys() <= self._entries.keys():
                return
            merged = {key: entry for key, entry in self._entries.items() if key not in found} | found
            self._entries = dict(list(merged.items())[-MAX_KERNELS:])
            _write(self._path, pickle.dumps((_sources(_kernel_modules()), self._entries)))


def num_loaded(device: torch.device) -> int:
    """How many compiled kernels of specdec this process holds for the device: a launch that needs another one waits for it."""
    if device.type != "cuda" or not has_triton():
        return 0
    from triton.runtime.jit import JITFunction

    index = torch.cuda.current_device() if device.index is None else device.index
    held = {id(each): each for name in _kernel_modules() for each in vars(sys.modules[name]).values()}
    kernels = [each for each in held.values() if isinstance(each, JITFunction)]
    return sum(len(kernel.device_caches[index][0]) for kernel in kernels if index in kernel.device_caches)


def _entry(function: Any, key: str, kernel: Any) -> KnownKernel | None:
    """None for what is no compiled kernel, as one whose compilation goes on."""
    if getattr(function, "CompiledKernel", None) is not type(kernel):
        return None
    files = {name: path for name, path in kernel.metadata_group.items() if name.endswith((".json", ".cubin"))}
    source = kernel.src
    return KnownKernel(
        function.__module__, function.__name__, key, source.signature, source.constants, source.attrs, kernel.hash, files
    )


def _folder() -> Path:
    import triton

    return Path(triton.knobs.cache.dir) / FOLDER


def _read(path: Path) -> dict[EntryKey, KnownKernel]:
    """Nothing if there is no such file yet, if it is broken, or if it was written of other sources."""
    try:
        sources, entries = pickle.loads(path.read_bytes())
        for name in sources:
            importlib.import_module(name)
        return dict(entries) if _sources(sources) == sources else {}
    except Exception:  # of any kind that a broken file may give
        return {}


def _write(path: Path, content: bytes) -> None:
    """All at once, for another process may read or write the file now.  The oldest files beyond MAX_FILES go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    by_age = sorted(path.parent.glob("*.kernels"), key=lambda file: file.stat().st_mtime_ns)
    for file in by_age[:-MAX_FILES]:
        file.unlink(missing_ok=True)


def _digest(device: torch.device, purpose: str) -> str:
    """Of everything but specdec's sources on which a kernel's key or code depends."""
    import triton
    from triton._C import libtriton

    at = os.stat(libtriton.__file__)
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("TRITON_"))
    asked = getattr(libtriton, "get_cache_invalidating_env_vars", dict)  # others that Triton's own keys have
    variables += sorted(asked().items())
    facts = (
        purpose, sys.version, triton.__version__, libtriton.__file__, at.st_size, at.st_mtime_ns, variables,
        torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device),
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _kernel_modules() -> list[str]:
    """The modules of kernels that are imported, so those of all functions and constants that a compiled kernel used."""
    return sorted(name for name in sys.modules if name.startswith("specdec.") and name.endswith(ENDINGS))


def _sources(modules: Iterable[str]) -> dict[str, str]:
    """For each module a digest of the functions and constants that kernels find there."""
    from triton.language import constexpr
    from triton.runtime.jit import JITCallable

    def digest(name: str) -> str:
        held = vars(sys.modules[name]).items()
        functions = [(key, value.raw_src) for key, value in held if isinstance(value, JITCallable)]
        constants = [(key, repr(value)) for key, value in held if isinstance(value, (constexpr, int, float, str))]
        return hashlib.sha256(repr((functions, sorted(constants))).encode()).hexdigest()

    return {name: digest(name) for name in modules}
