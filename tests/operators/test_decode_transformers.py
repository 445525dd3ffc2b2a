"""Decode passes of targets that run through transformers' code: exported, saved and loaded, against transformers itself."""

from io import BytesIO
from pathlib import Path

import pytest
import torch
from toolkit.families import Families, eager
from toolkit.operators.passes import PAGE, VOCAB, check, copied, directly, inputs
from toolkit.oracles.encoder_decoders import save_encoder_decoder
from toolkit.own_attention.targets import save
from toolkit.trees import random_masks

from specdec.operators import DecodePass, export_decode

# Windows beside full layers and softcaps; sinks and experts; chunks and counted positions; shared keys; and fp8.
# An export takes 5 to 30 seconds of a CPU: the first two run there too.
CASES = [
    ("gemma2", "auto"), ("gemma3n", "int8"), ("gpt-oss", "auto"), ("llama4", "auto"), ("qwen3", "fp8"), ("gemma4", "auto"),
    ("mixtral", "auto"), ("phi3-longrope", "auto"),
]  # fmt: skip


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"), is_shallow=True)


def decode_pass(families: Families, name: str, dtype: str, device: str = "cpu") -> DecodePass:
    return DecodePass.from_pretrained(
        families.target(name), PAGE, dtype, max_positions=128, device=device, backend="transformers"
    )


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES[:2])
def test_a_saved_program_serves_all_shapes(families: Families, name: str, dtype: str) -> None:
    """Keeps out: sizes, a window's keys or another layer's keys frozen into the graph; transformers' own attention in it."""
    decode, file = decode_pass(families, name, dtype), BytesIO()
    exported = export_decode(decode)
    attention = [node for node in exported.graph.nodes if str(node.target) == "specdec.paged_attention.default"]
    assert len(attention) == decode.target.config.num_layers
    torch.export.save(exported, file)
    file.seek(0)
    program = torch.export.load(file).module()
    for lens, N in (([5, 0, 9], 1), ([1, 30], 4), ([3] * 6, 7)):
        check(decode, program, inputs(decode, lens, N), 1e-4)


def test_a_program_computes_what_transformers_computes(families: Families) -> None:
    """Chunks beside full layers.  Keeps out: a program that equals our own pass in a mistake; keys of a prompt that a later
    call does not find."""
    decode = decode_pass(families, name := "llama4", "auto")
    program, generator = export_decode(decode).module(), torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (1, 21), generator=generator)
    table_BW, cache = torch.randperm(6, dtype=torch.int32)[None], decode.new_cache(6 * PAGE)
    parts = [
        program(part, table_BW, torch.tensor([start], dtype=torch.int32), cache)
        for start, part in ((0, ids[:, :14]), (14, ids[:, 14:15]), (15, ids[:, 15:]))
    ]
    with torch.no_grad():
        want = eager(families.target(name))(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_slopes_are_those_of_the_direct_pass(tmp_path: Path) -> None:
    """Keeps out: distances (ALiBi) of other rows or of places in the pass, and heads whose slopes are exchanged."""
    name = "falcon-rw-odd"  # heads that are no power of two
    check_tree(DecodePass.from_pretrained(save(tmp_path / name, name, layers=1), PAGE, max_positions=128))


@pytest.mark.slow
def test_a_node_of_a_tree_gets_the_logits_of_its_path(families: Families) -> None:
    """Keeps out: positions by place instead of depth in transformers' rotations, and a node that sees a sibling."""
    check_tree(decode_pass(families, "gemma2", "auto"))


def check_tree(decode: DecodePass) -> None:
    """A node of a tree gets the logits of its path alone."""
    program = export_decode(decode, trees=True).module()
    given, masks_BNN = inputs(decode, [9, 0, 17], 6), random_masks(3, 6, seed=6)
    with torch.no_grad():
        logits_BNV = program(*copied(given), masks_BNN)
    for b, node in ((0, 0), (0, 5), (1, 3), (2, 4)):
        path = masks_BNN[b, node].nonzero()[:, 0]
        alone = (given[0][b : b + 1, path], given[1][b : b + 1], given[2][b : b + 1], copied(given)[3])
        torch.testing.assert_close(logits_BNV[b, node], directly(decode, alone)[0, -1], rtol=1e-4, atol=1e-4)


def test_compiling_is_refused_with_what_works(families: Families) -> None:
    """Keeps out: a failure deep inside of transformers' code, or a target that runs uncompiled where a graph was asked for."""
    decode = decode_pass(families, "gemma2", "auto")
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"torch.compile\(export_decode\(decode\).run_decompositions"),
    ):
        torch.compile(decode, fullgraph=True, backend="aot_eager")(*inputs(decode, [5]))


def test_a_target_with_an_encoder_is_refused(tmp_path: Path) -> None:
    """Keeps out: a failure in the middle of a trace for an encoder's text."""
    folder = save_encoder_decoder(tmp_path / "bart", "bart")
    with pytest.raises(
        ValueError, match="got family 'bart' with an encoder; nearest setting that works: run it by SpecDecoder"
    ):
        DecodePass.from_pretrained(folder, PAGE, max_positions=64)


def test_code_that_torch_cannot_export_is_refused(families: Families) -> None:
    """Keeps out: pages of torch's words for a model whose code reads a value on the host."""
    decode = decode_pass(families, "qwen3", "auto")
    norm = decode.target.decoder.norm
    norm.register_forward_hook(lambda _module, _args, out: out if float(out.sum()) > 0 else -out)
    with pytest.raises(ValueError, match="family 'qwen3' can't be exported through transformers' code .*run it by SpecDecoder"):
        export_decode(decode, batch=1, num_tokens=1)


@pytest.mark.slow_cases(keep=0)
def test_an_exported_program_can_be_compiled(families: Families) -> None:
    """Keeps out: the way that the refusal names, if it does not work."""
    decode = decode_pass(families, "qwen3", "auto")
    torch._dynamo.reset()
    program = torch.compile(export_decode(decode).run_decompositions().module(), fullgraph=True, backend="aot_eager")
    for lens, N in (([5, 0, 9], 1), ([1, 30], 4)):
        check(decode, program, inputs(decode, lens, N), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_on_a_gpu_a_program_equals_the_direct_pass(families: Families, name: str, dtype: str) -> None:
    """Keeps out: a host read in transformers' code, or kernels that find another cache than in a direct pass."""
    decode = decode_pass(families, name, dtype, "cuda")
    program = export_decode(decode).module()
    for lens, N in (([5, 0, 9], 1), ([1, 30], 4)):
        check(decode, program, inputs(decode, lens, N), 1e-3)
