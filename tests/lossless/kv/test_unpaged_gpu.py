"""Texts of 40,000 tokens over caches that are not paged (page_size="sequence"), on a GPU: the ids are those over pages of 16.

Keeps out: what test_unpaged.py keeps out, of kernels as GPUs run them, under CUDA graphs, and far beyond 4,096 tokens.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.models import Zoo

from specdec import SamplingParams, SpecConfig, SpecDecoder

pytestmark = pytest.mark.gpu
TOKENS = 40_000


@pytest.mark.parametrize(
    "settings", [dict(dtype="float32"), dict(dtype="bfloat16", deterministic=True)], ids=["float32", "deterministic"]
)
@pytest.mark.parametrize("spec", [(3, 1, 4), (4, 2, 7)], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_ids_are_those_over_pages(
    zoo: Zoo, tmp_path: Path, family: str, spec: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    """Full layers, and windows: over pages these have rings."""
    folder = tmp_path / "long"
    shutil.copytree(zoo.target(family), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": TOKENS + 100}))
    prompts = [[3 + 7 * i * i % 31 for i in range(n)] for n in (TOKENS, 700, 33)]
    texts = []
    for page_size in (16, "sequence"):
        more: dict[str, Any] = dict(device="cuda", page_size=page_size, max_batch_size=2, smoke=False)
        with SpecDecoder.from_pretrained(folder, "ngram", SpecConfig(*spec), **settings, **more) as decoder:
            texts.append([out.token_ids for out in decoder.generate(prompts, SamplingParams(max_tokens=60))])
            assert decoder.settings.page_size > TOKENS or page_size == 16
        torch.cuda.empty_cache()
    assert texts[0] == texts[1] and len(texts[0][0]) == 60
