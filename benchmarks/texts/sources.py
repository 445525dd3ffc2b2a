"""What sources beside a head are worth: tokens a second with the head alone, joined by the text's matches, by predictions, and
by earlier answers.

    python benchmarks texts.sources --device cuda --dtype float32 --out benchmarks/texts/results/sources_h200.json
    python benchmarks texts.sources --target FILE --draft DIR --chat --texts runs/pairs --seconds 300 --device cuda --out FILE

A kind of texts is one of these, where FILE is a file of prompts in --texts without its ending, or "own", the shipped ones:
- FILE: its prompts as they are.
- renamed, reformatted, corrected: with --chat the target edits the documents of edits.jsonl in --texts, which
  `pairs.run prompts` draws; a document is its answer's prediction.
- renamed:FILE and so on, which is meant without --chat too: the edit is made here.  The prediction is the answer itself with a
  name replaced everywhere, with every sentence on a line of its own, or with a word of 16 wrong, missing or doubled.
- cut:FILE, after:FILE, again:FILE, also of a kind of edit in the place of FILE: second answers.  All is asked twice, the second
  time without its last word, with a sentence in front of it, or as it was; sampled text has another seed then.  The second
  answers are measured.  Each turn has a `cache_salt` of its own, so that nothing is known of the turn before.

All ways write the same texts; in 16 bits texts may part where two tokens tie, and "differ" counts them.  Ways run
in turns, so that what else the machine does meets all of them; a number is tokens by seconds (on a CPU, of this process's
processor time), and its interval is that of 95 percent over the turns' ratios to the drafter alone.  --seconds: a case that
would end later, if it took as long as the longest yet, is left out, and named.  Batches come in their order, then temperatures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pairs.plan import TimeBudget

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.generation import Stats

OWN, EDITS = "own", ("renamed", "reformatted", "corrected")
FORMS: dict[str, Callable[[str], str]] = {  # second prompts, of first ones
    "cut": lambda prompt: prompt.rpartition(" ")[0] or prompt,
    "after": lambda prompt: f"The end. {prompt}",
    "again": lambda prompt: prompt,
}
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # of 95 percent, by how many turns there are


class Way(NamedTuple):
    """One way to write the same texts: with which decoder, whether it speculates, is given predictions, and has seen the first
    answers where second ones are asked for.
    """

    name: str
    decoder: SpecDecoder
    speculates: bool = True
    predicts: bool = False
    remembers: bool = False


class Text(NamedTuple):
    """A prompt, what is predicted of its answer, and what was asked before; None: nothing."""

    prompt: Any
    prediction: str | None = None
    before: Any = None


class Texts:
    """Texts of every kind."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = None if args.texts is None else Path(args.texts)
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"--texts: expected a folder, got {self.folder}; nearest thing that works: leave it out")

    def of(self, kind: str, count: int, plain: SpecDecoder, base: SamplingParams) -> list[Text]:
        how, _, rest = kind.rpartition(":")
        if how in FORMS:
            return [Text(_asked(text.prompt, FORMS[how]), None, text.prompt) for text in self.of(rest, count, plain, base)]
        if not how and rest in EDITS:
            if self.args.chat:
                return list(itertools.islice(itertools.cycle(self._edits(rest, plain, base)), count))
            how, rest = rest, OWN
        lines = _lines(shipped.prompts_file() if rest == OWN else self._file(rest))
        prompts = [self._prompt_of(line) for line in itertools.islice(itertools.cycle(lines), count)]
        if not how:
            return [Text(prompt) for prompt in prompts]
        answers, draw = plain.generate(prompts, base, speculate=False), random.Random(how)
        return [Text(prompt, edited(answer.text, how, draw)) for prompt, answer in zip(prompts, answers, strict=True)]

    def check(self, kinds: list[str]) -> None:
        """ValueError for a kind that is none, before anything is loaded."""
        for kind in kinds:
            how, _, rest = kind.rpartition(":")
            if how not in ("", *EDITS, *FORMS):
                raise ValueError(f"--kinds {kind}: expected one of {', '.join((*EDITS, *FORMS))} before the colon, got {how!r}")
            if rest != OWN and (rest not in EDITS or self.args.chat):
                self._file("edits" if rest in EDITS else rest)

    def _file(self, name: str) -> Path:
        if self.folder is None or not (self.folder / f"{name}.jsonl").is_file():
            raise ValueError(f"--texts: expected a folder with {name}.jsonl, got {self.folder}; `pairs.run prompts` writes one")
        return self.folder / f"{name}.jsonl"

    def _edits(self, kind: str, plain: SpecDecoder, base: SamplingParams) -> list[Text]:
        """Those of the file whose answers are so much like their documents."""
        lines = [line for line in _lines(self._file("edits")) if line["kind"] == kind]
        answers = plain.generate([line["messages"] for line in lines], base, speculate=False) if self.args.alike else []
        alike = [_likeness(line["prediction"], answer.text) for line, answer in zip(lines, answers)] or [1.0] * len(lines)
        found = [
            Text(line["messages"], line["prediction"])
            for line, like in zip(lines, alike, strict=True)
            if like >= self.args.alike
        ]
        if self.args.alike:
            print(f"{kind}: {len(found)} of {len(lines)} answers are at least {self.args.alike:g} like their documents")
        if not found:
            raise ValueError(f"--alike: expected less than {max(alike):.2f}, the most of {kind}, got {self.args.alike:g}")
        return found

    def _prompt_of(self, line: dict[str, Any]) -> Any:
        prompt = line.get("messages") or line.get("prompt") or line["turns"][0]
        return [{"role": "user", "content": prompt}] if self.args.chat and isinstance(prompt, str) else prompt


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _likeness(document: str, answer: str) -> float:
    """How much of an answer, which may have been cut, stands in the document in the same order, layout aside."""
    answer, document = (" ".join(text.split()) for text in (answer, document))
    return SequenceMatcher(None, document[: len(answer)], answer, autojunk=False).ratio()


