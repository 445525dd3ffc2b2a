"""Triton's interpreter without the work that it does again and again: the same results in a third of the time.

It looks through all names of `triton.language` at every launch, and at every call inside a kernel; it computes whether
sums of integers overflow, only to drop the answer; and it makes a table of types, and tuples of sizes, for every value.  This
module knows the interpreter of the pinned version; a version without these functions is left as it is.
"""

import functools
import inspect
import math
from dataclasses import replace
from typing import Any

from toolkit.inside.operands import share_operands


def quicken() -> None:
    """Changes the interpreter of this process, before its first launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    parts = "_patch_lang _patch_builtin _patch_attr _LangPatchScope _get_np_dtype interpreter_builder interpreter_semantic"
    if not all(hasattr(interpreter, name) for name in parts.split()):
        return

    @functools.cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins_of(package)  # as they are before any launch

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            if getattr(package, name) is member:  # inside a launch it has been replaced
                interpreter._patch_attr(package, name, member, builder, scope)

    patch_lang, scope_type = interpreter._patch_lang, interpreter._LangPatchScope
    patched: set[Any] = set()  # what of `triton.language` the launch that runs has replaced

    class Scope(scope_type):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    @functools.cache
    def modules_of(function: Any) -> frozenset[Any]:
        return frozenset(module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values()))

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if modules and modules <= patched:
            return Scope()
        scope = patch_lang(function)
        patched.update(modules)
        return scope

    find, found = interpreter._get_np_dtype, {}  # by name: types of blocks have no hash

    def np_dtype(type: Any) -> Any:
        name = type.name
        if name not in found:
            found[name] = find(type)
        return found[name]

    interpreter._patch_builtin, interpreter._LangPatchScope = patch_builtin, Scope
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, np_dtype
    _share_sizes(tl.core)
    share_operands(interpreter, tl.core)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else an overflow raises
        builder.options = replace(builder.options, sanitize_overflow=False)


def _share_sizes(core: Any) -> None:
    """Blocks and values of the same sizes share what their types' constructors make of the sizes, which nothing changes."""
    make_block_type = core.block_type.__init__
    of_blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, Any, str]] = {}
    of_values: dict[str, tuple[Any, Any, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([each.value if type(each) is core.constexpr else each for each in shape])
        if not all(type(size) is int for size in sizes):
            return make_block_type(self, element_ty, shape)  # type: ignore[no-any-return]  # which refuses it
        key = element_ty.name, sizes
        if key not in of_blocks:
            make_block_type(self, element_ty, shape)  # which refuses some too
            of_blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = of_blocks[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        name = type.name
        if name not in of_values:
            sizes = tuple(type.shape) if type.is_block() else ()
            of_values[name] = (
                core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes)), type.scalar
            )  # fmt: skip
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = of_values[name]

    core.block_type.__init__, core.tensor.__init__ = init_block_type, init_tensor


def dot_exactly(monkeypatch: Any) -> None:
    """Until a test ends, `tl.dot` of 16-bit numbers is exact up to its last rounding.

    As it stands, the interpreter asks numpy's BLAS, which on some CPUs (an AMD EPYC) adds a row's products in an order that
    depends on where in the matrix the row stands.  A GPU's tensor cores do not, so a test of equal bits needs sums without an
    order: in float64 the products of 16-bit numbers and their sums are exact.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        assert a.dtype.primitive_bitwidth == b.dtype.primitive_bitwidth == 16
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", create_dot)
