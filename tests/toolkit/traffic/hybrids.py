"""Random combinations of a hybrid target, a head, a tree, a cache, options and traffic, each drawn from a number.

Drawn are the family, its widths, its layers and their order, its weights, the drafter, its tree, the cache's type, pages, rows,
chunks, kept states, how requests are sampled, cancelled and broken.  What requests write must be what they write alone without
a drafter (float64), and a greedy text what transformers writes (float32, unless it finds a near-tie).

`PYTHONPATH=tests python -m toolkit.traffic.hybrids 0 100` runs those of numbers 0 to 99; one that fails says its number.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec import SamplingParams, SpecConfig
from toolkit.heads import block_zoo
from toolkit.models import Zoo
from toolkit.recurrent import mamba_targets, more_targets, targets
from toolkit.traffic.traffic import Traffic, World, drive

Changes = dict[str, Any]
EVENTS, GREEDY = 50, 12  # of a combination's traffic; tokens of the text that transformers writes, too
ANY_HEADS = [None, "ngram"]
HEADS = ["eagle1", "eagle1-two-layers", "eagle3", "eagle3-full"]
# For targets of four layers; one of them holds a copy of an output layer, which tied targets lack.
BLOCK_HEADS = [name for name in block_zoo.HEADS if name != "dspark-gated"]
MOST_CANDIDATES = 6  # of DFlash2 heads among them
MTP = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")


def _order(chance: random.Random, recurrent: str, attending: str) -> list[str]:
    """Layers of both kinds, three at least, in any order."""
    more = chance.choice([1, 2, 2, 3])
    kinds = [recurrent, attending, *(chance.choice([recurrent, recurrent, attending]) for _ in range(more))]
    chance.shuffle(kinds)
    return kinds


def _delta(chance: random.Random) -> Changes:
    keys, order = chance.choice([1, 2, 3]), _order(chance, "linear_attention", "full_attention")
    return dict(
        layer_types=order, num_hidden_layers=len(order), linear_num_key_heads=keys,
        linear_num_value_heads=keys * chance.choice([1, 2, 3]), linear_key_head_dim=chance.choice([4, 6, 8, 16]),
        linear_value_head_dim=chance.choice([6, 8, 12, 20]), linear_conv_kernel_dim=chance.choice([2, 3, 4]),
        num_key_value_heads=chance.choice([1, 2, 4]),
    )  # fmt: skip


def _qwen_next(chance: random.Random) -> Changes:
    changes = _delta(chance)
    return changes | dict(mlp_only_layers=[i for i in range(1, changes["num_hidden_layers"] - 1) if chance.random() < 0.3])


def _olmo(chance: random.Random) -> Changes:
    theta = chance.choice([None, 1e4])
    return _delta(chance) | dict(
        linear_allow_neg_eigval=chance.random() < 0.5, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )


def _mamba(chance: random.Random) -> Changes:
    groups, width = chance.choice([1, 2]), chance.choice([8, 16, 32])  # of the 64 channels that mamba_expand = 2 makes
    return dict(
        mamba_n_groups=groups, mamba_d_head=width, mamba_n_heads=64 // width, mamba_d_state=chance.choice([4, 8, 12, 20]),
        mamba_d_conv=chance.choice([2, 3, 4]), num_key_value_heads=chance.choice([1, 2, 4]),
    )  # fmt: skip


def _granite(chance: random.Random) -> Changes:
    order = _order(chance, "mamba", "attention")
    return _mamba(chance) | dict(
        layer_types=order, num_hidden_layers=len(order), residual_multiplier=chance.choice([0.5, 1.0]),
        position_embedding_type=chance.choice(["nope", "rope"]),
    )  # fmt: skip


def _bamba(chance: random.Random) -> Changes:
    order = _order(chance, "mamba", "attention")
    attending = [index for index, kind in enumerate(order) if kind == "attention"]
    return _mamba(chance) | dict(num_hidden_layers=len(order), attn_layer_indices=attending)


def _falcon(chance: random.Random) -> Changes:
    changes, layers = _mamba(chance), chance.choice([3, 4])
    heads, width = 2 * chance.choice([1, 2, 3]), chance.choice([8, 12, 16])
    return changes | dict(
        num_hidden_layers=layers, mamba_n_heads=heads, mamba_d_head=width, mamba_d_ssm=heads * width,
        mamba_rms_norm=chance.random() < 0.5, mamba_norm_before_gate=False,
    )  # fmt: skip


def _nemotron(chance: random.Random) -> Changes:
    others = [chance.choice(["mamba", "mlp", "moe", "attention"]) for _ in range(chance.choice([1, 1, 2, 3]))]
    blocks = ["mamba", "attention", chance.choice(["mlp", "moe"]), *others]
    chance.shuffle(blocks)
    return dict(
        layers_block_type=blocks, mamba_num_heads=4, n_groups=chance.choice([1, 2, 4]), conv_kernel=chance.choice([2, 3, 4]),
        mamba_head_dim=chance.choice([8, 12, 16]), ssm_state_size=chance.choice([4, 8, 12, 20]),
        num_key_value_heads=chance.choice([1, 2, 4]), moe_latent_size=chance.choice([None, 16]),
    )  # fmt: skip


def _lfm2(chance: random.Random) -> Changes:
    order = _order(chance, "conv", "full_attention")
    return dict(layer_types=order, num_hidden_layers=len(order), conv_L_cache=chance.choice([2, 3, 4]))


def _kimi(chance: random.Random) -> Changes:
    order = _order(chance, "kda", "full")
    numbers = {kind: [index + 1 for index, each in enumerate(order) if each == kind] for kind in ("kda", "full")}
    linear = dict(
        head_dim=chance.choice([4, 8, 12, 16]), num_heads=chance.choice([1, 2, 4]), full_attn_layers=numbers["full"],
        short_conv_kernel_size=chance.choice([2, 3, 4]), kda_layers=numbers["kda"],
    )  # fmt: skip
    return dict(num_hidden_layers=len(order), linear_attn_config=linear, kv_lora_rank=chance.choice([8, 16]))


# By name of a family: how a folder of it is written, what is drawn of its config.
FAMILIES: dict[str, tuple[Callable[..., Path], Callable[[random.Random], Changes]]] = {
    **{name: (targets.tiny_hybrid, _qwen_next if name == "qwen3_next" else _delta) for name in targets.FAMILIES},
    "granitemoehybrid": (mamba_targets.tiny_mamba, _granite),
    "granite dense": (mamba_targets.tiny_mamba, _granite),
    "bamba": (mamba_targets.tiny_mamba, _bamba),
    "falcon_h1": (mamba_targets.tiny_mamba, _falcon),
    "nemotron_h": (mamba_targets.tiny_mamba, _nemotron),
    "lfm2": (more_targets.save_more, _lfm2),
    "lfm2_moe": (more_targets.save_more, _lfm2),
    "olmo_hybrid": (more_targets.save_more, _olmo),
    "kimi_linear": (more_targets.save_more, _kimi),
}


def draw_target(chance: random.Random, folder: Path, number: int) -> tuple[str, Changes]:
    """Writes a target that is drawn into the folder.  (its family, what its config changes)."""
    family = list(FAMILIES)[number % len(FAMILIES)]
    save, changes_of = FAMILIES[family]
    changes = changes_of(chance)
    save(folder, family, chance.randrange(10**6), **changes)
    return family, changes


def draw_spec(chance: random.Random, head: str | None) -> SpecConfig | None:
    if head is None:
        return None
    topk = chance.choice([1, 1, 2, 3, 4, 8])
    topk = min(topk, MOST_CANDIDATES) if head.startswith("dflash2") else topk
    if chance.random() < 0.2 and head != "ngram":
        return SpecConfig("auto", topk, topk + chance.choice([3, 6]))
    depth = chance.randrange(1, 5)
    most = depth + 1 if topk == 1 else min(24 if head == "ngram" else 40, 1 + topk + (depth - 1) * topk * topk)
    return SpecConfig(depth, topk, chance.randrange(depth + 1, most + 1))


def draw_world(chance: random.Random, family: str, folder: Path) -> World:
    """What runs over the zoo's target "drawn", which lies in that folder."""
    raw = json.loads((folder / "config.json").read_text())
    text = raw.get("text_config", raw)
    layers = text.get("num_hidden_layers") or len(text["layers_block_type"])
    heads = [*ANY_HEADS, *(["mtp"] if family in MTP else [])]
    if text is raw:  # heads of the zoo know no wrappers' configs
        heads += HEADS + (BLOCK_HEADS if layers == 4 else [])
    head = chance.choice(heads)
    if head == "mtp":
        targets.with_mtp(folder, family, num_key_value_heads=text["num_key_value_heads"])
    settings: dict[str, Any] = {"spec": draw_spec(chance, head)}
    if chance.random() < 0.25 and family != "kimi_linear":
        settings["kv_cache_dtype"] = chance.choice(["fp8", "int8"])
    kept = chance.choice([None, 4, 16])
    if kept is not None:
        settings["prefix_caching"] = True
    return World("drawn", head, settings, kept)


