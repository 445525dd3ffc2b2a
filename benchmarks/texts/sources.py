"""What sources beside a head are worth: tokens a second with the head alone, joined by the text's matches, and by predictions.

    python benchmarks texts.sources --device cuda --dtype float32 --out benchmarks/texts/results/sources_h200.json
    python benchmarks texts.sources --target SmolLM2.gguf --draft none --chat --edits runs/pairs/edits.jsonl --prompts FILE

A pair that follows no instructions gets edits that are made here: the prediction of an answer is the answer itself with a name
replaced everywhere, with every sentence on a line of its own, or with a word of 16 wrong, missing or doubled.  With --chat the
target itself edits the documents of --edits, which `pairs.run prompts` draws; a document is its answer's prediction.  "own" are
prompts as they are, without predictions.

All ways write the same texts, which is checked; in bfloat16 they may part where two tokens tie. They run in turns, so that
what else the machine does meets all of them; a number is tokens by seconds (on a CPU, of this process's processor time),
and its interval is that of 95 percent over the turns' ratios to the drafter alone.
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
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder, shipped

EDITS = ("renamed", "reformatted", "corrected")
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # of 95 percent, by how many turns there are


class Way(NamedTuple):
    """One way to write the same texts: with which decoder, whether it speculates, and whether it is given predictions."""

    name: str
    decoder: SpecDecoder
    speculates: bool = True
    predicts: bool = False


class Text(NamedTuple):
    """A prompt, and what is predicted of its answer; None: nothing."""

    prompt: Any
    prediction: str | None


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


def texts_of(kind: str, count: int, args: argparse.Namespace, plain: SpecDecoder, base: SamplingParams) -> list[Text]:
    if args.chat and kind != "own":
        edits = [line for line in map(json.loads, Path(args.edits).read_text().splitlines()) if line["kind"] == kind]
        return [Text(line["messages"], line["prediction"]) for line in itertools.islice(itertools.cycle(edits), count)]
    lines = [json.loads(line) for line in Path(args.prompts or shipped.prompts_file()).read_text().splitlines()]
    prompts = [_prompt_of(line, args.chat) for line in lines]
    prompts = [prompts[number % len(prompts)] for number in range(count)]
    if kind == "own":
        return [Text(prompt, None) for prompt in prompts]
    answers, draw = plain.generate(prompts, base, speculate=False), random.Random(kind)
    return [Text(prompt, edited(answer.text, kind, draw)) for prompt, answer in zip(prompts, answers, strict=True)]


def _prompt_of(line: dict[str, Any], chat: bool) -> Any:
    prompt = line.get("messages") or line.get("prompt") or line["turns"][0]
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def run(way: Way, texts: list[Text], base: dict[str, Any]) -> tuple[list[Generation], float]:
    given = [
        SamplingParams(**base, **({"prediction": text.prediction} if way.predicts and text.prediction else {}))
        for text in texts
    ]  # fmt: skip
    clock = time.process_time if way.decoder.settings.device.type == "cpu" else time.perf_counter
    prompts, begun = [text.prompt for text in texts], clock()
    outputs = way.decoder.generate(prompts, given, speculate=way.speculates)
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


def case(ways: list[Way], kind: str, temperature: float, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """All ways over one kind of texts, in turns."""
    base: dict[str, Any] = {"max_tokens": args.tokens, "temperature": temperature, **({"seed": 1} if temperature else {})}
    base["ignore_eos"] = not args.chat
    texts = texts_of(kind, max(batch, args.texts), args, ways[0].decoder, SamplingParams(**base))
    used = [way for way in ways if not way.predicts or kind != "own"]
    want, rates = None, {way.name: list[float]() for way in used}
    lengths = dict[str, float]()
    for turn in range(-args.warm_ups, args.turns):
        for way in used[turn % len(used) :] + used[: turn % len(used)]:
            outputs, seconds = run(way, texts, base)
            ids = [out.token_ids for out in outputs]
            want = want or ids
            assert ids == want, f"{way.name} wrote other texts"
            rounds = sum(out.stats.rounds for out in outputs)
            lengths[way.name] = sum(out.stats.emitted for out in outputs) / rounds
            if turn >= 0:
                rates[way.name].append(sum(map(len, ids)) / seconds)
    reference = rates[used[1].name]
    found = {"kind": kind, "temperature": temperature, "batch": batch}
    for way in used:
        ratios = [own / other for own, other in zip(rates[way.name], reference, strict=True)]
        found[way.name] = {"tok_s": statistics.median(rates[way.name]), "accept_length": lengths[way.name], **interval(ratios)}
    said = [
        f"{way.name} {found[way.name]['tok_s']:.0f} ({found[way.name]['accept_length']:.2f}; {told(found[way.name])})"
        for way in used
    ]
    print(f"{kind}, T {temperature:g}, batch {batch}: {', '.join(said)}", flush=True)
    return found


def ways_of(args: argparse.Namespace, batch: int) -> list[Way]:
    """Plain decoding, the drafter alone, and what sources add to it."""
    spec, target = SpecConfig(*args.spec), args.target or shipped.target_folder()
    deep = SpecConfig(*(args.predicted_spec or args.spec))
    settings: dict[str, Any] = {"max_batch_size": batch, "smoke": False, "max_seq_len": args.max_seq_len}
    settings |= {"device": args.device} | ({"dtype": args.dtype} if args.dtype else {})
    if args.draft == "none":
        grams = SpecDecoder.from_pretrained(target, "ngram", spec, **settings)
        deeper = grams if deep == spec else SpecDecoder.from_pretrained(target, "ngram", deep, **settings)
        return [Way("plain", grams, False), Way("n-grams", grams), Way("n-grams, prediction", deeper, predicts=True)]
    head = args.draft or shipped.draft_folder()
    alone = SpecDecoder.from_pretrained(target, head, spec, **settings)
    joined = SpecDecoder.from_pretrained(target, [head, "suffix"], spec, **settings)
    deeper = joined if deep == spec else SpecDecoder.from_pretrained(target, [head, "suffix"], deep, **settings)
    return [
        Way("plain", alone, False), Way("head", alone), Way("head, text", joined),
        Way("head, text, prediction", deeper, predicts=True),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", help='a head; "none": n-grams alone')
    parser.add_argument("--prompts")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--edits", help="with --chat: a file of edits, a line each with kind, messages and prediction")
    parser.add_argument("--spec", type=lambda text: tuple(map(int, text.split(","))), default=(5, 4, 16))
    parser.add_argument(
        "--predicted-spec", type=lambda text: tuple(map(int, text.split(","))), help="the shape with predictions, if another"
    )
    parser.add_argument("--kinds", default=",".join(("own", *EDITS)))
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--texts", type=int, default=8, help="at least so many; those of a smaller batch come one after another"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm-ups", type=int, default=1, help="turns before those; a GPU needs more, to capture graphs")
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.chat and not args.edits and args.kinds != "own":
        parser.error("--chat needs --edits, or --kinds own")
    torch.set_num_threads(1)
    cases = []
    for batch in map(int, args.batches.split(",")):
        ways = ways_of(args, batch)
        for kind in args.kinds.split(","):
            for temperature in map(float, args.temperatures.split(",")):
                cases.append(case(ways, kind, temperature, batch, args))
                if args.out:
                    asked = {name: str(value) for name, value in vars(args).items()}
                    result = {"machine": platform.processor() or platform.machine(), "settings": asked, "cases": cases}
                    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
