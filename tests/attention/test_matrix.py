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
from collections.abc import Mapping
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
    COMPLETE,
    H100,
    HAS_GPU,
    LAYERS,
    PASSES,
    WALKED,
    MatrixCell,
    combinations_of,
    label,
)
from toolkit.attention.matrix import World
from toolkit.attention.wide_pair import widened
from toolkit.checkpoints.load import cut_numbers
from toolkit.inside.captures import capturing
from toolkit.paths import ROOT
from torch import Tensor

from specdec import SamplingParams, SpecConfig, SpecDecoder, cli
from specdec.attention.attend import make_backend
from specdec.attention.capabilities import BACKENDS, TABLE, choose_backend, installed, table_of, why_not
from specdec.attention.capability import GRAPHS, KINDS, Capability, Feature
from specdec.attention.kinds import FULL
from specdec.attention.needs import AttentionNeeds
from specdec.lossless.near_tie import explain_divergence
from specdec.options import ATTENTION_BACKENDS
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


FEATURES = {  # settings that switch one off, as they are spelled
    name: {feature for feature in Feature if (feature.setting or "").startswith(f"{name}=")}
    for name in ("int8_queries", "topk", "cuda_graphs", "prefix_caching", "decode_context_parallel_size", "deterministic")
}


def applied(name: str, needs: AttentionNeeds, settings: dict[str, Any]) -> tuple[str, AttentionNeeds]:
    for setting in settings.keys() & FEATURES.keys():
        needs = needs.without(*FEATURES[setting])
    settings = {key: value for key, value in settings.items() if key not in FEATURES}
    if "dtype" in settings:
        settings["dtype"] = getattr(torch, settings["dtype"])
    return settings.pop("attention", name), replace(needs, **settings)


def hold_refusal(name: str, needs: AttentionNeeds, table: Mapping[str, Capability] = TABLE) -> None:
    """Raised where the engine is built, and every setting it calls nearest does work."""
    with pytest.raises(ValueError, match=f"attention='{name}' .*nearest setting that works: ") as refusal:
        choose_backend(name, needs, table)
    for settings in settings_in(str(refusal.value)):
        assert why_not(*applied(name, needs, settings), table) == "", (str(refusal.value), settings)


def test_every_cell_is_answered_or_refused_with_the_nearest_setting() -> None:
    """Keeps out: a cell nobody thought of, which runs and is wrong, or is refused with a setting that is refused too."""
    refused = set(CELLS) - set(ANSWERED)
    for cell in refused:
        hold_refusal(cell.backend, cell.needs, COMPLETE)
    assert {cell.backend for cell in refused if not cell.rank} == {"fa2", "fa3", "fa4", "flashmla"}
    for cell in ANSWERED:
        assert choose_backend(cell.backend, cell.needs, COMPLETE).name == cell.backend
    tested = {cell._replace(kind=kind) for cell in PASSES + CAPTURED for kind in KINDS}
    assert tested == set(ANSWERED), "an answered cell is in no pass"
    walked = set().union(*map(combinations_of, WALKED))
    assert all(combinations_of(cell) <= walked for cell in PASSES), "of a cell, two things never meet on this machine"


@pytest.mark.parametrize("name", [name for name in BACKENDS if "cpu" not in TABLE[name].machine.devices])
def test_the_door_refuses_before_it_reads_weights(name: str, tmp_path: Path) -> None:
    """Keeps out: a refusal that comes after minutes of loading, or with the first prompt."""
    target = cut_numbers(Path(shutil.copytree(target_folder(), tmp_path / "without numbers")))  # whoever reads them fails
    with pytest.raises(ValueError, match=f"attention='{name}' needs a CUDA device, got cpu; nearest .*attention='torch'"):
        SpecDecoder.from_pretrained(target, draft_folder(), device="cpu", attention=name)


