"""Targets of the Llama family whose layers share keys and values: what they compute, store and refuse.

Keeps out: keys of another layer than the source, a sharing layer that stores or costs memory, and rows left out of a prompt
that somebody reads.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.attention.segments import ragged_causal_segment
from toolkit.models import save_target
from toolkit.oracles.reference import ReferenceBackend
from toolkit.sharing import SHARING, SharingZoo, write_sources
from torch import Tensor, nn

from specdec import SpecDecoder
from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.eager.dense import DenseAttention
from specdec.attention.pages import PageTable
from specdec.attention.plan import AttentionPlan
from specdec.models.causal_lm import CausalLM
from specdec.models.kv import kv_token_bytes, make_cache
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import TargetOutput

CPU = torch.device("cpu")
LENGTHS = [40, 1, 17]
PAGE = max(LENGTHS)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> SharingZoo:
    return SharingZoo(tmp_path_factory.mktemp("sharing"))


def load(folder: Path) -> CausalLM:
    target = load_chosen(choose_target(folder, "native"), folder, 128, CPU, torch.float32, cuda_graphs=False)
    assert isinstance(target, CausalLM)
    return target


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(40, (n,), generator=generator) for n in LENGTHS]
