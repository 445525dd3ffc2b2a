"""Tokens a second and prompt tokens found in caches, of replicas behind Ray Serve, where requests share system prompts.

    python benchmarks serving.replicas --replicas 1,2,4 --shape 8B --out benchmarks/serving/results/replicas_h200_x4.json
    python benchmarks serving.replicas --replicas 1,2 --tiny        # the shipped target on a CPU: whether all of it runs

Each number of replicas is measured with two of Ray's routers.  "spread": a request goes to the one of two replicas with fewer
requests, whatever their caches hold.  "sessions": Ray's ConsistentHashRouter sends requests with one x-session-id to one
replica, and clients name their system prompt there.  A closed loop of clients for each replica asks; prompts begin with one of
--groups system prompts.  It needs the extras `ray` and `serve` and the package openai.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from gpus import device_name
from safetensors.torch import save_file
from shapes import SHAPES

from serving.numbers import latencies, rates
from serving.processes import ClientProcesses
from serving.work import Work, save_tokenizer
from specdec import shipped
from specdec.models.config import ModelConfig
from specdec.models.registry import choose_target
from specdec.serve.replicas import application

KEY, MODEL = "only-for-this-benchmark", "measured"
ROUTERS: dict[str, dict[str, Any]] = {
    "spread": {},
    "sessions": {
        "request_router_config": {"request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"}
    },
}
COUNTED = ("specdec_prompt_tokens_total", "specdec_cached_tokens_total")


def save_llama(folder: Path, config: ModelConfig) -> Path:
    """Random bf16 weights of a Llama of that shape, a file a layer, as checkpoints have them, with a tokenizer."""
    H, I, D = config.hidden_size, config.intermediate_size, config.head_dim
    Q, K, device = config.num_heads * D, config.num_kv_heads * D, "cuda" if torch.cuda.is_available() else "cpu"
    attention = {"q_proj": (Q, H), "k_proj": (K, H), "v_proj": (K, H), "o_proj": (H, Q)}
    mlp = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    layer = {f"self_attn.{name}": size for name, size in attention.items()} | {
        f"mlp.{name}": size for name, size in mlp.items()
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    files = [{f"model.layers.{i}.{name}": size for name, size in (layer | dict.fromkeys(norms, (H,))).items()}
             for i in range(config.num_layers)]  # fmt: skip
    files.append({"model.embed_tokens": (config.vocab_size, H), "lm_head": (config.vocab_size, H), "model.norm": (H,)})
    places = {}
    for number, names in enumerate(files):
        tensors = {f"{name}.weight": torch.ones(size) if len(size) == 1 else 0.02 * torch.randn(size, device=device)
                   for name, size in names.items()}  # fmt: skip
        file = f"model-{number:03}.safetensors"
        save_file({name: each.bfloat16().cpu() for name, each in tensors.items()}, folder / file)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    raw = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=H, intermediate_size=I, head_dim=D,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        vocab_size=config.vocab_size, rms_norm_eps=config.rms_norm_eps, rope_parameters=rope, tie_word_embeddings=False,
        max_position_embeddings=config.max_position, torch_dtype="bfloat16", hidden_act="silu",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    save_tokenizer(folder, config.vocab_size)
    return folder


@contextmanager
def local_ray(cpus: int, gpus: int) -> Iterator[int]:
    """A Ray of this machine alone, whose proxy listens on the port that the block is given."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0")
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        own: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False, "log_to_driver": False}
        ray.init(num_cpus=cpus, num_gpus=gpus, _node_ip_address="127.0.0.1", _temp_dir=folder, **own)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield port
        finally:
            ray.shutdown()


def counted(url: str) -> list[float]:
    """What COUNTED say of all replicas together."""
    request = Request(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"})
    lines = urlopen(request, timeout=60).read().decode().splitlines()
    return [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")) for name in COUNTED]


def measure(target: Path, work: Work, replicas: int, router: str, port: int, args: argparse.Namespace) -> dict[str, Any]:
    """One line: so many replicas with one router, which are gone afterwards."""
    from ray import serve

    application_of = application(
        target, num_replicas=replicas, num_gpus=0 if args.tiny else 1, ray_options=ROUTERS[router], api_key=KEY,
        model_name=MODEL, max_batch_size=args.clients, max_queue=args.clients * replicas, prefix_caching=True,
        max_seq_len=work.prompt_tokens + work.max_tokens + 16,
    )  # fmt: skip
    serve.run(application_of, name="measured", route_prefix="/measured")
    url, lanes = f"http://127.0.0.1:{port}/measured", args.clients * replicas
    try:
        with ClientProcesses(f"{url}/v1", KEY, min(8, lanes)) as clients:
            clients.closed(replace(work, max_tokens=2), [[-1 - lane] for lane in range(lanes)])  # compiles and captures
            before = counted(url)
            numbers = range(lanes * args.requests)
            start, records = clients.closed(work, [list(numbers[lane::lanes]) for lane in range(lanes)])
            asked, found = (after - earlier for after, earlier in zip(counted(url), before, strict=True))
    finally:
        serve.delete("measured")
    row = (
        {"replicas": replicas, "router": router, "hit_rate": found / max(1.0, asked)}
        | rates(start, records)
        | latencies(records)
    )
    print(f"{replicas} replicas, {router:8}: {row['tok_s']:8.0f} tok/s, {row['hit_rate']:.1%} of prompt tokens found, "
          f"{row['failures']} failures", flush=True)  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,2,4", help="numbers of replicas, separated by commas")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--target", type=Path, help="a folder; left out: random weights of --shape")
    parser.add_argument("--shape", choices=("8B", "SmolLM2-135M"), default="8B")
    parser.add_argument("--clients", type=int, default=16, help="of each replica")
    parser.add_argument("--requests", type=int, default=12, help="of each client")
    parser.add_argument("--groups", type=int, default=24, help="system prompts")
    parser.add_argument("--tiny", action="store_true", help="the shipped target on the CPU, and few short requests")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts = [int(count) for count in args.replicas.split(",")]
    if args.tiny:
        args.clients, args.requests, args.groups = 2, 3, 2
    rows = []
    with tempfile.TemporaryDirectory() as made:
        target = shipped.target_folder() if args.tiny else args.target or save_llama(Path(made), SHAPES[args.shape].config)
        sizes = (64, 8, 48) if args.tiny else (2560, 128, 2048)
        work = Work(MODEL, choose_target(target).config.vocab_size, *sizes[:2], groups=args.groups, shared_tokens=sizes[2])
        with local_ray(max(counts), 0 if args.tiny else max(counts)) as port:
            for count in counts:
                for router in args.routers:
                    rows.append(measure(target, work, count, router, port, args))
                    if args.out:
                        result = {"device": device_name(), "date": time.strftime("%Y-%m-%d"), "tiny": args.tiny, "rows": rows}
                        args.out.parent.mkdir(parents=True, exist_ok=True)
                        args.out.write_text(json.dumps(result, indent=1) + "\n")
