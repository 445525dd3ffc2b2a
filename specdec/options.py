"""Every engine setting, once: its name, default, bounds, meaning and command-line flag.

`SpecDecoder.from_pretrained`, the command line, `doctor` and `bench` are derived from the fields of EngineOptions, so a new
setting is a new field here and its use in the engine.  This file knows no torch, no model and no file: what "auto" becomes on
a machine and for a model is decided in resolve.py.
"""

from __future__ import annotations

import inspect
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from specdec.checks import (
    nearest_name,
    option,
    require_file,
    require_folder,
    require_memory,
    require_share,
    require_size,
    setting_of,
    store,
)
from specdec.config import GraphMode, SpecConfig
from specdec.trees.shape import require_shapes

if TYPE_CHECKING:
    import torch

ATTENTION_BACKENDS = {  # the choices of `attention`: where each backend declares its Capability
    "torch": "specdec.attention.eager.capability:TORCH",
    "triton": "specdec.attention.kernels.capability:TRITON",
    "fa2": "specdec.attention.flash.capability:FA2",
    "fa3": "specdec.attention.flash.capability:FA3",
    "fa4": "specdec.attention.flash.capability:FA4",
    "flashmla": "specdec.attention.flashmla.capability:FLASHMLA",
}
AUDIT = ("audit_max_tokens", "audit_busy", "audit_stop", "audit_folder")  # settings that say how `audit` works
F = TypeVar("F", bound=Callable[..., Any])


def served(name: str) -> dict[str, str]:
    """`decided_by` of an option that is for serve alone."""
    return {command: f"{name} is for serve" for command in ("bench", "generate", "trace", "verify")}


