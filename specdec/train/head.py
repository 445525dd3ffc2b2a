"""Trains an EAGLE-3 head (arXiv 2503.01840) for a target, and measures the finished head with the runtime itself.

The target writes the text that the head learns from.  The finished folder has the layout of the heads that SafeAILab publishes.
This file knows settings, files and the order of the steps; `selftext` writes the text, `unroll` computes the loss, and `loop`
runs the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.decoder import SpecDecoder
from specdec.draft.eagle.formats.body import default_aux_layers
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.eagle.spec import HeadSpec
from specdec.generation import Stats
from specdec.loading.threads import set_training_threads
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.layers import RMSNorm
from specdec.models.linear import Linear
from specdec.models.target import Target
from specdec.train.loop import Checkpoint, Progress, Schedule, fit, make_optimizer
from specdec.train.selftext import frequent_ids, prompt_ids, write_rows
from specdec.train.settings import MEASURED, HeadRun
from specdec.train.text import load_documents
from specdec.train.unroll import head_loss


def train_head(
    run: HeadRun,
    target: str | Path,
    texts: Sequence[str | Path],
    out: str | Path,
    *,
    aux_layers: tuple[int, ...] | None = None,
    resume: bool = False,
    device: str = "auto",
    threads: int | None = None,
) -> Progress:
    """Trains a head, saves it in the folder `out`, and measures its accept length.

    target: the target's folder or hub id.  texts: files of UTF-8 text (plain, .xz or .gz); their documents open the rows that
    the target writes.  Held-out documents are used for nothing but the final accept length.
    out: gets config.json and model.safetensors of the weights with the lowest evaluation loss, training.json with the settings
    and results, and the two files that `resume` reads: checkpoint.pt and self_text.pt.
    aux_layers: 0-based numbers of the target layers whose outputs are the head's features; None stands for EAGLE-3's choice.
    threads: of torch, for a run on a CPU; None for as many as torch takes by itself.

    Returns the progress at the end.  ValueError for text, settings or files that can't work.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(run.seed)
    train, held = load_documents(texts, run.held_out)
    decoder = SpecDecoder.from_pretrained(target, device=device, dtype="float32", max_batch_size=256, max_seq_len=run.width)
    if decoder.model.config.encoder is not None:
        raise ValueError(
            f"target must be a decoder-only model, such as a Llama, got {target}, a {decoder.model.config.family} model: "
            "training reads texts of one model, not what an encoder read besides"
        )
    if refusal := decoder.model.config.features_refusal:
        raise ValueError(f"target: an EAGLE-3 head can't be trained for {target}: {refusal}")
    set_training_threads(decoder.settings.device, threads)
    rows = _rows(decoder, train, run, folder / "self_text.pt", resume).to(decoder.settings.device)
    model = decoder.model
    draft_ids_V = frequent_ids(rows.cpu(), run.draft_vocab_size or model.config.vocab_size, model.config.vocab_size)
    head = new_head(model, aux_layers or default_aux_layers(model.config.num_layers), draft_ids_V, run)
    schedule = Schedule(run.steps, run.lr, run.warmup, run.weight_decay, run.eval_every)
    checkpoint = Checkpoint(folder / "checkpoint.pt", head, make_optimizer(head, schedule))
    progress = checkpoint.load() if resume and checkpoint.path.is_file() else Progress()
    loss_at, evaluate = _objective(model, head, rows, draft_ids_V.to(rows.device), run)
    progress = fit(schedule, checkpoint, progress, loss_at, evaluate, lambda _: save_head(head, folder))
    _report(decoder, folder, held, run, progress)
    return progress


def new_head(model: Target, aux_layers: tuple[int, ...], draft_ids_V: Tensor, run: HeadRun) -> Eagle3Head:
    """A fresh head with random weights, except that language-model head and final norm start as copies of the target's.

    aux_layers: 0-based target layers whose outputs are the features.  draft_ids_V: ids of the draft vocabulary, ascending.
    The head shares the target's embeddings, which are not trained.
    """
    config = model.config
    shape = replace(
        config, num_layers=1, layer_kinds=(), kv_source=(), tie_embeddings=False, qk_norm=False, qkv_bias=False, o_bias=False,
        mlp_bias=False, intermediate_size=run.intermediate_size or config.intermediate_size,
    )  # fmt: skip
    head_config = HeadSpec(shape, "eagle3", tuple(sorted(aux_layers)), config.hidden_size, len(draft_ids_V))
    device = model.embed_tokens.weight.device
    head = build(lambda: Eagle3Head(head_config, run.width), device, torch.float32)
    head.embed_tokens = model.embed_tokens
    head.requires_grad_(True)
    head.embed_tokens.requires_grad_(False)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, Linear):
                module.weight.normal_(std=0.02)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
        head.lm_head.tensors()["weight"].tensor.copy_(model.lm_head.rows(draft_ids_V.to(device)))
        if isinstance(model, CausalLM):  # the final norm of another model implementation may be of another kind
            head.norm.weight.copy_(model.norm.weight)
    head.d2t_V = (draft_ids_V - torch.arange(len(draft_ids_V))).to(device)
    return head