class OddTraffic(Traffic):
    """Traffic whose requests have penalties, biases, floors and banned words, too."""

    def ask(self) -> tuple[list[int], SamplingParams]:
        prompt, sampling = super().ask()
        odd: list[Changes] = [
            {}, {}, {}, {"repetition_penalty": 1.4}, {"presence_penalty": 0.8, "frequency_penalty": 0.3}, {"min_tokens": 1},
            {"logit_bias": {self.random.randrange(40): 2.5}}, {"bad_words": [[self.random.randrange(40)]]}, {"min_p": 0.05},
        ]  # fmt: skip
        kept = {
            name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids")
        }
        return prompt, SamplingParams(**kept | self.random.choice(odd))


def run(number: int) -> tuple[str, int, int]:
    """Draws a combination and holds its texts.  (what it is; requests; 1 if transformers' text was compared, else 0)."""
    chance = random.Random(f"hybrids {number}")
    with TemporaryDirectory() as place:
        zoo = Zoo(Path(place))
        said = str(number)
        try:
            family, changes = draw_target(chance, zoo.root / "drawn", number)
            said += f": {family} {changes}"
            world = draw_world(chance, family, zoo.root / "drawn")
            said += f" {world}"
            traffic = OddTraffic(zoo, world, chance)
            asked, _ = drive(traffic, EVENTS)
            compared = "kv_cache_dtype" not in world.settings and _is_transformers(zoo, traffic, chance)
        except BaseException as error:
            error.add_note(said)
            raise
    return said, len(asked), int(compared)


