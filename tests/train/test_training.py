"""Training: what the head learns on must be what it will meet, and what is written must be what the runtime loads."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.inside.captures import HostUses
from toolkit.oracles.heads import DenseHead, PathDrafter
from transformers import AutoModelForCausalLM

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.cli.entry import main
from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.dflash2.head import DFlash2Head
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.head import DraftHead
from specdec.shipped import draft_folder, prompts_file, target_folder
from specdec.train.block_loss import block_loss, choose_anchors
from specdec.train.head import command_to_try, train_head
from specdec.train.heads.files import save
from specdec.train.heads.fresh import new_head
from specdec.train.lesson.lesson import Lesson
from specdec.train.lesson.objective import loss_of_head, objective
from specdec.train.loop import STEPS
from specdec.train.selftext import SelfText, frequent_ids
from specdec.train.settings import HeadRun, TargetRun
from specdec.train.states import StateStore, read_rows
from specdec.train.target import train_target
from specdec.train.text.documents import Document
from specdec.train.unroll import draft_steps

ROW = [0, 290, 411, 35, 1020, 77, 512, 933, 64, 1500, 8, 271]


@pytest.fixture(scope="module")
def pair() -> SpecDecoder:
    return SpecDecoder.from_pretrained(target_folder(), draft_folder(), device="cpu", max_seq_len=64)


@pytest.mark.slow
def test_each_step_sees_what_drafting_sees(pair: SpecDecoder) -> None:
    """Keeps out: a mask or a shift that is off by one, which trains a head for a runtime that does not exist.

    Step j at pair i must equal the head run alone: true features up to pair i - j, then its own j outputs.
    """
    head = pair.head
    assert isinstance(head, Eagle3Head)
    ids = torch.tensor([ROW])
    features_1TF = read_rows(pair.model, ids, head.config.aux_layers).features_BTF
    P, num_steps = len(ROW) - 1, 4
    steps = list(draft_steps(head, features_1TF[:, :P], ids[:, 1:], num_steps))
    oracle = AutoModelForCausalLM.from_pretrained(target_folder(), dtype=torch.float64)
    dense = DenseHead(draft_folder(), oracle)
    for step in range(num_steps):
        for i in range(step, P):
            alone = PathDrafter(dense, oracle, ROW[: i - step + 2]).hidden(tuple(ROW[i - step + 2 : i + 2]))
            torch.testing.assert_close(steps[step][0, i].double(), alone, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_a_saved_head_is_the_head(layout: str, pair: SpecDecoder, tmp_path: Path) -> None:
    """Keeps out: names or fused rows mixed up on the way to disk.  bfloat16 weights survive a save and load unchanged."""
    assert isinstance(pair.head, Eagle3Head)
    save(pair.head, tmp_path, layout, target_folder())
    again = SpecDecoder.from_pretrained(target_folder(), tmp_path, device="cpu", max_seq_len=64).head
    assert again is not None
    for (name, a), b in zip(pair.head.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert again.config.format == layout and again.config.aux_layers == (1, 13, 24)
    modes = [path.stat().st_mode & 0o777 for path in sorted(tmp_path.iterdir())]
    assert len(modes) == 2 and modes[0] == modes[1], "whoever may read the config may read the weights"
    if layout == "speculators":  # which refuses a config without
        named = json.loads((tmp_path / "config.json").read_text())["speculators_config"]["verifier"]
        assert named == {"name_or_path": str(target_folder()), "architectures": ["LlamaForCausalLM"]}


def test_frequent_ids_are_the_most_frequent_ascending() -> None:
    rows = torch.tensor([[5, 5, 2, -1], [2, 5, 9, 0]])
    assert frequent_ids(rows, 2, 16).tolist() == [2, 5]
    assert frequent_ids(rows, 4, 16).tolist() == [0, 2, 5, 9]
    with pytest.raises(ValueError, match="draft_vocab_size"):
        frequent_ids(rows, 17, 16)


def story_file(folder: Path) -> Path:
    """A few hundred words in documents, made of the shipped prompts.  No two open alike."""
    prompts = [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()]
    path = folder / "stories.txt"
    path.write_text("<|endoftext|>".join(f"{a}. {b}." for a, b in zip(prompts[:24], prompts[24:], strict=True)))
    return path


def test_a_head_of_chats_is_tried_on_chats(tmp_path: Path) -> None:
    """Keeps out: a head of an instruct model whose first numbers come from prompts without the chat template."""
    chat = Document("Hi", [{"role": "user", "content": "Hi"}])
    assert command_to_try("a b", tmp_path, [Document("Hi")]) == f"done; try it: specdec bench --target 'a b' --draft {tmp_path}"
    assert command_to_try("a", tmp_path, [Document("Hi"), chat]).endswith(f"--draft {tmp_path} --chat")


@pytest.mark.slow_cases(keep=0)
def test_train_head_end_to_end_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a script that trains but writes what the runtime can't load; a resume that starts from nothing; a card with
    other numbers than those that were measured; a run that does not say why it ended."""
    run = HeadRun(texts=6, width=48, longest_prompt=16, steps=2, batch=2, eval_every=1, eval_prompts=2, draft_vocab_size=300)
    out, other = tmp_path / "head", tmp_path / "other.txt"
    other.write_text("A cat and a dog sat on a mat. They looked at the moon.")
    first = train_head(run, target_folder(), [story_file(tmp_path)], out, device="cpu")
    assert first.step == 2 and len(first.history) == 2
    more = replace(run, steps=3, save_dtype="fp8", call_seconds=3600)
    given = {"resume": True, "device": "cpu", "eval_texts": [other]}
    assert train_head(more, target_folder(), [story_file(tmp_path)], out, **given).step == 3
    told = capsys.readouterr().out
    assert "held-out text, T=1: accept length" in told and told.count(f"\nended by: {STEPS}\ndone; try it: specdec bench") == 2
    record, card = json.loads((out / "training.json").read_text()), (out / "README.md").read_text()
    assert record["accept"].keys() == {"held-out text", "other"} and record["steps"] == 3 and record["ended"] == STEPS
    number = record["accept"]["other"]["S=5 k=1 nd=6"]["greedy"]
    assert number["low"] <= number["accept_length"] <= number["high"] and f"{number['accept_length']:.3f} [" in card
    assert "`--save-dtype fp8`" in card and "call-seconds" not in card
    head = SpecDecoder.from_pretrained(target_folder(), out, SpecConfig(3, 2, 5), device="cpu")
    (output,) = head.generate("Once upon a time", SamplingParams(max_tokens=24))
    plain = head.generate("Once upon a time", SamplingParams(max_tokens=24), speculate=False)
    assert output.token_ids == plain[0].token_ids


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_resumed_head_is_the_uninterrupted_one(kind: str, pair: SpecDecoder, tmp_path: Path) -> None:
    """Keeps out: a resumed run that reads other rows or places, or forgets moments or the rate, and so ends as another head."""
    rows = torch.randint(2048, (24, 48), generator=torch.Generator().manual_seed(0))
    text = SelfText(rows, torch.full((24,), 5))
    run = HeadRun(kind=kind, texts=24, width=48, longest_prompt=16, steps=4, batch=2, warmup=2, lr=1e-3, eval_every=1)
    saves = 0

    def stop(head: DraftHead) -> None:
        nonlocal saves
        saves += 1
        if saves == 2:
            raise KeyboardInterrupt

    def lesson(name: str) -> Lesson:
        return Lesson(pair, text, run, (1, 13, 24), tmp_path / name, {}, time.monotonic())

    whole, first, second = lesson("a"), lesson("b"), lesson("b")
    assert whole.fit(False, lambda head: None).step == 4
    with pytest.raises(KeyboardInterrupt):
        first.fit(False, stop)
    done = second.fit(True, lambda head: None)
    assert [step for step, _, _ in done.history] == [1, 2, 3, 4] and first.checkpoint.load().step == 4
    for name, weight in whole.head.state_dict().items():
        assert torch.equal(weight, second.head.state_dict()[name]), name


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "vocab"), [("p-eagle", 300), ("dflash", 0), ("dflash2", 0), ("dspark", 300)])
def test_heads_of_one_pass_are_trained_and_read_back(kind: str, vocab: int, tmp_path: Path) -> None:
    """Keeps out: a head whose files say another kind or sizes than what was trained, and one that nothing trains."""
    run = HeadRun(
        kind=kind, layers=2, texts=4, width=48, longest_prompt=16, steps=2, batch=2, eval_every=1, eval_prompts=1,
        draft_vocab_size=vocab,
    )  # fmt: skip
    done = train_head(run, target_folder(), [story_file(tmp_path)], tmp_path / "head", device="cpu")
    assert done.history[1][2] < done.history[0][2], "a step makes the held-out loss smaller"
    decoder = SpecDecoder.from_pretrained(target_folder(), tmp_path / "head", SpecConfig(3, 2, 5), device="cpu", smoke=False)
    assert decoder.head is not None and decoder.head.config.kind == kind
    (output,), (plain,) = (
        decoder.generate(["Once upon a time"], SamplingParams(max_tokens=24), speculate=speculate)
        for speculate in (True, False)
    )
    assert output.token_ids == plain.token_ids


