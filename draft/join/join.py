"""A drafter's tree and paths from other sources become one tree: nodes are joined by (parent, token), and the best are kept.

Survival goes down the tree step by step: a node's is its parent's, times the larger of what its sources say of that step.  So a
path that the drafter and a match agree on is worth more, and so is what either of them proposes after it.

This is pure tensor code over tokens, parents and scores; on a GPU it is one launch of join_triton.py, and of trees one that
keeps the best nodes.  It knows bits of sources, and none of them.

Shapes: B sequences, N nodes of the drafter's tree, P paths of each sequence, D tokens of a path, C candidates of both.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates
from specdec.ops.index import arange
from specdec.ops.launch import use_kernels

MAX_KERNEL_NODES = 256  # threshold: a program holds all of a drafter's tree in registers
SHIFT = 32  # a candidate's sources stand so many bits above its token, so that both stay together
DRAFTER = 1  # the bit of the drafter among a node's sources
ALL_SOURCES = -1  # the bits of a row that takes what any source proposes
OFF = -1e6  # the logarithm of a step that only sources propose which the row does without: it fills a tree, and no more
MIN_SCORE = -1e30  # in place of a score that is no number: still above those of places that hold no node


def joined_tree(tree: DraftTree, tokens_BPD: Tensor, steps_BPD: Tensor, bits_P: Tensor, num_nodes: int) -> DraftTree:
    """The best num_nodes nodes of a drafter's tree and of paths, the root included.

    tokens_BPD: int64, what each path proposes after the root, which is the tree's; -1 from a path's end on, and those after D
        mean nothing.  The last path is the drafter's own if its tree is a chain without scores, and else empty.
    steps_BPD: float32, at most 0, the logarithm of how likely each token is, given those before it; as deep as paths are.
    bits_P: int64, what a node's sources hold if the path proposes it; DRAFTER is the drafter's own.
    num_nodes: at most N, or at most D + 1 if some path of each sequence has D tokens: so there are as many nodes whatever paths
        and tree have in common.
    """
    N, D = tree.num_nodes, steps_BPD.shape[2]
    assert num_nodes <= max(N, D + 1)
    root_B, max_depth = tree.tokens_BN[:, 0], min(num_nodes - 1, max(tree.max_depth, D))
    if N <= MAX_KERNEL_NODES and use_kernels(steps_BPD):
        from specdec.draft.join.join_triton import launch_candidates

        candidates = launch_candidates(tree, tokens_BPD, steps_BPD, bits_P)
        return best_nodes(candidates, root_B, num_nodes, max_depth, SHIFT)
    tree = with_scores(tree, steps_BPD[:, -1])
    tokens_BPD = tokens_BPD[:, :-1, :D]
    steps_BPD = agreed_steps(tokens_BPD, steps_BPD[:, :-1])
    nodes_BPD = nodes_of_paths(tree, tokens_BPD)
    scores_BN = raised_scores(tree, nodes_BPD, steps_BPD)
    candidates = candidates_of(tree, scores_BN, nodes_BPD, tokens_BPD, steps_BPD, bits_P)
    return best_nodes(candidates, root_B, num_nodes, max_depth, SHIFT)


def joined_chain(tree: DraftTree, tokens_BPD: Tensor, steps_BPD: Tensor, bits_P: Tensor) -> DraftTree:
    """The chain that is expected to be followed furthest, of paths and of a drafter's chain, as which it goes on where it ends.

    tree: a chain without scores.  The other arguments: see `joined_tree`.
    """
    assert tree.is_chain and tree.scores_BN is None
    if use_kernels(steps_BPD):
        from specdec.draft.join.join_triton import launch_joined_chain

        tokens_BN, sources_BN = launch_joined_chain(tree.tokens_BN, tokens_BPD, steps_BPD, bits_P)
        return replace(DraftTree.chain(tokens_BN), sources_BN=sources_BN)
    tokens_BPD, steps_BPD = (x_BPD[..., : tree.max_depth] for x_BPD in (tokens_BPD, steps_BPD))
    worth_BP = torch.where(tokens_BPD >= 0, steps_BPD.cumsum(-1).exp(), 0.0).sum(-1)
    best_BD = torch.take_along_dim(tokens_BPD, worth_BP.argmax(1)[:, None, None], dim=1)[:, 0]
    best_BN = F.pad(best_BD, (1, 0), value=-1)  # the root is the tree's, as is what comes after the path's end
    tokens_BN = torch.where(best_BN < 0, tree.tokens_BN, best_BN)
    is_there_BPD = (tokens_BPD == tokens_BN[:, None, 1:]).cumprod(-1)
    sources_BD = (best_BD < 0) * DRAFTER
    for p in range(tokens_BPD.shape[1]):
        sources_BD = sources_BD | is_there_BPD[:, p] * bits_P[p]
    return replace(DraftTree.chain(tokens_BN), sources_BN=F.pad(sources_BD, (1, 0)))


def with_scores(tree: DraftTree, steps_BD: Tensor) -> DraftTree:
    """The tree; a chain without scores has those of its steps."""
    if tree.scores_BN is not None:
        return tree
    assert tree.is_chain, "a drafter that branches has scores"
    sums_BS = steps_BD[:, : tree.max_depth].cumsum(-1)
    return replace(tree, scores_BN=torch.cat((torch.zeros_like(sums_BS[:, :1]), sums_BS), dim=1))


def nodes_of_paths(tree: DraftTree, tokens_BPD: Tensor) -> Tensor:
    """[B, P, D] int64: the node of the tree that each token of each path is, or -1 from where the path leaves the tree."""
    numbers_N = arange(tree.num_nodes, tokens_BPD.device)
    nodes_BPD = torch.full_like(tokens_BPD, -1)
    at_BP = torch.zeros_like(tokens_BPD[..., 0])
    for d in range(min(tree.max_depth, tokens_BPD.shape[2])):
        is_child_BPN = (tree.parents_BN[:, None] == at_BP[..., None]) & (tree.tokens_BN[:, None] == tokens_BPD[..., d, None])
        nodes_BPD[..., d] = at_BP = torch.where(is_child_BPN & (numbers_N > 0), numbers_N, -1).amax(-1)
    return nodes_BPD


def without_some(tree: DraftTree, steps_BPD: Tensor, bits_P: Tensor, allowed_B: Tensor) -> tuple[DraftTree, Tensor]:
    """The tree and the steps of rows that do without some sources: what these propose comes after all else.

    allowed_B: int64, the bits of the sources that each row has.  The other arguments: see `joined_tree`.
    """
    has_BP = (bits_P & allowed_B[:, None]) != 0  # the last path is the drafter's
    if tree.scores_BN is not None:
        fall_N = torch.full_like(tree.scores_BN[0], OFF).cumsum(0)  # along each path
        tree = replace(tree, scores_BN=torch.where(has_BP[:, -1:], tree.scores_BN, fall_N))
    return tree, torch.where(has_BP[..., None], steps_BPD, OFF)


def agreed_steps(tokens_BPD: Tensor, steps_BPD: Tensor) -> Tensor:
    """[B, P, D] float32: of paths that begin alike, each step that they share is the largest of theirs."""
    return torch.where(begin_alike(tokens_BPD), steps_BPD[:, None], -torch.inf).amax(2)


def begin_alike(tokens_BPD: Tensor) -> Tensor:
    """[B, P, P, D] bool: [b, p, q, d] says whether paths p and q are equal up to token d."""
    return (tokens_BPD[:, :, None] == tokens_BPD[:, None]).cumprod(-1).bool()


def raised_scores(tree: DraftTree, nodes_BPD: Tensor, steps_BPD: Tensor) -> Tensor:
    """[B, N] float32: the tree's scores, where each step counts as the source has it that expects most of it."""
    assert tree.scores_BN is not None
    scores_BN = tree.scores_BN.nan_to_num(MIN_SCORE, neginf=MIN_SCORE).clamp(MIN_SCORE, 0)
    own_BN = (scores_BN - scores_BN.gather(1, tree.parents_BN)).clamp(max=0)
    hit_BX, steps_BX = nodes_BPD.flatten(1), steps_BPD.flatten(1)
    steps_BX = torch.where(hit_BX >= 0, steps_BX, -torch.inf)  # what left the tree reaches no node
    own_BN = own_BN.scatter_reduce(1, hit_BX.clamp(min=0), steps_BX, "amax")
    own_BN[:, 0] = 0
    raised_BN = torch.zeros_like(own_BN)
    for _ in range(tree.max_depth):
        raised_BN = (raised_BN.gather(1, tree.parents_BN) + own_BN).clamp(min=MIN_SCORE)
    return raised_BN


