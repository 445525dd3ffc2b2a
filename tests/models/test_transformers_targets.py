"""Targets through transformers' code: what they hand out is what transformers computes, and what can't run is refused by name.

Keeps out: a feature of another layer, logits without the model's own cap or scale, positions of the pass instead of the text's,
and a model that runs but means something else here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.attention.segments import ragged_causal_segment
from toolkit.families import COMMON, FAMILIES, NO_FEATURES, Families, eager, save_family
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from specdec import SpecDecoder
from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.kinds import FULL, LayerKind
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target, TargetOutput
from specdec.models.transformers_backend.experts import experts_forward
from specdec.models.transformers_backend.load import check_tokens_are_apart
from specdec.models.transformers_backend.target import TransformersTarget

CPU = torch.device("cpu")
LENGTHS = [40, 1, 17]
# Families beyond those of the losslessness tests: other names of the parts, learnt positions, scaled logits, biased heads.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", dict(n_positions=64, n_embd=32, n_head=2, n_layer=4, head_dim=16)),
    "opt": ("opt", dict(ffn_dim=48, word_embed_proj_dim=32, num_attention_heads=2, max_position_embeddings=64)),
    "gpt_neox": ("gpt_neox", dict(num_attention_heads=2)),
    "phi": ("phi", dict(num_attention_heads=2, num_key_value_heads=2, hidden_size=32, head_dim=16)),
    "cohere2": ("cohere2", dict(sliding_window=8, logit_scale=0.3, layer_types=["sliding_attention", "full_attention"] * 2)),
    "granite": (
        "granite",
        dict(logits_scaling=3.0, residual_multiplier=0.5, attention_multiplier=0.2, embedding_multiplier=2.0),
    ),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", dict(sliding_window=8)),
    "llama-yarn": (
        "llama",
        dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}),
    ),
    "llama-dynamic": ("llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    made = Families(tmp_path_factory.mktemp("families"))
    for seed, (name, (model_type, own)) in enumerate(OTHERS.items()):
        save_family(made.root / name, model_type, seed, **own)
    return made


def folder_of(families: Families, name: str) -> Path:
    return families.target(name) if name in FAMILIES else families.root / name


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersTarget:
    target = load_chosen(choose_target(folder, "transformers"), folder, 128, CPU, dtype, cuda_graphs=False)
    assert isinstance(target, TransformersTarget)
    return target


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(COMMON["vocab_size"], (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def ours(target: Target, ids: list[Tensor], aux_layers: tuple[int, ...] = (), rows: Tensor | None = None) -> TargetOutput:
    """All prompts as one ragged batch, one page each, through the reference attention."""
    config, page = target.config, max(LENGTHS)
    cache = KVCache(HeadsLayout(config.num_kv_heads, config.head_dim, torch.float32), config.layer_kinds, len(ids) * page,
                    kv_layers=config.kv_source)  # fmt: skip
    table, lens = torch.arange(len(ids), dtype=torch.int32)[:, None], [len(x) for x in ids]
    positions = torch.cat([torch.arange(n) for n in lens])
    plan = AttentionPlan((ragged_causal_segment(PageTable(table, page), lens, lens),), positions)
    slots = torch.cat([row * page + torch.arange(n) for row, n in enumerate(lens)])
    return target(
        torch.cat(ids), positions, PagedAttention(ReferenceBackend(), cache, PassTables(plan, slots)), aux_layers, rows
    )


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
@torch.no_grad()
def test_forward_equals_transformers(families: Families, name: str) -> None:
    """Prompts in one pass: logits, and each layer's output (hidden_states[i + 1], but for the last, which is normed)."""
    folder, ids = folder_of(families, name), prompts()
    target, hf = load(folder), eager(folder)
    N, H = target.config.num_layers, target.config.hidden_size
    out = ours(target, ids, () if name in NO_FEATURES else tuple(range(N)))
    theirs = [hf(x[None], output_hidden_states=True, use_cache=False) for x in ids]
    close(target.logits(out.hidden_TH), torch.cat([o.logits[0] for o in theirs]))
    if name in NO_FEATURES:
        close(out.hidden_TH, torch.cat([hf.model(x[None]).last_hidden_state[0] for x in ids]))
        return
    assert out.aux_TA is not None and out.aux_TA.shape[1] == N * H
    for layer in range(N - 1):
        want = torch.cat([o.hidden_states[layer + 1][0] for o in theirs])
        close(out.aux_TA[:, layer * H : (layer + 1) * H], want)
    close(out.hidden_TH, torch.cat([o.hidden_states[N][0] for o in theirs]))


