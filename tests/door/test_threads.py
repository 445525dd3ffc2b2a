"""CPU threads are chosen by the size of the model, and set where a decoder is built."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from toolkit.checkpoints.load import read_target_config
from toolkit.driver import Driver
from toolkit.models import Zoo

from specdec import SamplingParams, shipped
from specdec.loading import threads as threads_module
from specdec.loading.load import decoding_threads
from specdec.loading.threads import (
    MIN_BYTES_A_THREAD,
    allowed_threads,
    set_training_threads,
    threads_for,
    use_threads,
    using_threads,
)


def in_a_thread_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """The test in a thread for which specdec has not set anything yet.  Afterwards torch has the threads that it had."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        before = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(test, *args, **kwargs).result()
        finally:
            torch.set_num_threads(before)

    return run


def test_small_models_run_on_one_thread_and_large_ones_on_all() -> None:
    """Keeps out: two threads for matrices of 36 KiB, which ran 17 times slower beside one busy core."""
    config = read_target_config(shipped.target_folder())
    assert threads_for(12_000_000, config.num_layers, 64) == 1
    layers_8b, bytes_8b = 32, 16_000_000_000
    assert threads_for(bytes_8b, layers_8b, 64) == 64 and threads_for(bytes_8b, layers_8b, 1) == 1
    assert threads_for(0, 0, 8) == 1
    counts = [threads_for(size << 20, 10, 8) for size in range(0, 1000, 10)]
    assert counts == sorted(counts) and set(counts) == set(range(1, 9)), "more weights never mean fewer threads"
    assert threads_for(30 * MIN_BYTES_A_THREAD, 10, 8) == 3


@in_a_thread_of_its_own
def test_a_decoder_s_threads_are_its_own(zoo: Zoo) -> None:
    """Keeps out: a rule that is known and not applied; a decoder that sets the number of its caller, of threads that the caller
    starts later, or of another decoder.
    """
    torch.set_num_threads(3)
    found = list[int]()
    for threads in (1, 2):
        decoder = zoo.decoder("llama", **({} if threads == 1 else {"threads": threads}))
        assert decoder.settings.by_option()["threads"] == threads
        found.clear()
        Driver(decoder).watch(lambda _step: found.append(torch.get_num_threads()))
        decoder.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        decoder.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        assert set(found) == {threads}
        assert torch.get_num_threads() == 3 == threads_module._in_new_thread(torch.get_num_threads)


@in_a_thread_of_its_own
def test_a_gpu_decoder_leaves_them_alone(zoo: Zoo) -> None:
    """Keeps out: a GPU decoder that slows down the rest of the program."""
    decoder = zoo.decoder("llama")
    assert decoding_threads(decoder.model, replace(decoder.settings, device=torch.device("cuda", 0))) is None
    torch.set_num_threads(2)
    with using_threads(None):
        assert torch.get_num_threads() == 2


@in_a_thread_of_its_own
def test_training_takes_all_threads() -> None:
    """Keeps out: a training run on one thread, because the decoder that writes its text is tiny."""
    torch.set_num_threads(3)
    use_threads(1)
    set_training_threads(torch.device("cuda", 0), None)
    assert torch.get_num_threads() == 1
    set_training_threads(torch.device("cpu"), None, 8)
    assert torch.get_num_threads() == 3
    set_training_threads(torch.device("cpu"), 2, 8)
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match=r"threads must be in \[1, 8\], got 9; nearest setting that works: threads=8"):
        set_training_threads(torch.device("cpu"), 9, 8)


@in_a_thread_of_its_own
def test_a_small_decoder_does_not_hold_back_a_large_one() -> None:
    """Keeps out: one thread for everything built after a tiny model, and more threads than the program asked torch for."""
    torch.set_num_threads(2)
    assert allowed_threads(8) == 2
    use_threads(1)
    assert allowed_threads(8) == 2, "1 was specdec's own choice"
    torch.set_num_threads(3)
    assert allowed_threads(8) == 3, "3 is what the program said since"
    assert allowed_threads(2) == 2