def candidates_of(
    tree: DraftTree, scores_BN: Tensor, nodes_BPD: Tensor, tokens_BPD: Tensor, steps_BPD: Tensor, bits_P: Tensor
) -> Candidates:
    """The tree's nodes after the root, then a place for each token of each path; a candidate's sources stand above its token.

    A place counts where its path goes on and has left the tree, and no earlier path begins alike up to it; others have a score
    of -inf.  steps_BPD: those of `agreed_steps`, or a node that several paths have would be worth what its first one says.
    """
    (B, P, D), M, device = tokens_BPD.shape, tree.num_nodes - 1, tokens_BPD.device
    numbers_P = arange(P, device)
    first_BPD = torch.where(begin_alike(tokens_BPD), numbers_P[:, None], P).amin(2)  # the first path that begins alike
    is_own_BPD = (nodes_BPD < 0) & (first_BPD == numbers_P[:, None])
    is_new_BPD = is_own_BPD & (tokens_BPD >= 0)
    places_BPD = M + first_BPD * D + arange(D, device)  # where each token's candidate is, if it is no node of the tree
    own_BPD = torch.where(nodes_BPD < 0, places_BPD, nodes_BPD - 1)
    above_BPD = own_BPD.roll(1, -1)
    above_BPD[..., 0] = -1
    scores_BC = torch.cat((scores_BN[:, 1:], scores_BN.new_full((B, P * D), -torch.inf)), dim=1)
    sums_BPD = steps_BPD.cumsum(-1)
    for p in range(P):  # in order, since a path may go on after an earlier path's nodes
        start_B1 = (~is_own_BPD[:, p]).sum(1, keepdim=True)  # its first own place: those after it are its own too
        above_B1 = above_BPD[:, p].gather(1, start_B1.clamp(max=D - 1))
        before_B1 = torch.where(above_B1 < 0, 0.0, scores_BC.gather(1, above_B1.clamp(min=0)))
        skipped_B1 = torch.where(start_B1 > 0, sums_BPD[:, p].gather(1, (start_B1 - 1).clamp(min=0)), 0.0)
        added_BD = (before_B1 + sums_BPD[:, p] - skipped_B1).clamp(min=MIN_SCORE)
        added_BD = added_BD.minimum(before_B1)  # rounding must not lift a node above its parent
        scores_BC[:, M + p * D : M + (p + 1) * D] = torch.where(is_new_BPD[:, p], added_BD, -torch.inf)
    sources_BC = torch.cat((torch.full_like(tree.tokens_BN[:, 1:], DRAFTER), torch.zeros_like(tokens_BPD.flatten(1))), dim=1)
    for p in range(P):
        own_BC = torch.zeros_like(sources_BC).scatter_(1, own_BPD[:, p], 1)
        sources_BC |= own_BC * bits_P[p]
    return Candidates(
        tokens_BC=torch.cat((tree.tokens_BN[:, 1:], tokens_BPD.flatten(1)), dim=1) | sources_BC << SHIFT,
        scores_BC=scores_BC,
        parents_BC=torch.cat((torch.where(tree.parents_BN == 0, -1, tree.parents_BN - 1)[:, 1:], above_BPD.flatten(1)), dim=1),
    )
