"""Rows whose prompts come in several chunks, while rounds of other rows run over them."""

from pathlib import Path
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.models import save_eagle3, save_target

from specdec import SamplingParams, SpecConfig, SpecDecoder

PENALTIES: dict[str, Any] = dict(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5)
RULES: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES,
    "sampled penalties": dict(PENALTIES, temperature=0.9, seed=5),
    "bad words": dict(bad_words=[[token] for token in range(40, 60)] + [[t, t + 1] for t in range(60, 100)]),
    "grammar": dict(regex="[a-z]{2,9}( [0-9]{1,3}é)*"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = save_target(tmp_path_factory.mktemp("pair") / "target", "bytes", eos_token_id=383)
    return target, save_eagle3(target.parent / "head", target)


@pytest.mark.slow_cases
@pytest.mark.parametrize("spec", [None, SpecConfig(3, 2, 6)], ids=["plain", "tree"])
@pytest.mark.parametrize("name", list(RULES))
def test_rounds_tell_a_row_nothing_before_its_prompt_is_complete(
    folders: tuple[Path, Path], name: str, spec: SpecConfig | None
) -> None:
    """Keeps out: tokens that rounds compute in such a row, for nobody, counted as its text or taken by its grammar."""
    sampling = SamplingParams(max_tokens=16, **RULES[name])
    prompts = [[7, 1, 30], [11, 3, 8, 2, 9, 30, 31, 4, 2, 11, 70, 71, 72, 73, 80, 81] * 2, [5, 6]]
    settings: dict[str, Any] = dict(device="cpu", dtype="float32", page_size=4, max_batch_size=3, max_seq_len=80, smoke=False)
    draft = folders[1] if spec else None
    with SpecDecoder.from_pretrained(folders[0], draft, spec, prefill_chunk=4, **settings) as decoder:
        alone = [decoder.generate([prompt], sampling, speculate=False)[0].token_ids for prompt in prompts]
        driver, held = Driver(decoder), False
        driver.set_depth(0)
        requests = [driver.submit(prompts[0], sampling)]
        while not requests[0].output.token_ids:
            driver.step()
        requests += [driver.submit(prompt, sampling) for prompt in prompts[1:]]  # the short prompt, in the last row, ends first
        while not requests[1].output.token_ids:
            held = held or len(requests[2].output.token_ids) > 2
            driver.step()
        assert held, "no round ran over a row whose prompt was not complete"
        driver.run_until_idle()
        assert [request.output.token_ids for request in requests] == alone
