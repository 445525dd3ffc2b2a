"""`specdec plan`: bytes foreseen without a GPU must be those that a decoder takes."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.gpt_oss import save_gpt_oss
from toolkit.checkpoints.mixtures import save_mixture
from toolkit.checkpoints.plans import plan_memory
from toolkit.driver import Driver
from toolkit.heads.block_zoo import HEADS as BLOCK_HEADS
from toolkit.heads.block_zoo import save_block_head
from toolkit.models import Zoo, save_target
from toolkit.mtp_layers.targets import save_mtp_target
from toolkit.recurrent.more_targets import save_more

from specdec import SamplingParams, SpecConfig, SpecDecoder, cli, shipped
from specdec.batch.state import BatchState
from specdec.cli import plan
from specdec.cli.entry import build_parser
from specdec.cli.plan import _bytes
from specdec.loading.build import plan_pool
from specdec.loading.load import check_pair
from specdec.loading.plan import largest, plan_memories, rules_bytes
from specdec.models.checkpoints.frame import load_family
from specdec.options import EngineOptions
from specdec.parallel.shard import Shard

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")

TARGET, DRAFT = shipped.target_folder(), shipped.draft_folder()


@pytest.mark.slow_cases
@pytest.mark.parametrize("draft", [DRAFT, None], ids=["pair", "target alone"])
def test_weights_and_keys_are_those_of_a_decoder(draft: object) -> None:
    """Keeps out: a tied head counted twice, a vocabulary map counted as weights, look-ahead forgotten."""
    spec = SpecConfig(4, 4, 12) if draft else None
    options = EngineOptions(max_batch_size=3, max_seq_len=200, dtype="bfloat16", page_size=16, prefix_caching=False)
    plan = plan_memory(TARGET, DRAFT if draft else None, spec, options, 10**9)
    with SpecDecoder.from_pretrained(
        TARGET, DRAFT if draft else None, *([spec] if spec else []), device="cpu", dtype="bfloat16", max_batch_size=3,
        max_seq_len=200, page_size=16, prefix_caching=False,
    ) as decoder:  # fmt: skip
        assert plan.parts["weights of the target"] == sum(weight.nbytes for weight in decoder.model.parameters())
        if decoder.head is not None:
            own = {weight for weight in decoder.head.parameters()} - {weight for weight in decoder.model.parameters()}
            assert plan.parts["weights of the draft head"] == sum(weight.nbytes for weight in own)
        pool = plan_pool(decoder.model, decoder.head, decoder.settings)
        assert plan.parts["keys and values"] == pool.bytes
        assert sum(plan.kv_token) * 16 == sum(pool.page_bytes)


def test_texts_that_drafts_come_of_are_counted() -> None:
    """Keeps out: tables of corpora and of answers, tokens by slot and predictions that no plan knew of."""
    given: dict[str, Any] = {
        "max_batch_size": 2,
        "max_seq_len": 64,
        "dtype": "bfloat16",
        "page_size": 16,
        "corpus_memory": "1MiB",
    }
    draft, spec = [str(DRAFT), "suffix", "corpus", "answers"], SpecConfig(4, 4, 12)
    plan = plan_memories(TARGET, draft, spec, EngineOptions(**given, prefix_caching=False), (10**9,))[0]
    alone = plan_memories(TARGET, DRAFT, spec, EngineOptions(**{**given, "corpus_memory": "256MiB"}), (10**9,))[0]
    with SpecDecoder.from_pretrained(TARGET, draft, spec, device="cpu", smoke=False, **given) as decoder:
        decoder.generate([[5, 6]], SamplingParams(max_tokens=2, prediction="Once"))
        finders = Driver(decoder).drafter.finders
        held = [getattr(finder.table, name).nbytes for finder in finders[1:3] for name in ("text_2N", "order_2N")]
        held += [finders[0].rows.back_R.nbytes, finders[3].rows.ids_RX.nbytes]
        assert plan.parts["texts that drafts come of"] == sum(held)
        pool = plan_pool(decoder.model, decoder.head, decoder.settings)
        assert plan.parts["keys and values"] == pool.bytes > alone.parts["keys and values"]
    assert "texts that drafts come of" not in alone.parts


@pytest.mark.parametrize("ranks", [1, 3])
def test_tables_of_rules_are_counted(ranks: int) -> None:
    """Keeps out: tables of biases, counts and waits for grammars, 100 MB at 64 rows of a vocabulary of 128,000, that no plan
    knew of."""
    options = EngineOptions(max_batch_size=2, max_seq_len=64, dtype="bfloat16", tensor_parallel_size=ranks)
    state = BatchState.empty(3, 1, page_size=16, device="cpu").with_tables(-(-2048 // ranks)).with_waits(2048)
    assert state.tables is not None
    held = sum(tensor.nbytes for tensor in (*state.tables.tensors(), *state.waiting.tensors()))
    assert rules_bytes(2048, options) == held
    if ranks == 1:
        assert plan_memory(TARGET, None, None, options, 10**9).parts["rules of requests for single tokens"] == held


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("name", sorted(BLOCK_HEADS))
def test_weights_of_every_head_of_one_pass_are_those_of_a_decoder(name: str, zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: norms of queries and keys counted once for all heads, which each have a copy, also in Qwen3 targets; copies of
    the target's embeddings and language-model head counted, whose memory DeepSpec's heads give back.
    """
    target = zoo.target("qwen3")
    head = save_block_head(tmp_path / "head", target, name)
    options = EngineOptions(max_batch_size=2, max_seq_len=64, dtype="bfloat16", prefix_caching=False)
    plan = plan_memory(target, head, SpecConfig(4, 1, 5), options, 10**9)
    with SpecDecoder.from_pretrained(
        target, head, SpecConfig(4, 1, 5), device="cpu", dtype="bfloat16", max_batch_size=2, max_seq_len=64, smoke=False
    ) as decoder:
        assert decoder.head is not None
        shared = {id(weight) for weight in decoder.model.parameters()}
        assert plan.parts["weights of the target"] == sum(weight.nbytes for weight in decoder.model.parameters())
        own = sum(weight.nbytes for weight in decoder.head.parameters() if id(weight) not in shared)
        assert plan.parts["weights of the draft head"] == own


