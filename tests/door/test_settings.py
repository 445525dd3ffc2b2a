"""Settings as users write them: defaults that follow each other, and numbers of numpy."""

import copy
import dataclasses
import json
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from specdec import SamplingParams, SpecConfig


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ({}, 16), (dict(topk=1), 6), (dict(num_steps=3, topk=1), 4), (dict(num_steps=64, topk=1), 65),
        (dict(num_steps=3, topk=2), 11), (dict(num_steps=1), 5), (dict(num_steps=1, topk=64), 16),
        (dict(num_steps="auto"), 16), (dict(num_steps="auto", topk=1), 11), (dict(num_steps="auto", topk=2), 16),
    ],
)  # fmt: skip
def test_the_number_of_nodes_follows_the_other_two(given: dict[str, Any], nodes: int) -> None:
    """Keeps out: SpecConfig(topk=1) refused because of a number of nodes that nobody gave."""
    spec = SpecConfig(**given)
    assert spec.num_draft_tokens == nodes and spec == SpecConfig(**given, num_draft_tokens=nodes)
    assert SpecConfig(**given, num_draft_tokens=None) == spec and hash(spec) == hash(copy.deepcopy(spec))


def test_every_shape_has_a_number_of_nodes() -> None:
    """Keeps out: a default that its own check refuses."""
    for steps, topk in product(["auto", *range(1, 65)], range(1, 65)):
        spec = SpecConfig(steps, topk)
        assert 2 <= spec.num_draft_tokens <= max(16, spec.max_steps + 1) and spec.lookahead > 0


def test_a_shape_shows_what_it_is() -> None:
    """Keeps out: a shape that prints, compares or is copied as what was given, not as what it became."""
    spec = SpecConfig(topk=1)
    assert repr(spec) == "SpecConfig(num_steps=5, topk=1, num_draft_tokens=6)" and spec.label == "5,1,6"
    assert spec != SpecConfig(4, 1) and spec != (5, 1, 6) and len({spec, SpecConfig(5, 1, 6), SpecConfig()}) == 2
    assert pickle.loads(pickle.dumps(spec)) == spec == dataclasses.replace(spec)
    assert dataclasses.replace(spec, num_steps=2, num_draft_tokens=None) == SpecConfig(2, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.topk = 2  # type: ignore[misc]


def test_numbers_of_numpy_are_numbers() -> None:
    """Keeps out: np.int64(5) refused as no int, or kept as something that JSON can't write."""
    assert SpecConfig(np.int64(3), np.uint8(2), np.int32(7)) == SpecConfig(3, 2, 7)  # type: ignore[arg-type]
    plain = SamplingParams(8, 0.5, 0.75, 3, 7, stop_token_ids=[1, 2])
    for ids in (np.array([1, 2]), torch.tensor([1, 2]), (np.int64(1), np.uint8(2)), [1, 2]):
        params = SamplingParams(
            np.int64(8), np.float32(0.5), np.float64(0.75), np.int16(3), np.int64(7), stop_token_ids=ids  # type: ignore[arg-type]
        )  # fmt: skip
        assert params == plain and hash(params) == hash(plain)
        json.dumps(dataclasses.asdict(params))
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(max_tokens=np.bool_(True)), "max_tokens must be an int, got np.True_"),
        (dict(max_tokens=np.float64(3)), "max_tokens must be an int, got np.float64"),
        (dict(temperature=True), "temperature must be a number, got True"),
        (dict(temperature=np.bool_(True)), "temperature must be a number, got np.True_"),
        (dict(stop_token_ids=np.array([1.5])), "stop_token_ids must be a list of ints, got 1.5"),
        (dict(stop_token_ids=np.array([True])), "stop_token_ids must be a list of ints, got True"),
        (dict(stop_token_ids=np.array([[1]])), "stop_token_ids must be a list of ints, got array"),
        (dict(stop_token_ids="12"), "stop_token_ids must be a list of ints, got '12' of type str"),
    ],
)
def test_what_is_no_number_is_refused(values: dict[str, Any], message: str) -> None:
    """Keeps out: a bool that counts as 1."""
    with pytest.raises(TypeError) as info:
        SamplingParams(**values)
    assert message in str(info.value)
