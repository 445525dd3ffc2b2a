"""What a head is trained on, beside its passes: the rows, the loss, what a step may change, and the files that come of it."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toolkit.models import Zoo
from toolkit.recurrent.checks import load
from toolkit.recurrent.mamba_targets import tiny_mamba
from toolkit.unlike.targets import TARGETS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec import SamplingParams, SpecDecoder
from specdec.draft.block.dflash import DFlashHead
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.formats.open import open_head
from specdec.draft.load import load_head
from specdec.models.config import NO_ROPE, HeadSizes, RopeConfig
from specdec.models.layers import HeadsRMSNorm
from specdec.models.linear import Linear
from specdec.models.registry import choose_target
from specdec.models.yarn import YarnRope
from specdec.shipped import draft_folder, target_folder
from specdec.train import head as training
from specdec.train.block_loss import DraftedBlocks, _losses, choose_anchors
from specdec.train.heads.files import in_fp8, save
from specdec.train.heads.fresh import new_head, spec_of
from specdec.train.lesson.objective import loss_of_head, objective, teacher_rows
from specdec.train.selftext import SelfText, write_rows
from specdec.train.settings import HeadRun
from specdec.train.states import TargetStates, read_rows
from specdec.train.step import products
from specdec.train.unroll import draft_steps, head_loss

assert TARGETS  # which this import gives the zoo
ROW = [0, 290, 411, 35, 1020, 77, 512, 933, 64, 1500, 8, 271]
BLOCKS = ["p-eagle", "dflash", "dflash2", "dspark"]
LAYOUTS = [("eagle3", "safeailab"), ("eagle3", "speculators"), *((kind, "speculators") for kind in BLOCKS)]


@pytest.fixture(scope="module")
def pair() -> SpecDecoder:
    return SpecDecoder.from_pretrained(target_folder(), draft_folder(), device="cpu", max_seq_len=64)


@torch.no_grad()
def test_the_loss_of_unrolled_steps_is_that_of_its_definition(pair: SpecDecoder) -> None:
    """Keeps out: a pair that learns its neighbour's token, one without an output to read that counts, and padding that does."""
    head = pair.head
    assert isinstance(head, Eagle3Head) and head.d2t_V is not None
    ids_V = torch.arange(len(head.d2t_V)) + head.d2t_V
    assert 0 in ids_V.tolist()  # what padding is read as
    weight_VH = pair.model.lm_head.rows(ids_V)
    (written,) = pair.generate([[0, 290, 411, 35]], SamplingParams(max_tokens=10, ignore_eos=True), speculate=False)
    seen = read_rows(
        pair.model, torch.tensor([[*ROW, -1, -1], [*written.prompt_token_ids, *written.token_ids]]), head.config.aux_layers
    )
    steps, P = 3, seen.rows_BT.shape[1] - 2
    seen = seen._replace(begins_B=torch.tensor([4, 6]))  # the target wrote the tokens from there on
    loss, counts_2J = head_loss(head, seen, weight_VH, ids_V, steps, 0.5)
    outs = list(draft_steps(head, seen.features_BTF[:, :P], seen.ids_BT[:, 1 : P + 1], steps))
    places, wanted, counts = {token: place for place, token in enumerate(ids_V.tolist())}, 0.0, torch.zeros_like(counts_2J)
    is_right = {(row, i): True for row in (0, 1) for i in range(P)}  # by the first pair of a chain
    for step, out_BPH in enumerate(outs):
        values = []
        for row, ids in enumerate(seen.rows_BT.tolist()):
            for i in range(step, P):  # pair i reads token i + 1, and drafts token i + 2
                if ids[i + 2] < 0 or i + 2 < (4, 6)[row]:
                    is_right[row, i - step] = False
                    continue
                logits_V, place = head.logits(out_BPH[row, i]), places.get(ids[i + 2])
                counts[1, step] += is_right[row, i - step]
                is_right[row, i - step] &= int(logits_V.argmax()) == place
                counts[0, step] += is_right[row, i - step]
                if place is None:
                    continue
                teacher_V = (weight_VH @ seen.hidden_BTH[row, i + 1]).softmax(-1)
                values.append(float(-(teacher_V * logits_V.log_softmax(-1)).sum()))
        wanted += 0.5**step * sum(values) / len(values)
    assert float(loss) == pytest.approx(wanted, 1e-4) and torch.equal(counts_2J, counts) and counts[0, 0] > 0