@torch.no_grad()
@pytest.mark.parametrize("kind", ["p-eagle", "dflash", "dflash2", "dspark"])
def test_the_loss_of_a_block_is_that_of_its_definition(kind: str, pair: SpecDecoder) -> None:
    """Keeps out: a place that learns its neighbour's token, or a target's distribution of the token after the next."""
    torch.manual_seed(1)
    # half of the vocabulary, so that some places do not count; a DFlash2 head always has all
    ids_V, steps = torch.arange(0, 2048, 1 if kind == "dflash2" else 2), 5
    head = new_head(pair.model, (1, 13, 24), ids_V, HeadRun(kind=kind, width=48, longest_prompt=16))
    assert isinstance(head, PEagleHead | DFlashHead)
    if isinstance(head, DFlash2Head):  # which leaves logits as they are at first
        head.selector.successor.weight.normal_()
    row = torch.tensor([*ROW, -1, -1])
    seen = read_rows(pair.model, row[None], (1, 13, 24))
    weight_VH = pair.model.lm_head.rows(ids_V)
    seen = seen._replace(begins_B=torch.tensor([5]))  # the target wrote the token at 5 and those after it
    places = choose_anchors(seen.goals_BT, 100, torch.Generator().manual_seed(0))
    loss, counts_2S = block_loss(head, seen, weight_VH, ids_V, steps, 0.5, places)
    target_TV = pair.model.logits(seen.hidden_BTH[0])[:, ids_V].softmax(-1)
    total, counts = [[] for _ in range(steps)], torch.zeros(2, steps, dtype=torch.int64)
    for anchor in range(4, len(ROW) - 1):
        (hidden_1SH,) = head.drafts(seen.features_BTF, seen.ids_BT, torch.tensor([[anchor]]), steps)
        before = [ROW[min(anchor + i, len(ROW) - 1)] for i in range(steps)]
        is_spark, is_right = isinstance(head, DSparkHead), True
        logits_SV = head.walk(hidden_1SH, torch.tensor([before]))[0]
        for i in range(min(steps, len(ROW) - 1 - anchor)):
            token, of_all = ROW[anchor + 1 + i], len(ids_V) == 2048
            counts[1, i] += is_right
            is_right &= int(ids_V[logits_SV[i].argmax()]) == token
            counts[0, i] += is_right
            if (token % 2 and not of_all) or (is_spark and any(t % 2 for t in ROW[anchor + 1 : anchor + 1 + i])):
                continue
            p_V, log_V = target_TV[anchor + i], logits_SV[i].log_softmax(-1)
            value = -(p_V * log_V).sum()
            if of_all:
                kept_V = log_V > -torch.inf
                unary_V = head.logits(hidden_1SH[0, i]).log_softmax(-1)
                assert int(kept_V.sum()) == 16 and set(unary_V.topk(16).indices.tolist()) == set(
                    kept_V.nonzero()[:, 0].tolist()
                )
                value = -(p_V * unary_V).sum() - (p_V * log_V)[kept_V].sum()
            if is_spark:
                overlap = torch.minimum(p_V, log_V.exp()).sum()
                estimate = head.confidences(hidden_1SH[0, i], head.markov.embed(torch.tensor(before[i]))).sigmoid()
                unsure = -(overlap * estimate.log() + (1 - overlap) * (1 - estimate).log())
                value = 0.1 * value + 0.9 * (1 - overlap) + unsure
            total[i].append(float(value))
    assert float(loss) == pytest.approx(sum(0.5**i * sum(values) / max(1, len(values)) for i, values in enumerate(total)), 1e-4)
    assert torch.equal(counts_2S, counts)


