"""What a small model's files must be, what is said of them, and what users are told where they won't do."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.gguf_files import write_gguf
from toolkit.checkpoints.plans import plan_memory
from toolkit.checkpoints.tokenizers import byte_tokenizer, wordpiece_tokenizer
from toolkit.heads.kinds import small_models
from toolkit.models import Zoo, ragged_prompts, save_target
from toolkit.recurrent import targets as hybrids
from toolkit.unlike.targets import save_unlike

from specdec import SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.cli.entry import main
from specdec.draft.model.head import SmallModel
from specdec.draft.model.load import OpenSmallModel
from specdec.loading.about.doctor import drafter_rows
from specdec.loading.about.inspect_head import head_facts
from specdec.loading.about.inspect_target import target_facts
from specdec.loading.load import check_pair
from specdec.options import EngineOptions

assert small_models.SMALL and hybrids.FAMILIES  # which these imports give the zoo
OPTIONS = EngineOptions(device="cpu", dtype="float32", max_seq_len=64, smoke=False)
SPEC = SpecConfig(3, 2, 6)


def refused(target: Path, draft: Path, said: str, spec: SpecConfig = SPEC, **changes: Any) -> None:
    with pytest.raises(ValueError, match=said):
        check_pair(target, draft, spec, EngineOptions(device="cpu", dtype="float32", **changes))


def test_its_files_tell_what_it_is(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a model's folder that is taken for a head, a head's that is taken for a model, in files of either form."""
    pair = check_pair(zoo.target("qwen3"), zoo.target("llama"), SPEC, OPTIONS)
    assert isinstance(pair.drafter, OpenSmallModel) and pair.drafter.model.needs.features is None
    assert "a small model of the target's vocabulary: llama, 4 layers" in pair.drafter.model.description
    head = check_pair(zoo.target("llama"), zoo.head("llama", "eagle1"), SPEC, OPTIONS)  # whose config says it is a llama
    assert not isinstance(head.drafter, OpenSmallModel)
    saved = save_target(tmp_path / "wide", "llama", hidden_size=64, num_attention_heads=4)
    file = write_gguf(saved, tmp_path / "small.gguf")
    with SpecDecoder.from_pretrained(saved, file, SPEC, options=OPTIONS) as decoder:
        assert isinstance(decoder.head, SmallModel)
        (out,) = decoder.generate(ragged_prompts(40, 3)[2:], SamplingParams(max_tokens=12))
        assert min(out.stats.accepted_per_round) >= 1  # the same numbers