def usable_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a decoder runs: every engine setting, checked when the object is made.

    "auto" and None are decided by the machine and the model when the decoder is built.
    """

    device: str | torch.device = option(
        "auto",
        "where the models run: auto (the GPU if there is one), cpu, cuda or cuda:1",
        pattern=(r"auto|cpu|cuda(:\d+)?", "'auto', 'cpu', 'cuda' or 'cuda:N'"),
    )
    dtype: str | torch.dtype = option(
        "auto",
        "numbers that the models compute in; auto: the checkpoint's on a GPU, float32 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
    )
    max_batch_size: int = option(
        8,
        "requests that run at once; more wait for their turn",
        bounds=(1, 4096),
        decided_by={
            "generate": "max_batch_size is --n, at most 32: there is one prompt",
            "bench": "max_batch_size is what --batch-sizes says",
        },
    )
    max_seq_len: int | None = option(
        None,
        "most tokens of a request, prompt and output together; default: the model's own limit, in bench what its prompts need",
        bounds=(2, math.inf),
    )
    page_size: int | Literal["sequence"] = option(
        16,
        "tokens of a page, the unit in which memory for keys and values is given out; sequence: those of the longest sequence",
        details="With sequence nothing is paged: a request's page table has one entry, and its keys and values lie in one "
        "piece.  Each request then takes the memory of the longest one, and so does the padding of batches.  It is refused "
        "with prefix caching, which keeps full pages, and with decode_context_parallel_size, which divides pages.",
        word="sequence",
        bounds=(1, 1 << 20),
    )
    attention: str = option(
        "auto",
        "which attention backend reads the cached keys and values; `specdec doctor --table` says what each can do",
        choices=("auto", *ATTENTION_BACKENDS),
    )
    cuda_graphs: GraphMode = option(
        "round",
        "capture a whole round as one CUDA graph, each phase (step) as one, or nothing; without a GPU nothing is captured",
        choices=("round", "step", False),
    )
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are kept; auto: as the models compute them; fp8 and int8 take half the bytes of 16 bit; "
        "int8_keys: keys in int8, values as they are; fp8_ds_mla: latents (MLA) in 8 bits with scales",
        details="int8_keys takes three quarters of the bytes of 16 bit.  fp8_ds_mla takes 656 bytes a token and layer for "
        "DeepSeek's dims instead of 1,152.",
        choices=("auto", "fp8", "int8", "int8_keys", "fp8_ds_mla"),
    )
    kv_cache_memory: str | int | float = option(
        "auto",
        "memory of a process for keys and values: bytes, a size such as 2GiB, or a share of what is free below 1; auto: what "
        "max_batch_size longest requests need, or most of what is free",
        details="A pool that holds less than max_batch_size requests of max_seq_len serves them too: requests take pages as "
        "their texts grow, and wait where there are none.  A request that would not fit alone is refused.  More than is free "
        "is refused; more than max_batch_size longest requests need is taken only with prefix_caching, which keeps earlier "
        "texts in it.",
        others=require_memory,
        metavar="SIZE",
    )
    int8_queries: bool = option(
        False,
        "round queries to int8 too where keys are kept in int8 (kv_cache_dtype int8 or int8_keys), one scale a query and head",
        details="Kernels then multiply int8 keys without converting them first.",
    )
    backend: str = option(
        "auto",
        "who computes the target: specdec's own modules (native), transformers' code with specdec's attention, or the first of "
        "them that can (auto)",
        choices=("auto", "native", "transformers"),
    )
    quantize: str = option(
        "none",
        "round the target's weights as they are loaded: fp8 (8 bits, a scale for each row), int4 (4 bits, a scale for each 128 "
        "columns), none (as the checkpoint stores them), or blocks (keep those of a GGUF file)",
        details="Rounded to nearest, without a look at any text: a checkpoint that was quantised with one is usually better.  "
        "Where 128 does not divide a matrix's columns, 32 of them have a scale, or all of a row.  "
        "Embeddings, output layer and drafter stay as they are.  A checkpoint in 8 or 4 bits is refused.  Weights of a GGUF "
        "file are dequantised, and rounded like any; with blocks, matrices in Q8_0, Q4_0 and MXFP4 stay quantised, in half or "
        "a quarter of the memory, and steps are slower.",
        choices=("none", "fp8", "int4", "blocks"),
    )
    pack_weights: bool = option(
        False,
        "keep each matrix of bfloat16 weights once more in 12 bits a number, without loss, for passes of few tokens",
        details="Rounds are faster, since they wait for memory; the copies take three quarters of the weights' memory in "
        "addition.  Every number has all of its bits; sums are taken in another order, as with other tiles.  It needs a GPU of "
        "compute capability 9.0 and specdec's own modules in bfloat16, and is for both models.  Weights in 8 or 4 bits and "
        "experts have no copies.  Passes of more than 64 tokens read the weights themselves, and on an H200 those of more than "
        "32, but for gate, up and output layers.",
    )
    prefix_caching: bool = option(
        False,
        "keep keys and values of earlier prompts and texts, so that a prompt that begins as one of them did starts after it",
        details="Rows that run together read a common beginning once where that is faster.  The memory for keys and values, "
        "otherwise that of max_batch_size longest sequences, is then larger: on a GPU 85% of what is free after the weights "
        "(at most 2**24 tokens), on a CPU 16 times as large (at most 40% of the host's memory, which is taken as it fills).  "
        "Without prefix caching, what runs now never depends on what ran before (in 16 bit, a text computed in other pieces "
        "may differ where two tokens tie).",
    )
    state_cache: str | int | float = option(
        "auto",
        "memory of a process for states that prefix_caching keeps of a target with recurrent layers: bytes, a size such as "
        "2GiB, or a share of the KV pool's memory below 1; auto: a tenth of that",
        details="The KV pool's memory is that of kv_cache_memory.  A later prompt starts only after a kept state; the one that "
        "was used least recently makes room for the next, and at most 1,024 are kept.  Other targets refuse it.",
        others=partial(require_memory, of="the KV pool's memory"),
        metavar="SIZE",
    )
    deterministic: bool = option(
        False,
        "compute each token's logits in one order of sums, so that a text does not depend on speculation, on the batch or on "
        "how prompts are cut, bit for bit in 16 bit too",
        details="It needs a GPU of compute capability 9.x, a target in bfloat16 or float16 through specdec's own modules, "
        "keys and values in the model's dtype, and attention 'triton', which 'auto' then chooses.  Anything else is refused.  "
        "Rows that begin alike do not read their beginning together.  Each number of ranks has bits of its own.",
    )
    tensor_parallel_size: int = option(
        1, "processes that hold the models together, each a share of every layer", bounds=(1, 64)
    )
    expert_parallel: str = option(
        "auto",
        "how processes share a mixture's experts: a part of each expert (tensor), whole experts, some each (experts), or what "
        "reads fewer bytes (auto)",
        details="It is for tensor_parallel_size above 1.  Attention, shared experts and dense layers are always shared by "
        "parts, and every process has the router.  With experts, numbers need not divide evenly: the last processes may have "
        "fewer experts, or none.",
        choices=("auto", "tensor", "experts"),
    )
    decode_context_parallel_size: int = option(
        1,
        "processes of tensor_parallel_size that divide each sequence's keys and values, where all of them would hold the same",
        details="They do with latent attention (MLA), where there are fewer key/value heads than processes, and through "
        "transformers' code, of which each process then computes the whole target.  A page then stands for that many "
        "times page_size tokens, also for prefix caching.",
        bounds=(1, 64),
    )
    context_interleave: int | None = option(
        None,
        "tokens in a row that one process keeps with decode_context_parallel_size, a divisor of page_size; default: page_size",
        bounds=(1, 4096),
    )
    prefill_chunk: int | Literal["auto"] = option(
        "auto",
        "what one pass over prompts may cost, in tokens of an empty context; auto: by the device, less while rows run",
        details="Prompts run in chunks between the rounds of the rows that run, so this bounds how long a row waits for other "
        "prompts.  A token that reads many earlier ones costs more: at the context that doubles it, two.  With a number, no "
        "chunk costs more, also while nothing else runs.  The texts are the same whatever the chunks are, up to near-ties in "
        "16 bit; fp8 keys and values without scales of their own take them from the first chunk.",
        bounds=(1, 1 << 20),
    )
    threads: int | Literal["auto"] = option(
        "auto",
        "CPU threads of a decoder on a CPU; auto: by the size of the model, 1 for a tiny one",
        details="They are those of the decoder's own thread: whatever else uses torch in the process keeps its number.  A "
        "decoder on a GPU refuses a number.",
        bounds=(1, usable_cpus),
    )

    corpus: str | Path | None = option(
        None,
        "a file of text of which drafts are made too, beside a drafter: UTF-8, or .jsonl with a text in each line's `text`",
        details="What followed a row's last tokens in the file joins the drafter's tree.  It implies the source `corpus` of "
        "`draft`, which other corpora can be added to.",
        others=require_file,
        metavar="FILE",
    )
    corpus_memory: str | int = option(
        "256MiB",
        "memory of a process for texts of which drafts are made, corpora and earlier answers: bytes, or a size such as 1GiB",
        details="A token takes 16 bytes.  A corpus that is longer is refused; earlier answers have a sixteenth of the memory, "
        "and the oldest go.  Nothing is taken without such a source.",
        others=require_size,
        metavar="SIZE",
    )
    shapes: str | Sequence[SpecConfig | Sequence[int]] | None = option(
        None,
        "shapes of trees for which requests may ask besides the decoder's own, such as `3,1 5,8,32`: levels, branches, nodes",
        details="A round has one shape, the largest for which any of its rows asks.  SpecConfig('auto') has shapes enough, and "
        "refuses more.",
        others=require_shapes,
        metavar="SHAPES",
        decided_by=dict.fromkeys(("bench", "verify", "generate", "trace"), "all requests have the shape of --spec"),
    )

    chat_template: str | Path | None = option(
        None,
        "a file with a chat template in Jinja's language, in the place of the target's own",
        others=require_file,
        metavar="FILE",
    )

    draft_format: str = option(
        "auto",
        "layout of the draft head's folder; auto: by its config and tensor names; `specdec inspect` says which that is",
        choices=("auto", "safeailab", "specforge", "speculators", "modelopt", "torchspec", "z-lab", "deepspec"),
    )
    draft_pickle: bool = option(
        False,
        "read the draft head's weights from pytorch_model.bin where it has no safetensors file",
        details="A pickle is opened without running code of its own (weights_only), but it is a format that can hold code.",
    )
    draft_quantize: str = option(
        "none",
        "round the draft head's weights as they are loaded: fp8, int4 or none, as quantize does the target's; its own choice",
        details="Its language-model head is rounded too, if it has one of its own.  Texts stay the same; fewer tokens may be "
        "accepted, and a round reads fewer bytes.",
        choices=("none", "fp8", "int4"),
    )
    beyond_trained: str = option(
        "draft",
        "where a text is longer than the draft head was trained on: go on (draft), read so many of the last tokens alone "
        "(window), or decode plainly (stop)",
        choices=("draft", "window", "stop"),
    )
    smoke: bool = option(
        True,
        "have the draft head draft along a short text when it is loaded, and warn if the target would accept hardly any of it",
        details="The warning names the reading of the head's files that is clearly better, if there is one: other layers, "
        "other embeddings, another vocabulary map.  It takes some passes over about 250 tokens, and the target's tokenizer.",
    )

    audit: float = option(
        0.0,
        "share of finished answers that are compared with the target once more, as verify does, while no request is there",
        details="A text that the target would not write is counted, and a replay file of it is written.",
        others=require_share,
        metavar="SHARE",
        decided_by=served("audit"),
    )
    audit_max_tokens: int = option(
        2048,
        "tokens of the longest prompt and answer that are compared; longer ones count as skipped",
        bounds=(2, 1 << 20),
        decided_by=served("audit_max_tokens"),
    )
    audit_busy: float = option(
        0.0,
        "share of the time that comparisons may take, a layer at a time, while requests run; 0: only while none is there",
        others=require_share,
        metavar="SHARE",
        decided_by=served("audit_busy"),
    )
    audit_stop: bool = option(
        False,
        "draft nothing any more once such a text is found, until somebody says otherwise",
        decided_by=served("audit_stop"),
    )
    audit_folder: str | Path = option(
        "specdec-audit",
        "folder of the replay files, which `specdec verify --replay` runs again",
        others=require_folder,
        metavar="DIR",
        decided_by=served("audit_folder"),
    )

    @property
    def corpus_bytes(self) -> int:
        """corpus_memory as a number."""
        return require_size("corpus_memory", self.corpus_memory)

    def __post_init__(self) -> None:
        checked = {
            item.name: setting_of(item).check(item.name, getattr(self, item.name), item.default) for item in fields(self)
        }
        store(self, **checked)

    @classmethod
    def of(cls, options: EngineOptions | None, settings: dict[str, Any]) -> EngineOptions:
        """The object if one was given, else one of the single settings.  TypeError for both, or an unknown name."""
        known = [item.name for item in fields(cls)]
        for name in settings:
            if name not in known:
                alike = nearest_name(name, [*known, "target", "draft", "spec", "options"])
                hint = f"nearest: {alike}" if alike else f"known: {', '.join(known)}"
                raise TypeError(f"there is no engine setting {name!r}; {hint}")
        if options is None:
            return cls(**settings)
        if not isinstance(options, EngineOptions):
            raise TypeError(f"options must be an EngineOptions, got {options!r} of type {type(options).__name__}")
        if settings:
            raise TypeError(
                f"options already holds every engine setting, but {', '.join(settings)} was given too; "
                f"nearest: dataclasses.replace(options, {next(iter(settings))}=...)"
            )
        return options


def shows_options(function: F) -> F:
    """Shows the fields of EngineOptions, which the function takes as **settings, in its signature and its documentation."""
    signature = inspect.signature(function)
    listed = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type)
        for item in fields(EngineOptions)
    ]
    kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*kept, *listed])  # type: ignore[attr-defined]
    if function.__doc__:  # python -OO strips it
        function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\nEngine settings:\n\n{options_as_text()}"
    return function


def options_as_text() -> str:
    """One paragraph a setting: name, default, meaning and details."""
    paragraphs = []
    for item in fields(EngineOptions):
        assert item.default is not MISSING
        setting = setting_of(item)
        text = f"{item.name} (default {item.default!r}): {setting.meaning}.  {setting.details}".strip()
        paragraphs.append(textwrap.fill(text, 120, initial_indent="  ", subsequent_indent="      "))
    return "\n".join(paragraphs)
