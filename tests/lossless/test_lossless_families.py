"""Targets through transformers' code write what transformers writes, token for token, in float32: every family, any tree.

Keeps out: a window, chunk, sink, softcap or scale that is lost on the way to our attention, or that a tree's nodes see wrongly;
an expert chosen for another token; positions that depend on the batch.
"""

from pathlib import Path

import pytest
from toolkit.driver import Driver
from toolkit.families import FAMILIES, NATIVE, NO_FEATURES, Families, assert_greedy, full_pass_greedy
from toolkit.models import HEADS, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder

# Every family with a tree; those whose attention is unlike the others' with a chain too; page sizes 1, 5 and 16 with each.
CHAINS = ("gemma3", "llama4", "gemma3n", "gemma4")
CASES = [
    *(
        (name, "eagle1" if name in NO_FEATURES else "eagle3", (5, 4, 16), (1, 5, 16)[index % 3], 3)
        for index, name in enumerate(FAMILIES)
    ),
    *((name, "eagle1", (5, 1, 6), (5, 16, 1)[index % 3], 2) for index, name in enumerate(CHAINS)),
]
PROMPTS = ragged_prompts(40, 5, seed=11)
MAX_TOKENS = [24, 9, 16, 1, 20]
SAMPLING = [SamplingParams(max_tokens=n) for n in MAX_TOKENS]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


def load(families: Families, name: str, head: str | None, spec: SpecConfig | None = None, **settings: object) -> SpecDecoder:
    folder: Path | None = None
    if head is not None:
        folder = families.root / f"{name}--{head}"
        folder = folder if folder.is_dir() else HEADS[head](folder, families.target(name))
    merged = {"device": "cpu", "dtype": "float32", "max_seq_len": 64, "backend": "transformers", **settings}
    return SpecDecoder.from_pretrained(families.target(name), folder, spec, **merged)  # type: ignore[arg-type]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "head", "shape", "page_size", "batch"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_generate_equals_transformers(
    families: Families, name: str, head: str, shape: tuple[int, int, int], page_size: int, batch: int
) -> None:
    """More prompts than places, so that rows leave and enter in the middle of others' rounds."""
    decoder = load(families, name, head, SpecConfig(*shape), page_size=page_size, max_batch_size=batch)
    assert decoder.settings.target_backend == "transformers"
    outputs = decoder.generate(PROMPTS, SAMPLING)
    for out, max_tokens in zip(outputs, MAX_TOKENS, strict=True):
        assert len(out.token_ids) == max_tokens
        assert_greedy(families.hf(name), out)
    assert sum(out.stats.drafted for out in outputs) > 0
    Driver(decoder).assert_nothing_leaked()
    plain = decoder.generate(PROMPTS, SAMPLING, speculate=False)
    assert [out.token_ids for out in plain] == [out.token_ids for out in outputs]


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", FAMILIES)
def test_the_oracle_is_transformers_own_search(families: Families, name: str) -> None:
    """Keeps out: an induction over one long pass that does not hold, because the pass depends on the text's end."""
    (out,) = load(families, name, None).generate(PROMPTS[4], SamplingParams(max_tokens=6))
    assert out.token_ids == full_pass_greedy(families.hf(name), PROMPTS[4], 6)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", NATIVE)
def test_native_modules_agree(families: Families, name: str) -> None:
    """Two implementations of one model: the same ids, and drafts accepted alike, since features agree too."""
    spec = SpecConfig(5, 4, 16)
    native, other = (load(families, name, "eagle3", spec, backend=backend) for backend in ("native", "transformers"))
    assert (
        native.settings.target_backend == "native"
        and load(families, name, None, backend="auto").settings.target_backend == "native"
    )
    for mine, theirs in zip(native.generate(PROMPTS, SAMPLING), other.generate(PROMPTS, SAMPLING), strict=True):
        assert mine.token_ids == theirs.token_ids and mine.stats.accepted_per_round == theirs.stats.accepted_per_round
        assert_greedy(families.hf(name), mine)


def test_auto_takes_transformers_without_a_native_module(families: Families) -> None:
    settings = load(families, "gemma2", None, backend="auto").settings
    assert (settings.target_backend, settings.target_backend_reason) == (
        "transformers",
        "there is no native module for model_type 'gemma2'",
    )
