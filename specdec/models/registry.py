"""Who computes a target: our own modules where there are some for its model_type, or transformers' code with our attention.

Reads configs and says why; a choice that nobody asked for by name has its reason with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.config_values import NotComputedHere, text
from specdec.models.checkpoints.frame import Family, check_tensors, empty, load_family, open_target
from specdec.models.checkpoints.mistaken import refuse_head_config
from specdec.models.checkpoints.mtp_names import with_mtp_count
from specdec.models.config import ModelConfig
from specdec.models.described import described
from specdec.models.gguf.blocks import KEPT
from specdec.models.gguf.file import is_gguf, open_gguf
from specdec.models.gguf.kept_blocks import BLOCKS, blocks_of
from specdec.models.keys.ends import with_ends
from specdec.models.keys.wrapper_table import WRAPPERS
from specdec.models.llama.config import FAMILIES as LLAMA
from specdec.models.mixtures.loader import FAMILIES as MIXTURES
from specdec.models.qwen_hybrid.config import FAMILIES as HYBRIDS
from specdec.models.schemes.config import round_to_nearest
from specdec.models.sharding import join
from specdec.models.target import Target
from specdec.parallel.group import ALONE, Group
from specdec.parallel.shard import Shard

BACKENDS = ("auto", "native", "transformers")
# Families with modules of our own: the folder, whose loader.py ends in a `Family`, and the model types that it is for.  Those
# whose layers differ from a Llama's by their mixtures alone are a table (mixtures/loader.py).
FOLDERS = {
    "llama": LLAMA,
    "deepseek": ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"),
    "diffllama": ("diffllama",),
    "gpt_oss": ("gpt_oss",),
    "qwen_hybrid": HYBRIDS,
    "bamba": ("bamba",),
    "falcon_h1": ("falcon_h1",),
    "granite_hybrid": ("granitemoehybrid",),
    "lfm2": ("lfm2", "lfm2_moe"),
    "nemotron_h": ("nemotron_h",),
    "olmo_hybrid": ("olmo_hybrid",),
    "kimi_linear": ("kimi_linear",),
    "mimo_v2": ("mimo_v2_flash",),
    "gemma4": ("gemma4_text",),
}
NATIVE = (*(name for types in FOLDERS.values() for name in types), *MIXTURES)


class TargetChoice(NamedTuple):
    """backend: "native" or "transformers".  reason: why.  config: the target's, as that backend reads it.

    refusal: what our own module said, if transformers stands in for it.
    """

    backend: str
    reason: str
    config: ModelConfig
    refusal: NotComputedHere | None = None

    @property
    def native(self) -> Family | None:
        """The family whose modules compute it; None: transformers' code does."""
        return None if self.backend == "transformers" else family_of(self.config.family)


def choose_target(folder: Path, backend: str = "auto", quantize: str = "none") -> TargetChoice:
    """As `read_target`, and with what is to become of the weights.  quantize: see EngineOptions.

    ValueError if the weights can't be rounded: they are quantised already, or transformers' code computes the target.
    """
    chosen = read_target(folder, backend)
    if quantize == "none":
        return chosen
    if quantize == BLOCKS:
        return _with_blocks(chosen, folder)
    if chosen.backend == "transformers":
        raise ValueError(
            f"quantize={quantize!r} rounds the weights of specdec's own modules, but transformers' code computes this target "
            f"({chosen.reason}); nearest setting that works: quantize='none'"
        )
    if chosen.config.quantization is not None:
        raise ValueError(
            f"quantize={quantize!r} rounds unquantised weights, but {folder} is stored as {chosen.config.quantization}; "
            "nearest setting that works: quantize='none'"
        )
    return chosen._replace(config=replace(chosen.config, quantization=round_to_nearest(quantize)))


