"""Every tensor of a target's MTP layers, with its shape: for strict reading before memory is taken, and for `inspect`."""

from __future__ import annotations

from specdec.draft.formats.reading import may_be_read
from specdec.draft.formats.stored import Formats, Shapes, beside_quantised, expect_shapes, formats_of
from specdec.draft.formats.stored import how_stored as ways_stored
from specdec.draft.formats.stored import stored_tensors as as_stored
from specdec.draft.mtp.fill import empty_mtp, fill
from specdec.draft.mtp.spec import MtpSpec
from specdec.models.checkpoints.checkpoint import AssumedCheckpoint, Checkpoint


def wanted_tensors(spec: MtpSpec) -> Shapes:
    """All that the layers need, unquantised: what filling them asks for."""
    asked = AssumedCheckpoint()
    fill(empty_mtp(spec), asked)
    return asked.shapes


def copies(spec: MtpSpec) -> dict[str, str]:
    """Tensors that may be there too and repeat one of the target's: by name, the target's."""
    return {name: own for names in spec.layers for name, own in names.copies}


def stored_tensors(checkpoint: Checkpoint, spec: MtpSpec) -> Shapes:
    """All that the layers need, as the checkpoint stores it."""
    wanted = wanted_tensors(spec)
    return as_stored(checkpoint, wanted, _formats(checkpoint, wanted))


def check_tensors(checkpoint: Checkpoint, spec: MtpSpec) -> None:
    """ValueError for a tensor of the layers that is missing, unknown, of another shape, or of the wrong kind of numbers.

    Reads headers alone: nothing was allocated yet.  Shapes of quantised values and of scales are checked as they are read.
    """
    wanted = wanted_tensors(spec)
    formats = _formats(checkpoint, wanted)
    stored, may = as_stored(checkpoint, wanted, formats), {*copies(spec), *beside_quantised(formats)}
    held = [name for name in checkpoint.names() if name.startswith(spec.prefixes)]
    spare = [name for name in held if name not in stored and name not in may and not may_be_read(name)]
    missing = sorted(set(stored) - set(checkpoint.names()))
    if missing:
        instead = f"; the layers hold {', '.join(spare[:4])}, which no part of them is called" if spare else ""
        raise ValueError(
            f"{checkpoint.folder}: tensor {missing[0]!r} is missing for draft='mtp': config.json counts "
            f"{spec.model.num_layers} MTP layers ({len(missing)} of {len(stored)} tensors are missing){instead}; "
            "nearest setting that works: draft='ngram'"
        )
    if spare:
        raise ValueError(
            f"{checkpoint.folder}: {len(spare)} tensors are not part of a {spec.family} target's MTP layers: "
            f"{', '.join(spare[:8])}"
        )
    expect_shapes(checkpoint, wanted, formats, lambda name: "the target's sizes")


def how_stored(checkpoint: Checkpoint, spec: MtpSpec) -> str:
    """How the layers' matrices lie in the checkpoint, in words."""
    wanted = wanted_tensors(spec)
    matrices = [name.removesuffix(".weight") for name, shape in wanted.items() if len(shape) == 2]
    return ", ".join(ways_stored(checkpoint, matrices, _formats(checkpoint, wanted)))


def _formats(checkpoint: Checkpoint, wanted: Shapes) -> Formats:
    """How matrices are stored in 8 or 4 bits.  The router, which decides between experts, is never quantised."""
    names = (name for name, shape in wanted.items() if len(shape) == 2 and not name.endswith(".gate.weight"))
    return formats_of(checkpoint, (name.removesuffix(".weight") for name in names))
