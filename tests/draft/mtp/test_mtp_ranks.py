"""MTP layers of which each rank holds a share: the same drafts and texts as on one rank."""

from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import ragged_prompts
from toolkit.mtp_layers.targets import MtpZoo
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.loading.pair import WantedPair
from specdec.options import EngineOptions

PROMPTS = ragged_prompts(40, 4, seed=5)
SAMPLING = [SamplingParams(max_tokens=n, temperature=t, seed=3) for n, t in ((16, 0.0), (9, 0.9), (14, 0.0), (12, 1.0))]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("target", "shape", "settings"),
    [
        ("v3", (3, 3, 8), {"expert_parallel": "experts"}),
        ("mimo", (3, 1, 4), {}),
        ("hy3", (3, 1, 4), {"expert_parallel": "experts"}),
        ("mimo-v2-three", (3, 3, 8), {}),
        ("v3", (3, 3, 8), {}),
        ("v32", (3, 1, 4), {}),
        ("v3", (3, 3, 8), {"decode_context_parallel_size": 2, "page_size": 4}),
    ],
    ids=str,
)
def test_ranks_draft_what_one_drafts(
    mtp_zoo: MtpZoo, target: str, shape: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    """Keeps out: a term that no rank adds up, a join that is cut, latents of another rank's heads, experts that are divided
    otherwise than the target's."""

    def use(decoder: SpecDecoder) -> tuple[list[list[int]], list[list[int]]]:
        outputs = decoder.generate(PROMPTS, SAMPLING)
        Driver(decoder).assert_nothing_leaked()
        return [out.token_ids for out in outputs], [out.stats.accepted_per_round for out in outputs]

    one = use(mtp_zoo.decoder(target, "mtp", SpecConfig(*shape), max_batch_size=3, max_seq_len=80))
    more: Any = {"dtype": torch.float32, "max_batch_size": 3, "smoke": False, **settings}
    draft: Any = "mtp"
    assert with_ranks(mtp_zoo.target(target), draft, SpecConfig(*shape), 2, use, **more) == one


def test_what_ranks_can_not_share(mtp_zoo: MtpZoo) -> None:
    """Before any rank starts: through transformers' code, and heads that do not divide."""
    for target, backend, size, said in (
        ("glm4", "transformers", 2, "through transformers' code"),
        ("v3", "auto", 3, "4 attention heads"),
    ):
        options = EngineOptions(device="cpu", tensor_parallel_size=size, backend=backend)
        with pytest.raises(ValueError, match=said):
            WantedPair(mtp_zoo.target(target), "mtp", SpecConfig(2, 1, 3), options).check(size)