def _with_blocks(chosen: TargetChoice, folder: Path) -> TargetChoice:
    """The choice, whose matrices stay in a GGUF file's blocks where a kernel of ours reads these.  ValueError if none are."""
    kept = blocks_of(open_gguf(folder), chosen.config) if is_gguf(folder) else None
    if kept is None:
        held = sorted({each.type for each in open_gguf(folder).tensors.values()}) if is_gguf(folder) else []
        what = f"has none beside the embeddings ({', '.join(held)})" if held else "is no such file"
        raise ValueError(
            f"quantize={BLOCKS!r} keeps matrices of a GGUF file in {', '.join(KEPT)}, but {folder} {what}; nearest setting "
            "that works: quantize='none'"
        )
    return chosen._replace(config=replace(chosen.config, quantization=kept))


def read_target(folder: Path, backend: str = "auto") -> TargetChoice:
    """Reads the folder's config.json, or a GGUF file's keys, by the backend of that name, or by the first that can.

    `auto` takes our own module; where that refuses a config for something that it does not compute, transformers' code, with
    a warning, and only if transformers knows every key of the config; never for a config that is malformed.  ValueError says
    what can't run, and what does.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}; nearest setting that works: 'auto'")
    if is_gguf(folder):
        return _read_gguf(folder, backend)
    found = described(folder)
    chosen = _read_folder(folder, found.config, backend)
    if not found.wrapper:
        return chosen
    scheme = chosen.config.quantization and replace(chosen.config.quantization, names=WRAPPERS[found.wrapper].matrix_names)
    return chosen._replace(config=replace(chosen.config, wrapper=found.wrapper, quantization=scheme))


def _read_folder(folder: Path, raw: dict[str, Any], backend: str) -> TargetChoice:
    """raw: its config, of a wrapper the text model's."""
    path = folder / "config.json"
    refuse_head_config(raw, path)
    family = text(raw, "model_type", str(path))
    native = family_of(family)
    if backend == "transformers":
        try:
            return TargetChoice(backend, "asked for by name", _read_by_transformers(folder))
        except ValueError as error:
            if native is None or not _parses(native, raw, path):
                raise
            raise ValueError(f"{error}; or backend='native', which computes this target") from error
    if native is None:
        reason = f"there is no native module for model_type {family!r}"
        if backend == "native":
            raise ValueError(
                f"{path}: {reason}, only for {', '.join(NATIVE)}; nearest setting that works: backend='transformers'"
            )
        return TargetChoice("transformers", reason, _read_by_transformers(folder))
    try:
        config = with_mtp_count(with_ends(native.parse(raw, str(path)), folder), folder)
    except NotComputedHere as error:
        if backend == "native":
            raise
        return _fall_back(folder, error)
    return TargetChoice("native", "asked for by name" if backend == "native" else f"a native module for {family!r}", config)


def _read_gguf(path: Path, backend: str) -> TargetChoice:
    """Our own modules alone compute a GGUF file's model: each architecture that is read has one."""
    if backend == "transformers":
        raise ValueError(
            f"backend='transformers' reads folders in Hugging Face layout, got the GGUF file {path}; nearest setting that "
            "works: backend='native'"
        )
    raw = described(path).config
    native = family_of(raw["model_type"])
    assert native is not None, raw["model_type"]
    return TargetChoice("native", "a GGUF file", native.parse(raw, str(path)))


def _parses(native: Family, raw: dict[str, Any], path: Path) -> bool:
    """Whether specdec's own module takes a config."""
    try:
        native.parse(raw, str(path))
    except ValueError:
        return False
    return True


def refuse_ranks(choice: TargetChoice, size: int, sharers: int) -> None:
    """ValueError if `size` ranks can't share such a target, and `sharers` of them each sequence."""
    if size > 1 and choice.backend == "transformers" and sharers != size:
        raise ValueError(
            f"tensor_parallel_size must be 1 for a target through transformers' code ({choice.reason}), which each process "
            f"holds whole, got {size}; nearest setting that works: tensor_parallel_size=1, or "
            f"decode_context_parallel_size={size} too, with which the processes divide each text"
        )