WANTED = AttentionNeeds(
    H100, torch.bfloat16, (9, 0), kinds=(FULL, LAYERS["window"]), page_size=256, features=frozenset({Feature.TREES})
)
DIFFERENTIAL, INT8_QUERIES = (WANTED.features | {feature} for feature in (Feature.DIFFERENTIAL, Feature.INT8_QUERIES))
OTHER_MACHINES = {  # what the cells hold fixed
    "device": dict(device=torch.device("cpu"), architecture=None, dtype=torch.float32),
    "architecture": dict(architecture=(8, 0)),
    "page_size": dict(page_size=128),
    "turing": dict(architecture=(7, 5), dtype=torch.float16),
    "dtype": dict(dtype=torch.float64),
    "head_dims": dict(head_dims=(128, 272)),
    "odd heads": dict(head_dims=(100,)),
    "no full layer": dict(kinds=(LAYERS["window"], LAYERS["chunk"])),
    "two at once": dict(latents=(512, 64), head_dims=(), kv_cache_dtype="fp8"),
    "latents on Ampere": dict(latents=(512, 64), head_dims=(), kv_cache_dtype="fp8_ds_mla", architecture=(8, 0)),
    "keys as latents": dict(kv_cache_dtype="fp8_ds_mla"),
    "wide values as latents": dict(value_dims=(256,), features=DIFFERENTIAL, kv_cache_dtype="fp8_ds_mla"),
    "odd latents": dict(latents=(320, 64), head_dims=(), kv_cache_dtype="fp8_ds_mla"),
    "other rotated parts": dict(latents=(512, 32), head_dims=(), page_size=64),
    "int8 for odd latents": dict(latents=(320, 64), head_dims=(), kv_cache_dtype="int8"),
    "split heads in int8": dict(value_dims=(64,), kv_cache_dtype="int8"),
    "differential in fp8": dict(value_dims=(256,), features=DIFFERENTIAL, kv_cache_dtype="fp8"),
    "differential with int8 keys": dict(value_dims=(256,), features=DIFFERENTIAL, kv_cache_dtype="int8_keys"),
    "values too wide": dict(value_dims=(512,), features=DIFFERENTIAL),
    "fp8 of odd heads": dict(head_dims=(128, 72), kv_cache_dtype="fp8"),
    "split heads in fp8 with int8 queries": dict(value_dims=(64,), kv_cache_dtype="fp8", features=INT8_QUERIES),
    "split heads with int8 queries": dict(value_dims=(64,), features=INT8_QUERIES),
    "split heads in int8 with int8 queries": dict(value_dims=(64,), kv_cache_dtype="int8", features=INT8_QUERIES),
    "latents with int8 queries": dict(latents=(512, 64), head_dims=(), features=INT8_QUERIES),
    "latents in int8 with int8 queries": dict(latents=(512, 64), head_dims=(), kv_cache_dtype="int8", features=INT8_QUERIES),
    "latents with int8 keys": dict(latents=(512, 64), head_dims=(), kv_cache_dtype="int8_keys"),
    "a head with latents": dict(draft_latents=((320, 64),)),
    "a head with other latents": dict(latents=(512, 64), draft_latents=((320, 64),), head_dims=(), kv_cache_dtype="fp8_ds_mla"),
    "fp8 with int8 queries": dict(kv_cache_dtype="fp8", features=INT8_QUERIES),
    "16 bit with int8 queries": dict(features=INT8_QUERIES),
    "int8 keys with int8 queries": dict(kv_cache_dtype="int8_keys", features=INT8_QUERIES),
    "fp8 on Ampere": dict(architecture=(8, 0), kv_cache_dtype="fp8"),
    "nothing": dict(),
    "shared_prefixes": dict(features=WANTED.features | {Feature.SHARED_PREFIXES}),
}


