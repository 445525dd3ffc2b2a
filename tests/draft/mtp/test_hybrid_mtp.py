"""The MTP layer of Qwen's hybrids: against transformers' own decoder layer, and as drafter of a whole target.

Keeps out: a join read the other way round, norms without their one, a gate left out, a target's states with a draft's in them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toolkit.checkpoints.plans import plan_memory
from toolkit.driver import Driver
from toolkit.families import assert_greedy
from toolkit.models import ragged_prompts
from toolkit.recurrent.targets import hybrid_model, tiny_hybrid, with_mtp
from torch import Tensor

from specdec import EngineOptions, SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.eager.dense import DenseAttention
from specdec.draft.mtp.load import OpenMtp
from specdec.models.registry import choose_target, load_chosen

CPU = torch.device("cpu")
IDS = torch.randint(40, (13,), generator=torch.Generator().manual_seed(2))
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mtp")
    return {family: with_mtp(tiny_hybrid(root / family, family), family) for family in FAMILIES}


@torch.inference_mode()
def by_transformers(folder: Path, family: str) -> Tensor:
    """[T, H]: the layer's normed outputs over a text's pairs, from transformers' modules."""
    own = {name.removeprefix("mtp."): x for name, x in load_file(folder / "model.safetensors").items() if name[:4] == "mtp."}
    one: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    text = family if family in ("qwen3_next", "qwen3_5_text") else f"{family}_text"
    layer = hybrid_model(text, 11, **one, **({"mlp_only_layers": []} if family == "qwen3_next" else {}))  # the seed's weights
    decoder, target = layer.model, hybrid_model(family)
    norm = type(decoder.norm)

    def normed(name: str, x: Tensor) -> Tensor:
        module = norm(x.shape[-1], eps=layer.config.rms_norm_eps)
        module.weight.data = own[f"{name}.weight"]
        return module(x)

    hidden = target.model(input_ids=IDS[None, :-1], use_cache=False).last_hidden_state[0]
    embedded = target.get_input_embeddings()(IDS[1:])
    pairs = torch.cat((normed("pre_fc_norm_embedding", embedded), normed("pre_fc_norm_hidden", hidden)), -1)
    x = pairs @ own["fc.weight"].T
    decoder.norm.weight.data = own["norm.weight"]
    return decoder(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_layer_is_transformers_own(folders: dict[str, Path], family: str) -> None:
    folder = folders[family]
    target = load_chosen(choose_target(folder), folder, 64, CPU, torch.float32, False)
    head = OpenMtp(folder, target.config).load(target, 64, CPU, torch.float32)
    count = len(IDS) - 1
    hidden = target(IDS[:-1], torch.arange(count), DenseAttention(target.config.layer_kinds)).hidden_TH
    attn = DenseAttention(head.needs.models[0].layer_kinds)
    got = head.begin(IDS[1:], hidden, torch.arange(count), attn, torch.arange(count))
    torch.testing.assert_close(got, by_transformers(folder, family), atol=1e-4, rtol=1e-4)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("family", "shape", "rows"), [("qwen3_next", (4, 1, 5), 2), ("qwen3_5_text", (4, 4, 14), 3), ("qwen3_5_moe", (3, 2, 6), 2)]
)
def test_text_is_transformers(folders: dict[str, Path], family: str, shape: tuple[int, int, int], rows: int) -> None:
    """Chains and trees, prompts in chunks, rows that enter and leave, rows that don't speculate beside those that do."""
    prompts, hf = ragged_prompts(40, 4, seed=9), hybrid_model(family)
    with SpecDecoder.from_pretrained(
        folders[family], "mtp", SpecConfig(*shape), device="cpu", dtype="float32", max_seq_len=96, max_batch_size=rows,
        page_size=4, smoke=False,
    ) as decoder:  # fmt: skip
        Driver(decoder).set_chunk(9)
        sampling = [SamplingParams(max_tokens=n) for n in (14, 5, 18, 9)]
        for speculate in (True, False):
            outputs = decoder.generate(prompts, sampling, speculate=speculate)
            for out in outputs:
                assert_greedy(hf, out)
        Driver(decoder).assert_nothing_leaked()
        own = sum(x.nbytes for x in (*decoder.head.parameters(), *decoder.head.buffers())) - decoder.head.rotary.table.nbytes
        shared = {id(x) for x in decoder.model.parameters()}
        own -= sum(x.nbytes for x in decoder.head.parameters() if id(x) in shared)
    plan = plan_memory(folders[family], "mtp", None, EngineOptions(dtype="float32", max_seq_len=64), 10**9)
    assert plan.parts["weights of the draft head"] == own


def test_more_layers_than_one_are_refused(tmp_path: Path) -> None:
    folder = with_mtp(tiny_hybrid(tmp_path, "qwen3_5_text"), "qwen3_5_text")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"mtp_num_hidden_layers": 1', '"mtp_num_hidden_layers": 2'))
    with pytest.raises(ValueError, match="runs one MTP layer of a qwen3_5_text target, got mtp_num_hidden_layers 2"):
        OpenMtp(folder, choose_target(folder).config)
