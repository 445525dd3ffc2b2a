"""What several ranks write together, beside what one writes: texts of a pair, and of requests that come and go at random."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec import SpecDecoder
from specdec.loading.pair import WantedPair
from specdec.loading.ranks import Ranks
from specdec.options import EngineOptions
from specdec.prompts.tokenizer import Tokenizer
from toolkit.driver import Driver
from toolkit.parallel.many import CHAIN, PAGE, SAMPLINGS, TREE, Pair, PairFeature

Folders = tuple[Path, "Path | str"]
OF_SEVERAL = ("decode_context_parallel_size", "context_interleave", "expert_parallel")  # options that one rank has no use for
EVENTS, SYSTEM = 24, [(7 * i * i + 3 * i) % 40 for i in range(30)]  # of random traffic: steps; what many prompts begin with


def options_of(size: int, device: str = "cpu", **settings: Any) -> EngineOptions:
    own = {"max_seq_len": 120, "max_batch_size": 3, "threads": 1 if device == "cpu" else "auto", **settings}
    return EngineOptions(device=device, dtype="float32", tensor_parallel_size=size, **own)


def both_options(feature: PairFeature, size: int, device: str = "cpu") -> tuple[EngineOptions, EngineOptions]:
    """(of one rank, of `size`) for the same work: a page of one stands for as many tokens as one of all that divide a text."""
    own = {"prefill_chunk": 20, **feature.options}
    sharers = own.get("decode_context_parallel_size", 1)
    of_one = {name: value for name, value in own.items() if name not in OF_SEVERAL}
    return options_of(1, device, page_size=PAGE * sharers, **of_one), options_of(size, device, page_size=PAGE, **own)


def decoder_of(folders: Folders, feature: PairFeature, options: EngineOptions, ranks: Ranks) -> SpecDecoder:
    model, head, settings, folder = ranks.load(WantedPair(*folders, feature.spec, options))
    return SpecDecoder(model, head, settings, Tokenizer(folder), ranks)


def texts(folders: Folders, feature: PairFeature, options: EngineOptions, ranks: Ranks) -> list[Any]:
    """What requests got, and how many draft tokens each round accepted; with prefix caching twice: kept prompts are found."""
    with decoder_of(folders, feature, options, ranks) as decoder:
        turns = range(1 + options.prefix_caching)
        outs = [out for _ in turns for out in decoder.generate(feature.prompts, feature.samplings)]
        rounds = [None if feature.follows_clock else out.stats.accepted_per_round for out in outs]
        return [(out.token_ids, out.finish_reason, taken) for out, taken in zip(outs, rounds, strict=True)]


def both_texts(
    folders: Folders, feature: PairFeature, ranks: Ranks, alone: Ranks, device: str = "cpu"
) -> tuple[list[Any], list[Any]]:
    """(what one rank wrote, what all wrote)."""
    of_one, of_all = both_options(feature, ranks.size, device)
    return texts(folders, feature, of_one, alone), texts(folders, feature, of_all, ranks)


def of_family(pair: Pair, size: int) -> list[PairFeature]:
    """Trees, chains, and how `size` ranks may divide sequences: over all that hold the same, and over two; every interleave."""
    found = [PairFeature("tree", pair), PairFeature("chain", pair, CHAIN)]
    sharers = dict.fromkeys(number for number in (size // pair.divides, 2) if number > 1) if pair.divides else ()
    for number in sharers:
        for run in (run for run in range(1, PAGE + 1) if PAGE % run == 0):
            divided = {"decode_context_parallel_size": number, "context_interleave": run, "prefix_caching": True}
            found.append(PairFeature(f"tree, divided by {number}, {run} in a row", pair, TREE, options=divided))
    return found


def traffic(folders: Folders, feature: PairFeature, ranks: Ranks, alone: Ranks, seed: int) -> tuple[int, list[Any]]:
    """(requests that finished, those whose text is not what the target writes for them alone): they come, are cancelled, and
    enter in chunks of random sizes, while others run.
    """
    chance = random.Random(f"{feature.name} {seed}")
    of_one, of_all = both_options(feature, ranks.size)
    asked = []
    with decoder_of(folders, feature, of_all, ranks) as decoder:
        driver = Driver(decoder)
        for _ in range(EVENTS):
            event = chance.random()
            if event < 0.3:
                prompt = SYSTEM[: chance.choice([0, 5, 17, 30])] + [chance.randrange(40) for _ in range(chance.randrange(1, 9))]
                sampling = replace(chance.choice(SAMPLINGS), max_tokens=chance.choice([1, 4, 8]))
                asked.append(driver.submit(prompt, sampling, speculate=chance.random() < 0.8))
            elif event < 0.38 and asked:
                driver.cancel(chance.choice(asked[-3:]))
            elif event < 0.45:
                driver.set_chunk(chance.choice([1, 7, 20, 64]))
            else:
                driver.step()
            driver.assert_books_balance()
        driver.run_until_idle()
        driver.assert_nothing_leaked()
    whole = [request for request in asked if not request.cancelled]
    with decoder_of(folders, feature, replace(of_one, max_batch_size=1), alone) as decoder:
        wanted = decoder.generate([each.prompt_ids for each in whole], [each.sampling for each in whole], speculate=False)
    pairs = zip(whole, wanted, strict=True)
    return len(whole), [(each.prompt_ids, each.sampling) for each, want in pairs if each.output.token_ids != want.token_ids]
