"""Ways in which files of a trained head come to be wrong, and what the look at a head should say of each (draft/smoke.py).

The heads are in SafeAILab's layout, EAGLE-3 or EAGLE-1.  This module knows names of keys and tensors, and no look.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Generator, Tensor

from toolkit.heads.writers import Files

IDS = "eagle_aux_hidden_state_layer_ids"


class Damage(NamedTuple):
    """change: makes the damaged files in place; it returns False if the head has not what it would damage.

    cause: a part of the reading's name that undoes the damage; empty: no reading does.
    """

    name: str
    change: Callable[[Files, Tensor, Generator], bool | None]
    cause: str = ""


def read_files(folder: Path) -> Files:
    """A head's config, and its tensors in float32."""
    tensors = load_file(folder / "model.safetensors")
    floats = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
    return json.loads((folder / "config.json").read_text()), floats


def damaged(files: Files, embed_VH: Tensor) -> Iterator[tuple[Damage, Files]]:
    """Every damage that the head can have, the first of which is none, and the files with it.  embed_VH: the target's table."""
    for damage in DAMAGES:
        changed = copy.deepcopy(files)
        if damage.change(changed, embed_VH, torch.Generator().manual_seed(0)) is not False:
            yield damage, changed


# ---- what is changed ----


def matrices(files: Files) -> list[str]:
    return [name for name, x in files[1].items() if x.dim() == 2]


def weight(ending: str, change: Callable[[Tensor, Generator], Tensor]) -> Callable[[Files, Tensor, Generator], bool]:
    """Changes the tensors whose names end so."""

    def apply(files: Files, _: Tensor, made: Generator) -> bool:
        names = [name for name in files[1] if name.removesuffix(".weight").endswith(ending)]
        for name in names:
            files[1][name] = change(files[1][name], made)
        return bool(names)

    return apply


def like(x: Tensor, made: Generator) -> Tensor:
    """Random numbers of the tensor's size."""
    return torch.randn(x.shape, generator=made) * x.std()


def noise(share: float) -> Callable[[Files, Tensor, Generator], None]:
    """Noise on all matrices, as large as this share of them."""

    def apply(files: Files, _: Tensor, made: Generator) -> None:
        for name in matrices(files):
            files[1][name] = files[1][name] + share * like(files[1][name], made)

    return apply


def trained(share: float) -> Callable[[Files, Tensor, Generator], None]:
    """This share of the trained numbers, and a random start's for the rest, as in the middle of a training."""

    def apply(files: Files, _: Tensor, made: Generator) -> None:
        for name in matrices(files):
            x = files[1][name]
            files[1][name] = share * x + (1 - share) * torch.randn(x.shape, generator=made) * 0.02

    return apply


def rounded(dtype: torch.dtype) -> Callable[[Files, Tensor, Generator], None]:
    def apply(files: Files, _: Tensor, made: Generator) -> None:
        for name in matrices(files):
            files[1][name] = files[1][name].to(dtype).float()

    return apply


def embeddings(make: Callable[[Tensor, Generator], Tensor]) -> Callable[[Files, Tensor, Generator], bool]:
    """Embeddings of the head's own, made of the target's.  EAGLE-1/2 heads never have ones that are read."""

    def apply(files: Files, embed_VH: Tensor, made: Generator) -> bool:
        files[1]["embed_tokens.weight"] = make(embed_VH.float(), made)
        return "d2t" in files[1]

    return apply


def vocabulary(change: Callable[[Tensor, int, Generator], Tensor]) -> Callable[[Files, Tensor, Generator], bool]:
    """Another map of the draft vocabulary, from target ids, and no t2d that tells of the right one."""

    def apply(files: Files, _: Tensor, made: Generator) -> bool:
        if "d2t" not in files[1]:
            return False
        files[1].pop("t2d", None)
        at_V = torch.arange(len(files[1]["d2t"]))
        files[1]["d2t"] = change(files[1]["d2t"] + at_V, files[0]["vocab_size"], made) - at_V
        return True

    return apply


def layers(change: Callable[[list[int]], list[int]]) -> Callable[[Files, Tensor, Generator], bool]:
    def apply(files: Files, _: Tensor, made: Generator) -> bool:
        nested = files[0].get("eagle_config")
        if nested is None or min(changed := change(nested[IDS])) < 0:
            return False
        nested[IDS] = changed
        return True

    return apply


def key(name: str, value: object) -> Callable[[Files, Tensor, Generator], None]:
    def apply(files: Files, _: Tensor, made: Generator) -> None:
        files[0][name] = value

    return apply


def eagle_key(name: str) -> Callable[[Files, Tensor, Generator], bool]:
    """A switch of the config, turned."""

    def apply(files: Files, _: Tensor, made: Generator) -> bool:
        nested = files[0].get("eagle_config")
        if nested is None:
            return False
        nested[name] = not nested.get(name, False)
        return True

    return apply


def exchanged(first: str, second: str) -> Callable[[Files, Tensor, Generator], bool]:
    """Two tensors of one shape under each other's names."""

    def apply(files: Files, _: Tensor, made: Generator) -> bool:
        tensors = files[1]
        if first not in tensors or second not in tensors:
            return False
        tensors[first], tensors[second] = tensors[second], tensors[first]
        return True

    return apply


