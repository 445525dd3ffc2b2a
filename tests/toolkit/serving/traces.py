"""Traces of random trees, with texts that a page must not take for its own."""

from __future__ import annotations

import random

from specdec.generation import NodeTable, Round
from specdec.trace.trace import Trace, TracedText

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><b>",
    "\u202eright to left",
    "x" * 10_000,
    "\U0001f600\u200d",
    "{{DATA}}",
    '"\\',
]


def drawn_trace(chance: random.Random, texts: int) -> Trace:
    """A trace of random trees, with hostile texts."""
    made = []
    for _ in range(texts):
        rounds, tokens = [], [0]
        for _ in range(chance.randrange(1, 9)):
            nodes = chance.randrange(1, 20)
            parents = [0] + [chance.randrange(n) for n in range(1, nodes)]
            chosen = [chance.randrange(7) for _ in range(nodes)]
            ids = [chance.choice([chosen[parents[n]], 100 + n]) if n else tokens[-1] for n in range(nodes)]
            ids = [
                token if (parents[n], token) not in zip(parents[1:n], ids[1:n], strict=True) else 100 + n
                for n, token in enumerate(ids)
            ]
            names = chance.choice([("drafter",), ("drafter", "suffix")])
            sources = [0] * nodes if len(names) == 1 else [0, *([1 + n % 3 for n in range(nodes - 1)])]
            at, accepted = 0, 0
            while following := [n for n in range(1, nodes) if parents[n] == at and ids[n] == chosen[at]]:
                at, accepted = following[0], accepted + 1
            rounds.append(Round(len(tokens), accepted, NodeTable(ids, parents, chosen, [0.0] * nodes, sources), names))
            tokens += [chance.randrange(7) for _ in range(accepted + 1)]
        made.append(
            TracedText(
                chance.choice(HOSTILE),
                3,
                tokens,
                [chance.choice(HOSTILE) for _ in tokens],
                [0] * len(tokens),
                "eos",
                rounds,
                sources=[chance.choice(["", "suffix", "drafter+suffix"]) for _ in tokens],
            )
        )
    return Trace({"a": HOSTILE[0]}, {n: chance.choice(HOSTILE) for n in range(120)}, made)