def _rows(decoder: SpecDecoder, documents: list[str], run: HeadRun, path: Path, resume: bool) -> Tensor:
    """The rows [texts, width] that the target writes.  They are saved as they come, so a resumed run writes only the rest."""
    made_of = {name: getattr(run, name) for name in ("texts", "width", "longest_prompt", "greedy_share", "seed")}
    rows = torch.full((run.texts, run.width), -1, dtype=torch.int64)
    if resume and path.is_file():
        saved = torch.load(path, weights_only=True)
        if saved["made_of"] != made_of:
            raise ValueError(
                f"resume: {path} was written with {saved['made_of']}, this run has {made_of}; start without --resume"
            )
        rows = saved["rows"]
    prompts = prompt_ids(decoder, documents, run.texts, run.longest_prompt, run.seed)
    write_rows(decoder, prompts, rows, run.greedy_share, run.seed, lambda: torch.save({"made_of": made_of, "rows": rows}, path))
    return rows


def _objective(
    model: Target, head: Eagle3Head, rows: Tensor, draft_ids_V: Tensor, run: HeadRun
) -> tuple[Callable[[int], Tensor], Callable[[], float]]:
    """Two functions: the training loss of a step, and the mean loss over the last rows, which are kept out of training."""
    kept = min(256, max(1, len(rows) // 20))
    train, test = rows[:-kept], rows[-kept:]
    if not len(train):
        raise ValueError(f"texts: expected at least 2, got {len(rows)}")

    def loss_at(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(run.seed * 1_000_003 + step)
        picks = torch.randint(len(train), (run.batch,), generator=generator).to(rows.device)
        return head_loss(model, head, train[picks], draft_ids_V, run.num_steps, run.decay)[0]

    @torch.no_grad()
    def evaluate() -> float:
        parts = [head_loss(model, head, part, draft_ids_V, run.num_steps, run.decay) for part in test.split(run.batch)]
        accuracy = torch.stack([part[1] for part in parts]).mean(0)
        print("first choice right, by step: " + " ".join(f"{share:.3f}" for share in accuracy.tolist()), flush=True)
        return float(torch.stack([part[0] for part in parts]).mean())

    return loss_at, evaluate


def save_head(head: Eagle3Head, folder: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16) in the layout of the EAGLE-3 heads that SafeAILab publishes."""
    from safetensors.torch import save_file

    model, Vd = head.config.model, head.config.draft_vocab_size
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "vocab_size": model.vocab_size, "draft_vocab_size": Vd, "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(head.config.aux_layers), "use_aux_hidden_state": True,
            "norm_before_residual": False, "norm_output": False,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    tensors = {name: tensor.to(torch.bfloat16).contiguous().cpu() for name, tensor in split_weights(head).items()}
    assert head.d2t_V is not None
    tensors["d2t"] = head.d2t_V.cpu()
    tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool)
    tensors["t2d"][tensors["d2t"] + torch.arange(Vd)] = True
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def split_weights(head: Eagle3Head) -> dict[str, Tensor]:
    """The head's weights by the tensor names of SafeAILab's heads, with fused projections split into their parts."""
    attention, mlp = head.self_attn, head.mlp
    matrices = {"fc": head.fc, "lm_head": head.lm_head}
    matrices |= {"midlayer.self_attn.o_proj": attention.o_proj, "midlayer.mlp.down_proj": mlp.down_proj}
    weights = {name: matrix.tensors()["weight"].tensor for name, matrix in matrices.items()}
    for prefix, fused in {"midlayer.self_attn": attention.qkv_proj, "midlayer.mlp": mlp.gate_up_proj}.items():
        weights |= {f"{prefix}.{part}": fused.tensors(part)["weight"].tensor for part in fused.parts.sizes}
    weights |= {"norm": head.norm.weight.detach()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{name}"] = getattr(head, name).weight.detach()
    return {f"{name}.weight": weight for name, weight in weights.items()}


def _report(decoder: SpecDecoder, folder: Path, held: list[str], run: HeadRun, progress: Progress) -> None:
    """Measures the saved head with the runtime on openings of held-out documents; prints and saves the accept lengths."""
    from specdec.draft.eagle.load import load_head

    settings = decoder.settings
    head = load_head(folder, decoder.model, run.width, settings.device, settings.dtype)
    prompts = prompt_ids(decoder, held, run.eval_prompts, run.longest_prompt, run.seed + 1)
    found = {}
    for spec in MEASURED:
        lookahead = spec.lookahead
        measured = replace(settings.with_options(max_batch_size=32), spec=spec, max_seq_len=run.width - lookahead)
        pair = SpecDecoder(decoder.model, head, measured, decoder.tokenizer)
        sampling = SamplingParams(max_tokens=run.width - run.longest_prompt - lookahead)
        stats = Stats.total([output.stats for output in pair.generate(prompts, sampling)])
        name = f"S={spec.num_steps} k={spec.topk} nd={spec.num_draft_tokens}"
        by_depth = " ".join(f"{share:.3f}" for share in stats.acceptance_by_depth)
        print(f"held-out accept length at {name}: {stats.accept_length:.3f} (by depth {by_depth})", flush=True)
        found[name] = {"accept_length": stats.accept_length, "acceptance_by_depth": stats.acceptance_by_depth}
    record = {"run": vars(run), "best_step": progress.best_step, "held_out_loss": progress.best_loss, "accept": found}
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
