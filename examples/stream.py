"""Prints a text while it is written, and what the whole took: stream.py [TARGET DRAFT]."""

import sys
import time

from specdec import Generation, SamplingParams, SpecDecoder, shipped

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else (shipped.target_folder(), shipped.draft_folder())
decoder = SpecDecoder.from_pretrained(target, draft, max_batch_size=1)


def show(prompt: str, sampling: SamplingParams) -> Generation:
    """Each chunk is what one round added.  The generator's return value is the finished Generation."""
    stream = decoder.stream(prompt, sampling)
    while True:
        try:
            chunk = next(stream)
        except StopIteration as end:
            print()
            return end.value
        print(chunk.text, end="", flush=True)


began = time.perf_counter()
answer = show("The little bear", SamplingParams(max_tokens=64))
print(f"\n{len(answer.token_ids)} tokens in {time.perf_counter() - began:.2f} s, the first pass of the process included")

stream = decoder.stream("The little bear", SamplingParams(max_tokens=64))
print("only the first chunk:", repr(next(stream).text))
stream.close()  # a stream that is closed early frees its place in the batch
