"""What a step of a head's training reads and computes, and the evaluation on rows that no step reads.

This file knows losses, rows and states.  It knows neither optimizers nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.draft.block.head import BlockHead
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.head import DraftHead
from specdec.models.target import Target
from specdec.train.block_loss import Anchors, block_loss, choose_anchors
from specdec.train.selftext import SelfText
from specdec.train.settings import HeadRun
from specdec.train.states import StateStore, TargetStates
from specdec.train.step import products
from specdec.train.unroll import accept_length, head_loss

Loss = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]  # of a step's inputs: the loss, and counts of drafts (`unroll`)


def teacher_rows(model: Target, draft_ids_V: Tensor) -> Tensor:
    """[V, H]: by which final hidden states become the target's logits of these tokens, multipliers of logits included."""
    weight_VH, scale = model.lm_head.rows(draft_ids_V), model.config.logits_scale
    return weight_VH if scale == 1 else weight_VH * scale


def loss_of_head(model: Target, head: DraftHead, draft_ids_V: Tensor, run: HeadRun) -> Loss:
    """Of the tensors of TargetStates, and of Anchors for heads that draft in one pass."""
    weight_VH = teacher_rows(model, draft_ids_V)
    if isinstance(head, BlockHead):
        return lambda inputs: block_loss(
            head, TargetStates(*inputs[:4]), weight_VH, draft_ids_V, run.num_steps, run.decay, Anchors(*inputs[4:])
        )
    assert isinstance(head, Eagle3Head)
    return lambda inputs: head_loss(head, TargetStates(*inputs), weight_VH, draft_ids_V, run.num_steps, run.decay)


def objective(
    states: StateStore, loss_of: Loss, text: SelfText, run: HeadRun, precision: torch.dtype = torch.float32
) -> tuple[Callable[[int, Callable[[str], object]], tuple[Tensor, ...]], Callable[[], float]]:
    """Two functions: the inputs of a 0-based step, and the mean loss over the last rows, which are kept out of training.

    text: on the CPU.  The rows of a step follow from its number alone, so a resumed run reads on where it stopped; each epoch
    has all rows once, in an order of its own.  The second argument of the first function is told which part of a step is done.
    """
    train, is_block = len(text.rows_NT) - text.checked, run.kind != "eagle3"
    goals_NT = text.goals()

    def picked(picks_B: Tensor, generator: torch.Generator, mark: Callable[[str], object]) -> tuple[Tensor, ...]:
        places = choose_anchors(goals_NT[picks_B], run.anchors, generator) if is_block else ()
        at_B, *more = (_sent(each, states.device) for each in (picks_B, *places))
        mark("rows")
        seen = states.of(at_B)
        mark("target's states")
        assert seen.begins_B is not None
        return seen.rows_BT, seen.hidden_BTH, seen.features_BTF, seen.begins_B, *more

    def inputs_of(step: int, mark: Callable[[str], object] = lambda _: None) -> tuple[Tensor, ...]:
        generator = torch.Generator("cpu").manual_seed(run.seed * 1_000_003 + step)
        return picked(rows_of_step(step, run.batch, train, run.seed), generator, mark)

    def evaluate() -> float:
        generator = torch.Generator("cpu").manual_seed(run.seed)  # the same places at each evaluation
        picks = torch.arange(train, len(text.rows_NT), dtype=torch.int64, device="cpu")
        losses, counts = [], []
        for part in picks.split(run.batch):
            inputs = picked(part, generator, lambda _: None)
            with products(states.device, precision):  # with gradients, so that what runs is what steps run
                loss, counted = loss_of(inputs)
            losses.append(loss.detach() * len(part))
            counts.append(counted)
        length, shares = accept_length(torch.stack(counts).sum(0).cpu())
        by_depth = " ".join(f"{share:.3f}" for share in shares)
        print(
            f"greedy chains of {run.num_steps} on text kept out: {length:.3f} tokens a round, by depth {by_depth}", flush=True
        )
        return float(torch.stack(losses).sum()) / len(picks)

    return inputs_of, evaluate


def rows_of_step(step: int, batch: int, rows: int, seed: int) -> Tensor:
    """[batch] int64 on the CPU: numbers of the rows of a 0-based step, of an endless sequence of epochs."""
    picked: list[Tensor] = []
    at, left = step * batch, batch
    while left:
        epoch, first = divmod(at, rows)
        generator = torch.Generator("cpu").manual_seed(seed * 100_003 + epoch)
        part = torch.randperm(rows, generator=generator, dtype=torch.int64, device="cpu")[first : first + left]
        picked.append(part)
        at, left = at + len(part), left - len(part)
    return torch.cat(picked)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device; a GPU is not waited for."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
