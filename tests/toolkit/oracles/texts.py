"""Whole decoders of a zoo's targets against transformers' greedy search."""

from collections.abc import Callable

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder
from specdec.models.target import Target
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts

LENGTHS = [20, 7, 24, 1, 13, 18]
PROMPTS = ragged_prompts(40, len(LENGTHS), seed=7)


def hold_text(zoo: Zoo, name: str, decoder: SpecDecoder, chunk: int = 10) -> list[Generation]:
    """Prompts longer than a chunk, in rows that change owners, with drafts if there are any, and without.

    What was written with drafts, without a drafter what was written plainly.
    """
    Driver(decoder).set_chunk(chunk)
    found = list[Generation]()
    for speculate in (True, False) if decoder.head is not None else (False,):
        outputs = decoder.generate(PROMPTS, [SamplingParams(max_tokens=n) for n in LENGTHS], speculate=speculate)
        for prompt, n, out in zip(PROMPTS, LENGTHS, outputs, strict=True):
            assert out.token_ids == zoo.greedy(name, prompt, 24)[:n], (speculate, prompt)
        found = found or outputs
    Driver(decoder).assert_nothing_leaked()
    return found


def hold_captured_text(zoo: Zoo, name: str, shape: tuple[int, int, int], page_size: int) -> None:
    """In float32 on a GPU, whole rounds in graphs, and without graphs."""
    want = [zoo.greedy(name, prompt, 24) for prompt in PROMPTS]
    for graphs in ("round", False):
        settings = dict(page_size=page_size, max_batch_size=3, device="cuda", cuda_graphs=graphs)
        decoder = zoo.decoder(name, "eagle3", SpecConfig(*shape), **settings)
        outputs = decoder.generate(PROMPTS, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == want, graphs


def hold_text_after_shared_prefixes(
    zoo: Zoo, name: str, shape: tuple[int, int, int], prepare: Callable[[Target], None] = lambda model: None
) -> None:
    """Prompts that begin alike, in a decoder that keeps their pages.  prepare: what is done to the target first."""
    decoder = zoo.decoder(name, "eagle3", SpecConfig(*shape), page_size=5, max_batch_size=4, prefix_caching=True)
    prepare(decoder.model)
    tails = ragged_prompts(40, 5, seed=8)
    common = tails[-1] + tails[-2]
    prompts = [common + tail for tail in tails] + [common, tails[0]]
    for _ in range(2):  # the second time, every prompt is known
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=12))
        assert [out.token_ids for out in outputs] == [zoo.greedy(name, prompt, 12) for prompt in prompts]