@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "dflash", "dflash2", "dspark"])
def test_losses_read_nothing_on_the_host(kind: str, pair: SpecDecoder) -> None:
    """Keeps out: a value that the host reads in a step, a constant that it copies to the device, or inputs of other shapes:
    no capture takes that, on GPUs alone."""
    rows = torch.randint(2048, (12, 32), generator=torch.Generator().manual_seed(0))
    rows[3, 9:] = -1  # a text with fewer places than there are anchors
    text, run, ids_V = SelfText(rows, torch.full((12,), 5)), HeadRun(kind=kind, batch=3), torch.arange(2048)
    head = new_head(pair.model, (1, 13, 24), ids_V, run)
    loss_of = loss_of_head(pair.model, head, ids_V, run)
    inputs_of, _ = objective(StateStore(pair.model, text, (1, 13, 24), 1 << 30), loss_of, text, run)
    steps, uses = [inputs_of(step) for step in range(9)], HostUses()
    assert len({tuple((x.shape, x.dtype) for x in inputs) for inputs in steps}) == 1
    with uses:
        loss_of(steps[0])
    assert not uses.found


def test_states_that_are_kept_are_those_of_a_pass(pair: SpecDecoder) -> None:
    """Keeps out: rows that learn from another row's states, and states that change with the memory they may take."""
    text = SelfText(torch.tensor([ROW, ROW[::-1], [7, *ROW[:-3], -1, -1]]), torch.tensor([4, 5, 6]))
    kept, computed = (StateStore(pair.model, text, (1, 13), size, at_once=2) for size in (1 << 30, 0))
    assert kept.kept is not None and computed.kept is None
    for a, b in zip(kept.of(torch.tensor([2, 0])), computed.of(torch.tensor([2, 0])), strict=True):
        torch.testing.assert_close(a, b)


