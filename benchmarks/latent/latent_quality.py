"""What latents in 8 bits (kv_cache_dtype="fp8_ds_mla") change in a model's logits and in a draft head's accept length.

    python benchmarks latent.latent_quality --text STORIES --tokenizer DIR --pair DIR --out FILE

No trained DeepSeek is small enough for a CPU, so the script trains one: 5 dense layers of width 64 with latents of 128 + 16
numbers, and an EAGLE-3 head for it.  Both stay in the folder `--pair`, and are not trained again if they are there.  All runs
are in float32: only how latents are kept differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from pathlib import Path
from typing import Any

import torch
from engine_internals import target_cache
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.caches.quant_cache import as_stored
from specdec.attention.eager.dense import DenseAttention
from specdec.generation import Generation, Stats
from specdec.models.kv import cache_layout
from specdec.train.head import train_head
from specdec.train.settings import HeadRun
from specdec.train.text.heldout import load_corpus

SHAPES = ((5, 1, 6), (5, 4, 16))
CACHES = ("auto", "fp8_ds_mla")
DIMS = dict(
    hidden_size=64, intermediate_size=192, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=128,
    q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=5, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=24, n_group=2, topk_group=1, max_position_embeddings=512,
    rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
STEPS, ROWS, WIDTH, RATE = 900, 16, 128, 3e-3
HEAD = HeadRun(texts=512, width=128, longest_prompt=24, steps=500, batch=16, warmup=50, eval_every=100, eval_prompts=32)
OPENING, TOKENS = 60, 128  # characters of a prompt, and tokens of its answer


def train_target(tokenizer: Any, documents: list[str], out: Path) -> None:
    """A target that has read the documents for a few minutes."""
    torch.manual_seed(0)
    ids = torch.tensor(tokenizer("\n".join(documents), add_special_tokens=False).input_ids)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=len(tokenizer), **DIMS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        rows = torch.stack([ids[start : start + WIDTH] for start in torch.randint(len(ids) - WIDTH, (ROWS,)).tolist()])
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"target: step {step + 1}/{STEPS}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def accepted(pair: Path, prompts: list[list[int]], shape: tuple[int, int, int], cache: str) -> tuple[dict[str, Any], list]:
    """One setting's accept length, and whether speculation changed a text."""
    decoder = decoder_of(pair, shape, cache)
    sampling = SamplingParams(max_tokens=TOKENS)
    outputs, plain = decoder.generate(prompts, sampling), decoder.generate(prompts, sampling, speculate=False)
    row = {
        "shape": shape,
        "cache": cache,
        "accept_length": Stats.total([out.stats for out in outputs]).accept_length,
        "equal_to_plain": sum(a.token_ids == b.token_ids for a, b in zip(outputs, plain, strict=True)),
        "prompts": len(prompts),
        "target_bytes_a_token": target_bytes(decoder, cache),
    }
    print(row, flush=True)
    return row, outputs


def target_bytes(decoder: SpecDecoder, cache: str) -> int:
    """Of one token, in all layers of the target."""
    layout = cache_layout(decoder.model.config, cache, torch.float32)
    return sum(map(layout.layer_bytes, range(decoder.model.config.num_layers)))


def decoder_of(pair: Path, shape: tuple[int, int, int], cache: str) -> SpecDecoder:
    settings: dict[str, Any] = dict(device="cpu", dtype="float32", max_batch_size=16, max_seq_len=256, kv_cache_dtype=cache)
    return SpecDecoder.from_pretrained(pair / "target", pair / "head", SpecConfig(*shape), **settings)


@torch.inference_mode()
def logit_error(pair: Path, outputs: list[Generation]) -> dict[str, float]:
    """How far rounding latents moves logits, beside their standard deviation."""
    decoder = decoder_of(pair, SHAPES[0], "fp8_ds_mla")
    model, store = decoder.model, as_stored(target_cache(decoder))
    errors, spreads = [], []
    for out in outputs[:8]:
        ids = torch.tensor([*out.prompt_token_ids, *out.token_ids])
        exact, rounded = (
            model.logits(model(ids, torch.arange(len(ids)), DenseAttention(model.config.layer_kinds, as_stored=how)).hidden_TH)
            for how in (None, store)
        )
        errors.append((exact - rounded).abs().mean().item())
        spreads.append(exact.std().item())
    return {"logit_error": sum(errors) / len(errors), "logit_std": sum(spreads) / len(spreads)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="UTF-8 text, plain, .xz or .gz")
    parser.add_argument("--tokenizer", required=True, help="a folder with a small tokenizer")
    parser.add_argument("--pair", type=Path, required=True, help="where the trained pair lies or will lie")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    corpus = load_corpus([args.text], HEAD.held_out, "stories")
    train, held = ([document.text for document in part] for part in corpus[:2])
    if not (args.pair / "target").is_dir():
        train_target(tokenizer, train, args.pair / "target")
    if not (args.pair / "head").is_dir():
        train_head(
            HEAD,
            args.pair / "target",
            [args.text],
            args.pair / "head",
            split="stories",
            aux_layers=(1, 2, 3),
            device="cpu",
            threads=1,
        )
    random.Random(0).shuffle(held)
    openings = [text[:OPENING] for text in held if len(text) > OPENING][: args.prompts]
    prompts = [[1, *tokenizer(text, add_special_tokens=False).input_ids] for text in openings]
    rows, outputs = [], []
    for shape in SHAPES:
        for cache in CACHES:
            row, outputs = accepted(args.pair, prompts, shape, cache)
            rows.append(row)
    about = {"torch": torch.__version__, "date": datetime.date.today().isoformat(), **logit_error(args.pair, outputs)}
    print(about)
    if args.out:
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