def _asked(prompt: Any, form: Callable[[str], str]) -> Any:
    """The prompt in another form; of a chat the last message."""
    if isinstance(prompt, str):
        return form(prompt)
    return [*prompt[:-1], {**prompt[-1], "content": form(prompt[-1]["content"])}]


def edited(answer: str, kind: str, draw: random.Random) -> str:
    """The answer as it was before the edit that it stands for."""
    if kind == "renamed":
        names = re.findall(r"(?<![.!?\"] )(?<!^)\b[A-Z][a-z]+", answer) or re.findall(r"\b[a-z]{4,}", answer) or [answer[:1]]
        return answer.replace(statistics.mode(names), "Bartholomew")
    if kind == "reformatted":
        return re.sub(r"([.!?\"]) ", r"\1\n", answer)
    words = answer.split(" ")
    for place in range(draw.randrange(16), len(words), 16):
        words[place] = draw.choice(["", "wrong", f"{words[place]} {words[place]}"])
    return " ".join(words)


def run(way: Way, texts: list[Text], params: SamplingParams, salt: str) -> tuple[list[Generation], float]:
    """The answers, and the seconds that they took."""
    if way.remembers:
        first = params if params.seed is None else replace(params, seed=params.seed + 1)
        way.decoder.generate([text.before for text in texts], first, cache_salt=salt)
        assert way.decoder.settle_tables(), "the table takes too long"
    given = [replace(params, prediction=text.prediction or None) if way.predicts else params for text in texts]
    clock = time.process_time if way.decoder.settings.device.type == "cpu" else time.perf_counter
    prompts, begun = [text.prompt for text in texts], clock()
    outputs = way.decoder.generate(prompts, given, speculate=way.speculates, cache_salt=salt)
    return outputs, clock() - begun


