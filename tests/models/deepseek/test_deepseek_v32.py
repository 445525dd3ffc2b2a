"""DeepSeek V3.2 and GLM-5 targets against transformers, in float32: logits, and text through the whole runtime.

Keeps out: rotary pairs of the indexer in the wrong layout, a score without its scale or its relu, keys chosen that the query
may not see, a layer that reads another layer's choice.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.load import load_target
from toolkit.deepseek import MARGIN, SPARSES, TOPK, SparseZoo, least_margin, save_sparse, use_limits
from toolkit.driver import Driver
from toolkit.models import ragged_prompts
from toolkit.oracles import texts
from toolkit.prompts import dense_logits, paged_logits
from torch import Tensor

from specdec import SamplingParams, SpecConfig
from specdec.attention.caches.sparse_cache import SparseLatentView
from specdec.attention.latent.limits import Limits
from specdec.attention.sparse import inputs as sparse_inputs
from specdec.loading.build import doubling_context
from specdec.models.causal_lm import CausalLM
from specdec.models.config import read_json
from specdec.models.deepseek.config import parse_deepseek
from specdec.models.kv import kv_read_bytes, make_cache

CPU = torch.device("cpu")
PROMPTS = ragged_prompts(40, 5, seed=3)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> SparseZoo:
    return SparseZoo(tmp_path_factory.mktemp("sparse"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_target(folder, parse_deepseek(read_json(folder / "config.json"), str(folder)), 256, CPU, dtype)


# ---- logits ----


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", SPARSES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(zoo: SparseZoo, name: str) -> None:
    """Whole prompts, chunks, few queries at once, expanded where the host knows that all keys are read, without a cache."""
    hf, model = zoo.hf(name), load(zoo.target(name))
    assert max(map(len, PROMPTS)) > 4 * TOPK and min(least_margin(hf, prompt) for prompt in PROMPTS) > MARGIN
    want = torch.cat([hf(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    close = dict(atol=2e-5 * float(want.abs().max()), rtol=2e-5)
    torch.testing.assert_close(paged_logits(model, PROMPTS), want, **close)
    for chunk, P in ((9, 1), (4, 16)):
        torch.testing.assert_close(paged_logits(model, PROMPTS, chunk, P), want, **close)
    use_limits(model, Limits(expand_above=4, absorbed=5 * 4 * 24))
    torch.testing.assert_close(paged_logits(model, PROMPTS, chunk=5), want, **close)
    alone = dense_logits(model, PROMPTS[2] + PROMPTS[2][::-1], batch=2)
    torch.testing.assert_close(alone[: len(PROMPTS[2])], want[3 : 3 + len(PROMPTS[2])], **close)
    torch.testing.assert_close(alone[len(PROMPTS[2]) :], dense_logits(model, PROMPTS[2][::-1]), **close)


def v3_of(folder: Path, to: Path) -> CausalLM:
    """The same weights as a DeepSeek V3 target, without its indexers."""
    tensors = load_file(folder / "model.safetensors")
    raw = read_json(folder / "config.json")
    kept = {key: value for key, value in raw.items() if not key.startswith("index")}
    to.mkdir()
    (to / "config.json").write_text(json.dumps({**kept, "model_type": "deepseek_v3"}))
    save_file({n: t for n, t in tensors.items() if ".indexer." not in n}, to / "model.safetensors", metadata={"format": "pt"})
    return load(to)


@torch.inference_mode()
def test_few_keys_are_all_read(zoo: SparseZoo, tmp_path: Path) -> None:
    """With topk at least as long as the text, V3.2 is V3, and it is not with fewer.

    Keeps out: a test above that passes because nothing was left out; a key too few.
    """
    v3 = paged_logits(v3_of(zoo.target("v32"), tmp_path / "v3"), PROMPTS)
    longest = max(map(len, PROMPTS))
    for topk in (longest, 200):  # chosen by the indexer, and known to the host
        folder = save_sparse(tmp_path / str(topk), "v32", index_topk=topk)
        assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], v3_lm_head(zoo))
        torch.testing.assert_close(paged_logits(load(folder), PROMPTS), v3, atol=1e-4, rtol=1e-4)
    sparse = paged_logits(load(zoo.target("v32")), PROMPTS)
    torch.testing.assert_close(sparse[:3], v3[:3], atol=1e-4, rtol=1e-4)
    assert (sparse - v3)[3 + TOPK : 3 + longest].abs().amax(-1).min() > 1e-3


def v3_lm_head(zoo: SparseZoo) -> Tensor:
    return load_file(zoo.target("v32") / "model.safetensors")["lm_head.weight"]


@torch.inference_mode()
def test_what_the_host_knows_changes_nothing(zoo: SparseZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a first chunk that reads other keys when it is answered as dense attention."""
    model, first = load(zoo.target("glm-shared")), [prompt[:TOPK] for prompt in PROMPTS]
    dense_path = paged_logits(model, first)
    monkeypatch.setattr(sparse_inputs, "reads_all", lambda plan, topk: False)
    torch.testing.assert_close(paged_logits(model, first), dense_path, atol=1e-5, rtol=1e-5)


# ---- text ----

CASES = [
    ("v32", "eagle3", (4, 1, 5), 1),
    ("v32", "eagle3", (3, 4, 8), 16),
    ("v32-dense-biases", "eagle1", (3, 4, 8), 1),
    ("glm", "eagle3", (2, 8, 12), 64),
    ("glm-shared", "eagle3", (3, 4, 8), 5),
]


