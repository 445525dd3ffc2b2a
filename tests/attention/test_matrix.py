"""The matrix: every combination of backend, layer kind, KV dtype, page size, chain or tree, and graph mode that the capability
table knows either equals dense masked attention, or is refused at construction with the nearest setting that works.

The cells are walked off the table (attention/capabilities.py), so a new entry there is tested here, or fails here.  Layers of
all kinds are answered in one pass.  On a CPU: torch, ours under Triton's interpreter, flash-attn by stand-ins, in enough cells
that in each backend any two of cache, page size, chain or tree, scoring and extras meet.  The other cells, graphs and
bfloat16 need a GPU, where fa4 runs if it is installed.
"""

import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.attention import fake_flash
from toolkit.attention.cells import (
    ANSWERED,
    CAPTURED,
    CELLS,
    H100,
    HAS_GPU,
    LAYERS,
    PASSES,
    WALKED,
    Cell,
    combinations_of,
    label,
)
from toolkit.attention.matrix import World
from toolkit.attention.wide_pair import widened
from toolkit.checkpoints.load import cut_numbers
from toolkit.paths import ROOT
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder, cli
from specdec.attention.attend import make_backend
from specdec.attention.capabilities import BACKENDS, GRAPH_MODES, KINDS, TABLE, choose_backend, faults, installed, why_not
from specdec.attention.kinds import FULL
from specdec.attention.needs import AttentionNeeds
from specdec.lossless.near_tie import explain_divergence
from specdec.session import Session
from specdec.shipped import draft_folder, prompts_file, target_folder


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for flash-attn on a CPU; on a GPU what is installed."""
    if not HAS_GPU:
        fake_flash.install(monkeypatch)


# ---- the walk ----


def settings_in(message: str) -> list[dict[str, Any]]:
    """The settings a refusal calls nearest: ways, of which each is one setting or two that belong together."""
    ways = re.search(r"nearest setting that works: (.*)$", message)
    assert ways, message
    found = []
    for way in ways[1].split(" or "):
        found.append({key: eval(value) for key, value in re.findall(r"(\w+)=('[^']*'|\w+)", way)})
        assert found[-1], message
    return found


NAMES = {"cuda_graphs": "graphs", "prefix_caching": "shared_prefixes"}


def applied(name: str, needs: AttentionNeeds, settings: dict[str, Any]) -> tuple[str, AttentionNeeds]:
    settings = {NAMES.get(key, key): value for key, value in settings.items()}
    if "dtype" in settings:
        settings["dtype"] = getattr(torch, settings["dtype"])
    if "topk" in settings:
        settings["tree"] = settings.pop("topk") > 1
    return settings.pop("attention", name), replace(needs, **settings)


def hold_refusal(name: str, needs: AttentionNeeds) -> None:
    """Raised where the engine is built, and every setting it calls nearest does work."""
    with pytest.raises(ValueError, match=f"attention='{name}' .*nearest setting that works: ") as refusal:
        choose_backend(name, needs)
    for settings in settings_in(str(refusal.value)):
        assert why_not(*applied(name, needs, settings)) == "", (str(refusal.value), settings)


def test_every_cell_is_answered_or_refused_with_the_nearest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a cell nobody thought of, which runs and is wrong, or is refused with a setting that is refused too."""
    fake_flash.install(monkeypatch)
    refused = set(CELLS) - set(ANSWERED)
    for cell in refused:
        hold_refusal(cell.backend, cell.needs)
    assert {cell.backend for cell in refused if not cell.rank} == {"fa2", "fa3", "fa4", "flashmla"}
    for cell in ANSWERED:
        assert choose_backend(cell.backend, cell.needs).name == cell.backend
    tested = {cell._replace(kind=kind) for cell in PASSES + CAPTURED for kind in KINDS}
    assert tested == set(ANSWERED), "an answered cell is in no pass"
    walked = set().union(*map(combinations_of, WALKED))
    assert all(combinations_of(cell) <= walked for cell in PASSES), "of a cell, two things never meet on this machine"