def blocks(order: tuple[int, int, int]) -> Callable[[Files, Tensor, Generator], bool]:
    """The columns of `fc`, a block for each of three layers, in another order."""

    def apply(files: Files, _: Tensor, made: Generator) -> bool:
        if "eagle_config" not in files[0]:
            return False
        parts = files[1]["fc.weight"].chunk(3, 1)
        files[1]["fc.weight"] = torch.cat([parts[i] for i in order], 1)
        return True

    return apply


def columns(x: Tensor, made: Generator) -> Tensor:
    return x[:, torch.randperm(x.shape[1], generator=made)]


def rows(x: Tensor, made: Generator) -> Tensor:
    return x[torch.randperm(x.shape[0], generator=made)]


def others(files: Files, _: Tensor, made: Generator) -> None:
    """Weights as a training for another target would leave them: of the same sizes, without any of these numbers."""
    for name in matrices(files):
        files[1][name] = rows(columns(files[1][name], made), made)


def random_ids(ids_V: Tensor, size: int, made: Generator) -> Tensor:
    return torch.randperm(size, generator=made)[: len(ids_V)].sort().values


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
OWN, MAP, LM = "embed_tokens", "d2t", "lm_head"
LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DAMAGES = [
    Damage("none", lambda files, _, made: None),
    Damage("rounded to bfloat16", rounded(torch.bfloat16)),
    Damage("rounded to float8", rounded(torch.float8_e4m3fn)),
    Damage("noise of a tenth", noise(0.1)),
    Damage("noise of a quarter", noise(0.25)),
    Damage("noise of a half", noise(0.5)),
    Damage("noise as large as the numbers", noise(1.0)),
    Damage("noise of three times the numbers", noise(3.0)),
    Damage("trained to 90 %", trained(0.9)),
    Damage("trained to 50 %", trained(0.5)),
    Damage("trained to 20 %", trained(0.2)),
    Damage("trained to 5 %", trained(0.05)),
    Damage("not trained at all", trained(0.0)),
    Damage("trained for another target", others),
    Damage("embeddings random", embeddings(like), OWN),
    Damage("embeddings of zeros", embeddings(lambda x, made: torch.zeros_like(x)), OWN),
    Damage("embeddings' rows mixed", embeddings(rows), OWN),
    Damage("embeddings' columns mixed", embeddings(columns), OWN),
    Damage("embeddings shifted by one id", embeddings(lambda x, made: x.roll(1, 0)), OWN),
    Damage("embeddings ten times as large", embeddings(lambda x, made: 10 * x)),
    Damage("d2t of zeros", vocabulary(lambda ids, size, made: torch.arange(len(ids))), MAP),
    Damage("d2t of other ids", vocabulary(random_ids), MAP),
    Damage("d2t of the last ids", vocabulary(lambda ids, size, made: torch.arange(size - len(ids), size)), MAP),
    Damage("d2t of absolute ids", vocabulary(lambda ids, size, made: ids + torch.arange(len(ids))), MAP),
    Damage("d2t one id too high", vocabulary(lambda ids, size, made: (ids + 1).clamp(max=size - 1)), MAP),
    Damage("lm_head random", weight("lm_head", like), LM),
    Damage("lm_head of zeros", weight("lm_head", lambda x, made: torch.zeros_like(x)), LM),
    Damage("lm_head's rows mixed", weight("lm_head", rows), LM),
    Damage("lm_head's columns mixed", weight("lm_head", columns), LM),
    Damage("ids one higher", layers(lambda ids: [i + 1 for i in ids]), "lower"),
    Damage("ids one lower", layers(lambda ids: [i - 1 for i in ids]), "higher"),
    Damage("first two ids one higher", layers(lambda ids: [ids[0] + 1, ids[1] + 1, ids[2]])),
    Damage("ids of other layers", layers(lambda ids: [ids[0] + 1, ids[1] - 1, ids[2] - 1])),
    Damage("features in the opposite order", blocks((2, 1, 0)), "opposite order"),
    Damage("features in another order", blocks((1, 2, 0)), "in the order"),
    Damage("fc random", weight("fc", like)),
    Damage("fc's columns mixed", weight("fc", columns)),
    Damage("fc of zeros", weight("fc", lambda x, made: torch.zeros_like(x))),
    Damage("norm_before_residual turned", eagle_key("norm_before_residual"), "norm_before_residual"),
    Damage("input_layernorm and hidden_norm exchanged",
           exchanged("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"), "hidden_norm exchanged"),
    Damage("norm and hidden_norm exchanged", exchanged("norm.weight", "midlayer.hidden_norm.weight")),
    Damage("gate and up exchanged", exchanged("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight")),
    Damage("gate and up exchanged", exchanged("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")),
    Damage("keys and values exchanged", exchanged("midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight")),
    Damage("keys and values exchanged", exchanged("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight")),
    Damage("rope_theta 100", key("rope_theta", 100.0), "rope"),
    Damage("rope_theta 500000", key("rope_theta", 500000.0), "rope"),
    Damage("rope scaled as Llama 3's", key("rope_scaling", LLAMA3), "rope"),
    Damage("rope scaled linearly by 8", key("rope_scaling", {"rope_type": "linear", "factor": 8.0}), "rope"),
    Damage("rms_norm_eps 0.1", key("rms_norm_eps", 0.1)),
    *(Damage(f"{part} random", weight(part, like)) for part in LAYER),
    *(Damage(f"{part} of zeros", weight(part, lambda x, made: torch.zeros_like(x))) for part in LAYER),
]  # fmt: skip
