"""Operands of Triton's interpreter, which it makes anew for every sum and product: types, numbers as blocks, checks of sizes.

Most operands already have the same type, and the same few numbers meet the same few shapes in every program of a launch, so
that what was once made is kept.  Nothing writes into it: its memory is read-only.  This module knows the pinned version.
"""

import functools
from collections.abc import Callable
from typing import Any


def share_operands(interpreter: Any, core: Any) -> None:
    """Operands of one type are taken as they are; a number beside a type is made into a block once."""
    _meet(type(interpreter.interpreter_semantic), core)
    _call_directly(interpreter, core)
    _check_sizes_by_type(interpreter.TensorHandle, core)
    _keep_types(type(interpreter.interpreter_builder), interpreter.TensorHandle)
    unwrap, constexpr, sequences = core._unwrap_if_constexpr, core.constexpr, (list, tuple, core.tuple)

    def unwrap_if_constexpr(value: Any) -> Any:
        if type(value) is constexpr:
            return value.value
        return unwrap(value) if isinstance(value, sequences) else value

    core._unwrap_if_constexpr = unwrap_if_constexpr


def _meet(semantic: Any, core: Any) -> None:
    tensor, block_type = core.tensor, core.block_type
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    blocks: dict[tuple[Any, ...], Any] = {}  # numbers, by what they meet
    scalars: dict[tuple[Any, ...], Any] = {}  # what the elements of two types are cast to; None: as they are
    types: dict[tuple[str, str], tuple[Any, Any]] = {}  # what two types become; None: what they are

    def operands(self: Any, lhs: Any, rhs: Any, *flags: bool) -> tuple[Any, Any]:
        left, right = type(lhs), type(rhs)
        if left is tensor and right is tensor:
            key = lhs.type.name, rhs.type.name, flags
            if key not in scalars:
                first, second = check(self, lhs, rhs, *flags)
                scalars[key] = tuple(
                    None if made.type.scalar == each.type.scalar else made.type.scalar
                    for each, made in ((lhs, first), (rhs, second))
                )
                return first, second
            one, other = scalars[key]
            return met(self, lhs if one is None else self.cast(lhs, one), rhs if other is None else self.cast(rhs, other))
        if left is tensor and right in (int, float, bool):
            number, place, key = rhs, 1, ("right", lhs.type.name, right, rhs, flags)
        elif right is tensor and left in (int, float, bool):
            number, place, key = lhs, 0, ("left", rhs.type.name, left, lhs, flags)
        else:
            return check(self, lhs, rhs, *flags)  # type: ignore[no-any-return]
        if key not in blocks:
            made = check(self, lhs, rhs, *flags)
            if made[1 - place] is not (lhs, rhs)[1 - place] or number != number:  # another type for the tensor too, or NaN
                return made  # type: ignore[no-any-return]
            made[place].handle.data.setflags(write=False)
            blocks[key] = made[place]
        return (lhs, blocks[key]) if place else (blocks[key], rhs)

    def met(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        names = lhs.type.name, rhs.type.name
        if names[0] == names[1]:
            return lhs, rhs
        if names not in types:
            first, second = broadcast(self, lhs, rhs)
            ranks = [len(each.type.shape) if each.type.is_block() else 0 for each in (lhs, rhs)]
            if ranks[0] == ranks[1] or 0 in ranks:
                types[names] = (first.type if first is not lhs else None), (second.type if second is not rhs else None)
            return first, second
        return tuple(  # type: ignore[return-value]
            each if to is None else tensor(_spread(self.builder, each, to, block_type), to)
            for each, to in zip((lhs, rhs), types[names])
        )

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = operands, met


def _spread(builder: Any, value: Any, to: Any, block_type: Any) -> Any:
    if isinstance(value.type, block_type):
        return builder.create_broadcast(value.handle, to.shape)
    return builder.create_splat(to, value.handle)


def _call_directly(interpreter: Any, core: Any) -> None:
    """Builtins are called without a function around them that only looks whether an interpreter is given."""
    semantic, around = interpreter.interpreter_semantic, core.builtin(lambda: None).__code__

    @functools.cache
    def replacement(member: Callable[..., Any]) -> Callable[..., Any]:
        call = member.__wrapped__ if member.__code__ is around else member  # type: ignore[attr-defined]

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return call(*args, **kwargs)

        return called

    def patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(package, name, replacement(member))

    interpreter._patch_attr = patch_attr


def _check_sizes_by_type(handle: Any, core: Any) -> None:
    check, bytes_of = handle.__post_init__, dict[str, int]()

    def post_init(self: Any) -> None:
        name = self.dtype.name
        if name not in bytes_of:
            is_pointer = isinstance(self.dtype, core.pointer_type)
            bytes_of[name] = 8 if is_pointer else max(8, self.dtype.primitive_bitwidth) // 8
        if self.data.itemsize > bytes_of[name]:
            check(self)

    handle.__post_init__ = post_init


def _keep_types(builder: Any, handle: Any) -> None:
    """A result of the operands' own type is as large as they are, and nobody looks whether it is."""
    binary_op = builder.binary_op

    def quick_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        output = op(lhs.data, rhs.data)
        return handle(output, lhs.dtype.scalar) if output.dtype == lhs.data.dtype else binary_op(self, lhs, rhs, op)

    builder.binary_op = quick_op