@torch.no_grad()
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_saved_head_over_blocks_is_the_head(kind: str, pair: SpecDecoder, tmp_path: Path) -> None:
    """Keeps out: keys or tensors of the export that say another head: layer ids, the row that drafts first, norms of heads."""
    is_whole = kind == "dflash2"  # such heads have the target's vocabulary
    run = HeadRun(kind=kind, layers=2, width=48, longest_prompt=16, draft_vocab_size=0 if is_whole else 300)
    head = new_head(pair.model, (1, 13, 24), torch.arange(2048) if is_whole else torch.arange(0, 900, 3), run)
    assert isinstance(head, PEagleHead | DFlashHead)
    torch.manual_seed(0)
    for name, weight in head.named_parameters():
        if ("norm" in name and "qk_norm" not in name) or "conv" in name or "selector" in name:
            weight.copy_(1 + torch.randn(weight.shape))
    for module in head.modules():
        if isinstance(module, HeadsRMSNorm):  # one for all query heads, and one for all key heads
            module.weight.copy_(1 + torch.randn(2, module.weight.shape[1])[[0, 0, 0, 1]])
    save(head, tmp_path, "speculators", target_folder())
    again = load_head(tmp_path, pair.model, 48, torch.device("cpu"), torch.bfloat16)
    assert again.config.aux_layers == (1, 13, 24) and again.config.block == head.config.block
    own, read = head.state_dict(), again.state_dict()
    for name in own.keys() | read.keys():
        assert torch.equal(own[name].bfloat16(), read[name].bfloat16()), name


ROPES = [
    RopeConfig(theta=3000.0),
    RopeConfig(theta=7e4, kind="linear", factor=2.5),
    RopeConfig(theta=7e4, kind="llama3", factor=5.0, low_freq_factor=1.5, high_freq_factor=6.0, original_max_position=96),
    YarnRope(theta=7e4, factor=4.0, original_max_position=96, beta_fast=20.0, beta_slow=2.0, amplitude=1.3, truncate=False),
    YarnRope(theta=7e4, factor=4.0, original_max_position=96, mscale=0.7, mscale_all_dim=0.8, amplitude=1.2),
]


