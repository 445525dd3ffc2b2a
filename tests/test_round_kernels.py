"""Whole rounds through the kernels around the two models, without a GPU: Triton's interpreter runs them on the CPU's tensors.

tests/test_gpu.py runs them for real, and each room's tests hold each kernel against its definition.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # before the kernels are decorated, or they could never be interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig
from specdec.attention import plan
from specdec.attention.caches import kv_cache, move_triton
from specdec.attention.kernels import tables_triton
from specdec.draft import branches, branches_triton, build_tree, build_tree_triton, expand, expand_triton
from specdec.ops import rows, rows_triton, topk, topk_triton
from specdec.verify import accept, accept_triton, tables
from specdec.verify import tables_triton as verify_tables_triton

DOORS = (plan, kv_cache, branches, build_tree, expand, rows, topk, accept, tables)
LAUNCHES = {
    tables_triton: ["launch_next_tokens"],
    move_triton: ["launch_move"],
    branches_triton: ["launch_fork"],
    build_tree_triton: ["launch_best_nodes"],
    expand_triton: ["launch_first_level", "launch_expand"],
    rows_triton: ["launch_take_rows"],
    topk_triton: ["launch_top_tokens", "launch_greedy_tokens"],
    accept_triton: ["launch_accept"],
    verify_tables_triton: ["launch_path_tables"],
}
CHAIN_ONLY_WITHOUT = {
    "launch_move",
    "launch_fork",
    "launch_best_nodes",
    "launch_first_level",
    "launch_expand",
    "launch_path_tables",
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's turn; a GPU has test_gpu.py")


@pytest.fixture()
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Every dispatch takes its kernel; counts the launches."""
    counts: Counter[str] = Counter()

    def counted(name: str, launch: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return launch(*args, **kwargs)

        return run

    for door in DOORS:
        name = "use_kernels" if hasattr(door, "use_kernels") else "use_index_kernels"
        monkeypatch.setattr(door, name, lambda x: True)
    for module, names in LAUNCHES.items():
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    yield counts


@pytest.mark.parametrize("spec", [SpecConfig(3, 1, 4), SpecConfig(3, 2, 6), SpecConfig(2, 3, 12)], ids=str)
def test_rounds_through_the_kernels_give_the_target_s_text(zoo: Zoo, spec: SpecConfig, launched: Counter[str]) -> None:
    """Keeps out: a kernel whose door is never reached, or reached with strides and dtypes that only rounds have."""
    decoder = zoo.decoder("llama", "eagle3", spec, page_size=4, max_batch_size=2)
    prompts = ragged_prompts(40, 3, seed=1)[:2]
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=5))
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24)[:5] for prompt in prompts]
    wanted = {name for names in LAUNCHES.values() for name in names}
    assert set(launched) == (wanted - CHAIN_ONLY_WITHOUT if spec.topk == 1 else wanted)
