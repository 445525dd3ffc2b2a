"""Several coroutines that share one decoder, and a stream that its reader leaves: async_callers.py [TARGET DRAFT]."""

import asyncio
import sys
import time

from specdec import AsyncSpecDecoder, SamplingParams, shipped

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else (shipped.target_folder(), shipped.draft_folder())


async def tell(decoder: AsyncSpecDecoder, prompt: str, sampling: SamplingParams, speculate: bool) -> str:
    """One caller.  Requests of all callers run in one batch, and each may have settings of its own."""
    answer = await decoder.generate(prompt, sampling, speculate=speculate)
    return f"{prompt!r} -> {answer.text!r} ({answer.stats.rounds} rounds)"


async def read_a_few_words(decoder: AsyncSpecDecoder, prompt: str) -> str:
    """A reader that has enough: leaving the loop ends the request and frees its place in the batch."""
    text = ""
    async for chunk in decoder.stream(prompt, SamplingParams(max_tokens=300)):
        text += chunk.text
        if len(text) > 20:
            break
    return f"{prompt!r} -> {text!r}, and no further"


async def main() -> None:
    # The models are loaded when from_pretrained returns; leaving the block frees them.
    async with AsyncSpecDecoder.from_pretrained(target, draft, max_batch_size=4) as decoder:
        short, sampled = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.8, seed=7)
        callers = [
            tell(decoder, "Once upon a time", short, speculate=True),
            tell(decoder, "Once upon a time", short, speculate=False),  # the same text, in more rounds
            tell(decoder, "The sun was", sampled, speculate=True),
            read_a_few_words(decoder, "The little bear"),
        ]
        for line in await asyncio.gather(*callers):
            print(line)

        began = time.perf_counter()
        try:  # a task that is cancelled, here by a time limit, ends its request too
            async with asyncio.timeout(0.05):
                await decoder.generate("One day", SamplingParams(max_tokens=400, ignore_eos=True))
        except TimeoutError:
            print(f"given up after {time.perf_counter() - began:.2f} s")


asyncio.run(main())
