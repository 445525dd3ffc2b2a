"""Counting offline: what a served run counts, round by round, for every kind of head.

Keeps out: an accept length that is not the one that users get: trees that read another branch's pairs, places that are off by
one, rounds that go on after the end of a text.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.block_zoo import HEADS
from toolkit.heads.kinds.latent_heads import LATENT_HEADS
from toolkit.models import Zoo, ragged_prompts
from toolkit.trees import chain_shape, path_depth, random_shape

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.tree import DraftTree
from specdec.cli import main
from specdec.draft.eagle.head import EagleHead
from specdec.draft.load import load_head
from specdec.generation import Stats
from specdec.options import EngineOptions
from specdec.shipped import draft_folder, prompts_file, target_folder
from specdec.train.offline.branches import BranchPairs, KeptPairs, OfflineDrafter
from specdec.train.offline.count import accepted
from specdec.train.offline.run import check_head, eval_head

assert LATENT_HEADS  # which this import gives the zoo
SHAPES = (SpecConfig(4, 3, 12), SpecConfig(3, 1, 4))


def served(decoder: SpecDecoder, prompts: list[list[int]], max_tokens: int) -> Stats:
    return Stats.total([out.stats for out in decoder.generate(prompts, SamplingParams(max_tokens=max_tokens))])


def test_the_shipped_head_is_counted_as_it_is_served() -> None:
    pair = SpecDecoder.from_pretrained(target_folder(), draft_folder(), SHAPES[0], device="cpu", max_batch_size=2)
    texts = [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[:2]]
    prompts = [pair.tokenizer.encode(text) for text in texts]
    (found,) = eval_head(str(draft_folder()), target_folder(), prompts, SHAPES[:1], 24, EngineOptions(device="cpu"))
    assert found == served(pair, prompts, 24) and found.accept_length > 3


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("name", ["eagle3-window", "eagle1-two-layers", "latent", "latent-31", *HEADS])
def test_random_heads_are_counted_as_they_are_served(zoo: Zoo, name: str) -> None:
    prompts, head, target = ragged_prompts(40, 3), zoo.head("llama", name), zoo.target("llama")
    shapes = SHAPES[:1] if name.startswith("dflash") else SHAPES
    options = EngineOptions(device="cpu", dtype="float32", max_batch_size=3)
    for shape, found in zip(shapes, eval_head(str(head), target, prompts, shapes, 12, options), strict=True):
        assert found == served(zoo.decoder("llama", name, shape, max_batch_size=3), prompts, 12)


def test_a_tree_is_followed_along_the_text_and_no_further() -> None:
    """Keeps out: the last token of a text taken for all that may come after it; paths that begin again after a wrong token."""
    draw = random.Random(0)
    for _ in range(40):
        ids = [draw.randrange(3) for _ in range(12)]
        places = list(range(1, 12))
        trees = [random_shape(7, 4, draw)[0] if draw.random() < 0.7 else chain_shape(7)[0] for _ in places]
        tokens = [[ids[place], *(draw.randrange(3) for _ in range(6))] for place in places]
        deepest = max(path_depth(parents, node) for parents in trees for node in range(7))
        tree = DraftTree(torch.tensor(tokens), torch.tensor(trees), deepest)
        want = []
        for place, parents, drafts in zip(places, trees, tokens, strict=True):
            right, depths = {0}, [path_depth(parents, node) for node in range(7)]
            for node in range(1, 7):
                after = place + depths[node]
                if parents[node] in right and after < len(ids) and drafts[node] == ids[after]:
                    right.add(node)
            want.append(max(depths[node] for node in right))
        assert accepted(tree, torch.tensor(ids), torch.tensor(places)).tolist() == want


def test_a_text_is_counted_up_to_its_end(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: rounds after the token that ends a text, and a last round that is not counted."""
    prompts, head, options = (
        ragged_prompts(40, 3)[1:2],
        zoo.head("llama", "eagle3"),
        EngineOptions(device="cpu", dtype="float32"),
    )
    whole = zoo.decoder("llama", "eagle3", SHAPES[0]).generate(prompts, SamplingParams(max_tokens=12))[0].token_ids
    target = Path(shutil.copytree(zoo.target("llama"), tmp_path / "target"))
    end = next(token for token in whole[3:] if token not in whole[:3])
    other = next(token for token in range(40) if token not in whole)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, end]}))
    (found,) = eval_head(str(head), target, prompts, SHAPES[:1], 12, options)
    with SpecDecoder.from_pretrained(target, head, SHAPES[0], options=options) as decoder:
        (out,) = decoder.generate(prompts, SamplingParams(max_tokens=12))
    assert found == out.stats and out.finish_reason == "eos" and 3 < len(out.token_ids) < 12


def test_branches_take_their_parents_pairs_along() -> None:
    """Keeps out: a branch that goes on from another one and reads the keys of its own place in the list."""
    generator, attn = torch.Generator().manual_seed(0), BranchPairs(KeptPairs(()), torch.tensor([3, 5]), 3)
    attn.follow(torch.zeros(2, 3, dtype=torch.int64))  # the first level has no pairs yet
    attn.own = {layer: tuple(torch.randn(2, 3, 4, 1, 2, generator=generator) for _ in "kv") for layer in range(2)}  # type: ignore
    before, parents_PK = dict(attn.own), torch.tensor([[2, 0, 0], [1, 1, 2]])
    attn.follow(parents_PK)
    for layer, pair in before.items():
        for now, old in zip(attn.own[layer], pair, strict=True):
            assert torch.equal(now, old[torch.arange(2)[:, None], parents_PK])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["eagle3", "eagle3-window", "eagle1-window"])
