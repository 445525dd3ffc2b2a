"""What the look at a head says of trained heads that were damaged in some 60 ways, beside what each still drafts.

    python benchmarks texts.damaged_heads --out benchmarks/texts/results/damaged_heads_cpu.json
    python benchmarks texts.damaged_heads --pair stories FOLDER/target FOLDER/head FOLDER/prompts.jsonl

Without --pair, the shipped pair is damaged.  A line holds the share of drafts that the look prints, tokens a round along greedy
texts of the target, counted as `specdec eval-head` counts them, and what is said: nothing, that the files are refused, the
reading that would be better with its share, what is wrong at sight, or that the head is undertrained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from toolkit.heads.looks import looks, target_and_text

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.generation import Stats
from specdec.shipped import draft_folder, prompts_file, target_folder
from specdec.train.offline.count import count
from specdec.train.states import read_rows

SHAPES = (SpecConfig(5, 1, 6), SpecConfig(5, 4, 16))
MORE = 6  # tokens after the counted ones: what the last round drafts


def own_texts(target: Path, file: Path, prompts: int, tokens: int) -> list[tuple[int, torch.Tensor]]:
    """(tokens of the prompt, ids of the prompt and of what the target writes greedily after it)."""
    lines = [json.loads(line) for line in file.read_text().splitlines()[:prompts]]
    sampling = SamplingParams(max_tokens=tokens + MORE, ignore_eos=True)
    with SpecDecoder.from_pretrained(target, device="cpu", dtype="float32", max_batch_size=prompts) as decoder:
        outputs = decoder.generate([line.get("token_ids") or line["prompt"] for line in lines], sampling)
    return [(len(out.prompt_token_ids), torch.tensor(out.prompt_token_ids + out.token_ids)) for out in outputs]


def rows(name: str, target: Path, head: Path, file: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    texts = own_texts(target, file, args.prompts, args.tokens)
    model, ids_T = target_and_text(target)
    for damage, refused, drafter, found, _ in looks(model, head, ids_T):
        row: dict[str, Any] = {"head": name, "damage": damage.name}
        if refused:
            yield row | {"said": "refused"}
            continue
        assert drafter is not None and found is not None
        counted: list[list[Stats]] = []
        for prompt, ids in texts:
            features_TF = read_rows(model, ids[None], drafter.config.aux_layers).features_BTF[0]
            counted.append(count(drafter, ids, features_TF, prompt, args.tokens, SHAPES))
        tokens = [round(Stats.total([each[i] for each in counted]).accept_length, 2) for i in range(len(SHAPES))]
        if found.better is not None:
            said = f"{found.better[0]}: {found.better[1]:.1%}"
        else:
            said = "" if found.is_fine else found.broken or "undertrained, or trained for another target"
        yield row | {"accepted": round(found.accepted, 4), "chain": tokens[0], "tree": tokens[1], "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs=4, action="append", metavar=("NAME", "TARGET", "HEAD", "PROMPTS"))
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="prompts of the target's own texts")
    parser.add_argument("--tokens", type=int, default=80, metavar="N", help="tokens of each that are counted")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shipped = ["shipped", str(target_folder()), str(draft_folder()), str(prompts_file())]
    found = []
    for name, *paths in args.pair or [shipped]:
        for row in rows(name, *map(Path, paths), args):
            found.append(row)
            share = f"{row['accepted']:6.1%} {row['chain']:5.2f} {row['tree']:5.2f}" if "accepted" in row else " " * 18
            print(f"{name:10s} {row['damage']:42s} {share}  {row['said']}", flush=True)
    if args.out:
        settings = {"prompts": args.prompts, "tokens": args.tokens, "shapes": [spec.label for spec in SHAPES]}
        args.out.write_text(json.dumps({"torch": torch.__version__, **settings, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
