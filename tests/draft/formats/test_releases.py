"""Heads of every release of speculators, from 0.1 to 0.9: files that its own code wrote are read as that release meant them.

`toolkit/heads/releases.py` says how the files were made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.parts import Parts
from toolkit.heads.releases import MEANT, MIXED, REFUSED, names, parts_of, written
from toolkit.heads.writers import save
from toolkit.models import Zoo

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.eager.dense import DenseAttention
from specdec.attention.kinds import LayerKind
from specdec.cli.entry import main
from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.dflash2.head import DFlash2Head
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.eagle.head import EagleHead
from specdec.draft.formats.open import open_head
from specdec.draft.formats.reading import ParsedHead
from specdec.draft.load import build_head
from specdec.models.target import Target

CPU, F64 = torch.device("cpu"), torch.float64
TARGET = "llama-linear-8-layers"
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Target:
    where = zoo.target(TARGET)
    return load_target(where, read_target_config(where), 64, CPU, F64)


def parsed(folder: Path, name: str, target: Target | None = None, drop: tuple[str, ...] = (), **changes: Any) -> ParsedHead:
    """What is made of the head of that name with other keys in its config, and without those tensors; "absent" drops a key."""
    config, tensors = written(name)
    config = {key: value for key, value in {**config, **changes}.items() if value != "absent"}
    save(folder, (config, {key: tensor for key, tensor in tensors.items() if key not in drop}))
    return open_head(folder, target and target.config).parsed


def inner(name: str, **changes: Any) -> dict[str, Any]:
    """The config of the layers, with other keys; "absent" drops one."""
    found = {**written(name)[0]["transformer_layer_config"], **changes}
    return {key: value for key, value in found.items() if value != "absent"}


def test_every_head_is_looked_at() -> None:
    assert {*MEANT, *MIXED, *REFUSED} == set(names()) and {name[:3] for name in names()} == {f"0.{n}" for n in range(1, 10)}


@pytest.mark.parametrize("name", MEANT)
def test_heads_compute_what_their_release_meant(target: Target, tmp_path: Path, name: str) -> None:
    """Keeps out: heads that their own library wrote and that are refused for keys of its trainers or of transformers, and heads
    that are read with another release's layers, windows, norms, ids or blocks."""
    files = written(name)
    opened = open_head(save(tmp_path, files), target.config)
    head, parts = build_head(opened, target, 64, CPU, F64), parts_of(name, files[1])
    made = torch.Generator().manual_seed(5)
    ids, lm_head, embed = (
        torch.randint(40, (13,), generator=made),
        target.lm_head.rows(torch.arange(40)),
        target.embed_tokens.weight,
    )
    spec = opened.parsed.spec
    assert spec.aux_layers == parts.options.aux and (spec.own_embeddings, spec.draft_vocab_size) == (
        "embed_tokens.weight" in files[1], 40 if parts.draft_ids is None else 26,
    )  # fmt: skip
    if isinstance(parts, Parts):
        assert isinstance(head, EagleHead)
        if not parts.options.aux:  # the own code of EAGLE-1 turns heads as its target does
            assert spec.model.rope == target.config.rope
            return
        states = [torch.randn(13, 32, dtype=F64, generator=made) for _ in range(8)]
        got = head.fuse(torch.cat([states[layer] for layer in spec.aux_layers], -1))
        want = parts.fuse(parts.features(states, states[-1]))
        for _ in range(2):  # the second step reads what the first one left
            got = head(ids, got, torch.arange(13), DenseAttention(spec.model.layer_kinds))
            want = parts.hidden(ids, want, embed)
            torch.testing.assert_close(head.logits(got), parts.logits(want, lm_head), rtol=1e-5, atol=5e-5)
        return
    assert isinstance(head, PEagleHead | DFlashHead)
    steps = 4 - parts.options.skips
    features = torch.randn(13, 96, dtype=F64, generator=made)
    (drawn,) = head.drafts(features[None], ids[None], torch.tensor([[2, 5, 8]]), steps)
    for hidden, anchor in zip(drawn, (2, 5, 8), strict=True):
        wanted, before = parts.drafts(features, ids.tolist(), anchor, steps, embed), ids[anchor : anchor + steps]
        walks = isinstance(head, DSparkHead | DFlash2Head)
        logits = head.walk(hidden[None], before[None])[0] if walks else head.logits(hidden)
        torch.testing.assert_close(logits, parts.logits(wanted, lm_head, before.tolist()), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["0.1 eagle-bias", "0.5 eagle-plain"])
