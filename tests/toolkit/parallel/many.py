"""Pairs that up to 8 ranks can share, and what `scripts/many_ranks` asks of them: every native family, and every feature.

Tiny random models with as many heads, and widths that divide as evenly, as it takes.  EIGHT is what the suite asks of 8 ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from specdec import SamplingParams, SpecConfig
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import save_mixture
from toolkit.deepseek import save_deepseek, save_sparse
from toolkit.heads.block_zoo import save_block_head
from toolkit.models import HEADS, ragged_prompts, save_target
from toolkit.mtp_layers.targets import save_mtp_target
from toolkit.recurrent.mamba_targets import tiny_mamba
from toolkit.recurrent.more_targets import KIMI, save_more
from toolkit.recurrent.targets import tiny_hybrid

TREE, CHAIN = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8), SpecConfig(num_steps=3, topk=1, num_draft_tokens=4)
PAGE = 4
IDS = [[*prompt, *prompt] for prompt in ragged_prompts(40, 4, seed=5)]
SAMPLINGS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=5, temperature=0.9, seed=3),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=7, top_p=0.9, seed=4),
    SamplingParams(max_tokens=7),
]
OPTIONS: dict[str, Any] = dict(
    max_tokens=9, logit_bias={1: 2.0, 39: -9.0}, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
    bad_words=[[3], [38], [0, 1], [30, 31, 32]], min_tokens=4, logprobs=3, logprobs_mode="processed",
)  # fmt: skip
ALL_OPTIONS = [
    SamplingParams(**OPTIONS), SamplingParams(**OPTIONS, temperature=0.9, min_p=0.02, seed=5),
    SamplingParams(**OPTIONS, temperature=1.2, top_p=0.95, seed=6), SamplingParams(max_tokens=9),
]  # fmt: skip
RULES: tuple[dict[str, Any], ...] = (
    dict(regex="[a-z]{2,4}( [0-9]{1,3}é)*"), {}, dict(grammar='start: ("ab" | "cd")+ "."', temperature=1.0, seed=3),
    dict(json_schema={"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}),
)  # fmt: skip
GRAMMARS = [SamplingParams(max_tokens=12, **rule) for rule in RULES]


class Pair(NamedTuple):
    """A target and its drafter.  target, draft: write it into a folder; a drafter may be a name instead.

    divides: the first number of ranks that hold the same keys and values, so that they can divide sequences; 0: none does.
    """

    name: str
    target: Callable[[Path], Path]
    draft: Callable[[Path, Path], Path] | str = HEADS["eagle3"]
    divides: int = 0

    def make(self, root: Path) -> tuple[Path, Path | str]:
        target = self.target(root / self.name)
        return target, self.draft if isinstance(self.draft, str) else self.draft(root / f"{self.name}-head", target)


@dataclass(frozen=True)
class PairFeature:
    """What is asked of a pair.  options: of the engine.  follows_clock: rounds depend on time, so that texts alone count."""

    name: str
    pair: Pair
    spec: SpecConfig = TREE
    samplings: list[SamplingParams] = field(default_factory=lambda: SAMPLINGS)
    options: dict[str, Any] = field(default_factory=dict)
    prompts: list[Any] = field(default_factory=lambda: IDS)
    follows_clock: bool = False


def _gpt_oss(folder: Path) -> Path:
    return save_gpt_oss(folder, num_attention_heads=8, head_dim=32, intermediate_size=256)[
        0
    ]  # a group of 32 columns for each rank


def _plain(name: str, **changes: Any) -> Callable[[Path], Path]:
    return partial(save_target, name=name, **{"num_attention_heads": 8, **changes})


def _mixture(name: str, **changes: Any) -> Pair:
    return Pair(name, partial(save_mixture, name=name, **{"num_attention_heads": 8, **changes}))


def _hybrid(name: str, save: Callable[..., Path], **changes: Any) -> Pair:
    return Pair(name, partial(save, family=name, **{"num_attention_heads": 8, **changes}))


LATENT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8}
WIDE = {"head_dim": 128, "intermediate_size": 1024}  # whole groups of 128 columns for 8 ranks
QWEN3 = Pair("qwen3", _plain("qwen3"), divides=2)
V3 = Pair("v3", partial(save_deepseek, name="v3", **LATENT), divides=1)
V32 = Pair("v32", partial(save_sparse, name="v32", **LATENT))
DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
QWEN3_NEXT = _hybrid("qwen3_next", tiny_hybrid, **DELTA)
MIXTURE = _mixture("qwen3-moe")
GPT_OSS = Pair("gpt-oss", _gpt_oss)
FAMILIES = (
    Pair("llama", _plain("llama", num_key_value_heads=8, head_dim=8)),
    Pair("llama3-tied-dim8", _plain("llama3-tied-dim8"), HEADS["eagle1"]),
    Pair("mistral", _plain("mistral")),
    Pair("qwen2", _plain("qwen2", num_key_value_heads=4)),
    QWEN3,
    Pair("mimo", partial(save_mtp_target, name="mimo", num_attention_heads=8), divides=2),
    Pair("diffllama-mha", _plain("diffllama-mha", num_attention_heads=16, num_key_value_heads=16, head_dim=4)),
    GPT_OSS,
    Pair("v2-lite", partial(save_deepseek, name="v2-lite", **LATENT), divides=1),
    Pair("v2", partial(save_deepseek, name="v2", **LATENT)),
    V3,
    Pair("v32-dense-biases", partial(save_sparse, name="v32-dense-biases", **LATENT)),
    V32,
    Pair("glm", partial(save_sparse, name="glm", **LATENT)),
    Pair("glm-shared", partial(save_sparse, name="glm-shared", **LATENT)),
    Pair("glm4-lite", partial(save_deepseek, name="glm4-lite", **LATENT)),
    MIXTURE,
    _mixture("qwen2-moe", shared_expert_intermediate_size=40),
    _mixture("mixtral-window"),
    _mixture("glm4-moe-biased"),
    _mixture("ernie"),
    _mixture("hy3-biased"),
    _mixture("dots1"),
    QWEN3_NEXT,
    _hybrid("qwen3_5_text", tiny_hybrid, **DELTA),
    _hybrid("nemotron_h", tiny_mamba, mamba_num_heads=16, n_groups=8, mamba_head_dim=16, ssm_state_size=16),
    _hybrid("lfm2", save_more),
    _hybrid(
        "kimi_linear",
        save_more,
        num_key_value_heads=8,
        linear_attn_config=KIMI["linear_attn_config"] | {"num_heads": 8, "head_dim": 16},
    ),
)


def _mtp(name: str, **changes: Any) -> Pair:
    return Pair(f"mtp-{name}", partial(save_mtp_target, name=name, **changes), "mtp")


def _block(name: str) -> Pair:
    return Pair(name, QWEN3.target, partial(save_block_head, name=name, heads=8))


CONTEXT_PARALLEL = {"decode_context_parallel_size": 2, "context_interleave": 2}
BYTES = Pair("bytes", _plain("bytes", eos_token_id=383))
NGRAM = Pair("ngram", _plain("bytes", eos_token_id=383), "ngram")
WORDS: list[Any] = ["one", "two", "three", "four"]
FEATURES = (
    PairFeature("every option", QWEN3, samplings=ALL_OPTIONS),
    PairFeature("every option, context parallelism", QWEN3, samplings=ALL_OPTIONS, options=CONTEXT_PARALLEL),
    PairFeature("windows, context parallelism", GPT_OSS, options=CONTEXT_PARALLEL),
    PairFeature("an indexer, context parallelism", V32, options=CONTEXT_PARALLEL),
    PairFeature("grammars", BYTES, samplings=GRAMMARS, prompts=WORDS),
    PairFeature("grammars", BYTES, CHAIN, GRAMMARS, prompts=WORDS),
    PairFeature("grammars, n-grams", NGRAM, samplings=GRAMMARS, prompts=WORDS),
    PairFeature("n-grams", NGRAM),
    PairFeature("n-grams, prompts kept", NGRAM, CHAIN, options={"prefix_caching": True}),
    PairFeature("levels chosen", QWEN3, SpecConfig("auto"), follows_clock=True),
    PairFeature("levels chosen, prompts kept", V3, SpecConfig("auto"), options={"prefix_caching": True}, follows_clock=True),
    PairFeature("weights in fp8", Pair("llama-wide", _plain("llama", **WIDE)), options={"quantize": "fp8"}),
    PairFeature("weights in int4", Pair("llama-wide", _plain("llama", **WIDE)), options={"quantize": "int4"}),
    PairFeature("experts in fp8", V3, options={"quantize": "fp8"}),
    PairFeature("experts in fp8", _mixture("qwen3-moe-tied"), options={"quantize": "fp8"}),
    PairFeature("experts in fp8, context parallelism", V3, options={"quantize": "fp8", **CONTEXT_PARALLEL}),
    PairFeature("keys and values in int8", Pair("mistral-int8", _plain("mistral")), options={"kv_cache_dtype": "int8"}),
    PairFeature("the drafter's window", QWEN3, options={"beyond_trained": "window"}),
    PairFeature("the drafter stops", QWEN3, options={"beyond_trained": "stop"}),
    PairFeature("MTP", _mtp("mimo", num_attention_heads=8)),
    PairFeature("MTP, two layers", _mtp("v3-two", **LATENT)),
    PairFeature("MTP, context parallelism", _mtp("v3", **LATENT), options={**CONTEXT_PARALLEL, "prefix_caching": True}),
    PairFeature("MTP", _mtp("glm-dsa", **LATENT), CHAIN),
    *(
        PairFeature("one pass", _block(name))
        for name in ("p-eagle", "dflash", "dflash-pruned", "dflash2", "dspark", "dspark-rnn")
    ),
)


def _eight(name: str, pair: Pair, spec: SpecConfig = TREE, **options: Any) -> PairFeature:
    """Few tokens: exchanges of eight processes take milliseconds on two cores."""
    return PairFeature(name, pair, spec, [replace(each, max_tokens=6) for each in SAMPLINGS[1:3]], options, IDS[2:4])


def _divided(sharers: int) -> dict[str, Any]:
    return {"decode_context_parallel_size": sharers, "context_interleave": 2, "prefix_caching": True}


KEPT, WHOLE = {"prefix_caching": True}, {"expert_parallel": "experts"}
_TEN = _mixture("mixtral-window", num_local_experts=10, num_attention_heads=16, num_key_value_heads=2)
# The last three of 8 ranks hold none of 10 experts; the last two no token of a vocabulary of 41.  The first COMMON cases are of
# what most people run: the suite asks more of them.
COMMON = 4
EIGHT = (
    _eight("whole experts", MIXTURE, **WHOLE, **KEPT),
    _eight("a hybrid, states kept", QWEN3_NEXT, **KEPT),
    _eight("latents, divided by 8", V3, **_divided(8)),
    _eight("fewer key/value heads than ranks, divided by 4", QWEN3, **_divided(4)),
    _eight("whole experts, of which some ranks hold none", _TEN, CHAIN, **WHOLE),
    _eight("a hybrid of Mamba layers", FAMILIES[-3], CHAIN),
    _eight("latents and states", FAMILIES[-1], **KEPT),
    _eight("windows and whole experts, divided by 2", GPT_OSS, CHAIN, **_divided(2), **WHOLE),
    _eight("an odd vocabulary", Pair("llama-odd", _plain("llama", vocab_size=41)), **KEPT),
)