RANKS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3-moe", 4, {"expert_parallel": "experts"}),
    ("qwen2-moe", 2, {"expert_parallel": "tensor"}),
    ("glm4-moe-biased", 4, {"quantize": "fp8", "expert_parallel": "experts"}),
    ("mixtral", 2, {"quantize": "fp8", "expert_parallel": "tensor"}),
    ("minimax", 4, {"expert_parallel": "experts"}),
    ("mxfp4", 2, {"expert_parallel": "experts"}),
    ("unquantised", 2, {"expert_parallel": "tensor"}),
]


@pytest.mark.parametrize(("name", "ranks", "settings"), RANKS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_rank_s_weights_are_those_of_the_first(tmp_path: Path, name: str, ranks: int, settings: dict[str, Any]) -> None:
    """Keeps out: a plan that divides what each rank has whole, or whole experts as if they were cut; routers, corrections and
    sinks that stay in float32, counted in 16 bits."""
    if name in ("mxfp4", "unquantised"):
        folder = save_gpt_oss(tmp_path / "oss", num_hidden_layers=2, num_local_experts=5)[name == "unquantised"]
    else:
        folder = save_mixture(tmp_path / "m", name, **({"num_experts": 5} if name.startswith("qwen") else {}))
    options = EngineOptions(dtype="bfloat16", max_batch_size=2, max_seq_len=64, tensor_parallel_size=ranks, **settings)
    plan = plan_memory(folder, None, None, options, 10**9)
    pair = check_pair(folder, None, None, replace(options, device="cpu"))
    assert pair.chosen.native is not None
    device, first = torch.device("cpu"), Shard(0, ranks)
    model = load_family(pair.chosen.native, pair.checkpoint, pair.chosen.config, 64, device, torch.bfloat16, first)
    kept = [part for part in model.buffers() if part.data_ptr() != model.rotary.table.data_ptr()]
    held = sum(part.nbytes for part in (*model.parameters(), *kept))
    assert plan.parts["weights of the target"] == held
    assert plan.experts.startswith("a part of each" if settings["expert_parallel"] == "tensor" else ("2", "3", "1"))


def test_the_command_counts_rounded_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a plan of 16 bits for weights that take 8 or 4, and one that does not say which it is."""
    flags = ["plan", "--target", str(TARGET), "--batch", "2", "--gpu-memory", "2GB", "--json", "--quantize"]
    found = []
    for quantize, said in (("none", "bfloat16"), ("fp8", "fp8"), ("int4", "int4")):
        assert cli.main([*flags, quantize]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["target_weights"].startswith(said)
        found.append(plan["parts"]["weights of the target"])
    assert found[0] > found[1] > found[2]


def test_a_head_in_a_pickle_is_planned_as_it_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: advice to give a flag that the command does not have."""
    (tmp_path / "config.json").write_bytes((DRAFT / "config.json").read_bytes())
    torch.save(load_file(DRAFT / "model.safetensors"), tmp_path / "pytorch_model.bin")
    flags = ["plan", "--target", str(TARGET), "--gpu-memory", "2GB", "--json", "--draft"]
    assert cli.main([*flags, str(tmp_path)]) == 2 and "(--draft-pickle)" in capsys.readouterr().err
    assert cli.main([*flags, str(tmp_path), "--draft-pickle"]) == 0
    pickled = json.loads(capsys.readouterr().out)
    assert cli.main([*flags, str(DRAFT)]) == 0 and json.loads(capsys.readouterr().out) == pickled


def test_what_fits_is_the_most_that_fits() -> None:
    """Keeps out: a context or a batch one too large."""
    options = EngineOptions(max_batch_size=4, max_seq_len=128, dtype="bfloat16")
    room = plan_memory(TARGET, DRAFT, SpecConfig(), options, 0).total
    plan = plan_memory(TARGET, DRAFT, SpecConfig(), options, room)
    assert plan.longest >= 128 and plan.widest == 4
    assert plan_memory(TARGET, DRAFT, SpecConfig(), options, room - 1).widest == 3
    assert [largest(lambda n, most=most: n <= most, 9) for most in (-1, 0, 1, 5, 9, 12)] == [0, 0, 1, 5, 9, 9]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a first try that needs folders, and an exit code that says of a pair which does not fit that it does."""
    flags = ["plan", "--target", str(TARGET), "--draft", str(DRAFT), "--batch", "2", "--gpu-memory", "2GB"]
    assert cli.main(flags) == 0
    assert "it fits" in capsys.readouterr().out
    assert cli.main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"] == sum(found["parts"].values()) and found["fits"] and found["batch"] == 2
    assert cli.main(["plan", "--batch", "2", "--gpu-memory", "2GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found  # the pair in the box
    assert cli.main([*flags[:-1], "1MB"]) == 1  # so that a script need not read the words
    shown = capsys.readouterr().out
    assert "does not fit" in shown and "0.00 " not in shown


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--draft", str(TARGET), "--gpu-memory", "1GB"], "target"),
        (["--draft", "/none", "--gpu-memory", "1GB"], "draft"),
        (["--spec", "5,1,6", "--gpu-memory", "1GB"], "--draft"),
        (["--context", "100000", "--gpu-memory", "1GB"], "--context must be at most 512"),
        (["--batch", "0", "--gpu-memory", "1GB"], "--batch=1"),
    ],
)
def test_wrong_input(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--target", str(TARGET), *flags]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("olmo_hybrid", [], "heads are a multiple of 16 wide, got key heads of 8"),
        ("lfm2", ["--draft", "ngram", "--spec", "64,4,201"], "num_draft_tokens must be at most 128 .* got 201"),
    ],
)
def test_what_no_gpu_runs_is_not_said_to_fit(
    tmp_path: Path, name: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps out: "it fits" of what loading on a GPU refuses, whatever its memory."""
    folder = save_more(tmp_path, name, vocab_size=800)
    assert cli.main(["plan", "--target", str(folder), "--gpu-memory", "80GB", *flags]) == 2
    assert re.search(f"no memory makes a GPU run this: .*{said}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.down_proj.weight"), "'model.layers.1.mlp.down_proj.weight' is missing"),
        (lambda t: t.update(odd=torch.ones(2)), "1 tensors are not part of this architecture: odd"),
        (lambda t: t.update({"model.norm.weight": torch.ones(33)}), "must have shape (32,), got (33,)"),
    ],
)
def test_nothing_fits_that_is_not_loaded(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps out: "it fits", of a folder that loading refuses by its headers."""
    tensors = load_file(save_target(tmp_path, "llama") / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert cli.main(["plan", "--target", str(tmp_path), "--gpu-memory", "1GB"]) == 2
    assert named in capsys.readouterr().err
    with pytest.raises(ValueError, match=re.escape(named)):
        SpecDecoder.from_pretrained(tmp_path, device="cpu")


def planned(usual: dict[str, int], *flags: str) -> int:
    """The exit code of `specdec plan` with these flags, for GPUs of these sizes."""
    return plan.run(build_parser().parse_args(["plan", *flags]), usual)


@without_gpu
def test_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keeps out: a plan that asks for a GPU, of whoever wants to know which one to get; and numbers that another call of the
    same command, with that GPU's memory, would not print."""
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["plan"]) == 0
    said = capsys.readouterr().out
    assert "24 GB" in said and "yes" in said and "the GPU has" not in said and max(map(len, said.splitlines())) <= 80
    sizes = {"roomy": 2 * 10**9, "tight": 860 * 10**6, "none": 10**6}
    own = ["--target", str(save_mtp_target(tmp_path, "v3"))]
    for flags in ([], [*own, "--draft", "mtp", "--spec", "3,1"], [*own, "--batch", "64"]):
        assert planned(sizes, "--json", *flags) == 0
        found = json.loads(capsys.readouterr().out)
        assert [gpu.pop("name") for gpu in found["gpus"]] == list(sizes)
        for gpu, size in zip(found["gpus"], sizes.values(), strict=True):
            assert cli.main(["plan", "--json", *flags, "--gpu-memory", f"{size // 10**6}MB"]) == (not gpu["fits"])
            one = json.loads(capsys.readouterr().out)
            assert {name: one[name] for name in gpu} == gpu
            assert one["parts"] == found["parts"] and one["total"] == found["total"]
        if not flags:
            assert found["gpus"][0]["longest"] > found["gpus"][1]["longest"] > found["gpus"][2]["longest"] == 0


@without_gpu
def test_what_fits_no_usual_gpu_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a script that reads of 0 that a model can be run, though no GPU holds it."""
    assert planned({"small": 10**6, "large": 2 * 10**9}) == 0  # one does
    assert re.search(r"small .* no .* none", capsys.readouterr().out)
    assert planned({"small": 10**6}) == 1


def test_sizes() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="80GB"):
        _bytes("80")  # of bytes: nobody means that
    assert [_bytes(text) for text in ("80GB", "1.5 GiB", "10m")] == [80 * 10**9, 3 << 29, 10**7]
