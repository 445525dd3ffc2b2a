"""A head of every option, written in each layout, is read back as the same head and computes the same logits.

Keeps out: ids that are off by one, norms in other places, another state recycled, offsets taken for ids: what loads without an
error and drafts badly.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads import writers
from toolkit.heads.block_parts import BlockOptions, random_block_parts
from toolkit.heads.block_writers import BLOCK_WRITERS
from toolkit.heads.parts import YARN, Latents, Options, random_parts
from toolkit.heads.writers import Files
from toolkit.models import Zoo

from specdec.attention.eager.dense import DenseAttention
from specdec.attention.kinds import LayerKind
from specdec.draft.formats.detect import FORMATS
from specdec.draft.formats.open import HowToRead, open_head
from specdec.draft.load import build_head
from specdec.models.config import RopeConfig

CPU, F64 = torch.device("cpu"), torch.float64
FULL = dict(draft_vocab=40)
LATENTS = Latents()
LATENT_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
WIDE = dict(hidden=48, own_embeddings=True)  # not as wide as its target
CASES: list[tuple[Callable[..., Files], dict[str, Any]]] = [
    (writers.safeailab, {}),
    (writers.safeailab, dict(before_residual=True, bias=True, window=3)),
    (writers.safeailab, dict(FULL, own_lm_head=False, aux=(2,))),
    (writers.safeailab, dict(WIDE, aux=(0, 1, 2, 3))),
    (writers.safeailab, dict(rope=YARN, own_embeddings=True)),
    (writers.safeailab, dict(aux=(), layers=2, fc_bias=False)),
    (writers.safeailab, dict(aux=(), window=4, bias=True)),
    (writers.specforge, {}),
    (writers.specforge, dict(feature_norm="each", own_embeddings=True)),
    (writers.specforge, dict(FULL, norms_logits=False, bias=True)),
    (writers.specforge, dict(WIDE, feature_norm="each", norms_logits=False)),
    (writers.speculators, dict(own_embeddings=True)),
    (writers.speculators, dict(own_embeddings=True, layers=3, feature_norm="joint", before_residual=True, qk_norm=True)),
    (writers.speculators, dict(FULL, own_embeddings=True, feature_norm="each", recycles_normed=True, layers=2, aux=(0, 2))),
    (writers.speculators, dict(own_embeddings=True, recycles_normed=True, bias=True, window=3, rope=YARN)),
    (writers.modelopt, {}),
    (writers.modelopt, dict(layers=3, rope=YARN, aux=(0, 1, 2, 3))),
    (partial(writers.modelopt, generation="midlayer"), dict(FULL, own_lm_head=False)),
    (partial(writers.modelopt, generation="midlayer.0"), dict(layers=2, own_embeddings=True, bias=True)),
    (partial(writers.modelopt, generation="deep"), dict(WIDE, layers=2)),
    (writers.modelopt_latent, dict(latent=LATENTS)),
    (writers.modelopt_latent, dict(latent=LATENTS, layers=3, rope=LATENT_YARN, aux=(0, 1, 2, 3), own_embeddings=True)),
    (partial(writers.modelopt_latent, generation="midlayer"), dict(FULL, latent=Latents(None, interleaved=False))),
    (partial(writers.modelopt_latent, generation="midlayer.0"), dict(WIDE, latent=LATENTS, layers=2)),
    (writers.torchspec, dict(latent=LATENTS, own_embeddings=True)),
    (writers.torchspec, dict(FULL, latent=LATENTS, own_lm_head=False, rope=LATENT_YARN)),
    (writers.torchspec, dict(WIDE, latent=Latents(None), before_residual=True)),
    (partial(writers.torchspec, for_vllm=True), dict(latent=LATENTS, feature_norm="each", recycles_normed=True)),
    (partial(writers.torchspec, for_vllm=True), dict(latent=LATENTS, layers=2, aux=(0, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("write", "options"), CASES, ids=lambda v: getattr(getattr(v, "func", v), "__name__", str(v)[:60]))
def test_reading_back(zoo: Zoo, tmp_path: Path, write: Callable[..., Files], options: dict[str, Any]) -> None:
    parts = random_parts(Options(**options), seed=3)
    o, folder = parts.options, writers.save(tmp_path, write(parts))
    where = zoo.target("llama")
    target = load_target(where, read_target_config(where), 64, CPU, F64)
    opened = open_head(folder, target.config)
    spec = opened.parsed.spec
    assert spec.format == opened.format.name == getattr(write, "func", write).__name__.removesuffix("_latent")
    assert (spec.kind, spec.aux_layers) == ("eagle3" if o.aux else "eagle1", o.aux)
    assert (spec.feature_norm, spec.norm_before_residual) == (o.feature_norm, o.before_residual)
    assert (spec.recycles_normed, spec.norms_logits) == (o.recycles_normed, o.norms_logits)
    assert spec.draft_ids == (None if parts.draft_ids is None else tuple(parts.draft_ids.tolist()))
    assert spec.model.layer_kinds == (LayerKind(window=o.window),) * o.layers and spec.trained_length == 64
    assert (spec.own_embeddings, spec.own_lm_head) == (o.own_embeddings, o.own_lm_head and bool(o.aux))
    head = build_head(opened, target, 64, CPU, F64)

    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(40, (9,), generator=generator)
    states = [torch.randn(9, 32, dtype=F64, generator=generator) for _ in range(5)]
    features = parts.features(states[:4], states[4])
    fused, want = head.fuse(features), parts.fuse(features)
    positions = torch.arange(9)
    for _ in range(2):  # the second step reads what the first one left
        inputs = ids, fused, positions, DenseAttention(spec.model.layer_kinds)
        (at_level, logits_at_level), fused = head.level(*inputs), head(*inputs)
        assert torch.equal(at_level, fused)
        want = parts.hidden(ids, want, target.embed_tokens.weight)
        torch.testing.assert_close(fused, want, rtol=1e-5, atol=2e-5)  # tables of angles are float32
        logits = parts.logits(want, target.lm_head.rows(torch.arange(40)))
        for got in (head.logits(fused), logits_at_level):
            torch.testing.assert_close(got, logits, rtol=1e-5, atol=2e-5)


HEADS = {  # but z-lab's and SpecForge's of one pass: nothing tells their folders apart
    **{name: partial(write, random_parts(Options(own_embeddings=True))) for name, write in writers.WRITERS.items()},
    **{
        f"{name}, one pass": partial(BLOCK_WRITERS[name], random_block_parts(BlockOptions()))
        for name in ("modelopt", "speculators")
    },
}


@pytest.mark.parametrize("name", HEADS)
def test_a_layout_named_wrongly_is_refused_with_the_right_one(tmp_path: Path, name: str) -> None:
    """Keeps out: a KeyError for a key of another layout; an error about a key that the files need not have."""
    folder = writers.save(tmp_path, HEADS[name]())
    right = open_head(folder, None).format.name
    for wrong in FORMATS.keys() - {right}:
        with pytest.raises(ValueError, match=f"nearest setting that works: draft_format='{right}' .*not in that of '{wrong}'"):
            open_head(folder, None, HowToRead(wrong))


def test_default_layers_and_the_target_s_rope(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: defaults of one layout in another.  SafeAILab's config may say nothing of rope, and others may not."""
    target = replace(read_target_config(zoo.target("llama")), num_layers=9, layer_kinds=(), kv_source=())
    parts = random_parts(Options(own_embeddings=True))
    for name, write in writers.WRITERS.items():
        config, tensors = write(parts)
        config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"] = None
        assert open_head(writers.save(tmp_path / name, (config, tensors)), target).parsed.spec.aux_layers == (1, 3, 5)
        inner = config.get("transformer_layer_config", config)
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            inner.pop(key, None)
        folder = writers.save(tmp_path / f"{name}-silent", (config, tensors))
        if name == "safeailab":
            assert open_head(folder, target).parsed.spec.model.rope == target.rope != RopeConfig(theta=3000.0)
        else:
            with pytest.raises(ValueError, match="lacks rope_theta"):
                open_head(folder, target)


