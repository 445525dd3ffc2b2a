"""A config.json with any key set to any wrong value loads, or is refused by file and key: never another error, never a hang.

Every key of the config is tried, and keys that other configs have.  The weights stay as they are.  Our own loaders take from
config.json only what they parse from it, so a value that changes nothing of that is not loaded with again.
"""

import json
import shutil
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.deepseek import save_deepseek, save_sparse
from toolkit.differential.defined import OPTIONS, save_with_options
from toolkit.families import FAMILIES, save_family
from toolkit.models import save_eagle1, save_target
from toolkit.oracles.sharing import save_sharing
from toolkit.own_attention.targets import save as save_own_attention

from specdec import shipped
from specdec.draft.formats.open import open_head
from specdec.draft.load import load_head
from specdec.loading.resolve import resolve_dtype
from specdec.models.config import read_json
from specdec.models.registry import TargetChoice, choose_target, load_chosen
from specdec.models.target import Target

CPU = torch.device("cpu")
SECONDS = 120  # for one load, which takes far less than one second
VALUES: tuple[Any, ...] = (None, "", "x", -1, 0, 10**9, 1e9, 10**30, 0.5, float("nan"), True, [], [None], {}, {"a": 1})
FEW: tuple[Any, ...] = (None, -1, [])  # for transformers' code, which takes longer
OTHERS = (
    "bias draft_vocab_size dtype eagle_config head_dim layer_types max_sequence_length max_window_layers "
    "partial_rotary_factor pretraining_tp quantization_config rope_parameters rope_scaling rope_theta sliding_window "
    "target_hidden_size tie_word_embeddings torch_dtype use_sliding_window"
).split()
Key = tuple[str, ...]
Load = Callable[[Path], object]


def load_target(folder: Path, choice: TargetChoice) -> Target:
    return load_chosen(choice, folder, min(choice.config.max_position, 256), CPU, torch.float32, cuda_graphs=False)


class Native:
    """Loads a target by our own modules."""

    def __init__(self) -> None:
        self.loaded: object = None  # what was parsed from the config loaded first

    def __call__(self, folder: Path) -> object:
        choice = choose_target(folder, "native")
        resolve_dtype("auto", choice.config, CPU)
        if self.loaded == choice.config:
            return None
        self.loaded = self.loaded or choice.config
        return load_target(folder, choice)


class HeadLoads:
    """Loads a head for a target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.loaded: object = None

    def __call__(self, folder: Path) -> object:
        config = open_head(folder, self.target.config).parsed.spec
        if self.loaded == config:
            return None
        self.loaded = self.loaded or config
        return load_head(folder, self.target, 128, CPU, torch.float32)


def by_transformers(folder: Path) -> object:
    return load_target(folder, choose_target(folder, "transformers"))


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Load]]:
    """Folders by name, and what loads each."""
    root = tmp_path_factory.mktemp("fuzz")
    llama = save_target(root / "llama", "llama")
    pair, target = (load_target(f, choose_target(f)) for f in (shipped.target_folder(), llama))
    return {
        "shipped target": (shipped.target_folder(), Native()),
        "shipped head": (shipped.draft_folder(), HeadLoads(pair)),
        "eagle1": (save_eagle1(root / "eagle1", llama), HeadLoads(target)),
        "qwen2": (save_target(root / "qwen2", "qwen2"), Native()),
        "llama3 rope": (save_target(root / "llama3", "llama3-tied-dim8"), Native()),
        "deepseek v2": (save_deepseek(root / "v2", "v2"), Native()),
        "deepseek v3": (save_deepseek(root / "v3", "v3"), Native()),
        "deepseek v32": (save_sparse(root / "v32", "v32"), Native()),
        "glm": (save_sparse(root / "glm", "glm-shared"), Native()),
        "shared kv": (save_sharing(root / "shared kv", "windows"), Native()),
        "gemma3n": (save_family(root / "gemma3n", "gemma3n_text", 0, **FAMILIES["gemma3n"][1]), by_transformers),
        "diffllama": (save_with_options(root / "diffllama", **OPTIONS["alibi, many"]), Native()),
        "falcon-40b": (save_own_attention(root / "falcon-40b", "falcon-40b", layers=2), by_transformers),
        "gemma2": (save_family(root / "gemma2", "gemma2", 0, sliding_window=8, tie_word_embeddings=True), by_transformers),
    }


NAMES = (
    "shipped target", "shipped head", "eagle1", "qwen2", "llama3 rope", "deepseek v2", "deepseek v3", "deepseek v32",
    "glm", "gemma2", "gemma3n", "shared kv", "diffllama", "falcon-40b",
)  # fmt: skip


def keys(raw: dict[str, Any]) -> Iterator[Key]:
    yield from ((key,) for key in dict.fromkeys([*raw, *OTHERS]))
    yield from ((key, inner) for key, value in raw.items() if isinstance(value, dict) for inner in value)


def with_value(raw: dict[str, Any], key: Key, value: Any) -> str:
    changed = json.loads(json.dumps(raw))
    place = changed[key[0]] if len(key) > 1 else changed
    place[key[-1]] = value
    return json.dumps(changed)


@contextmanager
def in_time(what: str) -> Iterator[None]:
    """Fails a load that hangs, from wherever it is."""

    def stop(*_: Any) -> None:
        pytest.fail(f"{what}: still loading after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_wrong_values_are_refused_or_load(loads: dict[str, tuple[Path, Load]], tmp_path: Path, name: str) -> None:
    """Keeps out: tracebacks and hangs from deep inside, for a config.json that somebody edited or a script wrote."""
    source, load = loads[name]
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    file, counts = tmp_path / "config.json", {"loads": 0, "refused": 0}
    raw = json.loads(file.read_text())
    load(tmp_path)
    tried: Iterable[Key] = keys(raw)
    if name == "gemma3n":  # the code that reads the other keys is the one that "gemma2" tries
        tried = [(key,) for key in raw.keys() - read_json(loads["gemma2"][0] / "config.json").keys()]
    for key in tried:
        for value in FEW if load is by_transformers else VALUES:
            what = f"{name}: {'.'.join(key)} = {value!r}"
            file.write_text(with_value(raw, key, value))
            try:
                with in_time(what), warnings.catch_warnings(action="ignore"):
                    load(tmp_path)
                counts["loads"] += 1
            except (ValueError, TypeError, OSError) as error:
                counts["refused"] += 1
                message = str(error)
                assert str(tmp_path) in message and "\n" not in message and len(message) < 1000, f"{what}: {message}"
                # Of weights that do not fit, the tensor is named; of what transformers refuses, transformers with its reason.
                named = any(part in message for part in (*key, "tensor", "the code of", "transformers does not accept it: "))
                assert named, f"{what}: {message}"
            except Exception as error:  # any other kind is a traceback for the user: the failure names the value
                pytest.fail(f"{what}: {type(error).__name__}: {error}")
    assert min(counts.values()) > (0 if name == "gemma3n" else 20), counts
