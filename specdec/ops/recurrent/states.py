"""What one recurrent layer keeps, addressed by number, and which numbers a pass reads and writes.  Knows no rule and no model.

A number names a state: that of the committed text of a sequence.  A pass never changes what it reads.  It reads one number of a
sequence and writes another, so a pass that is repeated, thrown away or failed has lost nothing.

The last verified path may still be missing in a state: it is *pending*.  The pass that wrote the state has left, beside it,
what each node of its tree would add, and the sequence knows which of the nodes were accepted.  The next pass adds them first.
So a state is read and written once a round.

Layers differ in their rule.  A state is a matrix for each head, onto which every rule adds products of a key and of what it
calls u (rule.py); before the rule stands a convolution, and some layers have nothing but it.

Shapes: P numbers, L of them that may hold nodes, H value heads, G key heads, K and V their widths, W inputs that the
convolution looks back, C its channels (before a rule 2 G K + H V: those of queries, keys and values), N nodes, E places on a
path, B sequences, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ConvStates(NamedTuple):
    """A convolution's memory, in the model's dtype.

    conv_PWC: the last inputs, the oldest first.  x_LNC: inputs of the last tree's nodes, of the first L numbers alone.
    """

    conv_PWC: Tensor
    x_LNC: Tensor


class RuleStates(NamedTuple):
    """A rule's memory, in float32 or wider.

    state_PHKV: the states.  The rest is what the nodes of the last tree left, in the order of the nodes, of the first L numbers
    alone: k_LNGK: their keys.  u_LNHV: what each adds with its key.  decay_LNH: log-decays, summed along each node's path, its
    own included; of a rule whose every key channel fades by itself, [L, N, H, K].
    """

    state_PHKV: Tensor
    k_LNGK: Tensor
    u_LNHV: Tensor
    decay_LNH: Tensor


class LayerStates(NamedTuple):
    """One layer's memory.  rule: None if the layer is a convolution and no more."""

    conv: ConvStates
    rule: RuleStates | None


class TreeSteps(NamedTuple):
    """A pass over a tree for each sequence, whose tokens are those of the first tree, then those of the second, ...

    All tensors are contiguous.

    read_B, write_B: int64 numbers.  No two sequences write one number, except TRASH (specdec/limits.py).
    parents_BN: int64; a parent comes before its children, and the root is its own.  max_depth, is_chain: see DraftTree.
    path_BE, count_B: int64, int32: the accepted nodes of the tree before, and how many they are; 0: nothing is pending, and
        read_B may be any number.
    """

    read_B: Tensor
    write_B: Tensor
    parents_BN: Tensor
    max_depth: int
    is_chain: bool
    path_BE: Tensor
    count_B: Tensor


class ChunkSteps(NamedTuple):
    """A pass over parts of texts, with nothing pending.  All tensors are contiguous.

    read_B, write_B: as of TreeSteps.  cu_B1: int32, cumulative counts of the parts' tokens; what follows them is padding.
    keep_B, after_B: int64, int32: a number that is to hold each part's state after so many of its tokens; TRASH, 0: none.
    most: the most tokens of a part; known to the host.
    """

    read_B: Tensor
    write_B: Tensor
    cu_B1: Tensor
    keep_B: Tensor
    after_B: Tensor
    most: int


def lie_whole(steps: TreeSteps | ChunkSteps) -> bool:
    """Whether the tensors that kernels read are contiguous.  They read no parents of chains, which all rows may share."""
    unread = steps.parents_BN if isinstance(steps, TreeSteps) and steps.is_chain else None
    return all(x.is_contiguous() for x in steps if isinstance(x, Tensor) and x is not unread)
