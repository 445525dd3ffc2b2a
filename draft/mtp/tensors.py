"""Every tensor of a target's MTP layers, with its shape: for strict reading before memory is taken, and for `inspect`."""

from __future__ import annotations

from specdec.draft.formats.reading import Shapes, may_be_read
from specdec.draft.mtp.fill import empty_mtp, fill
from specdec.draft.mtp.spec import MtpSpec
from specdec.models.checkpoints.checkpoint import AssumedCheckpoint, Checkpoint
from specdec.models.checkpoints.stored import SAFE_DTYPES
from specdec.models.schemes.source import WeightFormat


def wanted_tensors(spec: MtpSpec) -> Shapes:
    """All that the layers need, unquantised: what filling them asks for."""
    asked = AssumedCheckpoint()
    fill(empty_mtp(spec), asked)
    return asked.shapes


def copies(spec: MtpSpec) -> dict[str, str]:
    """Tensors that may be there too and repeat one of the target's: by name, the target's."""
    return {name: own for names in spec.layers for name, own in names.copies}


def stored_tensors(checkpoint: Checkpoint, spec: MtpSpec) -> Shapes:
    """All that the layers need, as the checkpoint stores it: a matrix in 8 or 4 bits is several tensors.

    The shape of a tensor of quantised values or scales is its own, by the header; nobody has compared it with the matrix's.
    """
    stored: Shapes = {}
    for name, shape in wanted_tensors(spec).items():
        matrix, format = name.removesuffix(".weight"), _format(checkpoint, name, shape)
        for tensor in (name,) if format is None else (f"{matrix}.{ending}" for ending in format.endings(checkpoint, matrix)):
            stored[tensor] = shape if tensor == name or tensor not in checkpoint else checkpoint.shape(tensor)
    return stored


def check_tensors(checkpoint: Checkpoint, spec: MtpSpec) -> None:
    """ValueError for a tensor of the layers that is missing, unknown, of another shape, or of the wrong kind of numbers.

    Reads headers alone: nothing was allocated yet.  Shapes of quantised values and of scales are checked as they are read.
    """
    wanted, may = stored_tensors(checkpoint, spec), {*copies(spec), *_beside_quantised(checkpoint, spec)}
    held = [name for name in checkpoint.names() if name.startswith(spec.prefixes)]
    spare = [name for name in held if name not in wanted and name not in may and not may_be_read(name)]
    missing = sorted(set(wanted) - set(checkpoint.names()))
    if missing:
        instead = f"; the layers hold {', '.join(spare[:4])}, which no part of them is called" if spare else ""
        raise ValueError(
            f"{checkpoint.folder}: tensor {missing[0]!r} is missing for draft='mtp': config.json counts "
            f"{spec.model.num_layers} MTP layers ({len(missing)} of {len(wanted)} tensors are missing){instead}; "
            "nearest setting that works: draft='ngram'"
        )
    if spare:
        raise ValueError(
            f"{checkpoint.folder}: {len(spare)} tensors are not part of a {spec.family} target's MTP layers: "
            f"{', '.join(spare[:8])}"
        )
    for name, shape in wanted_tensors(spec).items():
        if name in wanted:
            checkpoint.expect(name, shape, "the target's sizes")
            checkpoint.expect_kind(name, "floating-point numbers")


def how_stored(checkpoint: Checkpoint, spec: MtpSpec) -> str:
    """How the layers' matrices lie in the checkpoint, in words."""
    ways = []
    for name, shape in wanted_tensors(spec).items():
        if len(shape) == 2:
            format = _format(checkpoint, name, shape)
            ways.append(format.describe() if format else str(SAFE_DTYPES[checkpoint.dtype(name)]).removeprefix("torch."))
    return ", ".join(dict.fromkeys(ways))


def _format(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> WeightFormat | None:
    """How a matrix is stored in 8 or 4 bits.  The router, which decides between experts, is never quantised."""
    is_matrix = len(shape) == 2 and not name.endswith(".gate.weight")
    return checkpoint.format_of(name.removesuffix(".weight")) if is_matrix else None


def _beside_quantised(checkpoint: Checkpoint, spec: MtpSpec) -> set[str]:
    """Tensors that may lie beside the quantised values of a matrix."""
    matrices = {name: _format(checkpoint, name, shape) for name, shape in wanted_tensors(spec).items()}
    return {
        f"{name.removesuffix('.weight')}.{ending}" for name, format in matrices.items() if format for ending in format.may_end
    }