def assert_clear(zoo: SparseZoo, name: str, texts: list[list[int]]) -> None:
    """Asserts that rounding decides no choice of an indexer."""
    for text in texts:
        assert least_margin(zoo.hf(name), text) > MARGIN, "a near-tie: choose another seed for the model or the prompt"


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("name", "head", "shape", "page_size"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_text_is_that_of_transformers(
    zoo: SparseZoo, name: str, head: str, shape: tuple[int, int, int], page_size: int
) -> None:
    """Chains and trees at any page size, prompts longer than a chunk, rows that change owners."""
    decoder = zoo.decoder(name, head, SpecConfig(*shape), page_size=page_size, max_batch_size=3)
    assert isinstance(Driver(decoder).cache("target").view(0), SparseLatentView)
    assert_clear(zoo, name, [prompt + zoo.greedy(name, prompt, 24) for prompt in texts.PROMPTS])
    texts.hold_text(zoo, name, decoder)


@pytest.mark.slow
def test_shared_prefixes_are_read_from_each_rows_own_pages(zoo: SparseZoo) -> None:
    """Cached pages of another's prompt.  Keeps out: a plan that splits off what rows share, from which no query chooses."""
    texts.hold_text_after_shared_prefixes(zoo, "v32", (4, 4, 16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "shape", "page_size"), [("v32", (4, 1, 5), 1), ("v32", (3, 4, 8), 16), ("glm-shared", (3, 4, 8), 64)]
)
def test_captured_rounds_write_the_same(zoo: SparseZoo, name: str, shape: tuple[int, int, int], page_size: int) -> None:
    """In float32 on a GPU, whole rounds in graphs, against plain decoding on a CPU by torch.

    Keeps out: a choice, its number of keys, or a table's address that the host froze while it captured.
    """
    prompts, sampling = ragged_prompts(40, 6, seed=7), SamplingParams(max_tokens=24)
    want = [out.token_ids for out in zoo.decoder(name, max_batch_size=3).generate(prompts, sampling)]
    for graphs in ("round", "step", False):
        settings: dict[str, Any] = dict(page_size=page_size, max_batch_size=3, device="cuda", cuda_graphs=graphs)
        decoder = zoo.decoder(name, "eagle3", SpecConfig(*shape), **settings)
        assert decoder.settings.attention_backend.name == "triton"
        assert [out.token_ids for out in decoder.generate(prompts, sampling)] == want, graphs


# ---- strictness and sizes ----


def rewritten(folder: Path, to: Path, tensors: dict[str, Tensor]) -> Path:
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_an_indexers_tensors_are_all_wanted(zoo: SparseZoo, tmp_path: Path) -> None:
    """Keeps out: an indexer that chooses by uninitialised weights, or one whose weights nobody reads."""
    folder = zoo.target("glm-shared")
    tensors = load_file(folder / "model.safetensors")
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.layers.2.self_attn.indexer.k_norm.bias"}
    with pytest.raises(ValueError, match="'model.layers.2.self_attn.indexer.k_norm.bias' is missing"):
        load(rewritten(folder, tmp_path / "missing", missing))
    extra = tensors | {
        "model.layers.1.self_attn.indexer.wk.weight": tensors["model.layers.0.self_attn.indexer.wk.weight"].clone()
    }
    with pytest.raises(ValueError, match="not part of this architecture: model.layers.1.self_attn.indexer.wk.weight"):
        load(rewritten(folder, tmp_path / "extra", extra))
    config = tmp_path / "missing" / "config.json"
    config.write_text(config.read_text().replace('"index_n_heads": 16', '"index_n_heads": 8'))
    with pytest.raises(ValueError, match=r"indexer.wq_b.weight' must have shape \(128, 20\), got .* index_n_heads"):
        load(tmp_path / "missing")


def test_only_scores_grow_with_the_context(zoo: SparseZoo, tmp_path: Path) -> None:
    """Keeps out: chunks of a long prompt that get smaller as if each query read all keys; layers counted that score nothing."""
    shared, own = (load(zoo.target(name)).config for name in ("glm-shared", "glm"))
    assert own.key_operations == 3 * 2 * 16 * 16 and shared.key_operations == 2 * 2 * 16 * 16
    v3 = v3_of(zoo.target("v32"), tmp_path / "v3").config
    assert v3.max_read is None and own.max_read == TOPK
    assert doubling_context(v3) / doubling_context(own) == own.key_operations / v3.key_operations


def test_a_token_takes_its_latent_and_its_indexer_key(zoo: SparseZoo) -> None:
    """Keeps out: a pool that is sized for latents alone; a commit that moves a node's latent and leaves its key."""
    model = load(zoo.target("v32"))
    cache = make_cache(model, model.config, 7, "auto", torch.bfloat16, CPU)
    assert cache.bytes == 7 * 3 * (16 + 8 + 16) * 2
    shared = load(zoo.target("glm-shared"))  # two of five layers have an indexer
    of_shared = make_cache(shared, shared.config, 7, "auto", torch.bfloat16, CPU)
    assert of_shared.bytes == 7 * (5 * (16 + 8) + 2 * 16) * 2
    for context, latents in ((4, 4), (100, TOPK)):
        read = kv_read_bytes(shared.config, "auto", torch.bfloat16, context)
        assert read == (latents * 5 * (16 + 8) + context * 2 * 16) * 2
    for buffer in cache.buffers.values():
        buffer.copy_(torch.arange(7)[None, :, None].expand_as(buffer))
    cache.move(torch.tensor([[2, 3, 4, 5]]), torch.tensor([[0, 2, 3]]))
    for buffer in cache.buffers.values():
        assert buffer[:, :, 0].int().tolist() == [[0, 1, 2, 4, 5, 5, 6]] * 3