@pytest.mark.parametrize("rope", ROPES, ids=["default", "linear", "llama3", "yarn", "yarn-mscale"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_a_saved_config_says_every_number_of_the_head(
    kind: str, layout: str, rope: RopeConfig, pair: SpecDecoder, tmp_path: Path
) -> None:
    """Keeps out: a number of an export that is this pair's own by chance (epsilon of norms, rope, longest text), so that heads
    of other targets draft worse wherever they are read again."""
    more: dict[str, Any] = {"markov": "rnn"} if kind == "dspark" else {}
    layers = 1 if kind == "eagle3" else 2
    is_whole = kind == "dflash2"
    more |= {"selector_rank": 24, "candidates": 9} if is_whole else {"draft_vocab_size": 300}
    run = HeadRun(kind=kind, layers=layers, width=48, longest_prompt=16, **more)
    head = new_head(pair.model, (1, 13, 24), torch.arange(2048) if is_whole else torch.arange(0, 900, 3), run)
    model = replace(head.config.model, rms_norm_eps=3e-7, max_position=321, rope=rope)
    block = head.config.block and replace(head.config.block, mask_id=29)
    head.config = replace(head.config, model=model, block=block)
    save(head, tmp_path, layout, target_folder())
    read = open_head(tmp_path, pair.model.config).parsed.spec
    not_of_heads = {name: getattr(read.model, name) for name in ("dtype", "eos_ids", "ends_by_file", "family")}
    own = replace(model, **not_of_heads)
    owns = kind == "p-eagle" or (kind, layout) == ("eagle3", "speculators")  # whose layout has embeddings in any case
    ids = None if is_whole else tuple(range(0, 900, 3))
    assert read == replace(head.config, model=own, own_embeddings=owns, draft_ids=ids, format=layout)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["granitemoehybrid", "falcon_h1"])
def test_the_teacher_has_the_target_s_logits(family: str, tmp_path: Path) -> None:
    """Keeps out: a head that learns a sharper or flatter distribution than that of a target whose logits are multiplied."""
    model = load(tiny_mamba(tmp_path, family))
    hidden_TH, ids_V = torch.randn(5, model.config.hidden_size), torch.arange(0, 40, 3)
    torch.testing.assert_close(hidden_TH @ teacher_rows(model, ids_V).T, model.logits(hidden_TH)[:, ids_V])


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_a_head_of_a_target_without_rope_can_be_read(kind: str, layout: str, pair: SpecDecoder, tmp_path: Path) -> None:
    """Keeps out: a rope type of our own in the config of a head that was trained for OLMo Hybrid or Kimi Linear."""
    target = replace(pair.model.config, rope=RopeConfig(kind=NO_ROPE))
    size = 2048 if kind == "dflash2" else 300
    head = new_head(pair.model, (1, 13, 24), torch.arange(size), HeadRun(kind=kind, width=48, longest_prompt=16))
    spec = spec_of(target, (1, 13, 24), size, HeadRun(kind=kind, width=48, longest_prompt=16))
    head.config = replace(head.config, model=replace(head.config.model, rope=spec.model.rope))
    save(head, tmp_path, layout, target_folder())
    assert open_head(tmp_path, target).parsed.spec.model.rope == RopeConfig()


@pytest.mark.parametrize("kind", ["eagle3", *BLOCKS])
@pytest.mark.parametrize("target", ["mimo", "gemma"])
def test_a_head_of_a_target_with_unlike_heads_has_ordinary_ones(target: str, kind: str, zoo: Zoo) -> None:
    """Keeps out: widths of values, a scale and kinds of heads of MiMo-V2-Flash and Gemma 4 that no layout of heads can say."""
    config = choose_target(zoo.target(target)).config
    own = spec_of(config, (0, 1, 2), config.vocab_size, HeadRun(kind=kind)).model
    rope = config.rope.of_whole_heads
    assert own.all_heads == (HeadSizes(config.num_heads, config.num_kv_heads, config.head_dim, rope=rope),)


@pytest.mark.parametrize("rope", ROPES[:4], ids=lambda rope: rope.kind)
@pytest.mark.parametrize(
    ("kind", "layout"), [("eagle3", "safeailab"), *((kind, "speculators") for kind in ["eagle3", *BLOCKS])]
)
def test_a_saved_head_says_how_long_its_texts_were(
    kind: str, layout: str, rope: RopeConfig, pair: SpecDecoder, tmp_path: Path
) -> None:
    """Keeps out: a head that claims its target's context, so that `beyond_trained` never acts; and angles that other programs
    compute from the longest text of a config, where that is not the model's own.
    """
    run = HeadRun(kind=kind, width=48, longest_prompt=16)
    head = new_head(pair.model, (1, 13, 24), torch.arange(pair.model.config.vocab_size), run)
    head.config = replace(head.config, model=replace(head.config.model, rope=rope))
    save(head, tmp_path, layout, target_folder())
    again = load_head(tmp_path, pair.model, 48, torch.device("cpu"), torch.float32)
    assert again.trained_length == 48 < pair.model.config.max_position
    raw = json.loads((tmp_path / "config.json").read_text())
    config = LlamaConfig(**raw.get("transformer_layer_config", raw))
    angles = LlamaRotaryEmbedding(config)
    wanted = torch.stack(angles(torch.zeros(1), torch.arange(40)[None]), dim=2)[0, :, :, 16:]  # the other sines are negated
    assert torch.allclose(again.rotary.table[:40, :, 16:], wanted, atol=1e-5)


def test_an_estimate_learns_from_the_drafts_and_not_they_from_it() -> None:
    """Keeps out: drafts that are pulled to where the estimate of their acceptance is right."""
    generator = torch.Generator().manual_seed(0)
    logits, estimate = torch.randn(1, 2, 3, 5, generator=generator), torch.randn(1, 2, 3, generator=generator)
    teacher = torch.randn(1, 2, 3, 5, generator=generator).softmax(-1)
    logits.requires_grad_(), estimate.requires_grad_()
    none = torch.zeros(1, 2, 3, dtype=torch.int64)
    _losses(DraftedBlocks(logits, teacher, none, none.bool(), none.bool(), estimate)).sum().backward()
    got, of_estimate = logits.grad, estimate.grad
    overlap = torch.minimum(logits.softmax(-1), teacher).sum()
    entropy = -(teacher * logits.log_softmax(-1)).sum()
    (want,) = torch.autograd.grad(0.1 * entropy - 0.9 * overlap, logits)
    assert got is not None and of_estimate is not None and of_estimate.abs().min() > 0
    torch.testing.assert_close(got, want)


def test_a_block_begins_where_a_token_comes_before_and_after() -> None:
    """Keeps out: anchors of padding or of a row's last token, which teach nothing and take the place of others."""
    rows = torch.tensor([[*ROW, -1, -1], [5, 6, 7, *[-1] * 11], [5, 6, *[-1] * 12]])
    for seed in range(20):
        chosen_BA, exists_BA = choose_anchors(rows, 4, torch.Generator().manual_seed(seed))
        assert exists_BA.sum(1).tolist() == [4, 1, 0]
        for row, chosen, exists in zip(rows.tolist(), chosen_BA.tolist(), exists_BA.tolist(), strict=True):
            anchors = [anchor for anchor, real in zip(chosen, exists) if real]
            assert anchors == sorted(set(anchors)) and all(row[anchor - 1] >= 0 <= row[anchor + 1] for anchor in anchors)
            assert min(anchors, default=1) >= 1


def test_unknown_tokens_of_a_block_are_read_as_an_end(pair: SpecDecoder) -> None:
    """Keeps out: a mask that texts hold too, so that a row of a block can't tell what is known."""
    config = replace(pair.model.config, eos_ids=(7, 9))
    for kind, size in (("p-eagle", 5), ("dflash", 6), ("dflash2", 6), ("dspark", 5)):
        for eos_ids, mask in (((7, 9), 7), ((), config.vocab_size - 1)):
            block = spec_of(replace(config, eos_ids=eos_ids), (1, 2), 300, HeadRun(kind=kind)).block
            assert block is not None and (block.mask_id, block.size) == (mask, size)


def test_heads_of_a_norm_stay_alike(pair: SpecDecoder) -> None:
    """Keeps out: a norm for each head, of which the files can hold one alone."""
    head = new_head(pair.model, (1, 13, 24), torch.arange(300), HeadRun(kind="dflash", width=48, longest_prompt=16))
    assert isinstance(head, DFlashHead)
    seen = read_rows(pair.model, torch.tensor([ROW]), (1, 13, 24))
    head.drafts(seen.features_BTF, seen.ids_BT, torch.tensor([[2, 5]]), 3).square().sum().backward()
    (norm,) = (module for module in head.modules() if isinstance(module, HeadsRMSNorm))
    gradient_XD = norm.weight.grad
    assert gradient_XD is not None and gradient_XD.abs().sum() > 0
    assert torch.equal(gradient_XD[0], gradient_XD[1]) and torch.equal(gradient_XD[0], gradient_XD[2])
    assert not torch.equal(gradient_XD[0], gradient_XD[3])


def test_rows_that_are_kept_out_are_never_trained_on() -> None:
    """Keeps out: an evaluation loss of rows that the head has learnt by heart."""
    read: list[list[int]] = []

    class Recorded:
        device = torch.device("cpu")

        def of(self, picks_B: Tensor) -> TargetStates:
            read.append(picks_B.tolist())
            return TargetStates(picks_B, picks_B, picks_B, picks_B)

    states: Any = Recorded()
    text = SelfText(torch.zeros(100, 8, dtype=torch.int64), torch.full((100,), 2))
    counts = torch.tensor([[1, 1], [2, 1]])
    inputs_of, evaluate = objective(states, lambda _: (torch.zeros(()), counts), text, HeadRun(batch=4))
    for step in range(200):
        inputs_of(step, lambda _: None)
    trained = {row for rows in read for row in rows}
    read.clear()
    evaluate()
    assert trained == set(range(95)) and [row for rows in read for row in rows] == list(range(95, 100))


class OnMeta(TorchDispatchMode):
    """Refuses operators that read or make a tensor anywhere else than where a step's tensors are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        others = [x.device for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.device.type != "meta"]
        assert not others, (func, others)
        return out


@pytest.mark.parametrize("kind", ["eagle3", *BLOCKS])
def test_a_step_asks_the_host_for_nothing(kind: str, pair: SpecDecoder) -> None:
    """Keeps out: a copy from the host, or a value that the host waits for, which no CUDA graph can hold.  A tensor on the meta
    device has no values, so whoever asks for one fails.
    """
    run = HeadRun(kind=kind, width=48, longest_prompt=16)
    head = new_head(deepcopy(pair.model), (1, 13, 24), torch.arange(2048), run).to("meta")
    made = partial(torch.empty, device="meta")
    rows, begins = made(2, 48, dtype=torch.int64), made(2, dtype=torch.int64)
    inputs = [rows, made(2, 48, 96), made(2, 48, 288), begins]
    if kind != "eagle3":
        inputs += [made(2, 8, dtype=torch.int64), made(2, 8, dtype=torch.bool)]
    target: Any = SimpleNamespace(lm_head=SimpleNamespace(rows=lambda ids: made(len(ids), 96)), config=pair.model.config)
    with OnMeta():
        loss, _ = loss_of_head(target, head, made(2048, dtype=torch.int64), run)(inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([x for x in head.parameters() if x.requires_grad], 1.0)
    assert loss.is_meta and norm.is_meta


@pytest.mark.parametrize("kind", ["eagle3", *BLOCKS])
def test_products_in_16_bits_learn_the_same(kind: str, pair: SpecDecoder) -> None:
    """Keeps out: a kind of head whose step can't mix dtypes, sums or weights in 16 bits, and a gradient of something else."""
    is_whole = kind == "dflash2"
    run = HeadRun(kind=kind, width=48, longest_prompt=16, draft_vocab_size=0 if is_whole else 600)
    ids_V, rows = torch.arange(2048 if is_whole else 600), torch.tensor([ROW, [5, *ROW[:-1]]])
    head = new_head(pair.model, (1, 13, 24), ids_V, run)
    seen = read_rows(pair.model, rows, (1, 13, 24))._replace(begins_B=torch.tensor([2, 3]))
    more = () if kind == "eagle3" else choose_anchors(seen.goals_BT, 8, torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in (*seen, *more) if x is not None]
        head.zero_grad()
        with products(torch.device("cpu"), dtype):
            loss = loss_of_head(pair.model, head, ids_V, run)(inputs)[0]
        loss.backward()
        gradients = torch.cat([x.grad.flatten() for x in head.parameters() if x.grad is not None])
        assert loss.dtype == gradients.dtype == torch.float32
        found.append((float(loss), gradients))
    (exact, wanted), (rounded, got) = found
    assert rounded == pytest.approx(exact, rel=0.02) and torch.cosine_similarity(wanted, got, dim=0) > 0.98


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
@torch.no_grad()
def test_a_head_in_fp8_is_its_definition(kind: str, layout: str, pair: SpecDecoder, tmp_path: Path) -> None:
    """Keeps out: a head of half the bytes that a strict loader refuses, or reads with other scales than it was rounded with."""
    size = 2048 if kind == "dflash2" else 300
    head = new_head(pair.model, (1, 13, 24), torch.arange(size), HeadRun(kind=kind, width=48, longest_prompt=16))
    sizes = []
    for dtype in ("bfloat16", "fp8"):
        save(head, tmp_path, layout, target_folder(), dtype)
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
    assert sizes[1] < sizes[0]
    read = load_head(tmp_path, pair.model, 48, torch.device("cpu"), torch.float32)
    own, again = (dict(each.named_modules()) for each in (head, read))
    quantised = [name for name, module in again.items() if isinstance(module, Linear) and module.is_quantised]
    assert any(name.endswith("qkv_proj") for name in quantised)
    for name in quantised:
        weight = own[name].weight.bfloat16()
        wanted = in_fp8({"x.weight": weight}, ["x"])
        x = torch.eye(weight.shape[1])
        torch.testing.assert_close(again[name](x).T, wanted["x.weight"].float() * wanted["x.weight_scale"].float())


def test_rows_are_written_once_with_seeds_of_their_own() -> None:
    """Keeps out: prompts that come twice and get one text, and a resumed run that writes all texts again."""
    asked: list[tuple[list[int], SamplingParams]] = []

    def generate(prompts: list[list[int]], sampling: list[SamplingParams], **_: bool) -> list[SimpleNamespace]:
        asked.extend(zip(prompts, sampling, strict=True))
        return [SimpleNamespace(prompt_token_ids=prompt, token_ids=[len(asked)] * 3) for prompt in prompts]

    rows, saved = torch.full((10, 6), -1), []
    rows[:4, :3] = 7
    prompts = [[index, index] for index in range(10)]
    decoder: Any = SimpleNamespace(generate=generate)
    write_rows(decoder, prompts, rows, 0.5, 3, lambda: saved.append(rows.clone()), at_once=4)
    assert [prompt for prompt, _ in asked] == prompts[4:] and len({each.seed for _, each in asked}) == 6
    assert {each.temperature for _, each in asked} == {0.0, 1.0} and {each.max_tokens for _, each in asked} == {4}
    assert rows[:, 0].tolist() == [7] * 4 + list(range(4, 10)) and rows[4:, 5].tolist() == [-1] * 6
    assert [int((row[:, 0] >= 0).sum()) for row in saved] == [8, 10]


@pytest.mark.parametrize(
    ("layers", "layout"), [(1, "safeailab"), (3, "safeailab"), (6, "safeailab"), (2, "speculators"), (3, "speculators")]
)
def test_layers_that_are_named_can_be_asked_for(pair: SpecDecoder, layers: int, layout: str) -> None:
    """Keeps out: advice for small targets that is refused in turn."""
    config, run = replace(pair.model.config, num_layers=layers), HeadRun(layout=layout)
    with pytest.raises(ValueError, match="such as") as said:
        training._check(run, config, "a target", None)
    named = str(said.value).split("such as ")[1].split(", got")[0]
    assert training._check(run, config, "a target", [int(layer) for layer in named.split(",")])
