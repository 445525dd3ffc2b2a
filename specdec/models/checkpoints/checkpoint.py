"""Reads a model folder strictly: every tensor in it is used or is an error, every tensor wanted is found or is an error.

Knows files and names, not architectures; see `loader.py` for what a target takes.
"""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from specdec.models.checkpoints.config_values import one_line
from specdec.models.checkpoints.files import stored_tensors
from specdec.models.checkpoints.finite import FiniteCheck
from specdec.models.checkpoints.fused_experts import split_fused
from specdec.models.checkpoints.mistaken import name_hint
from specdec.models.checkpoints.stored import SAFE_DTYPES, StoredTensor
from specdec.models.gguf.container import MAGIC
from specdec.models.gguf.file import SUFFIX, gguf_in, is_gguf
from specdec.models.gguf.kept_blocks import GgmlBlocks
from specdec.models.keys.tensor_names import by_own_tensor_names
from specdec.models.keys.wrapper_table import Wrapper
from specdec.models.schemes.rules import Quantization
from specdec.models.schemes.source import WeightFormat
from specdec.startup import STARTUP

_SAFE_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in SAFE_DTYPES.items()}  # by those in pickles
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_ELSEWHERE = ["original/*", "consolidated*"]  # the same weights once more, in Meta's and Mistral's own layouts


