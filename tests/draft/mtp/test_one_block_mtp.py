"""The MTP layer of Nemotron 3: against transformers' own blocks, and as drafter of a whole target.

Keeps out: a join read the other way round, a block's norm in another's place, positions that turn heads, a mixture without its
latents.
"""

import json
from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.plans import plan_memory
from toolkit.driver import Driver
from toolkit.families import assert_greedy
from toolkit.models import ragged_prompts
from toolkit.recurrent.mamba_targets import mamba_model, mtp_tensors, tiny_mamba, with_mtp
from torch import Tensor

from specdec import EngineOptions, SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.eager.dense import DenseAttention
from specdec.cli import main
from specdec.draft.mtp.load import OpenMtp
from specdec.models.registry import choose_target, load_chosen

CPU = torch.device("cpu")
IDS = torch.randint(40, (13,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mtp(tiny_mamba(tmp_path_factory.mktemp("mtp"), "nemotron_h"))


@torch.inference_mode()
def by_transformers() -> Tensor:
    """[T, H]: the layer's normed outputs over a text's pairs, from transformers' modules."""
    own, target = mtp_tensors(11), mamba_model("nemotron_h")
    blocks = mamba_model("nemotron_h", 11, layers_block_type=["attention", "moe"])  # the seed's weights

    def normed(name: str, x: Tensor) -> Tensor:
        return own[f"mtp.layers.0.{name}.weight"] * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    hidden = target.model(input_ids=IDS[None, :-1], use_cache=False).last_hidden_state[0]
    pairs = torch.cat((normed("enorm", target.get_input_embeddings()(IDS[1:])), normed("hnorm", hidden)), -1)
    x = pairs @ own["mtp.layers.0.eh_proj.weight"].T
    return blocks.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]


@torch.inference_mode()
def test_the_layer_is_transformers_own(folder: Path) -> None:
    target = load_chosen(choose_target(folder), folder, 64, CPU, torch.float32, False)
    head = OpenMtp(folder, target.config).load(target, 64, CPU, torch.float32)
    count = len(IDS) - 1
    hidden = target(IDS[:-1], torch.arange(count), DenseAttention(target.config.layer_kinds)).hidden_TH
    attn = DenseAttention(head.needs.models[0].layer_kinds)
    got = head.begin(IDS[1:], hidden, torch.arange(count), attn, torch.arange(count))
    torch.testing.assert_close(got, by_transformers(), atol=1e-4, rtol=1e-4)


def test_text_is_transformers(folder: Path) -> None:
    """Trees, prompts in chunks, rows that enter and leave, rows that don't speculate beside those that do."""
    prompts, hf = ragged_prompts(40, 4, seed=9), mamba_model("nemotron_h")
    with SpecDecoder.from_pretrained(
        folder, "mtp", SpecConfig(4, 4, 14), device="cpu", dtype="float32", max_seq_len=96, max_batch_size=2, page_size=4,
        smoke=False,
    ) as decoder:  # fmt: skip
        Driver(decoder).set_chunk(9)
        sampling = [SamplingParams(max_tokens=n) for n in (14, 5, 18, 9)]
        for out in decoder.generate(prompts, sampling):
            assert_greedy(hf, out)
        Driver(decoder).assert_nothing_leaked()
        own = sum(x.nbytes for x in (*decoder.head.parameters(), *decoder.head.buffers())) - decoder.head.rotary.table.nbytes
        shared = {id(x) for x in decoder.model.parameters()}
        own -= sum(x.nbytes for x in decoder.head.parameters() if id(x) in shared)
    plan = plan_memory(folder, "mtp", None, EngineOptions(dtype="float32", max_seq_len=64), 10**9)
    assert plan.parts["weights of the draft head"] == own


def test_inspect_says_that_no_head_is_turned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a theta that nothing reads, as in transformers' configs of this family."""
    assert main(["inspect", "mtp", "--target", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head"]["rope"] == "none: layers know no positions"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_nextn_predict_layers": 2}, "runs one MTP layer of a nemotron_h target, got num_nextn_predict_layers 2"),
        ({"mtp_layers_block_type": ["moe", "attention"]}, "an MTP layer of full_attention and moe, got moe, full_attention"),
        ({"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "ME"}, "got linear_attention, moe"),
    ],
)
def test_other_layers_are_refused(folder: Path, tmp_path: Path, keys: dict[str, object], said: str) -> None:
    """Keeps out: blocks that are taken for others because their names alone are read."""
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **keys}))
    with pytest.raises(ValueError, match=said):
        OpenMtp(tmp_path, choose_target(tmp_path).config)
