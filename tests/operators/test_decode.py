"""A target's decode pass under torch.export and torch.compile equals the pass that the runtime runs, and transformers."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.deepseek import DEEPSEEKS, DeepseekZoo, save_deepseek
from toolkit.differential.defined import OPTIONS, OptionsZoo
from toolkit.models import FAMILIES, Zoo, save_target
from toolkit.operators.passes import PAGE, check, copied, directly, inputs, load
from toolkit.oracles.sharing import SHARING, SharingZoo
from toolkit.paths import ROOT
from toolkit.trees import random_masks

from specdec.operators import DecodePass, export_decode


def operators_in(program: torch.export.ExportedProgram) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph.nodes if str(node.target).startswith("specdec."))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Two layers: more only take longer to trace."""
    return Zoo(tmp_path_factory.mktemp("shallow"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random target of that name, from whichever zoo has it."""
    zoos = {DeepseekZoo: DEEPSEEKS, SharingZoo: SHARING, OptionsZoo: OPTIONS}
    made = [(kind(tmp_path_factory.mktemp(kind.__name__), **zoo.changes), names) for kind, names in zoos.items()]
    return lambda name: next((each for each, names in made if name in names), zoo).target(name)


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-dim80-biases", "auto"), ("mistral", "int8"), ("v3-dense-tied", "auto"), ("diffllama-gqa", "auto"),
     ("half", "int8"), ("all options", "auto")],
)  # fmt: skip
def test_one_exported_program_serves_all_shapes(folder: Callable[[str], Path], name: str, dtype: str) -> None:
    """Keeps out: a size, a table or a length frozen into the graph, and a layer that is stored in another layer's place."""
    decode = DecodePass(load(folder(name)), PAGE, dtype)
    program = export_decode(decode).module()
    for lens, N in (([5, 0, 9], 1), ([17], 1), ([1, 30], 4), ([3] * 6, 7)):
        check(decode, program, inputs(decode, lens, N))


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mistral", "auto"), ("v3-dense-tied", "auto"), ("qwen3", "int8"), ("alibi", "auto")],
)
def test_a_node_of_a_tree_gets_the_logits_of_its_path(folder: Callable[[str], Path], name: str, dtype: str) -> None:
    """Keeps out: a node that sees a sibling, positions by place instead of depth, windows that end in another branch."""
    decode = DecodePass(load(folder(name)), PAGE, dtype)
    program = export_decode(decode, trees=True).module()
    for lens, nodes in (([9, 0, 17], 6), ([12], 1), ([1, 3], 9)):
        given, masks_BNN = inputs(decode, lens, nodes), random_masks(len(lens), nodes, seed=nodes)
        with torch.no_grad():
            logits_BNV = program(*copied(given), masks_BNN)
        for b in range(len(lens)):
            for node in range(nodes):
                path = masks_BNN[b, node].nonzero()[:, 0]
                alone = (given[0][b : b + 1, path], given[1][b : b + 1], given[2][b : b + 1], copied(given)[3])
                torch.testing.assert_close(logits_BNV[b, node], directly(decode, alone)[0, -1], rtol=1e-4, atol=1e-4)


def test_a_program_writes_what_transformers_writes(zoo: Zoo) -> None:
    """Keeps out: a program that equals our own pass in a mistake; keys of a prompt that a later call does not find."""
    decode = DecodePass(load(zoo.target("llama")), PAGE)
    program, prompt = export_decode(decode).module(), [7, 1, 30, 22, 4]
    table_BW, cache = torch.tensor([[5, 2, 0, 3, 4, 1]], dtype=torch.int32), decode.new_cache(6 * PAGE)
    tokens, text = prompt, list[int]()
    for _ in range(12):
        lens_B = torch.tensor([len(prompt) + len(text) - len(tokens)], dtype=torch.int32)
        logits_BNV = program(torch.tensor([tokens]), table_BW, lens_B, cache)
        tokens = [int(logits_BNV[0, -1].argmax())]
        text += tokens
    assert text == zoo.greedy("llama", prompt, 12)


def test_a_graph_holds_operators_and_says_what_it_changes(zoo: Zoo) -> None:
    """Keeps out: kernels or their definitions spread over the graph, and a cache that the program changes undeclared."""
    decode = DecodePass(load(zoo.target("llama")), PAGE, "int8")
    program = export_decode(decode, batch=2, num_tokens=1, table_width=3, num_slots=24)
    L = decode.target.config.num_layers
    assert operators_in(program) == {
        "specdec.linear.default": 3 * L + 1, "specdec.gated_linear.default": L, "specdec.rms_norm.default": 1,
        "specdec.add_rms_norm.default": 2 * L, "specdec.rope_store.default": L, "specdec.paged_attention.default": L,
    }  # fmt: skip
    check(decode, program.module(), inputs(decode, [3, 8], extra=0))
    functional = program.run_decompositions()
    changed = functional.graph_signature.user_inputs_to_mutate
    assert len(changed) == 2 * L, "keys and values and their scales, of every layer"
    check(decode, functional.module(), inputs(decode, [3, 8], extra=0))


@pytest.mark.slow_cases(keep=1)
@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [("llama", "auto", "aot_eager"), ("mistral", "int8", "inductor")],  # inductor runs a C++ compiler
)
def test_compiled_whole_it_equals_the_direct_pass(tmp_path: Path, name: str, dtype: str, backend: str) -> None:
    """Keeps out: a graph break, a pass that inductor reorders around a store, and layers mixed up when sizes vary."""
    torch._dynamo.reset()
    save, layers = save_target if name in FAMILIES else save_deepseek, 1 if backend == "inductor" else 2
    decode = DecodePass(load(save(tmp_path, name, num_hidden_layers=layers)), PAGE, dtype)  # more only take longer to compile
    program = torch.compile(decode, fullgraph=True, backend=backend)
    for lens, N in (([5, 0, 9], 1), ([7, 20], 2), ([1, 6, 3, 8], 3)):  # sizes that change become symbols
        check(decode, program, inputs(decode, lens, N))


