"""Targets with recurrent layers write what transformers writes, token for token, in float32, whatever the tree.

Keeps out: a state that a rejected draft has touched, a pending path that is added twice, lost, or added in another row, a state
that a chunk begins anew, and a state of an earlier request that a row goes on with.
"""

import pytest
import toolkit.heads.block_zoo
import toolkit.recurrent.mamba_targets
import toolkit.recurrent.more_targets
import toolkit.recurrent.targets  # noqa: F401 (and its targets)
from toolkit.driver import Driver
from toolkit.models import Zoo
from toolkit.oracles.texts import LENGTHS, PROMPTS, hold_captured_text, hold_text

from specdec import SamplingParams, SpecConfig

# target, head, shape, page size, rows, tokens of a chunk
CASES = [
    ("qwen3_next", "eagle3", (4, 4, 14), 1, 3, 7),
    ("qwen3_5_text", "eagle1", (5, 8, 32), 16, 8, 64),
    ("qwen3_5_moe_text", "eagle3", (5, 1, 6), 5, 2, 1),
    ("qwen3_5_text", "ngram", (3, 2, 6), 4, 1, 10),
    ("qwen3_5_text", None, None, 4, 2, 1024),
    ("qwen3_next", "dflash", (4, 1, 5), 4, 2, 16),
    ("qwen3_5_text", "dspark", (4, 3, 12), 16, 3, 9),
    ("qwen3_5_text", "dflash2", (5, 6, 32), 16, 3, 9),
    ("lfm2", "eagle3", (4, 4, 14), 4, 3, 7),
    ("lfm2_moe", "ngram", (5, 1, 6), 1, 2, 1),
    ("granitemoehybrid", "eagle3", (4, 4, 14), 4, 3, 7),
    ("granite dense", "ngram", (3, 2, 6), 16, 2, 64),
    ("falcon_h1", "eagle3", (4, 3, 12), 4, 3, 10),
    ("bamba", "eagle1", (5, 1, 6), 16, 2, 12),
    ("nemotron_h", "eagle3", (5, 8, 32), 5, 4, 9),
    ("olmo_hybrid", "eagle3", (4, 4, 14), 5, 3, 9),
    ("kimi_linear", "eagle3", (4, 4, 14), 4, 3, 7),
    ("kimi_linear", "ngram", (5, 1, 6), 16, 2, 64),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "head", "shape", "page_size", "rows", "chunk"), CASES, ids=lambda v: str(v).replace(" ", "")
)
def test_text_is_transformers(
    zoo: Zoo, target: str, head: str | None, shape: tuple[int, int, int] | None, page_size: int, rows: int, chunk: int
) -> None:
    """More prompts than rows, so that rows leave, move and enter in the middle of others' rounds."""
    spec = None if shape is None else SpecConfig(*shape)
    decoder = zoo.decoder(target, head, spec, page_size=page_size, max_batch_size=rows)
    outputs = hold_text(zoo, target, decoder, chunk)
    assert head is None or sum(out.stats.accepted for out in outputs) > 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("target", ["qwen3_next", "qwen3_5_text"])