def check_chosen(choice: TargetChoice, folder: Path) -> Checkpoint:
    """The target's tensors, none of them taken.  ValueError for what headers alone show to be wrong."""
    checkpoint = open_target(folder, choice.config)
    if choice.native is not None:
        check_tensors(checkpoint, choice.native, choice.config)
        return checkpoint
    from specdec.models.transformers_backend.load import check_sizes

    with _refused_natively(choice):
        check_sizes(checkpoint)
    return checkpoint


@contextmanager
def _refused_natively(choice: TargetChoice) -> Iterator[None]:
    """Inside, a ValueError says too why transformers stands in for our own module, if it does."""
    try:
        yield
    except ValueError as error:
        if choice.refusal is None:
            raise
        raise ValueError(f"{error}; backend='auto' took transformers, since {choice.reason}") from error


def load_chosen(
    choice: TargetChoice,
    folder: Path,
    max_positions: int,
    device: torch.device,
    dtype: torch.dtype,
    cuda_graphs: bool,
    group: Group = ALONE,
    checked: Checkpoint | None = None,
) -> Target:
    """The folder's model with its weights, or with this rank's share of them; through transformers' code all of them.

    cuda_graphs: whether passes are to be captured; ValueError if they can't be.  group: the ranks that hold the model together.
    checked: what `check_chosen` gave; None: the folder is checked here.
    """
    checkpoint = checked or check_chosen(choice, folder)
    if checkpoint.passed_over and group.rank == 0:
        what = f"{len(checkpoint.passed_over)} tensors of {checkpoint.passed_over_bytes:,} bytes"
        warnings.warn(f"{folder}: texts alone are read: {what} are passed over, which images need", stacklevel=2)
    if choice.native is not None:
        shard = Shard(group.rank, group.size)
        model = load_family(choice.native, checkpoint, choice.config, max_positions, device, dtype, shard)
        join(model, group)
        return model
    from specdec.models.transformers_backend.load import load_transformers_target

    with _refused_natively(choice):
        target = load_transformers_target(checkpoint, choice.config, device, dtype, cuda_graphs)
    if group.size > 1:
        target.join(group)
    return target


def empty_target(choice: TargetChoice) -> Target:
    """The target without its weights: what can be asked of it before anything is loaded.

    ValueError for a target through transformers' code, which is made as it is loaded.
    """
    if choice.native is None:
        raise ValueError(
            f"only targets of specdec's own modules can be looked at without their weights, and transformers' code computes "
            f"this one ({choice.reason}); nearest thing that works: a target of {', '.join(LLAMA)}"
        )
    return empty(choice.native, choice.config)


def family_of(name: Any) -> Family | None:
    """How targets of that model_type are read, made and filled by our own modules; None: there are none for it."""
    folder = next((folder for folder, types in FOLDERS.items() if name in types), None)
    if folder is None:
        return MIXTURES.get(name)
    found: Family = import_module(f"specdec.models.{folder}.loader").FAMILY
    return found


def _fall_back(folder: Path, refusal: NotComputedHere) -> TargetChoice:
    """transformers, for what our module refused; but not for a key that transformers would silently ignore."""
    from specdec.models.transformers_backend.config import unknown_keys

    if keys := unknown_keys(folder):
        raise ValueError(f"{refusal}; transformers does not know {', '.join(keys)} either") from refusal
    try:
        config = _read_by_transformers(folder)
    except ValueError as error:
        raise ValueError(f"{refusal}; nor does backend='transformers' run it: {error}") from error
    reason = f"the native module refuses: {refusal}"
    warnings.warn(f"backend='auto' takes transformers: {reason}", stacklevel=2)
    return TargetChoice("transformers", reason, config, refusal)


def _read_by_transformers(folder: Path) -> ModelConfig:
    from specdec.models.transformers_backend.config import read_transformers_config

    return with_ends(read_transformers_config(folder), folder)