def test_tracing_leaves_nothing_behind(zoo: Zoo) -> None:
    """Keeps out: index tensors that a trace made, which have no memory, kept for the passes that run after it."""
    decode = DecodePass(load(zoo.target("mistral")), PAGE)
    given = inputs(decode, [2, 13, 4, 1, 1], 2)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(decode, fullgraph=True, backend="eager")(*copied(given))
        export_decode(decode, batch=5, num_tokens=2)
    check(decode, decode, given)


@pytest.mark.slow_cases(keep=0)
def test_a_saved_program_needs_the_operators_alone(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a program that only runs in the process that exported it."""
    decode = DecodePass(load(zoo.target("llama")), PAGE)
    given = inputs(decode, [5, 2])
    torch.export.save(export_decode(decode), tmp_path / "decode.pt2")
    torch.save((given, decode(*copied(given))), tmp_path / "case.pt")
    code = """if True:
        import sys, torch, specdec.operators
        given, want = torch.load("case.pt")
        with torch.no_grad():
            print((torch.export.load("decode.pt2").module()(*given) - want).abs().max().item() < 1e-5)
    """
    run: Any = dict(cwd=tmp_path, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-P", "-c", code], **run)
    assert done.stdout == "True\n", done.stderr


def test_what_a_decode_pass_cannot_do_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Keeps out: a failure deep inside a trace where the setting's name would have said it."""
    llama, latents = load(folder("llama")), load(folder("v3-dense-tied"))
    with pytest.raises(TypeError, match="target must be a Target, as load_chosen returns it, got Linear"):
        DecodePass(torch.nn.Linear(2, 2), PAGE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="page_size must be >= 1, got 0; nearest setting that works: page_size=1"):
        DecodePass(llama, 0)
    with pytest.raises(ValueError, match="'auto' or 'fp8' or 'int8' for a target of family 'llama', got 'fp8_ds_mla'"):
        DecodePass(llama, PAGE, "fp8_ds_mla")
    with pytest.raises(ValueError, match="'auto' for a target of family 'deepseek_v3', got 'int8'; nearest setting.*='auto'"):
        DecodePass(latents, PAGE, "int8")
    with pytest.raises(ValueError, match="batch must be >= 1, got 0"):
        export_decode(DecodePass(llama, PAGE), batch=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        ("qwen3", torch.float32, "eager"),
        ("mistral", torch.bfloat16, "eager"),
        ("llama-dim80-biases", torch.bfloat16, "inductor"),
    ],
)
def test_on_a_gpu_a_traced_pass_equals_the_direct_one(zoo: Zoo, name: str, dtype: torch.dtype, backend: str) -> None:
    """Keeps out: kernels in another order than in a direct pass, and a store that a later kernel does not see."""
    decode = DecodePass(load(zoo.target(name), "cuda", dtype), PAGE)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend=backend)
    for program in (export_decode(decode).module(), compiled):
        for lens, N in (([5, 0, 9], 1), ([7, 40], 1), ([1, 6], 3)):
            check(decode, program, inputs(decode, lens, N), tolerance)


def test_the_page_lists_every_operator_and_what_it_changes() -> None:
    """Keeps out: an operator that nobody finds, and a change of an argument that the page does not tell."""
    page = (ROOT / "docs" / "OPERATORS.md").read_text()
    rows = re.findall(r"^\| `specdec::(\w+)` \| (.*?) ?\|", page, re.M)
    told = {name: set(re.findall(r"`(\w+)`", changes)) for name, changes in rows}
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("specdec::")]
    changed = {
        schema.name.removeprefix("specdec::"): {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        for schema in schemas
    }
    assert told == changed