@pytest.mark.parametrize("change", OTHER_MACHINES)
@pytest.mark.parametrize("name", BACKENDS)
def test_what_the_cells_hold_fixed(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a refusal without a way out on another machine or model."""
    fake_flash.install(monkeypatch)
    needs = replace(WANTED, **OTHER_MACHINES[change])
    if why_not(name, needs):
        hold_refusal(name, needs)
    assert choose_backend("auto", replace(needs.without(Feature.INT8_QUERIES), kv_cache_dtype="auto")).reason


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "flashmla", "triton"])
@pytest.mark.parametrize("version", [None, "1.9"])
def test_a_missing_or_old_package(name: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an ImportError out of the first prompt."""
    package = TABLE[name].machine.package or ""
    if version is None and installed(package):  # on this machine
        machine = TABLE[name].machine._replace(package="a-package-of-nobody")
        assert "not installed" in why_not(name, WANTED, {**TABLE, name: replace(TABLE[name], machine=machine)})
        return
    others = {each: found for each, found in fake_flash.VERSIONS.items() if each != package}
    fake_flash.install(monkeypatch, others | ({package: version} if version else {}))
    if version is None or TABLE[name].machine.min_version > (0, 0):
        hold_refusal(name, WANTED)
        assert (version or "not installed") in why_not(name, WANTED)


LESSER = {  # what every backend does today: what a backend without it says, and the setting of its own that mends it
    Feature.SOFTCAP: ("has no softcap, which these models use", None),
    Feature.SINKS: ("has no attention sinks, which these models use", None),
    Feature.ALIBI: ("has no ALiBi, which these models use", None),
    Feature.ENCODER: ("has no encoder attention or cross attention, which these models use", None),
    Feature.TREES: ("answers chains only", "topk=1"),
    Feature.STEP_GRAPHS: ("be captured with cuda_graphs='step'", "cuda_graphs=False"),
    Feature.SHARED_PREFIXES: ("does not share prefixes", "prefix_caching=False"),
}


@pytest.mark.parametrize("lacks", LESSER, ids=lambda feature: feature.name)
def test_a_backend_that_does_less(lacks: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a new backend whose row says what it lacks, and which is taken, or named as the way out, all the same."""
    fake_flash.install(monkeypatch)
    problem, setting = LESSER[lacks]
    lesser = {name: replace(TABLE[name], features=TABLE[name].features - {lacks}) for name in ("fa4", "triton")}
    table = {**TABLE, "fa4": lesser["fa4"]}
    least = WANTED.without(Feature.TREES)
    more = replace(least, features=frozenset({lacks}))
    assert why_not("fa4", least, table) == ""
    hold_refusal("fa4", more, table)
    ways = f"{setting} or attention='triton'" if setting else "attention='triton'"
    assert why_not("fa4", more, table).endswith(f"{problem}; nearest setting that works: {ways}")
    table |= lesser
    assert choose_backend("auto", more, table).name == "torch"
    assert "attention='torch'" in why_not("triton", more, table)


def test_a_backend_is_a_declaration_and_a_line() -> None:
    """Keeps out: a new backend that some other file must know by name before it is chosen, refused or built."""
    table = table_of({**ATTENTION_BACKENDS, "mine": "toolkit.attention.own_backend:MINE"})
    needs = AttentionNeeds(torch.device("cpu"), torch.float32)
    choice = choose_backend("mine", needs, table)
    assert choice.name == "mine" and type(make_backend(choice, table=table)).__name__ == "OwnBackend"
    softcap = replace(needs, features=frozenset({Feature.SOFTCAP}))
    assert why_not("mine", softcap, table) == (
        "attention='mine' has no softcap, which these models use; nearest setting that works: attention='torch'"
    )
    assert why_not("fa2", needs, {name: table[name] for name in ("fa2", "mine")}).endswith("works: attention='mine'")
    assert "mine" in why_not("nobody", needs, table)


def test_the_walk_varies_everything_one_can_need() -> None:
    """Keeps out: a new need that the table knows and the matrix does not."""
    first, *others = [cell.needs for cell in CELLS]
    varied = {f.name for f in fields(AttentionNeeds) if any(getattr(x, f.name) != getattr(first, f.name) for x in others)}
    elsewhere = {key for change in OTHER_MACHINES.values() for key in change}
    assert varied | elsewhere | {"gpu", "largest"} == {f.name for f in fields(AttentionNeeds)}, "these two are only for auto"
    asked = set().union(*(needs.asked for needs in others), WANTED.asked, LESSER)
    # The right bits are no matter of tolerance (invariant/test_kv_blocks.py), and several ranks divide keys
    # (context_parallel/).
    assert asked | {Feature.DETERMINISTIC, Feature.CONTEXT_PARALLEL} == set(Feature)


def test_one_backend_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a library whose splits depend on the batch, taken for a text that must not depend on it."""
    fake_flash.install(monkeypatch)
    needs = AttentionNeeds(
        torch.device("cuda"), torch.bfloat16, (9, 0), features=frozenset({Feature.DETERMINISTIC}), page_size=256
    )
    refused = {name: why_not(name, needs) for name in BACKENDS if name not in ("triton", "flashmla")}
    assert all("order that depends on the batch" in why and "deterministic=False" in why for why in refused.values()), refused
    assert [name for name in BACKENDS if Feature.DETERMINISTIC in TABLE[name].features] == ["triton"]
    assert choose_backend("auto", needs).name == "triton"


def test_command_line_and_settings_page_say_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a backend or KV dtype that no flag names, and a page that promises what the code refuses."""
    assert cli.main(["doctor", "--table"]) == 0
    table = capsys.readouterr().out.strip()
    page = (ROOT / "docs" / "SETTINGS.md").read_text()
    blocks = re.findall(r"<!-- capabilities:[^>]*-->\n(.*?)\n<!-- /capabilities -->", page, re.S)
    assert blocks == [table], "docs/SETTINGS.md: put the output of `specdec doctor --table` between the markers"


# ---- what is answered, is right ----


def skip_what_is_absent(cell: MatrixCell) -> None:
    package = TABLE[cell.backend].machine.package
    if package and HAS_GPU and not installed(package):
        pytest.skip(f"{package} is not installed")


@pytest.mark.slow_cases(keep=20)
@pytest.mark.parametrize("cell", WALKED, ids=label)
def test_what_is_answered_equals_dense_masked_attention(cell: MatrixCell) -> None:
    """Keeps out: a combination that runs and reads other keys than its layers, its tree and its cache say."""
    skip_what_is_absent(cell)
    world = World(cell)
    q_THD, kv = world.inputs()
    world.check(world.forward(world.attention(make_backend(cell.backend)), q_THD, kv), q_THD, kv)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CAPTURED, ids=label)
def test_a_captured_pass_equals_dense_masked_attention(cell: MatrixCell) -> None:
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
    with capturing(graph):
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
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(("name", "kv"), [("fa2", "auto"), ("fa3", "auto"), ("fa3", "fp8"), ("fa4", "auto")])
def test_the_whole_runtime_on_flash_attn(name: str, kv: str, graphs: Any, tmp_path: Path) -> None:
    """Keeps out: a library that is compiled, or asks the device, in a capture; text of its own beyond near-ties."""
    package = TABLE[name].machine.package
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