def test_rows_and_layers_are_those_asked_for(families: Families) -> None:
    """Keeps out: states in the order of a list, captures that nobody asked for, and rows of another token."""
    target, ids = load(families.target("gemma2")), prompts()
    H, rows = target.config.hidden_size, torch.tensor([39, 40, 57])
    whole, some = ours(target, ids, (0, 1, 2, 3)), ours(target, ids, (0, 3), rows)
    assert whole.aux_TA is not None and some.aux_TA is not None
    close(some.aux_TA, torch.cat((whole.aux_TA[:, :H], whole.aux_TA[:, 3 * H :]), dim=1))
    close(some.hidden_TH, whole.hidden_TH[rows])
    assert ours(target, ids).aux_TA is None


def test_a_draft_head_shares_tables(families: Families) -> None:
    """Keeps out: Gemma's scaled embedding handed to a head, which takes rows as they are; weights held twice."""
    target, hf = load(families.target("gemma2")), families.hf("gemma2")
    ids = torch.arange(5)
    assert torch.equal(target.embed_tokens(ids), hf.get_input_embeddings().weight[ids])
    assert not torch.allclose(target.embed_tokens(ids), hf.get_input_embeddings()(ids))
    close(target.lm_head(torch.ones(1, 32)), hf.lm_head(torch.ones(1, 32)))
    sizes = {parameter.data_ptr(): parameter.numel() for parameter in target.parameters()}
    assert sum(sizes.values()) == sum(p.numel() for p in hf.parameters())


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", FAMILIES)
def test_configs_say_what_layers_read(families: Families, name: str) -> None:
    config = choose_target(families.target(name), "transformers").config
    window, chunk = LayerKind(window=8), LayerKind(chunk=16)
    expected = {
        **dict.fromkeys(("mistral", "phi3", "mixtral"), [window] * 4),
        **dict.fromkeys(("gemma2", "gemma3", "gpt-oss"), [window, FULL] * 2),
        **dict.fromkeys(("gemma3n", "gemma4"), [window, FULL] * 3),
        "qwen2": [FULL, FULL, window, window],
        "llama4": [chunk, FULL] * 2,
    }
    assert list(config.layer_kinds) == expected.get(name, [FULL] * 4)
    assert (config.softcap, config.has_sinks) == (3.0 if name == "gemma2" else None, name == "gpt-oss")
    assert config.max_position == (64 if name == "phi3-longrope" else 256)
    assert (config.num_kv_heads, config.head_dim) == (2, 16)


def test_experts_chosen_token_by_token(families: Families) -> None:
    """Keeps out: copies of experts' weights cut into parts that do not fit together."""
    hf = families.hf("qwen3-moe")
    experts = hf.model.layers[0].mlp.experts
    hidden, weights = torch.randn(11, 32), torch.rand(11, 2)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(11)])
    with torch.no_grad():
        want = type(experts).forward.__wrapped__(experts, hidden, index, weights)
        grouped = experts_forward(experts, hidden, index, weights)
        close(experts_forward(experts, hidden, index, weights, grouped=False, copied_bytes=1 << 16), want)
    close(grouped, want)


# ---- what is refused ----


def write(folder: Path, model_type: str, **changes: Any) -> Path:
    CONFIG_MAPPING[model_type](**changes).save_pretrained(folder)
    return folder