def resolve_folder(name: str | Path, argument: str) -> Path:
    """A local folder as it is; anything else is a hub id, fetched through huggingface_hub.  argument: for errors."""
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a folder or a hub id, a str or a Path; got {name!r} of type {type(name).__name__}")
    if name == "":  # which a Path takes for the current folder
        raise ValueError(f"{argument} must be a folder or a hub id like 'org/name', got ''")
    text = str(name)
    try:
        path = Path(name).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; a user that has no home
        raise ValueError(f"{argument} must be a folder or a hub id like 'org/name': {error}"[:400]) from error
    if is_folder:
        return path
    if is_there:
        raise ValueError(f"{argument}: expected a model folder or a hub id, got the file {text!r}{_instead(path)}")
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        hint = name_hint(text)
        raise ValueError(f"{argument}: expected an existing model folder or a hub id like 'org/name', got {text!r}{hint}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    STARTUP.begin(f"downloading {text}")
    try:
        folder = Path(snapshot_download(text, allow_patterns=_PATTERNS, ignore_patterns=_ELSEWHERE))
        if not any(folder.glob("*.safetensors")):  # heads are often published as pickles only
            folder = Path(snapshot_download(text, allow_patterns=[*_PATTERNS, "*.bin"], ignore_patterns=_ELSEWHERE))
        return folder
    except HFValidationError as error:
        raise ValueError(f"{argument} is no local folder, and no hub id either: {error}{name_hint(text)}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        said = f"{one_line(error)}{name_hint(text)}"
        raise ValueError(f"{argument}: {text!r} is no local folder, and the hub did not give it: {said}") from error


def _instead(path: Path) -> str:
    """What may be meant by a file that is given for a folder, with a "; " in front; empty if that can't be told."""
    try:
        with path.open("rb") as file:
            holds_gguf = file.read(4) == MAGIC
    except OSError:
        holds_gguf = False
    if not holds_gguf:
        return f"; nearest: {str(path.parent)!r}" if (path.parent / "config.json").is_file() else ""
    named = "the file as a target, since a GGUF file holds no draft head"
    return f"; nearest: {named}" if is_gguf(path) else f"; nearest: a name that ends in {SUFFIX}"


def resolve_target(name: str | Path, argument: str) -> Path:
    """As `resolve_folder`; a GGUF file, or a folder whose weights are in one, is that file."""
    if isinstance(name, (str, os.PathLike)) and is_gguf(file := Path(os.path.expanduser(name))):
        if not file.is_file():
            raise ValueError(f"{argument}: expected an existing GGUF file, got {str(name)!r}{name_hint(str(name))}")
        return file
    folder = resolve_folder(name, argument)
    return gguf_in(folder) or folder


def config_path(place: Path) -> Path:
    """What errors call the place where a target's config stands."""
    return place if is_gguf(place) else place / "config.json"


class Checkpoint:
    """The tensors of one folder or GGUF file, by name; remembers which were taken, and whether what was copied is finite.

    pickles: whether the weights may come from a pickle where there is no safetensors file.
    quantization: how its matrices are stored in 8 or 4 bits; None: none of them is.
    by_expert: whether tensors that hold all experts of a layer are seen as each expert's own.
    wrapper: what the model lies in, if not alone; its tensors are then seen under a text model's names.
    family: the model_type, by which tensors of some have other names (keys/tensor_names.py).
    passed_over: tensors of the wrapper that no text needs.
    has_data: whether tensors that are taken have their values.  Those of `headers` have none, and lie on torch's meta device.
    """

    has_data = True

    def __init__(
        self, folder: Path, pickles: bool = True, quantization: Quantization | None = None, by_expert: bool = False,
        wrapper: Wrapper | None = None, family: str = "",
    ) -> None:  # fmt: skip
        self.folder, self.quantization = folder, quantization
        stored, self.passed_over = stored_tensors(folder, pickles, self._stays_in_blocks), dict[str, StoredTensor]()
        if wrapper is not None:
            stored, self.passed_over = wrapper.split(stored)
        stored = by_own_tensor_names(stored, family)
        self._stored = split_fused(stored) if by_expert else stored
        self._untaken = set(self._stored)
        self._finite = FiniteCheck()

    def headers(self) -> Checkpoint:
        """The same tensors, none of them taken, on the meta device: only headers are read.

        What is filled from it shows all that names, shapes and dtypes show, and takes neither memory nor the time to read.
        """
        same = copy.copy(self)
        same.has_data, same._untaken = False, set(self._stored)
        return same

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> list[str]:
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """By the file's header: the tensor is not read."""
        return self._find(name).shape()

    def dtype(self, name: str) -> str:
        """By the file's header, as safetensors calls it."""
        name_there = self._find(name).dtype()
        return _SAFE_NAMES.get(name_there, name_there)

    def itemsize(self, name: str) -> int:
        """Bytes of one of the tensor's numbers, by the header."""
        return self._find(name).itemsize

    @property
    def passed_over_bytes(self) -> int:
        """Of all `passed_over` tensors, by their headers."""
        return sum(math.prod(each.shape()) * each.itemsize for each in self.passed_over.values())

    def expect(self, name: str, shape: tuple[int, ...], keys: str = "") -> None:
        """ValueError if there is no such tensor, or one of another shape.  Reads headers only: ask before memory is taken.

        keys: those of config.json that the shape follows from, for the error.
        """
        stored = self._find(name)
        if stored.shape() != tuple(shape):
            raise ValueError(
                f"{stored.file}: tensor {name!r} must have shape {tuple(shape)}, got {stored.shape()}"
                + (f"; config.json asks for the former by {keys}" if keys else "")
            )

    def expect_layers(self, prefix: str, count: int) -> None:
        """ValueError if there are fewer layers named `prefix` and a number than `count`."""
        numbers = {name.removeprefix(f"{prefix}.").partition(".")[0] for name in self._stored if name.startswith(f"{prefix}.")}
        held = 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
        if count > held:
            raise ValueError(
                f"{config_path(self.folder)}: num_hidden_layers is {count}, but the checkpoint holds {held} layers: "
                f"{prefix}.{held} is missing"
            )

    def expect_kind(self, name: str, kind: str) -> None:
        """ValueError if the tensor does not hold "floating-point numbers", or "integers" (or booleans), by the header."""
        stored = self._find(name)
        if stored.kind != kind:
            raise ValueError(f"{stored.file}: tensor {name!r} must hold {kind}, got {stored.dtype()}")

    def _stays_in_blocks(self, name: str) -> bool:
        return self.quantization is not None and isinstance(self.quantization.format_of(name, lambda _: True), GgmlBlocks)

    def format_of(self, name: str) -> WeightFormat | None:
        """How the matrix of that name is stored in 8 or 4 bits; None: it is unquantised."""
        if self.quantization is None:
            return None
        return self.quantization.format_of(name, lambda format: format.has(self, name))

    def has_matrix(self, name: str) -> bool:
        """Whether there is a matrix of that name, whose tensors may be those of a matrix in 8 or 4 bits."""
        format = self.format_of(name)
        endings = () if format is None else format.endings(self, name)
        return any(f"{name}.{ending}" in self for ending in ("weight", *endings))

    def expect_matrix(self, name: str, shape: tuple[int, int], keys: str) -> None:
        """As `expect`, of the weight of that name, unless its shape can't be seen before it is unpacked."""
        format = self.format_of(name)
        if format is None or not format.packs:
            self.expect(f"{name}.weight", shape, keys)

    def refuse(self, name: str, problem: str) -> ValueError:
        """What to raise of a tensor."""
        return ValueError(f"{self.file(name)}: tensor {name!r} {problem}")

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor of that name (and shape), of floating-point numbers; it counts as used.

        ValueError if the tensor has 8 bits in a quantised checkpoint: there its values are quantised, with scales.
        """
        if self.quantization is not None and (stored := self._find(name)).dtype().upper().startswith(("F8", "FLOAT8")):
            expected = "expected 16 or more bits of what config.json leaves unquantised"
            raise self.refuse(name, f"holds floats of 8 bits ({stored.dtype()}); {expected}")
        return self._take(name, shape, "floating-point numbers")

    def take_integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Like `take`, of integers or booleans."""
        return self._take(name, shape, "integers")

    def take_quantised(self, name: str, shape: tuple[int, ...], *dtypes: str) -> Tensor:
        """Like `take`, of quantised values: in any other dtype their bits would mean something else.

        dtypes: the only ones that the tensor may have, as safetensors calls them.
        """
        if (got := self.dtype(name)) not in dtypes:
            raise self.refuse(name, f"must hold {' or '.join(dtypes)}, got {got}")
        return self._take(name, shape, self._find(name).kind)

    def landed(self, name: str, kept: Tensor) -> None:
        """Says where the tensor's values are now: `finish` refuses them if they are not finite there."""
        if self.has_data:
            self._finite.see(name, kept)

    def ignore(self, name: str) -> None:
        """Declares a tensor as known and harmless, if there is one of that name."""
        self._untaken.discard(name)

    def ignore_endings(self, suffix: str) -> None:
        """The same of all tensors whose names end so."""
        self._untaken = {name for name in self._untaken if not name.endswith(suffix)}

    def leave(self, prefixes: tuple[str, ...]) -> None:
        """Declares tensors whose names begin so as another model's, which reads them itself."""
        self._untaken = {name for name in self._untaken if not name.startswith(prefixes)}

    def leave_all_but(self, prefixes: tuple[str, ...]) -> None:
        """The same of all others."""
        self._untaken = {name for name in self._untaken if name.startswith(prefixes)}

    def finish(self) -> None:
        """ValueError for tensors nobody took, which would change the model if they were used, and for values not finite."""
        if self._untaken:
            names = sorted(self._untaken)
            raise ValueError(f"{self.folder}: {len(names)} tensors are not part of this architecture: {', '.join(names[:8])}")
        if self.has_data:
            self.refuse_not_finite()

    def refuse_not_finite(self) -> None:
        """ValueError if a tensor that landed holds NaN or an infinity.  Waits for the device, once."""
        if not (names := self._finite.not_finite()):
            return
        name = names[0]
        more = f" ({len(names)} tensors do)" if len(names) > 1 else ""
        is_rounded = name in self and self._stored[name].kind != "integers"  # integers may stand for NaN
        if is_rounded and bool(self._stored[name].read().double().isfinite().all()):  # 8-bit floats have no isfinite
            raise ValueError(
                f"{self.file(name)}: tensor {name!r} holds numbers too large for the dtype asked for{more}; nearest setting "
                "that works: dtype='bfloat16'"
            )
        raise ValueError(
            f"{self.file(name)}: tensor {name!r} holds NaN or infinity{more}; expected finite weights: was training or "
            "conversion broken?"
        )

    def file(self, name: str) -> Path:
        """The file that holds the tensor, or the folder, if it is known by another name there."""
        return self._stored[name].file if name in self else self.folder

    def _find(self, name: str) -> StoredTensor:
        if name not in self._stored:
            have = ", ".join(self._beside(name))
            raise ValueError(f"{self.folder}: tensor {name!r} is missing; the checkpoint holds {have}, ...")
        return self._stored[name]

    def _beside(self, name: str) -> list[str]:
        """Up to eight names that are there: those that begin most like that name."""
        parts, names = name.split("."), self.names()
        for count in range(len(parts) - 1, 0, -1):
            if alike := [each for each in names if each.startswith(".".join(parts[:count]) + ".")]:
                return alike[:8]
        return names[:8]

    def _take(self, name: str, shape: tuple[int, ...] | None, kind: str) -> Tensor:
        self.expect_kind(name, kind)
        if shape is not None:
            self.expect(name, shape)
        self._untaken.discard(name)
        stored = self._stored[name]
        if not self.has_data:
            return stored.on_meta()
        STARTUP.part_done()
        return stored.read()


class AssumedCheckpoint(Checkpoint):
    """A checkpoint that has whatever it is asked for, unquantised, and no data.  No file is read.

    shapes: of the tensors that were taken, by name: what fills a module so says which tensors the module needs.
    """

    has_data = False

    def __init__(self) -> None:
        self.folder, self.quantization, self.shapes = Path(), None, dict[str, tuple[int, ...]]()
        self._stored, self._untaken = {}, set()

    def _take(self, name: str, shape: tuple[int, ...] | None, kind: str) -> Tensor:
        assert shape is not None, name
        self.shapes[name] = shape
        return torch.empty(shape, device="meta", dtype=torch.float32)
