"""200 streams for a minute through the HTTP server, with tools and without: whole rates, first tokens, pauses, errors.

    python benchmarks serving.tool_streams --out benchmarks/serving/results/tool_streams.json 2>log   (the server logs requests)
    python benchmarks serving.tool_streams --tiny   (the shipped pair on a CPU: whether this script works, no numbers)

The Llama-3.1-8B shape with an EAGLE-3 head of the real shape, random bf16 weights, the chain (5,1,6), a row for each stream.
Each of 200 clients, with the real `openai` package in processes of their own, sends its next chat when its last one has ended:
256 random words, greedy, at most 128 tokens, streamed.  Random weights accept next to nothing, on all sides alike.

none      No tools.
required  Two functions, of which one must be called: a grammar holds from the first token.  The argument is a string that
          random weights hardly ever end, so that nearly all streams are as long as without tools; `whole` counts them.
auto      The same functions, which the model may call.  A bias on the mark that begins a call makes it do so at once, so that
          the grammar begins within the text.

Tokens of each piece are those that the server's `usage` counts.  The first piece of a call is its name, after some tokens.  A
failure is a stream that ended in an error or without a finish reason.  Kinds run once for a while that is not counted.  Exit
code 1: a stream failed, or the pieces of one hold no tokens, or more than the server says it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rounds.round_8b import TARGET, make_decoder, random_pair
from toolkit.soak.run import pair_with_chat

from serving.clients import Record
from serving.numbers import latencies, rates
from serving.processes import ClientProcesses
from serving.serve_load import pair
from serving.server import http_server
from serving.work import Work, save_tokenizer
from specdec.config import SpecConfig
from specdec.decoder import SpecDecoder
from specdec.prompts.tokenizer import Tokenizer
from specdec.serve.options import ServeOptions

CHAIN, KEY, MODEL, BEGINS = SpecConfig(5, 1, 6), "streams", "model", "<tool_call>"
MARKS, END = ("</tool_call>", BEGINS), "<end>"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}:{# <tool_call> #}"
)
NOTE = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "write", "description": "Keeps a note.", "parameters": NOTE}},
    {"type": "function", "function": {"name": "send", "description": "Sends a note.", "parameters": NOTE}},
]
KINDS = ("none", "required", "auto")
PACKAGES = ("openai", "fastapi", "starlette", "uvicorn", "pydantic", "tokenizers", "transformers", "llguidance")


class Size(NamedTuple):
    """What is run.  words, tokens: of a prompt, and the most of an output.  most: of the requests of a stream."""

    streams: int
    seconds: float
    warm_up: float
    words: int
    tokens: int
    most: int


FULL, TINY = Size(200, 60.0, 10.0, 256, 128, 200), Size(6, 2.0, 0.5, 8, 60, 50)


def large_decoder(folder: Path, size: Size) -> SpecDecoder:
    """With a tokenizer of as many ids as the model has, of which the last are marks."""
    from transformers import PreTrainedTokenizerFast

    save_tokenizer(folder, TARGET.vocab_size - len(MARKS) - 1)
    inner = PreTrainedTokenizerFast.from_pretrained(folder)
    inner.add_special_tokens({"eos_token": END, "additional_special_tokens": list(MARKS)})
    inner.chat_template = TEMPLATE
    inner.save_pretrained(folder)
    torch.manual_seed(0)
    context = 2 * size.words + size.tokens
    target = replace(TARGET, eos_ids=(inner.convert_tokens_to_ids(END),))  # with which a call ends, under a grammar
    model, head = random_pair(context + 1024, torch.device("cuda", 0), target)
    return make_decoder(model, head, CHAIN, size.streams, context, "round", tokenizer=Tokenizer(folder))


def fields_of(kind: str, begins: int) -> dict[str, Any]:
    """Fields of each chat.  begins: the token that begins a call."""
    if kind == "none":
        return {}
    more: dict[str, Any] = {"logit_bias": {str(begins): 100}} if kind == "auto" else {}
    return {"tools": TOOLS, "tool_choice": kind, "parallel_tool_calls": False, **more}


def measure(clients: ClientProcesses, work: Work, size: Size, first: int) -> dict[str, Any]:
    """One kind of chats.  first: the number of its first request."""
    lanes = [list(range(start, start + size.most)) for start in range(first, first + size.streams * size.most, size.most)]
    clients.closed(work, [lane[size.most // 2 :] for lane in lanes], size.warm_up)
    start, records = clients.closed(work, [lane[: size.most // 2] for lane in lanes], size.seconds)
    whole = sum(record.tokens == work.max_tokens for record in records)
    return {**rates(start, records), **latencies(records), "whole": whole, "miscounted": sum(map(is_miscounted, records))}


def is_miscounted(record: Record) -> bool:
    """Whether its pieces have more tokens than the server wrote; fewer are what had no text, such as the end of a call."""
    return record.error is None and not 0 < sum(tokens for _, tokens in record.chunks) <= record.tokens


def show(kind: str, row: dict[str, Any]) -> None:
    between = row["between_tokens_ms"]
    print(
        f"{kind:>8}: {row['tok_s']:8.1f} tok/s {row['requests_s']:6.2f} requests/s, {row['failures']} of {row['requests']}"
        " failed, "
        f"{row['whole']} as long as asked; ms p50/p99: first token {pair(row['first_token_ms'])}, between tokens "
        f"{pair(between['all'])}, longest pause {row['longest_pause_ms']:.1f}; counted {row['counted_share']:.1%}",
        flush=True,
    )


def write(out: Path, size: Size, rows: dict[str, dict[str, Any]], tiny: bool) -> None:
    """The kinds so far: a run that is stopped leaves those that ended."""
    result = {
        "device": "cpu" if tiny else torch.cuda.get_device_name(), "cpus": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), **{name: version(name) for name in PACKAGES}, "date": time.strftime("%Y-%m-%d"),
        "weights": "shipped" if tiny else "random", "spec": CHAIN.label, **size._asdict(), "rows": rows,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the shipped pair on a CPU, few short streams for seconds")
    parser.add_argument("--seconds", type=float, help="for which each kind of chats is sent")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    size = size if args.seconds is None else size._replace(seconds=args.seconds)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tiny = {"device": "cpu", "dtype": "float32", "max_batch_size": size.streams}
        decoder = pair_with_chat(Path(folder), CHAIN, **tiny) if args.tiny else large_decoder(Path(folder), size)
        begins = decoder.encode(BEGINS)[-1]
        options = ServeOptions(port=0, model_name=MODEL, api_key=KEY, max_queue=size.streams)
        with http_server(decoder, options) as url, ClientProcesses(url, KEY, 2 if args.tiny else 8) as clients:
            for number, kind in enumerate(KINDS):
                chat = fields_of(kind, begins)
                work = Work(MODEL, decoder.model.config.vocab_size, size.words, size.tokens, chat=chat)
                rows[kind] = measure(clients, work, size, number * size.streams * size.most)
                show(kind, rows[kind])
                if args.out:
                    write(args.out, size, rows, args.tiny)
    found = [f"{kind}: {error}" for kind, row in rows.items() for error in row["errors"]]
    found += [f"{kind}: {row['miscounted']} streams miscounted" for kind, row in rows.items() if row["miscounted"]]
    for fault in found:
        print(f"FAILED: {fault}")
    return 1 if found else 0
