"""What recurrent layers launch, of the widths of Qwen3.5, Nemotron-3, Granite 4 and Kimi-Linear-48B-A3B: see passes.py.

Shapes: as of specdec/ops/recurrent/states.py.
"""

from __future__ import annotations

from specdec.ops.recurrent import kimi_delta, ssd
from specdec.ops.recurrent.conv import Convolution, chunk_convolution, tree_convolution
from specdec.ops.recurrent.gated_delta import Gates, chunk_outputs, tree_outputs
from specdec.ops.recurrent.gates.gated_norm import FALCON, KIMI, MAMBA, gated_norm
from specdec.ops.recurrent.gates.output_gate import gated_output
from specdec.ops.recurrent.kimi_delta import KimiGates
from specdec.ops.recurrent.ssd import SsdGates
from specdec.ops.recurrent.states import ChunkSteps, ConvStates, LayerStates, RuleStates, TreeSteps
from toolkit.ahead.made import counts, floats, halves, ids

G, H, WIDTH, TAPS = 16, 48, 128, 4  # key and value heads, their widths
CHANNELS = (2 * G + H) * WIDTH
SHAPES = ((1, 0, 1), (1, 0, 6), (6, 5, 6), (16, 15, 16), (32, 5, 6), (60, 7, 8))  # nodes, depth, places of a path
KIMI_HEADS = 32  # of 128 channels, too


def recurrent_layers() -> None:
    """Plain steps, chains and trees, and parts of prompts."""
    inputs = ConvStates(halves(80, TAPS - 1, CHANNELS), halves(66, 60, CHANNELS))
    memory = RuleStates(
        floats(80, H, WIDTH, WIDTH), floats(66, 60, G, WIDTH), floats(66, 60, H, WIDTH), floats(66, 60, H)
    )  # fmt: skip
    conv = Convolution(halves(TAPS, CHANNELS))
    for B in (1, 32):
        for N, depth, E in SHAPES:
            steps = TreeSteps(ids(B), ids(B), ids(B, N), depth, N == depth + 1, ids(B, E), counts(B))
            tree_convolution(halves(B * N, CHANNELS), conv, inputs, steps)
            gates = Gates(halves(B * N, H), halves(B * N, H), floats(H), floats(H))
            out = tree_outputs(halves(B * N, CHANNELS), gates, memory, steps)
            gated_norm(out, halves(B * N, H, WIDTH), halves(WIDTH), 1e-6)
    chunk = ChunkSteps(ids(4), ids(4), counts(5), ids(4), counts(4), 8192)
    chunk_convolution(halves(8192, CHANNELS), conv, inputs, chunk)
    chunk_outputs(halves(8192, CHANNELS), Gates(halves(8192, H), halves(8192, H), floats(H), floats(H)), memory, chunk)
    for T, R in ((1, None), (2048, None), (8192, ids(4))):  # of the attention beside these layers: 24 heads of 256
        gate = halves(T, 2 * 24 + 8, 256)[:, :24]
        gated_output(halves(T if R is None else 4, 24, 256), gate, R)


def mamba_layers() -> None:
    """As above, of Mamba-2: groups, heads of 64, states of so many numbers a channel."""
    for groups, heads, size in ((8, 64, 128), (1, 128, 128), (1, 48, 256)):
        memory = RuleStates(
            floats(80, heads, size, 64), floats(66, 60, groups, size), floats(66, 60, heads, 64), floats(66, 60, heads)
        )  # fmt: skip
        channels, weights = 2 * groups * size + heads * 64, (floats(heads), floats(heads), floats(heads))
        layer = LayerStates(ConvStates(halves(80, TAPS - 1, channels), halves(66, 60, channels)), memory)
        conv = Convolution(halves(TAPS, channels), halves(channels))
        for B in (1, 32):
            for N, depth, E in SHAPES:
                steps = TreeSteps(ids(B), ids(B), ids(B, N), depth, N == depth + 1, ids(B, E), counts(B))
                gates = SsdGates(halves(B * N, heads), *weights)
                ssd.convolved_tree_outputs(halves(B * N, channels), conv, gates, layer, steps)
        for T in (1, 2048):
            x, z, weight = (halves(*each, groups, heads * 64 // groups) for each in ((T,), (T,), ()))
            gated_norm(x, z, weight, 1e-5, MAMBA if size == 128 else FALCON)
            gated_norm(x.view(T, heads, 64), z.view(T, heads, 64), halves(64), 1e-5, KIMI)
            gated_output(x.view(T, 1, -1), z.view(T, 1, -1), silu=True)
        for B in (1, 4):  # one part is cut into stretches
            chunk = ChunkSteps(ids(B), ids(B), counts(B + 1), ids(B), counts(B), 8192)
            ssd.chunk_outputs(halves(8192, channels), SsdGates(halves(8192, heads), *weights), memory, chunk)


def kimi_layers() -> None:
    """As those above, without what is theirs, too."""
    heads, C = KIMI_HEADS, KIMI_HEADS * WIDTH
    memory = RuleStates(floats(80, heads, WIDTH, WIDTH), *(floats(66, 60, heads, WIDTH) for _ in range(3)))

    def gates(tokens: int) -> KimiGates:
        return KimiGates(halves(tokens, C), halves(tokens, heads), floats(heads), floats(C))

    for B in (1, 32):
        for N, depth, E in (*SHAPES, (32, 31, 8)):
            steps = TreeSteps(ids(B), ids(B), ids(B, N), depth, N == depth + 1, ids(B, E), counts(B))
            kimi_delta.tree_outputs(halves(B * N, 3 * C), gates(B * N), memory, steps)
    chunk = ChunkSteps(ids(4), ids(4), counts(5), ids(4), counts(4), 8192)
    kimi_delta.chunk_outputs(halves(8192, 3 * C), gates(8192), memory, chunk)
