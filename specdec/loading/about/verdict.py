"""What a machine runs of specdec, and the one thing to do next, from plain facts.  Asks the machine nothing itself.

Rules go from what keeps everything from running to what only makes it slower; the first that fits is the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from specdec.checks import major_minor

MIN_VERSIONS = {"torch": (2, 11), "transformers": (5, 0)}  # versions, as pyproject.toml has them
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "rich")
TRY = 'specdec generate "Once upon a time"'
HOPPER, AMPERE = (9, 0), (8, 0)
# What is optional: for what, the packages that do it, and whether it needs a GPU.
OPTIONAL = (
    ("kernels, CUDA graphs", ("triton",), True),
    ("attention of flash-attn", ("flash-attn", "flash-attn-3", "flash-attn-4"), True),
    ("JSON schemas, grammars", ("llguidance",), False),
    ("specdec serve", ("fastapi", "uvicorn", "prometheus-client"), False),
    ("replicas on Ray", ("ray",), False),
    ("bench --plot", ("matplotlib",), False),
)
ANY = "attention of flash-attn"  # one of its packages is enough, where the others need all


class Gpu(NamedTuple):
    """capability: of its computing, such as (9, 0).  memory: in bytes.  has_tiles: whether its products were measured."""

    name: str
    capability: tuple[int, int]
    memory: int
    has_tiles: bool = True

    def __str__(self) -> str:
        return f"{self.name}, {self.memory / 1e9:.0f} GB"


class Machine(NamedTuple):
    """What the verdict goes by."""

    gpus: tuple[Gpu, ...]  # that torch sees
    driver: str | None  # the NVIDIA driver's version; None: there is none
    torch_cuda: str | None  # the CUDA that torch was built for; None: it was built for CPUs
    visible: str | None  # CUDA_VISIBLE_DEVICES, if it is set
    packages: Mapping[str, str]  # the versions of those that are installed, by name
    attention: str  # the backend that "auto" takes here
    why: str  # its reason
    has_pair: bool = True  # whether the shipped pair is complete


class Verdict(NamedTuple):
    """runs: what this machine runs, a sentence.  next: the one thing to do.  is_whole: whether nothing is in the way."""

    runs: str
    next: str
    is_whole: bool


def verdict(machine: Machine) -> Verdict:
    return next(_verdicts(machine))


def _verdicts(m: Machine) -> Iterator[Verdict]:
    """All that hold, the most fundamental first; the last holds of every machine."""
    yield from broken(m.packages)
    yield from _unused(m)
    first = TRY if m.has_pair else "specdec generate --target DIR --draft DIR PROMPT, since the shipped pair is incomplete"
    if not m.gpus:
        yield Verdict("This machine runs specdec on its CPU: small models well; large ones need a GPU.", first, True)
        return
    gpu, several = m.gpus[0], f" (and {len(m.gpus) - 1} more)" if len(m.gpus) > 1 else ""
    here = f"This machine runs specdec on its GPU, {gpu}{several}"
    if m.attention == "torch":
        fix = "pip install triton" if "triton" not in m.packages else f"see why: {m.why}"
        yield Verdict(f"{here}, but slowly: without specdec's kernels, since {m.why}.", fix, False)
    if gpu.capability < AMPERE:
        runs = f"{here}, whose compute capability {_dotted(gpu.capability)} is older than any that specdec was tried on."
        yield Verdict(runs, "specdec verify --dtype float16, which shows whether the texts are right", False)
    if gpu.capability != HOPPER:
        runs = f"{here}, with specdec's kernels; they were measured on Hopper GPUs, and this one is of another kind."
        yield Verdict(runs, "specdec verify, which shows whether speculation leaves every text as it is here", True)
    if not gpu.has_tiles:
        runs = f"{here}, with all kernels; the sizes of their tiles were measured on an H100 and an H200."
        yield Verdict(runs, "specdec tune --target DIR, which measures this GPU's own", True)
    yield Verdict(f"{here}, with all kernels and CUDA graphs.", first, True)


def broken(packages: Mapping[str, str]) -> Iterator[Verdict]:
    """What keeps specdec from running at all.  packages: the versions of those that are installed, by name."""
    if missing := [name for name in NEEDED if name not in packages]:
        names = ", ".join(missing)
        yield Verdict(f"This machine runs no model yet: {names} not installed.", f"pip install {' '.join(missing)}", False)
    for name, least in MIN_VERSIONS.items():
        if major_minor(packages[name]) < least:
            wanted = _dotted(least)
            runs = f"This machine may fail to run models: {name} {packages[name]} is older than {wanted}."
            yield Verdict(runs, f"pip install --upgrade '{name}>={wanted}'", False)


def _unused(m: Machine) -> Iterator[Verdict]:
    """A GPU that is there and is not used."""
    if m.gpus or not m.driver:
        return
    runs = f"This machine runs specdec on its CPU, and leaves its GPU (driver {m.driver}) idle: "
    if m.torch_cuda is None:
        why = f"torch {m.packages['torch']} is built without CUDA."
        yield Verdict(runs + why, "install torch's build for CUDA (pytorch.org names it)", False)
    elif m.visible is not None and m.visible.strip() in ("", "-1"):
        yield Verdict(f"{runs}CUDA_VISIBLE_DEVICES={m.visible!r} hides it.", "unset CUDA_VISIBLE_DEVICES", False)
    else:
        why = f"torch, built for CUDA {m.torch_cuda}, sees none."
        yield Verdict(runs + why, f"nvidia-smi, whose CUDA version must be {m.torch_cuda} or later; else a newer driver", False)


def optional_rows(m: Machine) -> list[tuple[str, str]]:
    """What each optional part is for, and whether it is there, with the command that brings it if it is of use here."""
    rows = [
        ("text, chats (tokenizers)", m.packages.get("tokenizers", "missing")),
        ("GGUF targets", "yes; they need no package"),
    ]
    for purpose, packages, needs_gpu in OPTIONAL:
        have = [f"{name} {m.packages[name]}" for name in packages if name in m.packages]
        missing = [name for name in packages if name not in m.packages]
        if have and (purpose == ANY or not missing):
            rows.append((purpose, ", ".join(have)))
        elif needs_gpu and not m.gpus:
            rows.append((purpose, f"{', '.join(missing)} not installed; of use on a GPU only"))
        else:
            rows.append((purpose, f"no: pip install {missing[-1] if purpose == ANY else ' '.join(missing)}"))
    return rows


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