def test_what_is_said_of_it(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    facts = head_facts(zoo.target("llama"), zoo.target("qwen3"), EngineOptions())
    assert facts["format"] == "model" and facts["head"]["kind"] == "model" and facts["head"]["layers"] == 4
    assert facts["head"]["tokens that both have"] == 40 and "model.norm.weight" in facts["tensors"]
    assert main(["inspect", str(zoo.target("llama")), "--target", str(zoo.target("qwen3"))]) == 0
    assert "layout model (detected)" in " ".join(capsys.readouterr().out.split())
    offer = target_facts(zoo.target("llama"))["drafters"]["a small model's folder"]
    assert offer == "one with a tokenizer, best of the target's 40 tokens"
    other = head_facts(zoo.head("bytes", "model-permuted"), zoo.target("bytes"), EngineOptions())
    assert other["head"]["tokens that both have"] == 384
    assert other["meanings"]["the target's tokens"].startswith("384 read as a token of its own, 0 as the mean of")
    assert dict(drafter_rows())["model"].startswith("a causal language model")


def test_the_plan_counts_what_is_kept(zoo: Zoo) -> None:
    """Keeps out: weights counted twice that are tied, a drafter's keys and values that nobody counted."""
    llama, options = zoo.target("llama"), EngineOptions(dtype="float32", max_seq_len=64)
    of_text = zoo.target("bytes"), zoo.head("bytes", "model-permuted")
    for target, draft in ((llama, zoo.target("qwen3")), (llama, zoo.target("llama3-tied-dim8")), of_text):
        plan, alone = (plan_memory(target, each, SPEC if each else None, options, 10**9) for each in (draft, None))
        own = plan_memory(draft, None, None, options, 10**9)
        with SpecDecoder.from_pretrained(target, draft, SPEC, options=OPTIONS) as decoder:
            assert decoder.head is not None
            held = sum(weight.nbytes for weight in {w.data_ptr(): w for w in decoder.head.parameters()}.values())
        assert plan.parts["weights of the small model"] == held
        assert plan.kv_token == (*alone.kv_token, *own.kv_token)


def test_tokens_that_can_not_be_compared_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a model whose ids mean other texts, of which nothing would be accepted; tokens told apart by their number."""
    words, letters = zoo.target("words"), zoo.target("bytes")
    refused(words, letters, "has none of the target's tokens; it has 384 ids, and the target 512; .* draft='ngram'")
    refused(shipped.target_folder(), zoo.target("llama"), "has 40 ids, and the target 2048, and .* holds no tokenizer")
    pieces = tmp_path / "pieces"
    shutil.copytree(words, pieces)
    wordpiece_tokenizer().save_pretrained(pieces)
    refused(letters, pieces, r"tokens depend on those beside them \(WordPiece\), .* draft='ngram'")
    refused(letters, zoo.head("bytes", "model-permuted"), "which a model on one process drafts", tensor_parallel_size=2)
    by_layer = save_unlike(tmp_path / "inputs by layer", "gemma-small", vocab_size=384, vocab_size_per_layer_input=384)
    byte_tokenizer(384).save_pretrained(by_layer)  # rows of a table that other tokens' ids would choose
    refused(zoo.head("bytes", "model-permuted"), by_layer, "layers read tokens by their own ids, .* draft='ngram'")
    refused(words, words, "is the target itself, .* a smaller model of its vocabulary")
    same = check_pair(words, zoo.head("words", "model-more-ids"), SPEC, OPTIONS).drafter
    assert isinstance(same, OpenSmallModel) and same.words is None


def test_models_that_can_not_draft_here(zoo: Zoo) -> None:
    """Keeps out: an option that does nothing; a shape wider than both vocabularies."""
    llama = zoo.target("llama")
    refused(llama, zoo.target("qwen3"), "draft_pickle=True would do nothing with a small model", draft_pickle=True)
    refused(llama, zoo.target("qwen3"), "tokens of both vocabularies, 40, got 41; .* topk=40", SpecConfig(2, 41, 50))
    refused(llama, zoo.target("qwen3"), "expected a draft head, got a whole model's weights", draft_format="safeailab")


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "key", "no config"])
def test_damaged_files_are_refused(zoo: Zoo, tmp_path: Path, change: str) -> None:
    """Keeps out: a tensor that is left out, passed over or cut, and a key that nobody reads."""
    folder = tmp_path / "small"
    shutil.copytree(zoo.target("qwen3"), folder)
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["model.layers.1.mlp.other.weight"] = torch.zeros(2)
    elif change == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif change == "key":
        raw["attention_scale_nobody_knows"] = 3.0
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    if change == "no config":
        (folder / "config.json").unlink()
    said = {"key": "attention_scale_nobody_knows", "extra": "other.weight", "no config": "config.json does not exist"}
    refused(zoo.target("llama"), folder, re.escape(said.get(change, name)))


def test_longer_texts_than_it_was_made_for(zoo: Zoo) -> None:
    """Keeps out: positions that nobody says are beyond it, and policies that do nothing."""
    short = zoo.root / "short"
    if not short.is_dir():
        save_target(short, "llama", max_position_embeddings=32)
    target, prompt = zoo.target("llama"), ragged_prompts(40, 3)[2] * 2
    options: dict[str, Any] = dict(device="cpu", dtype="float32", max_seq_len=120, page_size=4)
    with pytest.warns(UserWarning, match="texts may have 120 tokens, and the head was trained on 32: it goes on there"):
        SpecDecoder.from_pretrained(target, short, SPEC, **options).close()
    accepted = {}
    for policy in ("draft", "window", "stop"):
        with SpecDecoder.from_pretrained(target, short, SPEC, **options, beyond_trained=policy, smoke=False) as decoder:
            (out,) = decoder.generate([prompt], SamplingParams(max_tokens=50))
            assert out.token_ids == zoo.greedy("llama", prompt, 50)
            accepted[policy] = out.stats.accepted, out.stats.drafted
            windows = {kind.window for kind in decoder.head.needs.models[0].layer_kinds}  # type: ignore[union-attr]
            assert windows == ({32} if policy == "window" else {None})
    assert accepted["stop"][1] < accepted["draft"][1]
    assert accepted["draft"][0] > accepted["window"][0]  # the same model, whose window leaves out what the target reads


def test_windows_of_layers_with_unlike_heads(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: layers that get the heads of another kind, because a kind with another window is another one."""
    short = save_unlike(tmp_path / "short", "gemma-small", max_position_embeddings=32)
    drafter = check_pair(zoo.target("llama"), short, SPEC, replace(OPTIONS, beyond_trained="window")).drafter
    assert isinstance(drafter, OpenSmallModel)
    config = drafter.chosen.config
    assert [kind.window for kind in config.layer_kinds] == [6, 32] * 3
    assert [config.heads_of(layer).head_dim for layer in range(6)] == [16, 24] * 3
    save_unlike(tmp_path / "one", "gemma-small", max_position_embeddings=6)
    refused(zoo.target("llama"), tmp_path / "one", "one window of 6; .* beyond_trained='draft'", beyond_trained="window")


def test_its_weights_in_eight_bits(zoo: Zoo) -> None:
    """Keeps out: an option about drafters that a model passes over."""
    target, options = zoo.target("llama"), replace(OPTIONS, draft_quantize="fp8")
    with SpecDecoder.from_pretrained(target, zoo.head("llama", "model-copy"), SPEC, options=options) as it:
        assert str(it.head.needs.models[0].quantization).startswith("fp8")  # type: ignore[union-attr]
        (out,) = it.generate(ragged_prompts(40, 3)[2:], SamplingParams(max_tokens=20))
        assert out.token_ids == zoo.greedy("llama", ragged_prompts(40, 3)[2], 20) and out.stats.accepted > 5


def test_the_look_at_it(zoo: Zoo) -> None:
    """Keeps out: a look that compares a token with the one before it: a copy agrees everywhere, a stranger hardly anywhere."""
    letters = zoo.target("bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for draft in (zoo.head("bytes", "model-copy"), zoo.head("bytes", "model-permuted")):
            with SpecDecoder.from_pretrained(letters, draft, SPEC, device="cpu", max_seq_len=256) as decoder:
                assert decoder.settings.first_accepted == 1.0
    with pytest.warns(UserWarning, match=r"accept \d\.\d% of what the small model drafts, too few to pay"):
        SpecDecoder.from_pretrained(letters, zoo.head("bytes", "model-more-ids"), SPEC, device="cpu", max_seq_len=256).close()
