"""The shape of the draft tree.  Every ValueError about a shape alone is raised here.

Knows no drafter, so what one of them can't grow is refused where it is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from specdec import checks
from specdec.limits import MAX_AUTO_STEPS, MAX_PAUSE, MAX_STEPS

AUTO_CHAINS, AUTO_TREES = (1, 2, 3, 4, 5, 7, 10), (3, 5, 7)  # the levels of the chains and trees that "auto" chooses from
AUTO_ROOMY = (1, 3)  # and of chains that have the nodes of trees, where other sources fill these
MIN_NODES = min(AUTO_TREES) + 2  # of a tree that "auto" chooses from: with one less, it is a chain
MIN_AUTO_TREE = 8  # trees have as many nodes as allowed, half of them, and so on, but no fewer than this by halving


@dataclass(frozen=True, init=False, repr=False)
class SpecConfig:
    """The shape of the draft tree, in EAGLE's three numbers and, where a drafter is not the only source, a fourth.

    num_steps: S, levels of the tree (an accepted path holds at most S draft tokens).  "auto" chooses the shape of each round
    among `shapes`, or plain decoding, by batch size, from what rounds cost and how far drafts were accepted lately.
    topk: k, branches kept per level; 1 is a chain.  With "auto", the most of them; chains are chosen too.
    num_draft_tokens: nd, nodes verified per round, the root included; with "auto", the most of them.  None for what suits the
    other two: all of a chain, or the best 16 nodes of a tree, all if it has fewer.  Once made, it is always a number.
    max_depth: the deepest level that paths of other sources than the drafter may reach; num_steps stays the drafter's own.
    None: as deep as the nodes allow, where there are other sources.  With "auto", of every shape, as far as its nodes allow.
    """

    num_steps: int | Literal["auto"]
    topk: int
    num_draft_tokens: int
    max_depth: int | None

    def __init__(
        self, num_steps: int | Literal["auto"] = 5, topk: int = 4, num_draft_tokens: int | None = None,
        max_depth: int | None = None,
    ) -> None:  # fmt: skip
        if isinstance(num_steps, str) and num_steps != "auto":
            number = num_steps.strip()
            near = min(max(int(number), 1), MAX_STEPS) if number.isdecimal() and len(number) < 10 else "auto"
            raise ValueError(f"num_steps must be an int or 'auto', got {num_steps!r}; nearest setting: {near!r}")
        if num_steps is None:
            raise TypeError("num_steps must be an int or 'auto', got None; nearest setting that works: 'auto'")
        S = num_steps if num_steps == "auto" else checks.require_int("num_steps", num_steps, 1, MAX_STEPS)
        k = checks.require_int("topk", topk, 1, 64)
        most = _candidates(MAX_AUTO_STEPS if S == "auto" else S, k) + 1
        if num_draft_tokens is None:
            nd = most if k == 1 else min(16, most)
        else:
            nd = checks.require_int("num_draft_tokens", num_draft_tokens, 2, 1024)
        if max_depth is not None and S != "auto":
            max_depth = self._checked_depth(S, k, nd, max_depth)
            checks.store(self, num_steps=S, topk=k, num_draft_tokens=nd, max_depth=max_depth)
            return
        if k == 1 and nd != most and S != "auto":
            other = f", or num_steps={nd - 1}" if nd - 1 <= MAX_STEPS else ""
            raise ValueError(
                f"num_draft_tokens must be num_steps + 1 = {most} when topk=1 (a chain, and its root), got {nd}; "
                f"nearest setting that works: num_draft_tokens={most}{other}"
            )
        if nd > most:
            raise ValueError(
                f"num_draft_tokens - 1 must be at most topk + topk*topk*(num_steps-1) = {most - 1}, the candidates of a tree "
                f"with num_steps={S} and topk={k}; got num_draft_tokens={nd}; "
                f"nearest setting that works: num_draft_tokens={most}"
            )
        if S == "auto" and k > 1 and nd < MIN_NODES:
            raise ValueError(
                f"topk={k} would do nothing with num_steps='auto' and num_draft_tokens={nd}: a tree among those it chooses "
                f"from has {MIN_NODES} nodes at least; nearest settings that work: topk=1, or num_draft_tokens={MIN_NODES}"
            )
        depth = None if max_depth is None else checks.require_int("max_depth", max_depth, 1, min(nd - 1, MAX_STEPS))
        checks.store(self, num_steps=S, topk=k, num_draft_tokens=nd, max_depth=depth)

    def __repr__(self) -> str:
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        said = ", ".join(f"{name}={number!r}" for name, number in numbers.items() if number is not None)
        return f"SpecConfig({said})"

    @staticmethod
    def _checked_depth(S: int, k: int, nd: int, max_depth: int) -> int:
        """max_depth beside the other three numbers.  ValueError if they do not fit."""
        most, deepest = _candidates(S, k) + 1, min(nd - 1, MAX_STEPS)
        if k == 1 and nd < most:
            raise ValueError(
                f"num_draft_tokens must be at least num_steps + 1 = {most} when topk=1 (a chain and its root), got {nd}; "
                f"nearest setting that works: num_draft_tokens={most}"
            )
        depth = checks.require_int("max_depth", max_depth, min(S, deepest), deepest)
        if nd > most and depth < nd - 1:
            raise ValueError(
                f"num_draft_tokens must be at most {max(most, depth + 1)} with max_depth={depth}: the drafter gives at most "
                f"{most} nodes, and a path {depth + 1} with the root; got {nd}; nearest setting that works: "
                f"num_draft_tokens={max(most, depth + 1)}"
            )
        return depth

    @property
    def levels(self) -> int:
        """The most levels that a tree can have, whoever proposes them."""
        return max(self.max_steps, self.max_depth or 0)

    @property
    def is_chain(self) -> bool:
        """Whether trees are chains, whatever their tokens are."""
        return self.topk == 1 and self.max_depth is None

    @property
    def of_drafter(self) -> SpecConfig:
        """The shape that the drafter alone grows."""
        if self.max_depth is None:
            return self
        if self.num_steps == "auto":
            return SpecConfig(self.num_steps, self.topk, self.num_draft_tokens)
        most = _candidates(self.max_steps, self.topk) + 1
        return SpecConfig(self.num_steps, self.topk, most if self.topk == 1 else min(most, self.num_draft_tokens))

    @property
    def joined(self) -> SpecConfig:
        """The shape with room for other sources: paths as deep as the nodes allow, unless it says how deep."""
        if self.max_depth is not None:
            return self
        return SpecConfig(self.num_steps, self.topk, self.num_draft_tokens, min(self.num_draft_tokens - 1, MAX_STEPS))

    @property
    def is_auto(self) -> bool:
        return self.num_steps == "auto"

    @property
    def max_steps(self) -> int:
        """The most levels a tree can have."""
        return min(MAX_AUTO_STEPS, self.num_draft_tokens - 1) if self.num_steps == "auto" else self.num_steps

    @property
    def shapes(self) -> tuple[SpecConfig, ...]:
        """What "auto" chooses from, besides plain decoding; any other shape itself.

        Neighbours are so close that the best of them is hardly worse than the best of all.
        """
        if self.num_steps != "auto":
            return (self,)
        if self.max_depth is not None:
            return self._joined_shapes(self.max_depth)
        chains = [SpecConfig(levels, 1) for levels in AUTO_CHAINS if levels <= self.max_steps]
        trees, nodes, topk = list[SpecConfig](), self.num_draft_tokens, self.topk
        while topk > 1 and (nodes == self.num_draft_tokens or nodes >= MIN_AUTO_TREE):
            for levels in AUTO_TREES:
                if levels <= self.max_steps and levels + 1 < nodes <= _candidates(levels, topk) + 1:
                    trees.append(SpecConfig(levels, topk, nodes))
            nodes //= 2
            topk = min(self.topk, max(2, nodes // 4))
        return (*chains, *trees)

    def _joined_shapes(self, max_depth: int) -> tuple[SpecConfig, ...]:
        """Those of a drafter alone, joined by paths; and short chains with room for paths, which take few of its passes."""
        own, most = self.of_drafter.shapes, min(max_depth, MAX_STEPS)
        numbers = [(shape.max_steps, shape.topk, shape.num_draft_tokens) for shape in own]
        for room in sorted({self.num_draft_tokens, *(shape.num_draft_tokens for shape in own if shape.topk > 1)}):
            numbers += [(levels, 1, nodes) for levels in AUTO_ROOMY if levels + 1 < (nodes := min(room, most + 1))]
        return tuple(SpecConfig(S, k, nd, max(S, min(most, nd - 1))) for S, k, nd in dict.fromkeys(numbers))

    @property
    def spare_nodes(self) -> int:
        """How many nodes a tree has that a chain as deep as the drafter's has not."""
        return self.num_draft_tokens - self.max_steps - 1

    @property
    def numbers(self) -> tuple[int | str, ...]:
        """S, k and nd, and max_depth where it has one: how records name a shape."""
        return (self.num_steps, self.topk, self.num_draft_tokens, *(() if self.max_depth is None else (self.max_depth,)))

    @property
    def label(self) -> str:
        """The same as tables write it."""
        return ",".join(map(str, self.numbers))

    @property
    def lookahead(self) -> int:
        """How many KV slots after the last token that the host knows of must be free for rounds to write to.

        A round writes the nodes it verifies, the draft's branches, and the rows by which the draft follows the target.  It
        may begin as many tokens later as a round emits at most, since the round before it has not been read yet.
        """
        emits, branches = self.levels + 1, self.topk * (self.max_steps - 1)
        return max(self.num_draft_tokens, branches, emits, MAX_PAUSE if self.is_auto else 0) + emits


