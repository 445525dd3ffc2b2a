"""Mamba-2's rule and Kimi's over trees, parts and whole rows against each rule, run along each path alone, in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from toolkit.recurrent.made import path_to, random_tree, steps_of, trash_steps
from torch import Tensor

from specdec.ops.recurrent import kimi_delta, ssd
from specdec.ops.recurrent.kimi_delta import KimiGates
from specdec.ops.recurrent.ssd import SsdGates
from specdec.ops.recurrent.states import ChunkSteps, RuleStates

G, H, K, V = 2, 4, 8, 6  # Kimi's rule: H key heads, and V as wide as K
TEXT = tuple[Tensor, ...]


class Ssd:
    """Mamba-2 on y (C of all groups, B, x of all heads) and dt."""

    rule, widths, key_heads, value_width, decays = ssd, (2 * G * K + H * V, H), G, V, (H,)

    def __init__(self) -> None:
        self.A_log, self.dt_bias, self.D = torch.rand(H).mul(3), torch.rand(H), torch.randn(H)

    def gates(self, text: TEXT) -> SsdGates:
        return SsdGates(text[1], self.A_log, self.dt_bias, self.D)

    def whole(self, y_BNC: Tensor, text: TEXT) -> Tensor:
        return ssd.row_outputs(y_BNC, self.gates(text), G, K)

    def one_by_one(self, text: TEXT) -> tuple[Tensor, Tensor]:
        """(outputs [M, H, V], the state after each token [M, H, K, V])."""
        state, outputs, states = torch.zeros(H, K, V), [], []
        for y, dt in zip(*text, strict=True):
            C, B, x = y[: G * K].view(G, K), y[G * K : 2 * G * K].view(G, K), y[2 * G * K :].view(H, V)
            for h in range(H):
                step, g = F.softplus(dt[h] + self.dt_bias[h]), h // (H // G)
                state[h] = (-self.A_log[h].exp() * step).exp() * state[h] + torch.outer(B[g], step * x[h])
                outputs.append(C[g] @ state[h] + self.D[h] * x[h])
            states.append(state.clone())
        return torch.stack(outputs).view(-1, H, V), torch.stack(states)


class Kimi:
    """Kimi's rule on y (queries, keys, values of all heads), the decays' projection and that of strengths."""

    rule, widths, key_heads, value_width, decays = kimi_delta, (3 * H * K, H * K, H), H, K, (H, K)

    def __init__(self) -> None:
        self.A_log, self.dt_bias = torch.rand(H).mul(3), torch.rand(H * K)

    def gates(self, text: TEXT) -> KimiGates:
        return KimiGates(text[1], text[2], self.A_log, self.dt_bias)

    def whole(self, y_BNC: Tensor, text: TEXT) -> Tensor:
        return kimi_delta.row_outputs(y_BNC, self.gates(text), H, K)

    def one_by_one(self, text: TEXT) -> tuple[Tensor, Tensor]:
        state, outputs, states = torch.zeros(H, K, K), [], []
        for y, a, b in zip(*text, strict=True):
            for h, (q, k, v) in enumerate(y.view(3, H, K).unbind(1)):
                q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
                own = slice(h * K, (h + 1) * K)
                faded = (-self.A_log[h].exp() * F.softplus(a[own] + self.dt_bias[own])).exp()[:, None] * state[h]
                state[h] = faded + torch.outer(k, b[h].sigmoid() * (v - k @ faded))
                outputs.append(q * K**-0.5 @ state[h])
            states.append(state.clone())
        return torch.stack(outputs).view(-1, H, K), torch.stack(states)


def memory_of(rule: Any, numbers: int, nodes: int) -> RuleStates:
    """Full of NaN, but for the state before any text."""
    shapes = (H, K, rule.value_width), (nodes, rule.key_heads, K), (nodes, H, rule.value_width), (nodes, *rule.decays)
    memory = RuleStates(*(torch.full((numbers, *shape), torch.nan) for shape in shapes))
    memory.state_PHKV[0] = 0
    return memory


def text_of(rule: Any, tokens: int) -> TEXT:
    """With one decay of e^-100 and less."""
    text = tuple(torch.randn(tokens, width) * 2 for width in rule.widths)
    text[1][tokens // 2] += 90
    return text


def close(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got, want, atol=1e-9, rtol=1e-9)


@pytest.fixture(autouse=True)
def wide() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", [Ssd, Kimi])
def test_nodes_and_commits(kind: Any) -> None:
    """Keeps out: a node that sees a node beside its path, a path added twice or not at all, a decay of another channel, a
    difference of decays that overflows between branches, and memory that nobody has written reaching an output.
    """
    torch.manual_seed(1)
    rng, rule = random.Random(1), kind()
    memory = memory_of(rule, 6, 33)
    texts: list[TEXT] = [tuple(torch.empty(0, width) for width in rule.widths)] * 2
    numbers, paths = [[0, 2, 3], [0, 4, 5]], [[], []]
    for nodes, chain in ((1, True), (6, True), (33, False), (2, False)):
        trees = [random_tree(nodes, rng, chain) for _ in texts]
        steps = steps_of(trees, [(read, write) for read, write, _ in numbers], paths, places=33)
        new = text_of(rule, 2 * nodes)
        out = rule.rule.tree_outputs(new[0], rule.gates(new), memory, steps).unflatten(0, (2, nodes))
        for row, tree in enumerate(trees):
            own = [part.unflatten(0, (2, nodes))[row] for part in new]
            for node in range(nodes):
                path = path_to(tree, node)
                want, _ = rule.one_by_one(tuple(torch.cat((old, part[path])) for old, part in zip(texts[row], own)))
                assert close(out[row, node], want[-1])
            read, write, other = numbers[row]
            if len(texts[row][0]):
                assert close(memory.state_PHKV[write], rule.one_by_one(texts[row])[1][-1])
            numbers[row], paths[row] = [write, other, write], path_to(tree, rng.randrange(nodes))
            texts[row] = tuple(torch.cat((old, part[paths[row]])) for old, part in zip(texts[row], own))


@pytest.mark.parametrize("kind", [Ssd, Kimi])
def test_parts_are_one_text(kind: Any) -> None:
    """Keeps out: a part that begins from another state than its text's, a block's border that shows, a kept state of another
    place, and whole rows that differ from both.
    """
    torch.manual_seed(2)
    rule, cuts = kind(), (70, 1, 9)
    text, memory = text_of(rule, sum(cuts)), memory_of(rule, 5, 1)
    outputs, states = rule.one_by_one(text)
    assert close(rule.whole(text[0][None], text)[0], outputs)
    done, read, write = 0, 0, 2
    for cut in cuts:
        keep_B, after_B = trash_steps(1)
        keep_B[0], after_B[0] = 4, (cut + 1) // 2
        cu_B1 = torch.tensor([0, cut], dtype=torch.int32)
        steps = ChunkSteps(torch.tensor([read]), torch.tensor([write]), cu_B1, keep_B, after_B, cut)
        part = tuple(torch.cat((each[done : done + cut], each[:2])) for each in text)  # padding last
        out = rule.rule.chunk_outputs(part[0], rule.gates(part), memory, steps)
        assert close(out[:cut], outputs[done : done + cut])
        assert close(memory.state_PHKV[write], states[done + cut - 1])
        assert close(memory.state_PHKV[4], states[done + (cut + 1) // 2 - 1])
        done, read, write = done + cut, write, 5 - write


@pytest.mark.parametrize("kind", [Ssd, Kimi])
def test_a_broken_node_reaches_those_below_it_alone(kind: Any) -> None:
    """Keeps out: NaN that goes through a product with a mask to a node beside it."""
    torch.manual_seed(3)
    rule = kind()
    tree = [0, 0, 1, 0, 3]  # 1 is broken, 2 is below it
    clean = text_of(rule, 5)
    for part in range(len(rule.widths)):
        broken = tuple(each.clone() for each in clean)
        broken[part][1] = torch.nan
        got, want = (
            rule.rule.tree_outputs(text[0], rule.gates(text), memory_of(rule, 4, 5), steps_of([tree], [(0, 2)], [[]], 5))
            for text in (broken, clean)
        )
        assert close(got[[0, 3, 4]], want[[0, 3, 4]]) and got[1].isnan().any()