def test_a_seed_alone_decides_sampled_text(zoo: Zoo, target: str) -> None:
    """Keeps out: noise or a state that depends on drafts, on rows that don't speculate beside, or on the batch."""
    decoder = zoo.decoder(target, "eagle3", SpecConfig(4, 4, 14), page_size=3, max_batch_size=4)
    sampling = [SamplingParams(max_tokens=n, temperature=0.9, seed=n) for n in LENGTHS]
    plain = [out.token_ids for out in decoder.generate(PROMPTS, sampling, speculate=False)]
    assert [out.token_ids for out in decoder.generate(PROMPTS, sampling)] == plain
    driver = Driver(decoder)
    requests = [driver.submit(prompt, each, speculate=at % 2 == 0) for at, (prompt, each) in enumerate(zip(PROMPTS, sampling))]
    driver.run_until_idle()
    assert [request.output.token_ids for request in requests] == plain


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("target", "shape", "page_size"),
    [("qwen3_next wide", (4, 4, 14), 5), ("qwen3_5_text wide", (5, 1, 6), 16), ("qwen3_5_moe_text wide", (5, 8, 32), 1)]
    + [("lfm2 wide", (4, 4, 14), 4), ("olmo_hybrid wide", (5, 8, 32), 5), ("kimi_linear wide", (4, 4, 14), 16)]
    + [("granitemoehybrid wide", (5, 8, 32), 4), ("falcon_h1 wide", (4, 4, 14), 5), ("nemotron_h wide", (5, 1, 6), 16)],
    ids=str,
)
def test_captured_rounds_write_the_same(zoo: Zoo, target: str, shape: tuple[int, int, int], page_size: int) -> None:
    """Keeps out: a number of a state or a length of a path that a graph holds from its capture."""
    hold_captured_text(zoo, target, shape, page_size)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "kv"), [("qwen3_5_text", "fp8"), ("qwen3_5_text", "int8"), ("falcon_h1", "fp8"), ("nemotron_h", "fp8")]
)
def test_caches_in_8_bits_hold_attention_layers_alone(zoo: Zoo, target: str, kv: str) -> None:
    """Keeps out: scales that are taken for those of another layer, because recurrent ones have none."""
    decoder = zoo.decoder(target, "eagle1", SpecConfig(3, 4, 12), page_size=4, kv_cache_dtype=kv, dtype="float64")
    sampling = [SamplingParams(max_tokens=n) for n in LENGTHS]
    outputs = [decoder.generate(PROMPTS, sampling, speculate=speculate) for speculate in (True, False)]
    assert [out.token_ids for out in outputs[0]] == [out.token_ids for out in outputs[1]]


def test_specdec_verify_reads_them_too(zoo: Zoo) -> None:
    """Keeps out: a dense reference that knows no rule but softmax."""
    decoder = zoo.decoder("qwen3_next", "eagle1", SpecConfig(3, 8, 40))
    found = decoder.verify(PROMPTS, SamplingParams(max_tokens=16))
    assert found.passed and found.count("EXACT") == len(PROMPTS) and found.unsure == 0 and found.accepted > 0


@pytest.mark.slow_cases
@pytest.mark.parametrize(("target", "head"), [("qwen3_5_text", "eagle3"), ("qwen3_next", "ngram"), ("falcon_h1", "eagle3")])
def test_texts_after_kept_states(zoo: Zoo, target: str, head: str) -> None:
    """Keeps out: a hit whose pages are there and whose state is another text's, and cached tokens that were computed after all.

    A, B, A; a text and what comes after its answer; one beginning with many endings.
    """
    decoder = zoo.decoder(target, head, SpecConfig(3, 4, 12), page_size=4, max_batch_size=3, prefix_caching=True)
    Driver(decoder).keep_states_from(8)
    plain = zoo.decoder(target, None, None, page_size=4, max_batch_size=1)
    a, b, system = ([(place * k + place) % 40 for place in range(50)] for k in (3, 7, 11))
    first = plain.generate([a], SamplingParams(max_tokens=9))[0].token_ids
    endings = [[*system, 3, place, 7, 1, 4, place] for place in range(6)]
    cached = []
    for prompts in ([a], [b], [a], [a + first + b[:9]], [endings[0]], [endings[1]], [endings[2]], endings[3:]):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=9))
        wanted = plain.generate(prompts, SamplingParams(max_tokens=9))
        assert [out.token_ids for out in outputs] == [out.token_ids for out in wanted]
        cached.append([out.stats.cached_tokens for out in outputs])
    assert cached == [[0], [0], [48], [48], [0], [0], [48], [48, 48, 48]], cached
    Driver(decoder).assert_nothing_leaked()