def _candidates(steps: int, topk: int) -> int:
    """How many draft tokens a tree can choose from: topk at the first level, topk for each of topk branches at the others."""
    return topk + topk * topk * (steps - 1) if topk > 1 else steps


def require_shape(name: str, value: Any) -> SpecConfig:
    """A shape that is not "auto": a SpecConfig, or its numbers S, k, nd and max_depth in a list, the last two of which may be
    left out.  ValueError or TypeError for anything else.
    """
    expected = f"{name} must be a SpecConfig, or a list of its numbers such as [5, 4, 16]"
    if isinstance(value, SpecConfig):
        made = value
    elif not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{expected}, got {checks.shown(value)} of type {type(value).__name__}")
    elif not 2 <= len(value) <= 4:
        raise ValueError(f"{expected}, got {checks.shown(value)}; nearest setting that works: [5, 4, 16]")
    else:
        made = SpecConfig(*value)
    if made.is_auto:
        raise ValueError(f"{name} must be one shape, got {made!r}; nearest setting that works: [5, {made.topk}]")
    return made


def require_shapes(name: str, value: Any) -> tuple[SpecConfig, ...]:
    """Some shapes, each as of `require_shape`, or all in one text such as "3,1 5,8,32".  ValueError or TypeError."""
    if isinstance(value, str):
        try:
            value = [[int(number) for number in each.split(",")] for each in value.split()]
        except ValueError:
            fits = "nearest setting that works: '3,1 5,8,32'"
            raise ValueError(f"{name} must be shapes with spaces between, got {checks.shown(value)}; {fits}") from None
    if not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of shapes, got {checks.shown(value)} of type {type(value).__name__}")
    made = tuple(require_shape(f"{name}[{index}]", each) for index, each in enumerate(value))
    if not made or len(set(made)) < len(made):
        raise ValueError(f"{name} must hold a shape or more, each once, got {checks.shown(value)}; nearest: leave it out")
    return made


def largest(shapes: Iterable[SpecConfig]) -> SpecConfig:
    """The one with the most nodes; of those with as many, the one with the most levels, then with the most branches."""
    return max(shapes, key=lambda shape: (shape.num_draft_tokens, shape.levels, shape.max_steps, shape.topk))
