"""A head of one pass of every option, written in each layout, is read back as the same head and computes the same logits.

Keeps out: blocks shifted by one place, causality taken from another layout, windows counted from another row, a Markov head
fed with another row's token: what loads without an error and drafts badly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.block_parts import BlockOptions, random_block_parts, with_copies
from toolkit.heads.block_writers import BLOCK_WRITERS
from toolkit.heads.writers import save
from toolkit.models import Zoo

from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.dflash2.head import DFlash2Head
from specdec.draft.block.formats.common import default_features
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.formats.open import HowToRead, open_head
from specdec.draft.formats.parts import tensors_of
from specdec.draft.load import build_head
from specdec.train.heads.safeailab import vocabulary_map
from specdec.train.heads.speculators import Verifier, config_of, has_map, parts_of

CPU, F64 = torch.device("cpu"), torch.float64
PEAGLE = dict(kind="p-eagle", skips=False, own_embeddings=True, own_lm_head=True, qk_norm=False, draft_vocab=26)
DSPARK = dict(kind="dspark", skips=False, rank=6, markov="vanilla")
PRUNED = dict(draft_vocab=26, own_lm_head=True)
DFLASH2: dict[str, Any] = dict(kind="dflash2", rank=6)
COPIES = dict(own_embeddings=True, own_lm_head=True)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("speculators", dict(PEAGLE, layers=3, feature_norm="joint", before_residual=True)),
    ("speculators", dict(PEAGLE, layers=1, feature_norm="each", windows=(5,), qk_norm=True)),
    ("specforge", dict(PEAGLE, layers=2, bias=True)),
    ("z-lab", {}),
    ("z-lab", dict(windows=(6, None), more={"is_causal": False}, bias=True)),
    ("specforge", dict(windows=(None, 5), causal=(False, True))),
    ("modelopt", dict(causal=(True, True), windows=(5, 5), layers=2)),
    ("modelopt", dict(layers=1, aux=(0, 1, 2, 3))),
    ("deepspec", dict(COPIES, skips=False)),
    ("speculators", dict(PRUNED, windows=(5, None), rule="anchor", causal=(True, False))),
    ("speculators", dict(windows=(5, 5), rule="anchor", skips=False)),
    ("deepspec", dict(COPIES, **DSPARK, confidence="markov")),
    ("specforge", dict(DSPARK, markov="gated", confidence="hidden")),
    ("modelopt", dict(DSPARK, markov="rnn", confidence="markov")),
    ("speculators", {**DSPARK, **PRUNED, "markov": "rnn", "confidence": "hidden"}),
    ("speculators", {**DSPARK, "skips": True}),
    ("z-lab", dict(windows=(6, None), causal=(True, False))),  # without is_causal
    ("z-lab", dict(windows=(6, None), causal=(True, True), more={"is_causal": True})),
    ("z-lab", dict(windows=(6, None), more={"architectures": ["Qwen3DFlashDraftModel"]})),
    ("z-lab", dict(embedding_scale=2.5, logit_scale=0.3, softcap=1.5)),
    ("z-lab", dict(DFLASH2, windows=(5, 5), more={"is_causal": False}, embedding_scale=0.4, logit_scale=2.0, softcap=4.0)),
    ("z-lab", dict(  # the other keys of z-lab's published configs
        DFLASH2, windows=(5, 5), softcap=20.0, logit_scale=0.196,
        more={
            "is_causal": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "dtype": "bfloat16",
            "use_cache": False, "rope_parameters": {"rope_theta": 3000.0, "rope_type": "default"},
            "transformers_version": "5.15.0",
        },
    )),
    ("z-lab", dict(DFLASH2, windows=(None, 5), causal=(False, True), taps=4, group=16, candidates=40)),
    ("z-lab", dict(DFLASH2, taps=0, more={"architectures": ["MiniMaxDFlash2DraftModel"]})),
    ("z-lab", dict(DFLASH2, taps=1, more={"architectures": ["DFlash2BeamDraftModel"]})),
    ("z-lab", dict(
        kind="dflash2", group=16, rank=256, candidates=16,
        more={"architectures": ["Qwen3DFlash2DraftModel"], "is_causal": False},
        nested={"block_size": 4, "final_logit_softcapping": None, "output_multiplier": 1.0, "input_embedding_scale": 1.0,
                "conv_kernel_size": None, "conv_group_size": None, "selector_rank": None, "selector_top_k": None},
    )),
    ("speculators", dict(DFLASH2, windows=(5, None), rule="anchor")),
    ("speculators", dict(DFLASH2, taps=3, candidates=3, skips=False, qk_norm=True)),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "options"), CASES, ids=lambda v: str(v)[:70])
def test_reading_back(zoo: Zoo, tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    parts = random_block_parts(BlockOptions(**options), seed=3)
    where = zoo.target("llama")
    parts = with_copies(parts, where) if layout == "deepspec" else parts
    o, folder = parts.options, save(tmp_path, BLOCK_WRITERS[layout](parts))
    target = load_target(where, read_target_config(where), 64, CPU, F64)
    is_open = layout == "specforge" and o.kind == "dflash"  # such a folder has no mark of its own
    opened = open_head(folder, target.config, HowToRead(layout if is_open else "auto"))
    spec, block = opened.parsed.spec, opened.parsed.spec.block
    assert block is not None and (spec.format, opened.format.name) == (layout, layout)
    assert (spec.kind, spec.aux_layers, block.mask_id, block.skips_anchor) == (o.kind, o.aux, o.mask, o.skips)
    rank = block.markov_rank if block.selection is None else block.selection.rank
    assert (block.markov, rank, block.confidence) == (o.markov, o.rank, o.confidence)
    head = build_head(opened, target, 64, CPU, F64)
    assert isinstance(head, PEagleHead | DFlashHead)

    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(40, (15,), generator=generator)
    features = torch.randn(15, 32 * len(o.aux), dtype=F64, generator=generator)
    anchors, steps = [1, 4, 9, 14], o.size - o.skips
    (drawn,) = head.drafts(features[None], ids[None], torch.tensor([anchors]), steps)
    lm_head, embed = target.lm_head.rows(torch.arange(40)), target.embed_tokens.weight
    for hidden, anchor in zip(drawn, anchors, strict=True):
        want = parts.drafts(features, ids.tolist(), anchor, steps, embed)
        before = torch.randint(40, (1, steps), generator=generator)
        torch.testing.assert_close(hidden, want, rtol=1e-5, atol=2e-5)
        if isinstance(head, DFlash2Head):
            got = head.walk(hidden[None], before)[0]
        elif isinstance(head, DSparkHead):
            got = head.walk(hidden[None], before)[0]
            if o.confidence != "none":
                estimates = head.confidences(hidden, head.markov.embed(before[0]))
                torch.testing.assert_close(estimates, parts.confidences(want, before[0].tolist()), rtol=1e-5, atol=2e-5)
        else:
            got = head.logits(hidden)
        torch.testing.assert_close(got, parts.logits(want, lm_head, before[0].tolist()), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("case", [0, 9, 10, 14, 15, -1, -2], ids=lambda i: str(CASES[i])[:70])
def test_exported_heads_are_read_back(zoo: Zoo, tmp_path: Path, case: int) -> None:
    """Keeps out: a trained head whose files hold other weights, or mean another block."""
    layout, options = CASES[case]
    options = {key: value for key, value in options.items() if key not in ("windows", "rule", "causal")}
    folder = save(tmp_path / "first", BLOCK_WRITERS[layout](random_block_parts(BlockOptions(**options))))
    where = zoo.target("llama")
    target = load_target(where, read_target_config(where), 64, CPU, torch.float32)
    opened = open_head(folder, target.config)
    head = build_head(opened, target, 64, CPU, torch.float32)
    assert isinstance(head, PEagleHead | DFlashHead)
    tensors = tensors_of(parts_of(head)) | (vocabulary_map(head) if has_map(head) else {})
    again = save(tmp_path / "second", (config_of(head, {"rope_theta": 3000.0}, Verifier("a", ["B"])), tensors))
    read = open_head(again, target.config)
    assert replace(read.parsed.spec, model=replace(read.parsed.spec.model, dtype="float32")) == opened.parsed.spec
    same = build_head(read, target, 64, CPU, torch.float32).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in head.state_dict().items())


def test_what_an_estimate_reads_where_nothing_says_so(tmp_path: Path) -> None:
    """Keeps out: z-lab's estimate of acceptance, which reads the hidden state alone, fed with the token too."""
    raw, tensors = BLOCK_WRITERS["specforge"](random_block_parts(BlockOptions(**DSPARK, confidence="hidden")))
    nested = raw["dflash_config"]
    assert nested.pop("confidence_head_with_markov") is False and nested.pop("enable_confidence_head") is True
    nested["confidence_head_alpha"] = 1.0
    block = open_head(save(tmp_path, (raw, tensors)), None, HowToRead("specforge")).parsed.spec.block
    assert block is not None and block.confidence == "hidden"


def test_the_deepest_proposal_says_how_far_a_head_was_trained(tmp_path: Path) -> None:
    """Keeps out: a warning of too many levels at a number that another proposal of the config is meant for."""
    raw, tensors = BLOCK_WRITERS["speculators"](random_block_parts(BlockOptions(**PEAGLE, size=4)))
    raw["speculators_config"]["proposal_methods"] += [{"proposal_type": "greedy", "speculative_tokens": n} for n in (7, 2)]
    block = open_head(save(tmp_path, (raw, tensors)), None).parsed.spec.block
    assert block is not None and block.size == 7


@pytest.mark.parametrize(("target", "head", "wanted"), [
    (36, 5, (1, 9, 17, 25, 33)), (36, 1, (18,)), (28, 3, (1, 13, 25)), (32, 4, (1, 10, 20, 29)),
    (61, 6, (1, 12, 24, 35, 47, 58)),
])  # fmt: skip
def test_features_that_a_config_does_not_name(target: int, head: int, wanted: tuple[int, ...]) -> None:
    """By z-lab's rule: the middle layer, or as many as the head has, evenly from 1 to N - 3.  Keeps out: a neighbour."""
    assert default_features(target, head, "here") == wanted
