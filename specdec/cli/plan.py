"""`specdec plan`: what memory a pair takes on a GPU, and which context and batch fit, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from specdec.checks import bytes_of, setting_of
from specdec.cli.flags import SPEC_HELP, StoreOnce, add_draft_flag, add_option_flags, not_empty, pair_of, tree_shape
from specdec.cli.terminal.output import console
from specdec.cli.terminal.waiting import over
from specdec.options import EngineOptions

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.loading.plan import MemoryPlan

HELP = "what memory a pair takes on a GPU, and which context and batch fit"
# Engine options that have the same flags here as in other commands.
USED = (
    "dtype", "quantize", "pack_weights", "kv_cache_dtype", "kv_cache_memory", "page_size", "tensor_parallel_size",
    "expert_parallel", "draft_format", "draft_pickle", "draft_quantize", "audit", "audit_max_tokens",
)  # fmt: skip
# What is planned for where no GPU is there and none is named: the memory that makers say, which drivers round up.
USUAL = {
    "24 GB (L4, RTX 4090)": 24 * 10**9, "48 GB (L40S)": 48 * 10**9, "80 GB (A100, H100)": 80 * 10**9,
    "96 GB (RTX PRO 6000)": 96 * 10**9, "141 GB (H200)": 141 * 10**9, "180 GB (B200)": 180 * 10**9,
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    target = "folder or hub id of the model, or a GGUF file; default: the shipped pair"
    add("--target", type=not_empty, metavar="DIR", help=target)
    add_draft_flag(parser, "without it, a --target is planned alone")
    add("--spec", type=tree_shape, action=StoreOnce, metavar="S,k,nd", help=f"{SPEC_HELP}; default: that of generate")
    add("--context", type=int, metavar="N", help="the most tokens of one request; default: what the model was made for")
    add("--batch", type=int, default=8, metavar="N", help="the most requests at once; default: 8")
    add("--gpu-memory", type=_bytes, metavar="SIZE", help="such as 80GB; default: this machine's GPU, or the usual ones")
    add_option_flags(parser, EngineOptions, [item.name for item in fields(EngineOptions) if item.name not in USED])
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, usual: Mapping[str, int] = USUAL) -> int:
    from specdec.loading.plan import plan_memories

    target, draft = pair_of(args, ["--spec"] if args.spec else [])
    for flag, name, value in (("--context", "max_seq_len", args.context), ("--batch", "max_batch_size", args.batch)):
        item = EngineOptions.__dataclass_fields__[name]
        setting_of(item).check(flag, value, item.default)
    used = {name: getattr(args, name) for name in USED}
    options = EngineOptions(max_seq_len=args.context, max_batch_size=args.batch, **used)
    spec = None if draft is None else args.spec
    known = args.gpu_memory or _gpu_memory()
    gpus = {"the GPU": known} if known else usual
    try:
        plans = dict(zip(gpus, plan_memories(target, draft, spec, options, tuple(gpus.values())), strict=True))
    except ValueError as error:  # which names options as `generate` calls them
        raise ValueError(str(error).replace("max_seq_len", "--context").replace("max_batch_size", "--batch")) from error
    over()
    if refusal := next(iter(plans.values())).refusal:
        raise ValueError(f"no memory makes a GPU run this: {refusal}")
    if args.json:
        print(json.dumps(_facts(plans, is_one=bool(known)), indent=1))
    else:
        _show(plans, is_one=bool(known))
    return 0 if any(plan.fits for plan in plans.values()) else 1


def _facts(plans: dict[str, MemoryPlan], is_one: bool) -> dict[str, Any]:
    """As plain data.  is_one: whether there is a GPU that is meant; if not, `gpus` lists the usual ones."""
    first = next(iter(plans.values()))
    said = {name: value for name, value in first._asdict().items() if name != "refusal"}
    if is_one:
        return {**said, "total": first.total, "fits": first.fits}
    own = ("memory", "longest", "widest")
    shared = {name: value for name, value in said.items() if name not in own}
    gpus = [{"name": name, **{field: getattr(plan, field) for field in own}, "fits": plan.fits} for name, plan in plans.items()]
    return {**shared, "total": first.total, "gpus": gpus}


def _show(plans: dict[str, MemoryPlan], is_one: bool) -> None:
    from rich.table import Table

    plan, out = next(iter(plans.values())), console()
    where = f", on each of {plan.ranks} GPUs" if plan.ranks > 1 else ""
    table = Table("what", title=f"{plan.batch} requests of at most {plan.context:,} tokens{where}")
    table.add_column("GB", justify="right")
    for name, size in plan.parts.items():
        table.add_row(name, _gigabytes(size))
    table.add_section()
    table.add_row("total", _gigabytes(plan.total))
    if is_one:
        table.add_row("the GPU has", _gigabytes(plan.memory))
    out.print(table)
    out.print(f"the target's weights: {plan.target_weights}")
    if plan.drafter:
        out.print(f"the {plan.drafter}'s weights: {plan.draft_weights}")
    if plan.passed_over:
        out.print(f"passed over, since texts alone are read: {plan.passed_over:,} bytes of tensors that images need")
    if plan.experts:
        out.print(f"experts: {plan.experts}")
    names = ("target", plan.drafter)
    out.print("a token's keys and values: " + ", ".join(f"{n} {b:,} bytes" for n, b in zip(names, plan.kv_token)))
    if len(plan.kv_kinds) > 1:
        out.print("of the target's, by kind of layer: " + ", ".join(f"{kind} {b:,}" for kind, b in plan.kv_kinds.items()))
    if not is_one:
        _show_usual(plans, out)
        return
    out.print("it fits" if plan.fits else f"it does not fit: {_gigabytes(plan.total - plan.memory)} GB are missing")
    out.print(_what_fits(plan))


def _show_usual(plans: dict[str, MemoryPlan], out: Console) -> None:
    """Which of the usual GPUs it fits, for a machine without one."""
    from rich.table import Table

    first = next(iter(plans.values()))
    table = Table("GPU", "fits", title="no GPU is here: the usual ones (--gpu-memory names another)")
    table.add_column(f"longest of {first.batch} requests", justify="right")
    table.add_column(f"requests of {first.context:,}", justify="right")
    for name, plan in plans.items():
        longest, widest = (f"{count:,}" if count else "none" for count in (plan.longest, plan.widest))
        table.add_row(name, "yes" if plan.fits else "no", longest, widest)
    out.print(table)


def _gigabytes(size: int) -> str:
    """Two places, or two digits of what is too small for them."""
    return f"{size / 1e9:.2f}" if size >= 95 * 10**6 or size == 0 else f"{size / 1e9:.2g}"


def _what_fits(plan: MemoryPlan) -> str:
    longest = f"{plan.batch} requests of up to {plan.longest:,} tokens"
    widest = f"up to {plan.widest:,} requests of {plan.context:,} tokens"
    if plan.longest and plan.widest:
        return f"what fits: {longest}, or {widest}"
    if plan.longest:
        return f"not one request of {plan.context:,} tokens fits; what does: {longest} (--context {plan.longest})"
    if plan.widest:
        return f"what fits: {widest}"
    return "weights and what CUDA takes leave no room: take a larger GPU, fewer bits, or more GPUs (--tensor-parallel-size)"


def _gpu_memory() -> int | None:
    """Of this machine's first GPU; None: there is none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _bytes(text: str) -> int:
    size = bytes_of(text)
    if not size:
        nearest = f"; nearest: {text.strip()}GB" if bytes_of(f"{text}GB") else ""
        raise argparse.ArgumentTypeError(f"expected a size such as 80GB or 75GiB, got {text!r}{nearest}")
    return size