@pytest.mark.parametrize("name", [name for name in BACKENDS if "cpu" not in TABLE[name].devices])
def test_the_door_refuses_before_it_reads_weights(name: str, tmp_path: Path) -> None:
    """Keeps out: a refusal that comes after minutes of loading, or with the first prompt."""
    target = cut_numbers(Path(shutil.copytree(target_folder(), tmp_path / "without numbers")))  # whoever reads them fails
    with pytest.raises(ValueError, match=f"attention='{name}' needs a CUDA device, got cpu; nearest .*attention='torch'"):
        SpecDecoder.from_pretrained(target, draft_folder(), device="cpu", attention=name)


WANTED = AttentionNeeds(H100, torch.bfloat16, (9, 0), kinds=(FULL, LAYERS["window"]), page_size=256)
OTHER_MACHINES = {  # what the cells hold fixed
    "device": dict(device=torch.device("cpu"), architecture=None, dtype=torch.float32),
    "architecture": dict(architecture=(8, 0)),
    "page_size": dict(page_size=128),
    "turing": dict(architecture=(7, 5), dtype=torch.float16),
    "dtype": dict(dtype=torch.float64),
    "head_dims": dict(head_dims=(128, 272)),
    "odd heads": dict(head_dims=(100,)),
    "no full layer": dict(kinds=(LAYERS["window"], LAYERS["chunk"])),
    "two at once": dict(mla=True, head_dims=(), kv_cache_dtype="fp8"),
    "latents on Ampere": dict(mla=True, head_dims=(), kv_cache_dtype="fp8_ds_mla", architecture=(8, 0)),
    "keys as latents": dict(kv_cache_dtype="fp8_ds_mla"),
    "wide values as latents": dict(value_dims=(256,), differential=True, kv_cache_dtype="fp8_ds_mla"),
    "odd latents": dict(mla=True, head_dims=(), kv_cache_dtype="fp8_ds_mla", latent_rank=320),
    "other rotated parts": dict(mla=True, head_dims=(), page_size=64, rope_dim=32),
    "int8 for odd latents": dict(mla=True, head_dims=(), kv_cache_dtype="int8", latent_rank=320),
    "split heads in int8": dict(value_dims=(64,), kv_cache_dtype="int8"),
    "differential in fp8": dict(value_dims=(256,), differential=True, kv_cache_dtype="fp8"),
    "values too wide": dict(value_dims=(512,), differential=True),
    "fp8 of odd heads": dict(head_dims=(128, 72), kv_cache_dtype="fp8"),
    "split heads in fp8 with int8 queries": dict(value_dims=(64,), kv_cache_dtype="fp8", int8_queries=True),
    "split heads with int8 queries": dict(value_dims=(64,), int8_queries=True),
    "split heads in int8 with int8 queries": dict(value_dims=(64,), kv_cache_dtype="int8", int8_queries=True),
    "latents with int8 queries": dict(mla=True, head_dims=(), int8_queries=True),
    "latents in int8 with int8 queries": dict(mla=True, head_dims=(), kv_cache_dtype="int8", int8_queries=True),
    "latents with int8 keys": dict(mla=True, head_dims=(), kv_cache_dtype="int8_keys"),
    "fp8 with int8 queries": dict(kv_cache_dtype="fp8", int8_queries=True),
    "16 bit with int8 queries": dict(int8_queries=True),
    "int8 keys with int8 queries": dict(kv_cache_dtype="int8_keys", int8_queries=True),
    "fp8 on Ampere": dict(architecture=(8, 0), kv_cache_dtype="fp8"),
    "nothing": dict(),
    "shared_prefixes": dict(shared_prefixes=True),
}