WRONG = [
    ("texts", 0), ("longest_prompt", 300), ("greedy_share", 1.5), ("steps", -1), ("kind", "medusa"), ("layers", 2),
    ("markov", "gated"), ("markov_rank", 8), ("anchors", 3), ("layout", "nemo"), ("selector_rank", 8), ("candidates", 4),
]  # fmt: skip


@pytest.mark.parametrize("field, value", WRONG)
def test_head_runs_that_cannot_work_are_refused(field: str, value: float | str) -> None:
    with pytest.raises(ValueError, match=field):
        HeadRun(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "near"), [(0.5, 1), (-2, 0), (-0.5, 0), (3.5, 4), (float("inf"), 0), ("9", 0)])
def test_a_number_that_is_not_whole_is_told_the_next_one(value: Any, near: int) -> None:
    """Keeps out: half a second, in whose place the error proposes 0, which is no pause at all."""
    with pytest.raises(ValueError, match=f"call_seconds: expected a whole number of at least 0, got .*; nearest: {near}$"):
        HeadRun(call_seconds=value)


@pytest.mark.parametrize(("flag", "value"), [("--candidates", "16"), ("--markov", "vanilla"), ("--anchors", "32")])
def test_flags_of_other_kinds_are_refused_at_their_defaults_too(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps out: a flag that is taken and does nothing, because its value is what other kinds have by default."""
    assert main(["train", "--target", "x", "--text", "y", "--out", "z", "--kind", "eagle3", flag, value]) == 2
    said = f"{flag[2:]}: expected no value for kind=eagle3, got {int(value) if value.isdecimal() else value!r}"
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("field", "value"), [("candidates", 3), ("candidates", 257), ("draft_vocab_size", 300), ("markov_rank", 8)]
)
def test_dflash2_runs_that_cannot_work_are_refused(field: str, value: int) -> None:
    """Keeps out: fewer candidates than the measuring tree has branches, and a vocabulary that no layout can say."""
    nearest = {3: "; nearest: 4$", 257: "; nearest: 256$"}.get(value, "")
    with pytest.raises(ValueError, match=f"{field}.*{nearest}"):
        HeadRun(kind="dflash2", **{field: value})  # type: ignore[arg-type]


def test_train_target_end_to_end(tmp_path: Path) -> None:
    """Keeps out: a target that our own loader refuses."""
    run = TargetRun(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        vocab_size=300, context=32, steps=2, batch=2, warmup=1, eval_every=1,
    )  # fmt: skip
    train_target(run, [str(story_file(tmp_path))], str(tmp_path / "target"), device="cpu")
    decoder = SpecDecoder.from_pretrained(tmp_path / "target", device="cpu")
    (output,) = decoder.generate("Once upon", SamplingParams(max_tokens=8))
    assert 1 <= len(output.token_ids) <= 8