SMALL = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=40)
REFUSED = [
    ("t5", {}, "t5 is an encoder-decoder model that adds a learnt bias .* such as a Llama, or .* of type bart, "),
    ("whisper", {}, "whisper is an encoder-decoder model that has an encoder that reads sound"),
    ("m2m_100", {}, "m2m_100 is an encoder-decoder model that counts positions by which ids are padding"),
    (
        "gpt_neo",
        dict(num_layers=2, attention_types=[[["global", "local"], 1]], **SMALL),
        "gpt_neo models has attention of its own",
    ),
    ("mamba", SMALL, "layers of type linear_attention"),
    ("falcon_h1", SMALL, "layers of type hybrid"),
    ("qwen3_next", dict(num_hidden_layers=4), "layers of type linear_attention"),
    ("recurrent_gemma", dict(num_hidden_layers=3, vocab_size=40), "layers of type linear_attention|never attend"),
    ("paligemma", {}, r"paligemma wraps several models.*: its attention .* looks ahead; .*text_config \(gemma\)"),
    ("mllama", {}, r"mllama wraps several models.*: .*layers of cross-attention; .*text_config \(mllama_text_model\)"),
    ("janus", {}, r"janus wraps several models.*alone; expected one of qwen2_vl, .*text_config \(llama\)"),
    ("gemma4_text", SMALL | dict(num_hidden_layers=6, head_dim=16), "all layers must have the same heads"),
    ("bert", SMALL, "layer 0 is not causal"),
    ("diffllama", SMALL, r"layers attend in the order \[0, 0, 1, 1\]"),
    ("vit", {}, "no causal language model of model_type 'vit'"),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("model_type", "changes", "match"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_can_not_run_is_refused_by_name(tmp_path: Path, model_type: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        choose_target(write(tmp_path, model_type, **changes), "transformers")


def rewrite(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the folder's config.json with other keys, without weights."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            dict(model_type="baichuan", auto_map={"AutoModelForCausalLM": "m.B"}),
            r"got 'baichuan': its code is its own \(auto_map\)",
        ),
        (dict(model_type="no_such"), "got 'no_such': it is unknown"),
        (dict(quantization_config={"quant_method": "mxfp4"}), "quantization_config must be absent"),
        (dict(sliding_window=0), "positive number of tokens"),
        (dict(sliding_window=None), "positive number of tokens|does not accept"),
    ],
)
def test_configs_are_refused_by_key(families: Families, tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        choose_target(rewrite(families.target("gemma2"), tmp_path, **changes), "transformers")


def test_a_window_that_code_and_config_tell_apart(families: Families, tmp_path: Path) -> None:
    """Keeps out: a full layer run with a window, because its config has a key that its code does not read."""
    with pytest.raises(
        ValueError, match=r"by the config \(sliding_window, .*\), layer 0 has window 8, but its code gives attention None"
    ):
        choose_target(rewrite(families.target("llama"), tmp_path, sliding_window=8), "transformers")


def test_weights_are_whole_or_refused(families: Families, tmp_path: Path) -> None:
    """Keeps out: a tensor that transformers would make up, or leave out, with a warning."""
    config = AutoConfig.from_pretrained(families.target("gemma2"))
    model = AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    del state["lm_head.weight"]  # tied
    lost = {name: t for name, t in state.items() if name != "model.layers.1.mlp.up_proj.weight"}
    for tensors, match in (
        (lost, "1 tensors are missing: model.layers.1.mlp.up_proj.weight"),
        (state | {"model.layers.1.mlp.bias": torch.ones(2)}, "1 tensors are not part .* model.layers.1.mlp.bias"),
        (
            state | {"model.layers.1.mlp.up_proj.weight": torch.ones(3, 3)},
            r"tensor 'model.layers.1.mlp.up_proj.weight' must have shape \(\d+, 32\), got \(3, 3\)",
        ),
    ):
        model.save_pretrained(tmp_path, state_dict=tensors)
        with pytest.raises(ValueError, match=match):
            load(tmp_path)


def test_tokens_that_mix_outside_of_attention_are_seen(families: Families) -> None:
    """Keeps out: a convolution or a recurrence beside attention, which would read a batch as one text."""
    target = load(families.target("llama"))
    check_tokens_are_apart(target, "here")

    def running_mean(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.cumsum(1) / torch.arange(1, out.shape[1] + 1)[:, None]

    target.decoder.layers[1].mlp.register_forward_hook(running_mean)  # type: ignore[index,union-attr]
    with pytest.raises(ValueError, match="here: this llama model mixes tokens outside of attention"):
        check_tokens_are_apart(target, "here")


# ---- who computes ----


def test_auto_falls_back_with_its_reason(families: Families) -> None:
    """Keeps out: a silent change of who computes; and a fall-back for a key that transformers would ignore."""
    with pytest.warns(UserWarning, match="auto' takes transformers: the native module refuses: .*rope type .*'yarn'"):
        choice = choose_target(families.root / "llama-yarn")
    assert choice.backend == "transformers" and "rope type" in choice.reason
    with pytest.raises(ValueError, match="rope type"):
        choose_target(families.root / "llama-yarn", "native")


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("llama", dict(num_key_value_heads=3), "num_attention_heads must be a multiple of num_key_value_heads, got 4, 3$"),
        ("llama", dict(num_hidden_layers="4"), "num_hidden_layers must be a whole number of at least 1, got '4'$"),
        ("mistral", dict(layer_types="sliding_attention"), "layer_types must be 4 of .* got 'sliding_attention'$"),
        ("mistral", dict(sliding_window=-1), "sliding_window must be a positive number of tokens or null, got -1$"),
        ("llama", dict(quantization_config="fp8"), "quantization_config must be an object of keys and values, got 'fp8'$"),
        ("llama", dict(model_type=["llama"]), r"model_type must be a string or null, got \['llama'\]$"),
        ("gemma2", dict(eos_token_id=[40]), r"eos_token_id must be null, a token id in \[0, 39\] or a list .*, got \[40\]$"),
    ],
)
def test_auto_does_not_fall_back_from_a_malformed_config(
    families: Families, tmp_path: Path, name: str, changes: dict[str, Any], match: str
) -> None:
    """Keeps out: a broken config that is read again by other rules, which hide what is wrong with it."""
    with pytest.raises(ValueError, match=match) as info:
        choose_target(rewrite(families.target(name), tmp_path, **changes))
    assert str(info.value).startswith(f"{tmp_path}/config.json: ")


def test_a_fall_back_that_fails_says_what_it_stood_in_for(families: Families, tmp_path: Path) -> None:
    """Keeps out: an error of transformers alone, for a model that our own module was meant to run."""
    folder = rewrite(families.root / "llama-yarn", tmp_path, intermediate_size=40)
    (folder / "model.safetensors").symlink_to(families.root / "llama-yarn" / "model.safetensors")
    with pytest.warns(UserWarning, match="auto' takes transformers"):
        choice = choose_target(folder)
    with pytest.raises(ValueError, match=r"mlp.* must have shape .*; backend='auto' took transformers, since .*rope type"):
        load_chosen(choice, folder, 128, CPU, torch.float32, cuda_graphs=False)


def test_auto_does_not_fall_back_from_an_unknown_key(families: Families, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown config keys mystery.*transformers does not know mystery either"):
        choose_target(rewrite(families.target("llama"), tmp_path, mystery=1))


def test_unknown_keys_are_refused_without_a_native_module_too(families: Families, tmp_path: Path) -> None:
    """Keeps out: a key that means something to whoever wrote the checkpoint, and that nobody here reads."""
    with pytest.raises(ValueError, match="unknown config keys mystery, which transformers does not read for a gemma2 model"):
        choose_target(rewrite(families.target("gemma2"), tmp_path, mystery=1))
    known = rewrite(families.target("gemma2"), tmp_path, cache_implementation="hybrid", pretraining_tp=1)
    assert choose_target(known).backend == "transformers"


def test_backends_by_name(families: Families) -> None:
    assert choose_target(families.target("llama")).backend == "native"
    with pytest.raises(ValueError, match="no native module for model_type 'gemma2'.* works: backend='transformers'"):
        choose_target(families.target("gemma2"), "native")
    with pytest.raises(ValueError, match="backend must be 'auto', 'native' or 'transformers', got 'vllm'"):
        SpecDecoder.from_pretrained(families.target("llama"), backend="vllm", device="cpu")


def test_longrope_ends_where_its_angles_change(families: Families) -> None:
    """Keeps out: keys turned by the short angles, read by queries turned by the long ones."""
    with pytest.raises(ValueError, match="max_seq_len must be at most 64"):
        SpecDecoder.from_pretrained(families.target("phi3-longrope"), device="cpu", max_seq_len=65)