@pytest.mark.parametrize("change", OTHER_MACHINES)
@pytest.mark.parametrize("name", BACKENDS)
def test_what_the_cells_hold_fixed(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a refusal without a way out on another machine or model."""
    fake_flash.install(monkeypatch)
    needs = replace(WANTED, **OTHER_MACHINES[change])
    if why_not(name, needs):
        hold_refusal(name, needs)
    assert choose_backend("auto", replace(needs, kv_cache_dtype="auto", int8_queries=False)).reason


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "flashmla", "triton"])
@pytest.mark.parametrize("version", [None, "1.9"])
def test_a_missing_or_old_package(name: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an ImportError out of the first prompt."""
    package = TABLE[name].package or ""
    if version is None and installed(package):  # on this machine
        missing = replace(TABLE[name], package="a-package-of-nobody")
        assert "not installed" in next(faults(missing, WANTED)).problem
        return
    others = {each: found for each, found in fake_flash.VERSIONS.items() if each != package}
    fake_flash.install(monkeypatch, others | ({package: version} if version else {}))
    if version is None or TABLE[name].least_version > (0, 0):
        hold_refusal(name, WANTED)
        assert (version or "not installed") in why_not(name, WANTED)


LESSER = {  # what every backend does today: a row without it, what it says then, and the setting of its own that mends it
    "softcap": (dict(softcap=False), dict(softcap=True), "has no softcap, which these models use", None),
    "sinks": (dict(sinks=False), dict(sinks=True), "has no attention sinks, which these models use", None),
    "alibi": (dict(alibi=False), dict(alibi=True), "has no ALiBi, which these models use", None),
    "encoder": (
        dict(encoder=False), dict(encoder=True), "has no encoder attention or cross attention, which these models use", None,
    ),
    "tree": (dict(tree=False), dict(tree=True), "answers chains only", "topk=1"),
    "graphs": (dict(graphs=(False,)), dict(graphs="step"), "be captured with cuda_graphs='step'", "cuda_graphs=False"),
    "shared_prefixes": (
        dict(shared_prefixes=False), dict(shared_prefixes=True), "does not share prefixes", "prefix_caching=False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lacks", LESSER)
def test_a_backend_that_does_less(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a new backend whose row says what it lacks, and which is taken, or named as the way out, all the same."""
    fake_flash.install(monkeypatch)
    row, more, problem, setting = LESSER[lacks]
    monkeypatch.setitem(TABLE, "fa4", replace(TABLE["fa4"], **row))
    least = replace(WANTED, tree=False)
    assert why_not("fa4", least) == ""
    hold_refusal("fa4", replace(least, **more))
    ways = f"{setting} or attention='triton'" if setting else "attention='triton'"
    assert why_not("fa4", replace(least, **more)).endswith(f"{problem}; nearest setting that works: {ways}")
    monkeypatch.setitem(TABLE, "triton", replace(TABLE["triton"], **row))
    assert choose_backend("auto", replace(least, **more)).name == "torch"
    assert "attention='torch'" in why_not("triton", replace(least, **more))


def test_the_walk_varies_everything_one_can_need() -> None:
    """Keeps out: a new need that the table knows and the matrix does not."""
    first, *others = [cell.needs for cell in CELLS]
    varied = {f.name for f in fields(AttentionNeeds) if any(getattr(x, f.name) != getattr(first, f.name) for x in others)}
    elsewhere = {key for change in OTHER_MACHINES.values() for key in change}
    only_for_auto = {"gpu", "rows", "tokens", "kv_heads", "packed"}
    # The right bits are no matter of tolerance (invariant/test_leaves.py), and several ranks divide keys (context/).
    by_another_test = {"deterministic", "divided"}
    assert varied | elsewhere | only_for_auto | by_another_test == {f.name for f in fields(AttentionNeeds)}


def test_one_backend_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a library whose splits depend on the batch, taken for a text that must not depend on it."""
    fake_flash.install(monkeypatch)
    needs = AttentionNeeds(torch.device("cuda"), torch.bfloat16, (9, 0), deterministic=True, page_size=256)
    refused = {name: why_not(name, needs) for name in BACKENDS if name not in ("triton", "flashmla")}
    assert all("order that depends on the batch" in why and "deterministic=False" in why for why in refused.values()), refused
    assert [name for name in BACKENDS if TABLE[name].deterministic] == ["triton"]
    assert choose_backend("auto", needs).name == "triton"


def test_command_line_and_settings_page_say_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a backend or KV dtype that no flag names, and a page that promises what the code refuses."""
    assert cli.main(["doctor", "--table"]) == 0
    table = capsys.readouterr().out.strip()
    page = (ROOT / "docs" / "SETTINGS.md").read_text()
    blocks = re.findall(r"<!-- capabilities:[^>]*-->\n(.*?)\n<!-- /capabilities -->", page, re.S)
    assert blocks == [table], "docs/SETTINGS.md: put the output of `specdec doctor --table` between the markers"


# ---- what is answered, is right ----


def skip_what_is_absent(cell: Cell) -> None:
    package = TABLE[cell.backend].package
    if package and HAS_GPU and not installed(package):
        pytest.skip(f"{package} is not installed")


@pytest.mark.slow_cases(keep=30)
@pytest.mark.parametrize("cell", WALKED, ids=label)
def test_what_is_answered_equals_dense_masked_attention(cell: Cell) -> None:
    """Keeps out: a combination that runs and reads other keys than its layers, its tree and its cache say."""
    skip_what_is_absent(cell)
    world = World(cell)
    q_THD, kv = world.inputs()
    world.check(world.forward(world.attention(make_backend(cell.backend)), q_THD, kv), q_THD, kv)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CAPTURED, ids=label)
def test_a_captured_pass_equals_dense_masked_attention(cell: Cell) -> None:
    """Keeps out: what a graph froze: lengths, starts, splits, a scale.  "step": one pass a graph; "round": two, in which the
    second begins a token later."""
    skip_what_is_absent(cell)
    world, backend = World(cell), make_backend(cell.backend)
    q_THD, kv = world.inputs()

    def captured() -> list[Tensor]:
        outs = world.forward(world.attention(backend), q_THD, kv)
        if cell.graphs == "round":
            world.lens_B.add_(1)
            outs = world.forward(world.attention(backend), q_THD, kv)
        return outs

    captured()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = captured()
    for lens in ((9, 2), (12, 1)):
        world.lens_B.copy_(torch.tensor(lens))
        for static, fresh in zip((q_THD, *kv), (lambda new: (new[0], *new[1]))(world.inputs()), strict=True):
            static.copy_(fresh)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        world.check(outs, q_THD, kv)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", GRAPH_MODES)
@pytest.mark.parametrize(("name", "kv"), [("fa2", "auto"), ("fa3", "auto"), ("fa3", "fp8"), ("fa4", "auto")])
def test_the_whole_runtime_on_flash_attn(name: str, kv: str, graphs: Any, tmp_path: Path) -> None:
    """Keeps out: a library that is compiled, or asks the device, in a capture; text of its own beyond near-ties."""
    package = TABLE[name].package
    if not installed(package or ""):
        pytest.skip(f"{package} is not installed")
    pair = target_folder(), draft_folder()
    if name == "fa2":
        pair = widened(pair[0], tmp_path / "target"), widened(pair[1], tmp_path / "draft")
    sampling, prompts = SamplingParams(max_tokens=48), [json.loads(line)["prompt"] for line in open(prompts_file())][:11]
    settings: dict[str, Any] = dict(device="cuda", dtype="bfloat16", max_seq_len=256, page_size=256, spec=SpecConfig(3, 8, 48))
    ours = SpecDecoder.from_pretrained(*pair, **settings, kv_cache_dtype=kv)
    flash = SpecDecoder.from_pretrained(*pair, **settings, kv_cache_dtype=kv, attention=name, cuda_graphs=graphs)
    assert (ours.settings.attention_backend.name, flash.settings.attention_backend.name) == ("triton", name)
    # Over fp8 the library rounds queries, which our kernels do not: there its own plain decoding is the baseline.
    baseline = ours if kv == "auto" else flash
    plain = baseline.generate(prompts, sampling, speculate=False)
    for fast in (flash.generate(prompts, sampling), flash.generate(prompts, sampling, speculate=False)):
        for number, (a, b) in enumerate(zip(plain, fast, strict=True)):
            found = explain_divergence(Session(baseline), number, a.prompt_token_ids, a.token_ids, b.token_ids, sampling)
            assert found is None or found.verdict == "near-tie", found
