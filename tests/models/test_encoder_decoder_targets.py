"""Encoder-decoder targets: what they hand out is what transformers computes, and what can't run is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.oracles.encoder_decoders import LONGEST, eager, save_encoder_decoder

from specdec import SamplingParams, SpecDecoder, cli
from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.encoder.encoder_texts import EncoderTexts
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.models.registry import choose_target, load_chosen
from specdec.models.transformers_backend.encoder_decoder import EncoderDecoderTarget
from specdec.train.head import train_head
from specdec.train.settings import HeadRun

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder_decoder(tmp_path_factory.mktemp("bart") / "target", "bart")


@torch.no_grad()
def test_every_layer_equals_transformers(bart: Path) -> None:
    """Keeps out: a feature of another layer for the head, logits without the model's bias, a text's keys in another's place."""
    target = load_chosen(choose_target(bart, "auto"), bart, 128, CPU, torch.float32, cuda_graphs=False)
    assert isinstance(target, EncoderDecoderTarget)
    B, N, config, hf = 2, 6, target.config, eager(bart)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 40, (n,), generator=generator) for n in (9, LONGEST)]
    ids_BN = torch.randint(3, 40, (B, N), generator=generator)
    layout = HeadsLayout(config.num_kv_heads, config.head_dim, torch.float32)
    own = KVCache(layout, config.layer_kinds, B * N, device=CPU)
    read = KVCache(layout, config.layer_kinds, B * LONGEST, device=CPU)
    for page, text in enumerate(texts):
        for layer, kv_S2KD in enumerate(target.read_text(text, TorchBackend())):
            read.view(layer).write(page * LONGEST + torch.arange(len(text)), kv_S2KD)
    read_texts = EncoderTexts(torch.arange(B).int(), torch.tensor([len(text) for text in texts]).int(), LONGEST)
    pages = PageTable(torch.arange(B, dtype=torch.int32)[:, None], N)
    plan = AttentionPlan((causal_segment(pages, torch.full((B,), N, dtype=torch.int32), N),), cross=read_texts.read_by(N))
    attn = PagedAttention(TorchBackend(), own, PassTables(plan, torch.arange(B * N)), encoder_cache=read)
    positions_T, layers = torch.arange(N).repeat(B), tuple(range(config.num_layers))
    out = target(ids_BN.flatten(), positions_T, attn, layers)
    theirs = [
        hf(input_ids=text[None], decoder_input_ids=ids[None], output_hidden_states=True) for text, ids in zip(texts, ids_BN)
    ]
    want = torch.cat([o.logits[0] for o in theirs])
    torch.testing.assert_close(target.logits(out.hidden_TH), want, atol=1e-4, rtol=1e-4)
    assert out.aux_TA is not None
    for layer, state in enumerate(out.aux_TA.split(config.hidden_size, dim=1)):
        want = torch.cat([o.decoder_hidden_states[layer + 1][0] for o in theirs])
        torch.testing.assert_close(state, want, atol=1e-4, rtol=1e-4)


def test_what_does_not_go_with_an_encoder_is_refused(bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: pages of one text's answer given to another's, and a bench or a training that ignores what was read."""
    settings: dict[str, Any] = dict(device="cpu", dtype="float32", max_batch_size=2)
    with pytest.raises(ValueError, match="prefix_caching=True is for decoder-only .*setting that works: prefix_caching=False"):
        SpecDecoder.from_pretrained(bart, **settings, prefix_caching=True)
    with SpecDecoder.from_pretrained(bart, **settings) as decoder:
        with pytest.raises(ValueError, match=f"prompt has {LONGEST + 1} tokens; expected at most {LONGEST}, the smaller of"):
            decoder.generate([5] * (LONGEST + 1))
        with pytest.raises(ValueError, match=f"setting that works: max_tokens={LONGEST - 1}"):  # the decoder's own limit
            decoder.generate([5], SamplingParams(max_tokens=LONGEST))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"token_ids": [5, 6]}) + "\n")
    assert cli.main(["bench", "--target", str(bart), "--prompts", str(prompts), "--batch-sizes", "1"]) == 2
    assert "must be a decoder-only model" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("one<|endoftext|>two")
    with pytest.raises(ValueError, match="target must be a decoder-only model, such as a Llama, got .* a bart model"):
        train_head(HeadRun(width=48, longest_prompt=8), bart, [tmp_path / "text.txt"], tmp_path / "out", device="cpu")


def test_the_start_is_named_by_the_checkpoint(bart: Path, tmp_path: Path) -> None:
    """Keeps out: a decoder that begins with a token of our own choice."""
    raw = json.loads((bart / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "decoder_start_token_id": None, "bos_token_id": None}))
    with pytest.raises(ValueError, match="decoder_start_token_id must be the id that the decoder's text begins with, got None"):
        choose_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "decoder_start_token_id": 40}))
    with pytest.raises(ValueError, match="decoder_start_token_id must be at most 39, got 40"):
        choose_target(tmp_path)


def test_an_encoder_with_fewer_tokens_is_refused(tmp_path: Path) -> None:
    """Keeps out: a prompt that the decoder's vocabulary allows, and that reads past the end of the encoder's table."""
    folder = save_encoder_decoder(tmp_path / "t5gemma", "t5gemma")
    raw = json.loads((folder / "config.json").read_text())
    raw["encoder"]["vocab_size"] -= 1
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="the encoder's vocab_size must be at least the decoder's, 40, got 39"):
        choose_target(folder)
