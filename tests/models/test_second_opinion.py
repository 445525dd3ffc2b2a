"""DeepSeek computed twice: by the native module over latents, and by transformers' code over keys and values of two widths.

Keeps out: an error that the native module shares with nobody, such as an absorbed projection that is right for one page size or
for chains only; and values that are read with the width or the stride of keys.
"""

from pathlib import Path

import pytest
import torch
from toolkit.deepseek import save_deepseek
from toolkit.models import HEADS, is_greedy, ragged_prompts
from transformers import AutoModelForCausalLM

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.eager.dense import DenseAttention
from specdec.models.registry import choose_target, load_chosen

WIDTHS = dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)  # 192/128 of DeepSeek V2 and V3, scaled down
NAMES = ["v3", "v2-lite"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deepseek(tmp_path_factory.mktemp("second") / request.param, request.param, **WIDTHS)


def test_both_give_the_same_logits(folder: Path) -> None:
    """In float32, without a cache."""
    ids = torch.tensor(ragged_prompts(40, 4, seed=6)[-1])
    logits = []
    with torch.inference_mode():
        for backend in ("native", "transformers"):
            choice = choose_target(folder, backend)
            assert choice.config.head_dim == (24 if backend == "transformers" else 8)
            target = load_chosen(choice, folder, 128, torch.device("cpu"), torch.float32, cuda_graphs=False)
            attn = DenseAttention(target.config.layer_kinds)
            logits.append(target.logits(target(ids, torch.arange(len(ids)), attn).hidden_TH))
    torch.testing.assert_close(*logits, atol=1e-5 * float(logits[0].abs().max()), rtol=1e-5)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("head", "shape", "page_size"), [("eagle3", (4, 4, 16), 16), ("eagle1", (3, 8, 24), 1), ("eagle3", (4, 1, 5), 64)], ids=str
)
def test_both_write_the_same(folder: Path, tmp_path: Path, head: str, shape: tuple[int, int, int], page_size: int) -> None:
    """Trees and a chain, at every page size: what transformers alone writes."""
    draft, prompts = HEADS[head](tmp_path / "head", folder), ragged_prompts(40, 5, seed=12)
    settings = dict(device="cpu", dtype="float32", max_seq_len=64, page_size=page_size, max_batch_size=3)
    texts, accepted = [], 0
    for backend in ("native", "transformers"):
        decoder = SpecDecoder.from_pretrained(folder, draft, SpecConfig(*shape), backend=backend, **settings)
        assert decoder.settings.target_backend == backend
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=16))
        texts.append([out.token_ids for out in outputs])
        accepted += sum(out.stats.accepted for out in outputs)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert texts[0] == texts[1] and all(is_greedy(hf, prompt, text) for prompt, text in zip(prompts, texts[0], strict=True))
    assert {len(text) for text in texts[0]} == {16}
    assert accepted > 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_split_heads_in_8_bits(folder: Path, tmp_path: Path, kept: str) -> None:
    """Keeps out: a setting that is ignored, and trees that read values of another width than was stored."""
    draft, prompts = HEADS["eagle3"](tmp_path / "head", folder), ragged_prompts(40, 5, seed=12)
    settings = dict(backend="transformers", device="cpu", dtype="float32", max_seq_len=64, kv_cache_dtype=kept)
    with SpecDecoder.from_pretrained(folder, draft, SpecConfig(4, 4, 16), **settings) as decoder:
        fast, plain = (decoder.generate(prompts, SamplingParams(max_tokens=16), speculate=on) for on in (True, False))
        assert decoder.settings.options.kv_cache_dtype == kept
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", False])
def test_a_gpu_writes_the_same(folder: Path, tmp_path: Path, graphs: str | bool) -> None:
    """In float32, by the Triton kernels, whole rounds in graphs.  Keeps out: strides of a view that a graph freezes."""
    draft, prompts = HEADS["eagle3"](tmp_path / "head", folder), ragged_prompts(40, 5, seed=12)
    settings = dict(device="cuda", dtype="float32", max_seq_len=64, page_size=16, max_batch_size=3, cuda_graphs=graphs)
    decoder = SpecDecoder.from_pretrained(folder, draft, SpecConfig(4, 4, 16), backend="transformers", **settings)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=16))
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert all(len(out.token_ids) == 16 and is_greedy(hf, out.prompt_token_ids, out.token_ids) for out in outputs)
