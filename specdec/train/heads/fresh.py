"""Fresh heads of every kind that can be trained.

What a head starts with: random weights, but for a final norm and a language-model head like the target's.  This file knows
kinds of heads and what they share with their target.  It knows neither losses nor text nor files.

Shapes: V draft vocabulary, Q query heads, K key and value heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import cast

import torch
from torch import Tensor, nn

from specdec.draft.block.dflash2.convolution import SublayerConvolution
from specdec.draft.block.dflash2.selector import CandidateSelector
from specdec.draft.formats.empty import class_of
from specdec.draft.formats.spec import KINDS, BlockSpec, HeadSpec, MarkovKind, Selection, SlotConvolution
from specdec.draft.head import DraftHead
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig, OutputNames
from specdec.models.layers import Embedding, HeadsRMSNorm, RMSNorm, SelfAttention
from specdec.models.linear import Linear
from specdec.models.target import Target
from specdec.train.settings import HeadRun

TAPS, GROUP = 2, 16  # of the convolutions of published DFlash2 heads


def new_head(model: Target, aux_layers: tuple[int, ...], draft_ids_V: Tensor, run: HeadRun) -> DraftHead:
    """A fresh head in float32, of which whatever is trained requires gradients.

    aux_layers: 0-based target layers whose outputs are the features.  draft_ids_V: ids of the draft vocabulary, ascending.
    The embeddings are the target's and are not trained, but for a P-EAGLE head, which trains a copy.  Heads over blocks read
    logits with the target's own rows too, as their trainers do it.
    """
    spec, device = spec_of(model.config, aux_layers, len(draft_ids_V), run), model.embed_tokens.weight.device
    head = build(lambda: class_of(run.kind)(spec, run.width), device, torch.float32)
    if spec.own_embeddings:
        assert isinstance(head.embed_tokens, Embedding)
    else:
        head.embed_tokens = model.embed_tokens
    if not spec.own_lm_head:
        head.share_lm_head(model)
    head.requires_grad_(True)
    generator = torch.Generator(device).manual_seed(run.seed)
    with torch.no_grad():
        for name, module in head.named_modules():
            _fill(module, name, generator)
        for own in head.parameters(recurse=False):  # numbers beside all modules, such as the feature of unknown pairs
            own.normal_(std=0.02, generator=generator)
        if spec.own_embeddings:
            head.embed_tokens.weight.copy_(model.embed_tokens.weight)
        if spec.own_lm_head:
            head.lm_head.tensors()["weight"].tensor.copy_(model.lm_head.rows(draft_ids_V.to(device)))
        if isinstance(model, CausalLM):  # the final norm of another model implementation may be of another kind
            assert isinstance(head.norm, RMSNorm)
            head.norm.weight.copy_(model.norm.weight)
    head.embed_tokens.requires_grad_(spec.own_embeddings)
    head.lm_head.requires_grad_(spec.reads_pairs)
    if spec.own_lm_head:
        head.d2t_V = (draft_ids_V - torch.arange(len(draft_ids_V), dtype=torch.int64, device="cpu")).to(device)
    return head


def spec_of(config: ModelConfig, aux_layers: tuple[int, ...], vocab: int, run: HeadRun) -> HeadSpec:
    """The normal form of a head of these settings.  vocab: of the drafts.

    Its longest text is a row of the training: what readers take for the length that a head was trained on.  Ropes that are
    scaled to a longer context name the original one themselves, so that their angles do not depend on it.
    """
    over_blocks = not KINDS[run.kind].reads_pairs
    config = with_plain_heads(config)
    shape = replace(
        config, num_layers=run.layers, layer_kinds=(), kv_source=(), tie_embeddings=False, qk_norm=over_blocks, qkv_bias=False,
        o_bias=False, mlp_bias=False, quantization=None, intermediate_size=run.intermediate_size or config.intermediate_size,
        max_position=run.width, experts=None, has_experts=False, rope=config.rope.of_whole_heads,
        one_block=False, output_names=OutputNames(), embedding_multiplier=1.0, logits_multiplier=1.0, logits_divisor=1.0,
        unlike_heads=(), value_width=0, attention_scale=None, has_sinks=False, values_are_keys=False,
    )  # fmt: skip
    spec = HeadSpec(shape, run.kind, tuple(sorted(aux_layers)), config.hidden_size, vocab)
    if run.kind == "eagle3":
        return spec
    mask = config.eos_ids[0] if config.eos_ids else config.vocab_size - 1  # as a row's input it can't come before an end
    skips = run.kind in ("dflash", "dflash2")
    block = BlockSpec(run.num_steps + skips, mask, (run.kind == "p-eagle",) * run.layers, skips)
    if run.kind == "dflash2":
        group = math.gcd(config.hidden_size, GROUP)
        block = replace(block, convolution=SlotConvolution(TAPS, group), selection=Selection(run.candidates, run.selector_rank))
    if run.kind == "dspark":
        block = replace(block, markov=cast(MarkovKind, run.markov), markov_rank=run.markov_rank, confidence="markov")
    owns = run.kind == "p-eagle"
    return replace(spec, block=block, own_embeddings=owns, own_lm_head=owns or vocab < config.vocab_size)


def with_plain_heads(config: ModelConfig) -> ModelConfig:
    """The same sizes with ordinary heads, as wide as what a target with latent attention rotates of its own."""
    if not config.keeps_latents:
        return config
    plain = {each.name: getattr(config, each.name) for each in fields(ModelConfig)}
    return ModelConfig(**plain | {"family": "llama", "latent_rank": 0, "indexer": None})


def _fill(module: nn.Module, name: str, generator: torch.Generator) -> None:
    """Random matrices, norms of 1.  What a head shares with its target has no module of its own yet, or one to be copied."""
    if name in ("embed_tokens", "lm_head"):
        return
    if isinstance(module, SublayerConvolution):  # which leaves rows as they are
        module.base_kernel.zero_()[:, 0] = 1.0
    elif isinstance(module, CandidateSelector):  # which leaves logits as they are
        module.predecessor.weight.normal_(generator=generator)
        module.successor.weight.zero_()
    elif name.endswith("kernel_projection") and isinstance(module, Linear) and module.weight is not None:
        module.weight.zero_()
    elif isinstance(module, Linear):
        assert module.weight is not None
        module.weight.normal_(std=0.02, generator=generator)
        if module.bias is not None:
            module.bias.zero_()
    elif isinstance(module, Embedding) and not name.startswith("selector."):
        module.weight.normal_(std=0.02, generator=generator)
    elif isinstance(module, RMSNorm):
        module.weight.fill_(1.0)
    elif isinstance(module, SelfAttention) and isinstance(module.qk_norm, HeadsRMSNorm):
        module.qk_norm.weight.fill_(1.0)
        queries = module.num_heads
        module.qk_norm.weight.register_hook(lambda grad_XD: _alike(grad_XD, queries))


def _alike(grad_XD: Tensor, queries: int) -> Tensor:
    """A gradient that keeps the norm's rows of all query heads equal, and those of all key heads: files hold one of each."""
    return torch.cat([part.sum(0, keepdim=True).expand_as(part) for part in (grad_XD[:queries], grad_XD[queries:])])