def test_layer_ids_at_the_top_are_read(tmp_path: Path) -> None:
    """Keeps out: the default layers for a head whose config names others beside its sizes, as older ones do."""
    config, tensors = writers.safeailab(random_parts(Options(own_embeddings=True)))
    key = "eagle_aux_hidden_state_layer_ids"
    config[key] = config.pop("eagle_config")[key]
    assert open_head(writers.save(tmp_path, (config, tensors)), None).parsed.spec.aux_layers == (0, 1, 2)


@pytest.mark.parametrize(("write", "options", "key"), [
    (writers.specforge, dict(own_embeddings=True), "norm_output"), (writers.safeailab, dict(aux=(), layers=2), "bias"),
])  # fmt: skip
def test_a_key_that_is_left_out_means_true(
    tmp_path: Path, write: Callable[..., Files], options: dict[str, Any], key: str
) -> None:
    """Keeps out: logits of an output that no norm has seen, and an fc without its bias: trainers default to true."""
    config, tensors = write(random_parts(Options(**options)))
    config.pop(key, None)
    spec = open_head(writers.save(tmp_path, (config, tensors)), None).parsed.spec
    assert spec.norms_logits and (spec.fc_bias or spec.kind == "eagle3")


def test_both_tensors_must_name_the_same_ids(tmp_path: Path) -> None:
    """Keeps out: a head whose d2t and t2d are of two vocabularies, of which one is then taken without a word."""
    config, tensors = writers.specforge(random_parts(Options(own_embeddings=True)))
    tensors = {**tensors, "t2d": tensors["t2d"].roll(1)}
    with pytest.raises(ValueError, match="t2d does not mark the 26 target ids"):
        open_head(writers.save(tmp_path, (config, tensors)), None)


def test_ids_that_could_be_offsets_are_not_taken_for_them(tmp_path: Path) -> None:
    """Keeps out: a d2t of absolute ids that, added to the draft's ids, stay in the vocabulary, where no t2d tells."""
    config, tensors = writers.modelopt(random_parts(Options(draft_vocab=20)))
    assert "t2d" not in tensors
    with pytest.raises(ValueError, match="d2t must hold offsets .* got ascending numbers, which are absolute ids"):
        open_head(writers.save(tmp_path, (config, {**tensors, "d2t": torch.arange(20)})), None)


def test_without_a_target(tmp_path: Path) -> None:
    """Keeps out: `inspect` that needs a target to say what a folder holds."""
    for name, write in writers.WRITERS.items():
        opened = open_head(writers.save(tmp_path / name, write(random_parts(Options(own_embeddings=True)))), None)
        assert (opened.format.name, opened.parsed.spec.aux_layers) == (name, (0, 1, 2))
    config, tensors = writers.safeailab(random_parts(Options(own_embeddings=True)))
    del config["eagle_config"]  # as most published ones: which layers it reads, the target decides
    assert open_head(writers.save(tmp_path / "silent", (config, tensors)), None).parsed.spec.aux_layers == ()