def _is_transformers(zoo: Zoo, traffic: Traffic, chance: random.Random) -> bool:
    """Whether transformers is an oracle for a text that is drawn; the decoder's must equal it then."""
    prompt = [chance.randrange(40) for _ in range(chance.randrange(2, 30))]
    text = traffic.decoder.generate([prompt], SamplingParams(max_tokens=GREEDY))[0].token_ids
    try:
        wanted = zoo.greedy("drawn", prompt, GREEDY).tokens
    except AssertionError as error:
        if "near-tie" not in str(error):
            raise
        return False
    assert text == wanted, (prompt, text, wanted)
    return True


def main(first: int, end: int) -> int:
    """Runs the combinations of those numbers.  How many failed."""
    counts: Counter[str] = Counter()
    started = time.monotonic()
    for number in range(first, end):
        try:
            _, requests, compared = run(number)
            counts.update(runs=1, requests=requests, compared=compared)
        except Exception as error:
            counts["failed"] += 1
            print("FAILED", *error.__notes__, flush=True)
            traceback.print_exc(limit=-4)
        if number % 10 == 9:
            print(f"{number}: {dict(counts)} in {time.monotonic() - started:.0f} s", flush=True)
    print(f"{first} to {end}: {dict(counts)} in {time.monotonic() - started:.0f} s")
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