def test_branches_draft_what_the_head_alone_drafts_along_them(zoo: Zoo, name: str) -> None:
    """Keeps out: branches that read a key before their window, which a head never sees when it is served; one key too few; a
    position that stays where the branch began."""
    where, cpu, deep = zoo.target("llama"), torch.device("cpu"), SpecConfig(5, 1, 6)
    target = load_target(where, read_target_config(where), 64, cpu, torch.float32)
    head = load_head(zoo.head("llama", name), target, 64, cpu, torch.float32)
    assert isinstance(head, EagleHead)
    generator = torch.Generator().manual_seed(0)
    ids_T, features_TF = torch.randint(40, (40,), generator=generator), torch.randn(40, head.feature_size, generator=generator)
    places_P = torch.tensor([1, 2, 20, 38])
    tokens_PN = OfflineDrafter(head, ids_T, features_TF).trees(places_P, deep).tokens_BN
    for place, tokens in zip(places_P.tolist(), tokens_PN.tolist(), strict=True):
        read, hidden, drafts = ids_T[1 : place + 1], head.fuse(features_TF[:place]), [int(ids_T[place])]
        for _ in range(deep.max_steps):
            out = head(read, hidden, torch.arange(len(read)), KeptPairs(head.config.model.layer_kinds))[-1:]
            token_11 = head.vocabulary.top(head.logits(out), 1, head.d2t_V)[1]
            read, hidden = torch.cat((read, token_11[0])), torch.cat((hidden, out))
            drafts.append(int(token_11))
        assert tokens == drafts, place


WRONG = [  # flags, what the line names
    (["ngram", "--target", str(target_folder())], "specdec bench --draft ngram"),
    ([str(draft_folder()), "--target", str(draft_folder())], "target"),
    ([str(draft_folder()), "--target", str(target_folder()), "--spec", "auto,4,16"], "--spec"),
    ([str(draft_folder()), "--target", str(target_folder()), "--longest-prompt", "9"], "--eval-text"),
    (
        [str(draft_folder()), "--target", str(target_folder()), "--max-tokens", "1"],
        "nearest setting that works: --max-tokens 2",
    ),
    ([str(draft_folder()), "--target", str(target_folder()), "--spec", "5,4,16", "--spec", "5,4"], "each shape once"),
    (
        [str(draft_folder()), "--target", str(target_folder()), "--max-tokens", "499"],
        "nearest setting that works: --max-tokens",
    ),
    ([str(draft_folder()), "--target", str(target_folder()), "--eval-text", "/none"], "/none"),
    ([str(draft_folder()), "--target", str(target_folder()), "--device", "cuda:99", "--prompts", "/none"], "device='cuda:99'"),
    ([str(draft_folder()), "--target", str(target_folder()), "--prompts", "LONG"], "--prompts with no prompt of more than 504"),
    (
        [str(draft_folder()), "--target", str(target_folder()), "--eval-text", "LONG", "--longest-prompt", "509"],
        "nearest thing that works: --longest-prompt 504",
    ),
    ([str(draft_folder()), "--target", str(target_folder()), "--num-prompts", "1000"], "--num-prompts 48"),
]


@pytest.mark.parametrize(("flags", "named"), WRONG, ids=str)
def test_wrong_input_is_named(flags: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = tmp_path / "long.txt"
    long.write_text("the cat " * 254)
    assert main(["eval-head", *(str(long) if flag == "LONG" else flag for flag in flags)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("specdec: error: ") and named in err and "Traceback" not in err


def test_the_command_counts_along_held_out_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a file of results that says something else than the table."""
    texts = [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[:3]]
    (tmp_path / "held.txt").write_text("<|endoftext|>".join([*texts, texts[0]]))
    flags = ["--target", str(target_folder()), "--eval-text", str(tmp_path / "held.txt"), "--max-tokens", "8"]
    shape = ["--spec", "3,1", "--device", "cpu", "--json", str(tmp_path / "out.json")]
    read = ["--draft-format", "safeailab", "--draft-quantize", "fp8"]  # say how the head is read, to a target without one
    assert main(["eval-head", str(draft_folder()), *flags, *shape, *read]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    (row,) = record["rows"]
    assert record["prompts"] == 3 and row["spec"] == "3,1,4" and row["rounds"] == len(row["accepted_per_round"])
    assert f"{row['accept_length']:.3f}" in capsys.readouterr().out


def test_a_shape_for_several_sources_is_refused() -> None:
    """Keeps out: a table of (5,4,16,12) whose fourth number did nothing, since a head alone is counted."""
    with pytest.raises(ValueError, match=r"max_depth=12; nearest settings that work: max_depth=None"):
        check_head(str(draft_folder()), target_folder(), [SpecConfig(5, 4, 16, 12)], EngineOptions(device="cpu"))
