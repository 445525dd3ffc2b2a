"""GGUF files of the Llama-3.1-8B shape, random: reading a header, making numbers of blocks, loading, and a plain step.

    python benchmarks products.gguf_files --out FILE
    python benchmarks products.gguf_files --layers 2 --types Q4_0 --device cpu       (for a look at the script)

The header is that of a vocabulary of Llama 3's size, read by specdec and by the package `gguf`, which the script needs; both
make numbers of blocks, too.  A file of each type is written, loaded, made to write a plain text, and deleted again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from specdec import SamplingParams, SpecDecoder
from specdec.models.gguf.blocks import BLOCKS, KEPT, dequantised
from specdec.models.gguf.file import open_gguf

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, MERGES = 4096, 14336, 32, 8, 128, 128256, 280147
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN), "ffn_down": (HIDDEN, WIDTH),
}  # fmt: skip
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}  # where scales lie


def random_rows(type: str, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Any quantised values, with scales that make numbers of about 0.02, as weights are."""
    if type not in BLOCKS:
        numbers = (0.02 * random.standard_normal(shape)).astype(np.float32)
        return numbers.astype(np.float16) if type == "F16" else numbers
    columns, size = BLOCKS[type][:2]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // columns, size), dtype=np.uint8)
    for place in HALVES.get(type, (0,)):
        scales = (random.random(len(blocks)) * (4e-6 if type.endswith("_K") else 3e-4)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    if type == "MXFP4":
        blocks[:, 0] = random.integers(118, 121, len(blocks))
    return blocks.reshape(shape[0], -1)


def write(path: Path, type: str, layers: int) -> float:
    """A model without a tokenizer, all matrices in the type but the embeddings, which are the output layer too.  Its GB."""
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for key, value in {
        "block_count": layers, "context_length": 8192, "embedding_length": HIDDEN, "feed_forward_length": WIDTH,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "vocab_size": VOCAB,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    kinds = gguf.GGMLQuantizationType
    writer.add_tensor("token_embd.weight", random_rows("F16", (VOCAB, HIDDEN), random))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    rows = {shape: random_rows(type, shape, random) for shape in set(SHAPES.values())}  # the same in all layers: no step knows
    for layer in range(layers):
        for name, shape in SHAPES.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rows[shape], raw_dtype=kinds[type])
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    finish(writer)
    return path.stat().st_size / 1e9


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seconds(work: Any, repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def header(folder: Path) -> dict[str, float]:
    """Seconds to read the keys of a vocabulary of Llama 3's size, which is written anew before each reading."""
    writer, path = gguf.GGUFWriter(folder / "vocabulary.gguf", "llama"), folder / "vocabulary.gguf"
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(VOCAB)])
    writer.add_array("tokenizer.ggml.merges", [f"left{number} right{number}" for number in range(MERGES)])
    writer.add_array("tokenizer.ggml.token_type", [1] * VOCAB)
    writer.add_tensor("a", np.ones(32, np.float32))
    finish(writer)

    def anew() -> None:
        path.touch()
        open_gguf(path)

    def by_package() -> None:
        for field in gguf.GGUFReader(path).fields.values():
            field.contents()

    return {"specdec": seconds(anew), "gguf": seconds(by_package)}


def numbers(type: str) -> dict[str, float]:
    """Millions of numbers a second that are made of a type's blocks, on the CPU."""
    rows = random_rows(type, (4096, 4096), np.random.default_rng(1))
    blocks, kind = torch.from_numpy(rows).view(-1, BLOCKS[type].bytes), gguf.GGMLQuantizationType[type]
    found = {"specdec": seconds(lambda: dequantised(type, blocks)), "gguf": seconds(lambda: dequantize(rows, kind))}
    return {name: rows.shape[0] * 4096 / taken / 1e6 for name, taken in found.items()}


def model(path: Path, device: str, quantize: str) -> dict[str, Any]:
    """Seconds of a load, the second one, with the file in the host's memory; and milliseconds of a plain step at batch 1."""
    sampling = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (64, 192)]
    for _ in range(2):
        began = time.perf_counter()
        decoder = SpecDecoder.from_pretrained(path, device=device, max_seq_len=512, quantize=quantize)
        loaded = time.perf_counter() - began
        with decoder:
            decoder.generate([1, 2, 3], sampling[1])
            few, many = (seconds(partial(decoder.generate, [1, 2, 3], each)) for each in sampling)
            kept = str(decoder.model.config.quantization or "unquantised")
    return {"kept": kept, "load_s": loaded, "step_ms": 1e3 * (many - few) / 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["F16", "Q8_0", "Q4_0", "MXFP4", "Q4_1", "Q4_K", "Q6_K"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=None, help="where files are written; default: a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    record: dict[str, Any] = {"where": where, "torch": torch.__version__, "layers": args.layers, "models": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        record["header_s"] = header(Path(folder))
        record["numbers_M_a_s"] = {type: numbers(type) for type in BLOCKS}
        print(json.dumps(record), flush=True)
        for type in args.types:
            path = Path(folder) / f"{type}.gguf"
            size = write(path, type, args.layers)
            for quantize in ("none", "blocks") if type in KEPT else ("none",):
                row = {"type": type, "GB": size, "quantize": quantize, **model(path, args.device, quantize)}
                record["models"].append(row)
                print(row, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(record, indent=1) + "\n")
            path.unlink()


if __name__ == "__main__":
    main()
