"""How sources of paths fare on texts that are known: what their estimates of survival should be at first, and what rounds emit.

    python benchmarks sources.calibration --texts ../shared/text --out benchmarks/sources/results/calibration.json

Nothing is generated: a text is replayed round by round, the sources propose from what stands before, and what follows says how
far they were right.  The head is a simulated one, whose probabilities are true.  Edits are made of code (a name replaced), of
JSON (indented) and of paragraphs (errors corrected), all of which stand in the prompt and are the prediction; "code", "prose"
and "sums" are texts as they are.  Numbers are fitted to half of the texts of each kind, each kind weighing as much, and the
other half is replayed with them.

Shapes: B texts at a time, X tokens of the longest, P paths, D tokens of a path; C, L, K, G: see draft/join/survival.py.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.batch.emitted import NewTokens
from specdec.batch.tree import DraftTree
from specdec.draft.join import survival
from specdec.draft.join.join import joined_tree
from specdec.draft.join.paths import Paths, end_paths
from specdec.draft.join.source import PathSource
from specdec.draft.join.survival import CHAIN, FIRST_DEPTHS, PathClass, Survival, halved
from specdec.draft.ngram.lookup import PagedTexts
from specdec.draft.ngram.source import OwnText
from specdec.draft.ngram.source import fill_paths as fill_own
from specdec.draft.prediction.places import fill_paths as fill_predicted
from specdec.draft.prediction.places import follow
from specdec.draft.prediction.source import Predicted, PredictionRows
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates

CPU = torch.device("cpu")
LATEST = "text, latest"  # matches as if no text followed any place, so that later ones are better
SOURCES: dict[str, tuple[type[PathSource], ...]] = {
    "head": (),
    LATEST: (OwnText,),
    "text": (OwnText,),
    "text, prediction": (OwnText, Predicted),
}
STEPS, TOPK, HEAD_NODES = 5, 4, 16  # the head's tree
SURE, RANKS = (2.0, 0.7), (0.55, 0.25, 0.12)  # how its first choices differ; what each other one takes of the rest
LIKELY = 0.3  # how often it proposes what followed its last token before, if that is wrong: as two real heads do
NAMES = ("amount", "current_value", "items", "lookup", "buffer", "entry", "position", "chosen_index", "matrix", "left_side")
KEYWORDS = "self return import from while print none true false else elif with raise yield float doctest testmod range list"


class Known(NamedTuple):
    """A text of tokens, and what is predicted of its answer; None: nothing."""

    prompt: list[int]
    answer: list[int]
    prediction: list[int] | None


class Counting(Survival):
    """One that forgets nothing beside what it halves.  whole_CLKG2: int64, all trials and what was accepted of them."""

    def __init__(self, classes: list[PathClass]) -> None:
        super().__init__(classes, CPU)
        self.whole_CLKG2 = torch.zeros(self.counts_CLKG2.shape, dtype=torch.int64)

    def learn(self, paths: Paths, new: NewTokens, active_B: Tensor) -> None:
        before = halved(self.counts_CLKG2)
        super().learn(paths, new, active_B)
        self.whole_CLKG2 += self.counts_CLKG2 - before


class Replay:
    """Texts of one kind, with what a head has to say of each of their tokens."""

    def __init__(self, texts: list[Known], seed: int = 0) -> None:
        self.texts, rows = texts, len(texts)
        self.sizes_B = torch.tensor([len(text.prompt) + len(text.answer) for text in texts])
        longest = int(self.sizes_B.max()) + 64
        self.ids_BX = torch.zeros(rows, longest, dtype=torch.int64)
        for row, text in enumerate(texts):
            self.ids_BX[row, : int(self.sizes_B[row])] = torch.tensor(text.prompt + text.answer)
        torch.manual_seed(seed)
        spread, mean = SURE
        true, off = (torch.distributions.Beta(mean * much * spread, (1 - mean) * spread) for much in (1.0, 0.7))
        self.sure_BX = true.sample((rows, longest)).clamp(0.02, 0.98)
        self.off_BXK = off.sample((rows, longest, TOPK)).clamp(0.02, 0.98)
        self.luck_BX = torch.rand(rows, longest)
        self.likely_BX = torch.full_like(self.ids_BX, -1)  # what followed the token before where it stood last, now and then
        for row, size in enumerate(self.sizes_B.tolist()):
            followed, ids = dict[int, int](), self.ids_BX[row, :size].tolist()
            for place in range(1, size):
                if (likely := followed.get(ids[place - 1], ids[place])) != ids[place] and self.luck_BX[
                    row, place
                ] % 0.01 < 0.01 * LIKELY:
                    self.likely_BX[row, place] = likely
                followed[ids[place - 1]] = ids[place]

    def head(self, lens_B: Tensor) -> DraftTree:
        """What the head drafts after so many tokens of each text."""
        rows_B, ranks_K = torch.arange(len(lens_B)), torch.arange(TOPK)
        scores_BK, is_true_BK = torch.zeros(len(lens_B), 1), torch.ones(len(lens_B), 1, dtype=torch.bool)
        above_BK, first = torch.full((len(lens_B), 1), -1), 0
        levels = list[tuple[Tensor, ...]]()
        for level in range(STEPS):
            at_B, K = lens_B + level, scores_BK.shape[1]
            sure_BK = torch.where(is_true_BK, self.sure_BX[rows_B, at_B][:, None], self.off_BXK[rows_B, at_B][:, :K])
            rates_BKK = torch.cat((sure_BK[..., None], (1 - sure_BK)[..., None] * torch.tensor(RANKS)), dim=-1)
            rank_BK = (self.luck_BX[rows_B, at_B][:, None, None] > rates_BKK.cumsum(-1)).sum(-1)
            is_next_BKK = is_true_BK[..., None] & (ranks_K == rank_BK[..., None])
            wrong_KK = 10**6 + 100 * level + TOPK * torch.arange(K)[:, None] + ranks_K  # no token of a text
            tokens_BKK = torch.where(is_next_BKK, self.ids_BX[rows_B, at_B][:, None, None], wrong_KK)
            likely_B11 = self.likely_BX[rows_B, at_B][:, None, None]
            is_likely_BKK = is_true_BK[..., None] & (ranks_K == (rank_BK == 0)[..., None]) & (likely_B11 >= 0)
            tokens_BKK = torch.where(is_likely_BKK, likely_B11, tokens_BKK)
            sums_BX = (scores_BK[..., None] + rates_BKK.log()).flatten(1)
            levels.append((tokens_BKK.flatten(1), sums_BX, above_BK.repeat_interleave(TOPK, dim=1)))
            best = sums_BX.topk(TOPK, dim=1)
            scores_BK, above_BK, first = best.values, best.indices + first, first + K * TOPK
            is_true_BK = is_next_BKK.flatten(1).gather(1, best.indices)
        candidates = Candidates(*(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))
        return best_nodes(candidates, self.ids_BX[rows_B, lens_B - 1], HEAD_NODES, STEPS)

    def accepted(self, tree: DraftTree, lens_B: Tensor) -> Tensor:
        """[B] int64: how many of its nodes the texts follow."""
        at_B, found_B, goes_B = (torch.zeros_like(lens_B) for _ in range(3))
        goes_B = goes_B == 0
        for depth in range(tree.max_depth):
            next_B1 = self.ids_BX.gather(1, (lens_B + depth)[:, None])
            is_child_BN = (tree.parents_BN == at_B[:, None]) & (tree.tokens_BN == next_B1)
            is_child_BN[:, 0] = False
            goes_B = goes_B & is_child_BN.any(1)
            at_B, found_B = torch.where(goes_B, is_child_BN.long().argmax(1), at_B), found_B + goes_B
        return found_B.minimum(self.sizes_B - 1 - lens_B)


class Outcome(NamedTuple):
    """tokens: of a round, the bonus token included.  possible: if every proposed node had been verified.
    of_paths: for each source, how many rounds had a path right so deep.  bins: of survival, what was expected and what came.
    """

    tokens: float
    possible: float
    rounds: int
    of_paths: list[list[int]]
    bins: Tensor
    counts_CLKG2: Tensor


def replayed(replay: Replay, way: str, nodes: int) -> Outcome:
    """All texts of a replay side by side, as rows of a batch."""
    sources = SOURCES[way]
    depth, rows = nodes - 1, len(replay.texts)
    classes, kinds, bits = list[PathClass](), list[int](), list[int]()
    for number, source in enumerate(sources):
        kinds += [len(classes) + own for own in source.paths]
        classes += source.classes
        bits += [2 << number] * len(source.paths)
    paths, rates = Paths.empty(rows, [*kinds, len(classes)], depth, CPU), Counting([*classes, CHAIN])
    lens_B = torch.tensor([len(text.prompt) + 1 for text in replay.texts])
    pages = PageTable(torch.arange(rows, dtype=torch.int32)[:, None], replay.ids_BX.shape[1])
    back_B, predicted = torch.zeros(rows, dtype=torch.int64), predictions(replay) if Predicted in sources else None
    rounds, emitted, possible, of_paths, bins = 0, 0, 0, [[0] * (depth + 1) for _ in sources], torch.zeros(10, 3)
    while bool((active_B := lens_B < replay.sizes_B).any()):
        at_B = lens_B.minimum(replay.sizes_B - 1)
        tree = replay.head(at_B)
        best_B, next_BD = replay.accepted(tree, at_B), replay.ids_BX.gather(1, at_B[:, None] + torch.arange(depth + 1))
        if sources:
            back_B *= way != LATEST
            fill_own(PagedTexts(replay.ids_BX.flatten(), pages, at_B.int(), None), back_B, depth, paths.of_source(0, 2))
            if predicted is not None:
                fill_predicted(predicted, depth, paths.of_source(2, 2))
            steps_BPD = end_paths(paths, tree, rates, depth)
            tree = joined_tree(tree, paths.tokens_BPD, steps_BPD, torch.tensor([*bits, 1]), nodes)
            right_BPD = (paths.tokens_BPD == next_BD[:, None, :depth]).cumprod(-1)
            add_bins(bins, steps_BPD[active_B].cumsum(-1).exp(), right_BPD[active_B], paths.tokens_BPD[active_B] >= 0)
            right_BP = right_BPD.sum(-1).minimum((replay.sizes_B - 1 - at_B)[:, None])
            best_B = best_B.maximum(right_BP.amax(1))
            for number in range(len(sources)):
                for right in right_BP[active_B, 2 * number : 2 * number + 2].amax(1).tolist():
                    of_paths[number][right] += 1
        accepted_B = replay.accepted(tree, at_B)
        rounds, emitted = rounds + int(active_B.sum()), emitted + int(((accepted_B + 1) * active_B).sum())
        possible += int(((best_B + 1) * active_B).sum())
        rates.learn(paths, NewTokens(at_B.int(), next_BD, accepted_B, None), active_B.long())
        grown_B = (accepted_B + 1) * active_B
        if predicted is not None:
            follow(predicted, next_BD, grown_B)
        lens_B = lens_B + grown_B
    return Outcome(emitted / rounds, possible / rounds, rounds, of_paths, bins, rates.whole_CLKG2)


def predictions(replay: Replay) -> PredictionRows:
    rows = PredictionRows.empty(len(replay.texts), max(len(text.prediction or ()) for text in replay.texts), CPU)
    for row, text in enumerate(replay.texts):
        rows.sizes_R[row] = len(text.prediction or ())
        rows.ids_RX[row, : int(rows.sizes_R[row])] = torch.tensor(text.prediction or [], dtype=torch.int32)
    first_B1 = torch.tensor([text.answer[:1] for text in replay.texts])
    follow(rows, first_B1, torch.ones(len(replay.texts), dtype=torch.int64))
    return rows


def add_bins(bins: Tensor, expected_XPD: Tensor, right_XPD: Tensor, is_there_XPD: Tensor) -> None:
    """Adds nodes of paths to ten bins of expected survival: how many, the sum of it, and how many were right."""
    expected_Y = expected_XPD[is_there_XPD]
    bin_Y = (expected_Y * 10).long().clamp(max=9)
    for column, values_Y in enumerate((torch.ones_like(expected_Y), expected_Y, right_XPD[is_there_XPD].float())):
        bins[:, column].index_add_(0, bin_Y, values_Y)


# ---- texts ----


def texts_of(folder: Path, tokenizer: Any, count: int, seed: int) -> dict[str, list[Known]]:
    """So many texts of each kind."""
    draw = random.Random(seed)
    code = lzma.open(folder / "thealgorithms_python.txt.xz", "rt").read().split("# file: ")
    files = [file.partition("\n")[2].strip() + "\n" for file in code if 700 < len(file) < 2200]
    sums = [json.loads(line) for line in lzma.open(folder / "gsm8k_train.jsonl.xz", "rt")]
    prose = re.split(r"\n\s*\n", lzma.open(folder / "classic_books_en.txt.xz", "rt").read(4_000_000))
    paragraphs = [re.sub(r"\s+", " ", each).strip() for each in prose if 500 < len(each) < 1500]
    for each in (files, sums, paragraphs):
        draw.shuffle(each)
    pairs = {
        "renamed": [pair for pair in (renamed(file, draw) for file in files) if pair][:count],
        "reformatted": [reformatted(sums[3 * row : 3 * row + 3], draw) for row in range(count)],
        "corrected": [(damaged(text, draw), text) for text in paragraphs[:count]],
    }
    ids = tokenizer.encode
    found = {kind: [Known(ids(a + "\n\n"), ids(b), ids(a)) for a, b in given] for kind, given in pairs.items()}
    found["code"] = [Known(ids(file[:150]), ids(file[150:]), None) for file in files[-count:]]
    found["prose"] = [Known(ids(text[:150]), ids(text[150:]), None) for text in paragraphs[-count:]]
    found["sums"] = [Known(ids(line["question"] + "\n"), ids(line["answer"]), None) for line in sums[-count:]]
    return found


def renamed(code: str, draw: random.Random) -> tuple[str, str] | None:
    names = Counter(name for name in re.findall(r"\b[a-z_]{4,}\b", code) if name not in KEYWORDS.split())
    often = [name for name, times in names.most_common(4) if times >= 4]
    new = [name for name in NAMES if name not in code]
    return (code, re.sub(rf"\b{draw.choice(often)}\b", draw.choice(new), code)) if often and new else None


def reformatted(lines: list[dict[str, str]], draw: random.Random) -> tuple[str, str]:
    items = [
        {"question": line["question"], "answer": line["answer"].split("####")[-1].strip(), "checked": draw.random() < 0.5}
        for line in lines
    ]
    record = {"id": draw.randrange(10**5), "tags": draw.sample(["word", "easy", "hard", "new"], 2), "items": items}
    return json.dumps(record), json.dumps(record, indent=2)


def damaged(text: str, draw: random.Random) -> str:
    words = text.split(" ")
    for place in range(draw.randrange(12), len(words), 13):
        word = words[place]
        words[place] = draw.choice([word[:-1], f"{word} {word}", "", f"{word}s", word[:1] + word[2:], "the"])
    return " ".join(word for word in words if word)


# ---- what fits ----


def fitted(counts: list[Tensor], classes: tuple[PathClass, ...], rounds: int = 600) -> dict[str, Any]:
    """The numbers of PathClass.prior that make what came the most likely, each kind of text weighing as much.

    counts: [C, L, K, G, 2] of each kind, of these classes.
    """
    weighted = sum(each.double() / each[..., 0].sum().clamp(min=1) for each in counts)
    assert isinstance(weighted, Tensor)
    first_CL = torch.tensor([each.first_L for each in classes]).double().logit().requires_grad_()
    missing_K = torch.tensor(survival.MISSING).double().log().requires_grad_()
    parting = torch.tensor(survival.PARTING).double().logit().requires_grad_()
    optimiser = torch.optim.Adam([first_CL, missing_K, parting], lr=0.03)
    halves_G = 0.5 ** torch.arange(len(FIRST_DEPTHS)).double()
    for _ in range(rounds):
        missing = (1 - first_CL.sigmoid())[..., None, None] * (missing_K - missing_K[0]).exp()[:, None] * halves_G
        rates = (1 - missing).clamp(min=survival.LEAST, max=0.999)
        rates = torch.cat((rates, parting.sigmoid() * rates), dim=-1)
        right, wrong = weighted[..., 1], weighted[..., 0] - weighted[..., 1]
        loss = -(right * rates.log() + wrong * (1 - rates).log()).sum() + 1e-5 * (first_CL**2).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {
        "first": [[round(rate, 2) for rate in rates] for rates in first_CL.sigmoid().tolist()],
        "missing": [round(each, 2) for each in (missing_K - missing_K[0]).exp().tolist()],
        "parting": round(parting.sigmoid().item(), 2),
        "loss": round(loss.item(), 5),
    }


def rates_of(outcome: Outcome, source: int) -> dict[str, float]:
    """Of the best path of a source: how often its first token is right, and its next ones where those before were."""
    right = outcome.of_paths[source]
    reached = [sum(right[depth:]) for depth in range(len(right))]
    first, later = reached[1] / max(1, reached[0]), sum(reached[2:9]) / max(1, sum(reached[1:8]))
    return {"first": round(first, 2), "next": round(later, 2)}


def held_out(texts: list[Known], way: str, nodes: int) -> tuple[dict[str, Any], list[list[float]]]:
    """Tokens of a round over these texts, eight at a time, each time with estimates that nothing was seen for; and the bins."""
    parts = [replayed(Replay(texts[first : first + 8], first), way, nodes) for first in range(0, len(texts), 8)]
    rounds, bins = sum(part.rounds for part in parts), torch.stack([part.bins for part in parts]).sum(0)
    tokens = sum(part.tokens * part.rounds for part in parts) / rounds
    possible = sum(part.possible * part.rounds for part in parts) / rounds
    row = {"sources": way, "nodes": nodes, "tokens": round(tokens, 3), "possible": round(possible, 3), "rounds": rounds}
    return row, [[round(number, 1) for number in line] for line in bins.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="a folder with code, prose and sums")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--nodes", default="16,32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    from specdec.models.gguf.tokenizer import gguf_tokenizer

    kinds = texts_of(args.texts, gguf_tokenizer(args.tokenizer), 2 * args.count, seed=0)
    found: dict[str, Any] = {"count": args.count, "rounds": [], "bins": {}, "path_rates": {}}
    seen: dict[str, list[Outcome]] = {way: [] for way in SOURCES}
    for kind, texts in kinds.items():
        for way, sources in SOURCES.items():
            if Predicted in sources and not texts[0].prediction:
                continue
            if sources:
                seen[way].append(replayed(Replay(texts[: args.count], 1), way, 16))
                found["path_rates"][f"{kind}; {way}"] = rates_of(seen[way][-1], len(sources) - 1)
            for nodes in map(int, args.nodes.split(",")):
                row, bins = held_out(texts[args.count :], way, nodes)
                found["rounds"].append({"kind": kind, **row})
                print(kind, row, flush=True)
                if sources:
                    found["bins"][f"{kind}; {way}; {nodes}"] = bins
    found["own"] = fitted([each.counts_CLKG2[:2] for each in seen["text"]], tuple(OwnText.classes))
    found["predicted"] = fitted([each.counts_CLKG2[2:4] for each in seen["text, prediction"]], tuple(Predicted.classes))
    for name in ("own", "predicted", "path_rates"):
        print(name, found[name])
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