def test_eagle1_computes_what_its_release_meant(zoo: Zoo, target: Target, tmp_path: Path, name: str) -> None:
    """Keeps out: a first layer with a norm, a bias left out, and the config's rope in place of the target's, by whose table the
    release's own code turns heads."""
    config, tensors = written(name)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    opened = open_head(save(tmp_path, (config, tensors)), target.config)
    assert "another one" in opened.parsed.meanings["rope"] and opened.parsed.spec.model.rope == target.config.rope
    head, parts = build_head(opened, target, 64, CPU, F64), parts_of(name, tensors)
    assert isinstance(parts, Parts)
    parts = parts.changed(rope=rope)
    made = torch.Generator().manual_seed(5)
    ids, features = torch.randint(40, (13,), generator=made), torch.randn(13, 32, dtype=F64, generator=made)
    assert isinstance(head, EagleHead)
    got = head(ids, features, torch.arange(13), DenseAttention((LayerKind(),)))
    torch.testing.assert_close(got, parts.hidden(ids, features, target.embed_tokens.weight), rtol=1e-5, atol=5e-5)


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize("name", [*MEANT, *MIXED])
def test_texts_are_the_target_s_own(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """Keeps out: a head that loads and can't run."""
    spec = SpecConfig(3, 1, 4) if "flash" in name or "dspark" in name or "peagle" in name else SpecConfig(3, 2, 6)
    folder = save(tmp_path, written(name))
    with SpecDecoder.from_pretrained(zoo.target(TARGET), folder, spec=spec, device="cpu", dtype="float32", max_seq_len=64) as d:
        sampling = SamplingParams(max_tokens=12)
        prompt = [list(range(3, 12))]
        (fast,), (plain,) = d.generate(prompt, sampling), d.generate(prompt, sampling, speculate=False)
    assert fast.token_ids == plain.token_ids and fast.stats.rounds


@pytest.mark.parametrize("name", ["0.5 dflash-window", "0.7 dspark-gated", "0.6 peagle-window"])
def test_nobody_has_to_know_how_long_a_block_is(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """Keeps out: "num_steps must be at most 3, got 5" where nobody gave a shape, for every head of small blocks."""
    options = dict(device="cpu", dtype="float32", max_seq_len=64)
    with SpecDecoder.from_pretrained(zoo.target(TARGET), save(tmp_path, written(name)), **options) as decoder:
        spec, block = decoder.settings.spec, getattr(decoder.head, "block", None)
        assert spec is not None and block is not None
        assert spec == SpecConfig(min(5, block.max_steps or 5), 4), "as many levels as a pass drafts"
        assert decoder.generate([[3, 4, 5]], SamplingParams(max_tokens=6))[0].stats.rounds


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Keeps out: an error about the first key or tensor that another kind has."""
    with pytest.raises(ValueError, match=REFUSED[name]):
        parsed(tmp_path, name)


# (a head, a key, the release that began it, a value that says more than its absence)
BEGAN = [
    ("0.1 eagle3-converted", AUX, 2, [1, 2, 3]), ("0.3 eagle3-converted", "embed_requires_grad", 4, True),
    ("0.4 eagle3-qwen3", "norm_before_fc", 5, True), ("0.6 eagle3-llama", "fc_norm", 7, True),
    ("0.6 peagle-window", "norm_output", 7, True), ("0.5 dflash-window", "sliding_window_non_causal", 6, True),
    ("0.6 dflash-full", "sample_from_anchor", 7, True),
]  # fmt: skip
# (a head, a key, the release that ended it, a value)
ENDED = [
    ("0.7 dflash", "max_anchors", 6, 256), ("0.7 peagle", "num_depths", 6, 4), ("0.7 peagle", "down_sample_ratio", 6, 0.7),
    ("0.9 eagle3-qwen3", "base_model_ep_plan", 4, None), ("0.5 eagle3-norm-before-fc", "has_no_defaults_at_init", 4, False),
]  # fmt: skip


def test_keys_of_another_release_are_named(tmp_path: Path) -> None:
    """Keeps out: a key that a head's own release did not have, and of which nobody knows what it meant there."""
    for name, key, first, value in BEGAN:
        since = rf"{key} is a key of speculators 0.{first} and later, got speculators_version '{name[:3]}.0'"
        with pytest.raises(ValueError, match=since):
            parsed(tmp_path, name, **{key: value})
    for name, key, last, value in ENDED:
        until = rf"{key} is a key of speculators 0.\d( to 0.{last})?, got speculators_version '{name[:3]}.0'"
        with pytest.raises(ValueError, match=until):
            parsed(tmp_path, name, **{key: value})
    for keys in ({"norm_output": False, "fc_norm": True}, {"fc_norm": True, "norm_output": False}):  # in any order
        with pytest.raises(ValueError, match="fc_norm is a key of speculators 0.7 and later"):
            parsed(tmp_path, "0.6 eagle3-llama", **keys)
    with pytest.raises(ValueError, match="unknown config keys block_size"):  # of another kind
        parsed(tmp_path, "0.6 peagle-window", block_size=4)
    for key, value in (("base_model_ep_plan", {"a": "b"}), ("has_no_defaults_at_init", True)):
        with pytest.raises(ValueError, match=f"{key} must be (null|false), got"):
            parsed(tmp_path, "0.3 eagle3-converted", **{key: value})
    with pytest.raises(ValueError, match="tie_word_embeddings must be false, got True"):
        parsed(tmp_path, "0.9 eagle3-qwen3", tie_word_embeddings=True)


def test_files_that_a_later_release_saved_again(target: Target, tmp_path: Path) -> None:
    """Keeps out: a head of 0.6 that 0.8 trained on, refused: it has the keys of 0.8 with values that say nothing, no copies of
    what is the target's, and the name of the release that began it."""
    again = parsed(tmp_path, "0.6 dflash-full", target, ("embed_tokens.weight", "lm_head.weight"), sample_from_anchor=False)
    assert (again.spec.own_embeddings, again.spec.own_lm_head) == (False, False)
    assert again.spec.block is not None and again.spec.block.skips_anchor
    for name, key, _, value in BEGAN:
        if value is True and "window" not in name:  # which would be open, see below
            assert "0.9" in parsed(tmp_path, name, target, **{key: False}).meanings["speculators_version"]
    for drop in ("embed_tokens.weight", "lm_head.weight"):  # without such a key the file is the first release's, and has both
        with pytest.raises(ValueError, match=f"tensor '{drop}' is missing"):
            parsed(tmp_path, "0.6 dflash-full", target, (drop,))


def test_what_between_two_releases_is_open(target: Target, tmp_path: Path) -> None:
    """Keeps out: a guess at windows that one release obeys and the next one does not, and at a nameless family of layers."""
    windows: dict[str, Any] = dict(speculators_version="0.7.0.dev12", norm_output="absent", fc_norm="absent")
    with pytest.raises(
        ValueError, match="what layer_types mean changed with speculators 0.7, .* of speculators_version 0.7.0.dev12"
    ):
        parsed(tmp_path, "0.7 eagle3-window", target, **windows)
    nameless = inner("0.9 eagle3-qwen3", model_type="absent")
    with pytest.raises(ValueError, match="an absent transformer_layer_config.model_type changed with speculators 0.7"):
        parsed(tmp_path, "0.9 eagle3-qwen3", target, speculators_version="0.7.0rc1", transformer_layer_config=nameless)
    assert parsed(tmp_path, "0.9 eagle3-qwen3", target, transformer_layer_config=nameless).spec.model.qk_norm
    old = inner("0.3 eagle3-converted", model_type="absent")
    assert not parsed(tmp_path, "0.3 eagle3-converted", target, transformer_layer_config=old).spec.model.qk_norm
    assert parsed(tmp_path, "0.7 eagle3-window", target).spec.model.layer_kinds == (LayerKind(window=3), LayerKind())
    early = parsed(tmp_path, "0.2 eagle3-converted-no-embeddings", target, speculators_version="0.1.0.dev14")
    assert early.spec.aux_layers == (1, 3, 4)


def test_versions(tmp_path: Path) -> None:
    """Keeps out: keys read by no release or by an unknown one, a release's own correction (post1) read as what came before it,
    and kinds of heads before they began or after they ended."""
    for version in ("absent", "1.0.0", "0.0.1", "nine"):
        with pytest.raises(ValueError, match="speculators_version"):
            parsed(tmp_path, "0.9 eagle3-qwen3", speculators_version=version)
    assert (
        "0.11.0: as release 0.9"
        in parsed(tmp_path, "0.9 eagle3-qwen3", speculators_version="0.11.0").meanings["speculators_version"]
    )
    for version, between in (
        ("0.6.0.dev3", "0.5 to 0.6"),
        ("0.5.0rc1", "0.4 to 0.5"),
        ("0.5.1.dev3+g1a2b3c", "0.5 to 0.6"),
        ("0.5.0.post1", "0.5 to 0.6"),
    ):
        said = parsed(tmp_path, "0.5 eagle3-norm-before-fc", speculators_version=version).meanings["speculators_version"]
        assert f"a head of releases {between}" in said
    for version in ("0.5.0.2", "0.5.3"):
        said = parsed(tmp_path, "0.5 eagle3-norm-before-fc", speculators_version=version).meanings["speculators_version"]
        assert "as release 0.5" in said
    for name, version, said in (
        ("0.9 dspark-vanilla", "0.6.0", "'dspark' began with speculators 0.7"),
        ("0.7 dflash", "0.4.0", "'dflash' began with speculators 0.5"),
        ("0.5 eagle-plain", "0.7.0", "'eagle' ended with speculators 0.6"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            parsed(tmp_path, name, speculators_version=version)


def test_a_layer_that_a_converter_lost(target: Target, tmp_path: Path) -> None:
    """Keeps out: a head whose layer is random: the converters of 0.2 to 0.4 did not know `midlayer.*` and said nothing."""
    for name, is_lost in (
        ("0.2 eagle3-converted-no-embeddings", True),
        ("0.3 eagle3-converted", True),
        ("0.1 eagle3-converted", False),
    ):
        config, tensors = written(name)
        lost = {key: torch.ones_like(x) if key.startswith("layers.0.") and "norm" in key else x for key, x in tensors.items()}
        save(tmp_path, (config, lost))
        if is_lost:
            with pytest.raises(ValueError, match="all three norms of layers.0 are exactly 1"):
                open_head(tmp_path, target.config)
        else:
            open_head(tmp_path, target.config)


@pytest.mark.parametrize("version, is_lost", [("0.2.0", True), ("0.4.0", True), ("0.4.2", True), ("0.5.0", False)])
def test_which_converters_lost_a_layer(target: Target, tmp_path: Path, version: str, is_lost: bool) -> None:
    """Keeps out: a random layer that the last of these converters left, a later release's head refused for norms of 1, and a
    trained head refused because some of its norms are 1."""
    config, tensors = written("0.3 eagle3-converted")
    leaked = ("base_model_ep_plan", "has_no_defaults_at_init")  # which not all of these releases wrote
    config = {key: value for key, value in config.items() if key not in leaked} | {"speculators_version": version}
    norms = [f"layers.0.{norm}.weight" for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    for kept in norms:  # is trained
        open_head(save(tmp_path, (config, tensors | {key: torch.ones(32) for key in norms if key != kept})), target.config)
    save(tmp_path, (config, tensors | {key: torch.ones(32) for key in norms}))
    if is_lost:
        with pytest.raises(ValueError, match="all three norms of layers.0 are exactly 1"):
            open_head(tmp_path, target.config)
    else:
        open_head(tmp_path, target.config)


def test_sizes_that_a_release_did_not_read(target: Target, tmp_path: Path) -> None:
    """Keeps out: 32 layers for a head of one, because its config is its target's; a head_dim that 0.1 never looked at."""
    for name in ("0.1 eagle-bias", "0.1 eagle3-converted", "0.2 eagle3-converted-no-embeddings"):
        many = inner(name, num_hidden_layers=32)
        assert parsed(tmp_path, name, target, transformer_layer_config=many).spec.model.num_layers == 1
    other = inner("0.1 eagle3-converted", head_dim=16)
    assert parsed(tmp_path, "0.1 eagle3-converted", target, transformer_layer_config=other).spec.model.head_dim == 8
    with pytest.raises(ValueError, match="must name 3 layers, as all heads before speculators 0.7 read"):
        parsed(tmp_path, "0.6 eagle3-llama", target, **{AUX: [1, 2]})
    with pytest.raises(ValueError, match="norm_before_fc must be false: speculators 0.6 has that norm in a P-EAGLE head"):
        config, tensors = written("0.6 peagle-window")
        save(tmp_path, ({**config, "norm_before_fc": True}, {**tensors, "input_norm.weight": torch.ones(96)}))
        open_head(tmp_path, target.config)
    block = parsed(tmp_path, "0.6 peagle-window", target, num_depths=6).spec.block
    assert block is not None and block.size == 6


def test_inspect_says_what_each_key_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a key passed over without a word, and a head without ids of layers that needs its target to be described."""
    for name, said in (
        ("0.3 eagle3-llama-2layers", {AUX: "null: 1, N//2 - 1 and N - 4", "base_model_ep_plan": "null: a name of"}),
        ("0.1 eagle-bias", {"fusion_bias": "True: fc has a bias", "num_hidden_layers": "one layer, always"}),
        ("0.5 dflash-window", {
            "max_anchors": "256: read in training alone", "layer_types": "all layers are full",
            "sample_from_anchor": "False, as heads of this release, which has no such key, were trained",
        }),
        ("0.6 peagle-window", {"num_depths": "4: tokens", "down_sample_ratio": "0.7: read in training alone"}),
    ):  # fmt: skip
        assert main(["inspect", str(save(tmp_path / name, written(name))), "--json"]) == 0
        meanings = json.loads(capsys.readouterr().out)["meanings"]
        for key, text in said.items():
            assert text in meanings[key], (name, key)
        assert f"{name[:3]}.0: as release {name[:3]}" in meanings["speculators_version"]