def interval(ratios: list[float]) -> dict[str, float | None]:
    """The mean of ratios and the interval of 95 percent, by their logarithms; one ratio has no interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, n = statistics.fmean(logs), len(logs)
    if n == 1:
        return {"ratio": ratios[0], "low": None, "high": None}
    half = STUDENT.get(n, 2.31) * statistics.stdev(logs) / math.sqrt(n)
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


def told(found: dict[str, Any]) -> str:
    """A ratio with its interval, if it has one."""
    return f"{found['ratio']:.2f}" + ("" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})")


def case(ways: list[Way], texts: list[Text], params: SamplingParams, args: argparse.Namespace) -> dict[str, Any]:
    """All ways over the same texts, in turns."""
    used = [
        way for way in ways
        if (not way.predicts or texts[0].prediction is not None) and (not way.remembers or texts[0].before is not None)
    ]  # fmt: skip
    rates, found = {way.name: list[float]() for way in used}, dict[str, Any]()
    counted = dict[str, dict[str, Any]]()
    want: list[list[int]] = []
    for turn in range(-args.warm_ups, args.turns):
        for way in used[turn % len(used) :] + used[: turn % len(used)]:
            outputs, seconds = run(way, texts, params, str(turn))
            ids = [out.token_ids for out in outputs]
            want = want or ids
            stats = Stats.total([out.stats for out in outputs])
            differ = sum(map(list.__ne__, ids, want))
            counted[way.name] = {"accept_length": stats.accept_length, "differ": differ}
            if turn >= 0:
                rates[way.name].append(sum(map(len, ids)) / seconds)
    reference = rates[used[1].name]
    for way in used:
        ratios = [rate / other for rate, other in zip(rates[way.name], reference, strict=True)]
        own = rates[way.name]
        found[way.name] = {"tok_s": statistics.median(own), **counted[way.name], **interval(ratios), "rates": own}
    return found


class LoadedPair:
    """The target with its drafters, which are loaded once for all batches."""

    def __init__(self, args: argparse.Namespace, kinds: list[str]) -> None:
        self.args, self.spec = args, SpecConfig(*args.spec)
        self.deep = SpecConfig(*(args.predicted_spec or args.spec))
        settings: dict[str, Any] = {"max_batch_size": 1, "smoke": False, "max_seq_len": args.max_seq_len, "device": args.device}
        settings |= {"dtype": args.dtype} if args.dtype else {}
        target, head = args.target or shipped.target_folder(), args.draft or shipped.draft_folder()
        widest = max(self.spec, self.deep, key=lambda spec: spec.lookahead)
        drafters: dict[str, Any] = (
            {"n-grams": "ngram"} if args.draft == "none" else {"head": head, "head, text": [head, "suffix"]}
        )
        if args.draft != "none" and any(kind.partition(":")[0] in FORMS for kind in kinds):
            drafters["head, text, answers"] = [head, "suffix", "answers"]
        self.loaded = {
            name: SpecDecoder.from_pretrained(target, drafter, widest, **settings) for name, drafter in drafters.items()
        }

    def ways(self, batch: int, opened: ExitStack) -> list[Way]:
        """Plain decoding, the drafter alone, and what sources add to it: decoders of that many rows, which `opened` closes."""

        def decoder(name: str, spec: SpecConfig) -> SpecDecoder:
            of = self.loaded[name]
            settings = replace(of.settings.with_options(max_batch_size=batch), spec=spec)
            return opened.enter_context(SpecDecoder(of.model, of.head, settings, of.tokenizer))

        found = {name: decoder(name, self.spec) for name in self.loaded}
        alone, joined = list(found)[0], list(found)[min(1, len(found) - 1)]
        deeper = found[joined] if self.deep == self.spec else decoder(joined, self.deep)
        return [
            Way("plain", found[alone], speculates=False),
            *(Way(name, made, remembers="answers" in name) for name, made in found.items()),
            Way(f"{joined}, prediction", deeper, predicts=True),
        ]


def said(numbers: dict[str, Any]) -> str:
    """Tokens a second, tokens a round, times the drafter alone, and how many texts differ, if any do."""
    differ = f", {numbers['differ']} texts differ" if numbers["differ"] else ""
    return f"{numbers['tok_s']:.0f} ({numbers['accept_length']:.2f}; {told(numbers)}{differ})"


def markdown(cases: list[dict[str, Any]]) -> str:
    """A table of ways: times the drafter alone, with the interval, and tokens a round; a row for each case."""
    ways = list(dict.fromkeys(way for case in cases for way, held in case.items() if isinstance(held, dict)))
    lines = [["texts", "batch", "T", *ways], ["---"] * (3 + len(ways))]
    for case in cases:
        cells = (f"{told(held)}, {held['accept_length']:.2f}" if (held := case.get(way)) else "" for way in ways)
        lines.append([case["kind"], str(case["batch"]), f"{case['temperature']:g}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(args: argparse.Namespace, decoder: SpecDecoder, cases: list[dict[str, Any]]) -> None:
    if args.out:
        gpu = torch.cuda.get_device_name() if decoder.settings.device.type == "cuda" else ""
        about = {"machine": gpu or platform.processor() or platform.machine(), "torch": torch.__version__}
        about |= {"dtype": str(decoder.settings.dtype), "date": time.strftime("%Y-%m-%d")}
        about |= {"settings": {name: str(value) for name, value in vars(args).items()}, "cases": cases}
        args.out.write_text(json.dumps(about, indent=1) + "\n")


def shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target")
    add("--draft", help='a head; "none": n-grams alone')
    add("--texts", type=Path, help="a folder of FILE.jsonl, such as the one of `pairs.run prompts`")
    add("--chat", action="store_true", help="prompts get the target's chat template, and a text ends where the target ends it")
    add("--spec", type=shape, default=(5, 4, 16))
    add("--predicted-spec", type=shape, help="the shape with predictions, if another")
    add("--kinds", default=",".join((OWN, *EDITS)), help="in the order of their importance; default: %(default)s")
    add("--temperatures", default="0,1")
    add("--batches", default="1,8,32")
    add("--tokens", type=int, default=64)
    add("--count", type=int, default=8, help="at least so many texts; those of a smaller batch come one after another")
    add("--alike", type=float, default=0.0, help="documents whose answers are less like them are left out, from 0 to 1")
    add("--turns", type=int, default=3)
    add("--warm-ups", type=int, default=1, help="turns before those; a GPU needs more, to capture graphs")
    add("--max-seq-len", type=int, default=512)
    add("--seconds", type=float, default=1e6, help="what this call may take")
    add("--device", default="cpu")
    add("--dtype")
    add("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse()
    kinds, temperatures, texts = args.kinds.split(","), [float(each) for each in args.temperatures.split(",")], Texts(args)
    texts.check(kinds)
    torch.set_num_threads(1)
    budget, cases, late = TimeBudget(args.seconds, ""), list[dict[str, Any]](), list[str]()
    pair = LoadedPair(args, kinds)
    for batch in map(int, args.batches.split(",")):
        with ExitStack() as opened:
            ways = list[Way]()
            for temperature, kind in itertools.product(temperatures, kinds):
                name, begun = f"{kind}, T {temperature:g}, batch {batch}", budget.left
                if begun <= budget.longest:
                    late.append(name)
                    continue
                ways = ways or pair.ways(batch, opened)
                seed = 1 if temperature else None
                params = SamplingParams(args.tokens, temperature=temperature, seed=seed, ignore_eos=not args.chat)
                meant = texts.of(kind, max(batch, args.count), ways[0].decoder, params)
                found = case(ways, meant, params, args)
                print(f"{name}: {'; '.join(f'{way} {said(found[way])}' for way in found)}", flush=True)
                budget.longest = max(budget.longest, begun - budget.left)
                cases.append({"kind": kind, "temperature": temperature, "batch": batch, "texts": len(meant), **found})
                write(args, ways[0].decoder, cases)
    print(f"\n{markdown(cases)}" + (f"\nno time for {'; '.join(late)}" if late else ""))
    for decoder in pair.loaded.values():
        decoder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
