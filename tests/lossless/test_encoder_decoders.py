"""Encoder-decoder targets write what transformers' greedy search writes, plainly and through draft trees.

Keeps out: a row that reads another row's text, or its own as an earlier request left it; a text read causally, twice or not at
all; positions of the pass instead of the decoder's; tokens that no prompt says, forgotten at the decoder's start.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.oracles.encoder_decoders import ENCODER_DECODERS, LONGEST, eager, greedy, save_encoder_decoder, save_head
from toolkit.serving.server import Served

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.models.transformers_backend.encoder_decoder import EncoderDecoderTarget

LENS = [1, 2, 35, LONGEST, 21, 9]
TOKENS = [14, 5, 9, 20, 3, 12]  # rows end at different times, and others move


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder_decoder(tmp_path_factory.mktemp("bart") / "target", "bart")


@pytest.fixture(scope="module")
def head(bart: Path) -> Path:
    return save_head(bart.parent / "head", bart)


def sources() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 40, (n,), generator=generator).tolist() for n in LENS]


def hold_lossless(
    target: Path,
    draft: Path | None,
    spec: SpecConfig | None,
    begin: int = 1,
    tokens: Sequence[int] = TOKENS,
    backend: Any = None,
    **settings: Any,
) -> None:
    """tokens: how many to write for each of the sources; 0: the source is left out."""
    given = {"device": "cpu", "dtype": "float32", "max_batch_size": 3, **settings}
    asked = [(source, count) for source, count in zip(sources(), tokens, strict=True) if count]
    with SpecDecoder.from_pretrained(target, draft, spec, **given) as decoder:
        if backend is not None:
            Driver(decoder).replace_backend(backend)
        outs = decoder.generate([source for source, _ in asked], [SamplingParams(max_tokens=count) for _, count in asked])
    model = eager(target)
    for (source, count), out in zip(asked, outs, strict=True):
        assert out.prompt_token_ids == source
        assert out.token_ids == greedy(model, source, count, begin), source
    assert len({tuple(out.token_ids[:3]) for out in outs}) > 1, "the texts must depend on what the encoder reads"


@pytest.mark.slow_cases
@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_every_family_equals_transformers(model_type: str, tmp_path: Path) -> None:
    hold_lossless(save_encoder_decoder(tmp_path / "target", model_type), None, None)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("page_size", "spec"), [(1, (3, 3, 8)), (4, (2, 2, 5)), (16, (4, 1, 5))], ids=str)
def test_trees_and_chains(bart: Path, head: Path, page_size: int, spec: tuple[int, int, int]) -> None:
    hold_lossless(bart, head, SpecConfig(*spec), page_size=page_size, prefill_chunk=7)


@pytest.mark.slow
def test_trees_by_our_kernels(bart: Path, head: Path) -> None:
    """On a CPU Triton's interpreter runs them, for minutes if the texts were long."""
    hold_lossless(
        bart, head, SpecConfig(2, 2, 4), tokens=[0, 4, 0, 0, 3, 5], backend=TritonBackend(2), page_size=4, max_batch_size=2
    )


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False])
def test_captured_rounds_read_the_rows_texts(bart: Path, head: Path, graphs: Any) -> None:
    """Keeps out: a graph that froze which text a row reads, or how long it is."""
    hold_lossless(bart, head, SpecConfig(3, 3, 8), page_size=16, device="cuda", cuda_graphs=graphs)


def test_the_forced_first_token_is_part_of_the_decoders_start(tmp_path: Path) -> None:
    """Keeps out: a summary or translation that lacks the token which the checkpoint forces after the first."""
    target = save_encoder_decoder(tmp_path / "target", "mbart", forced=7)
    hold_lossless(target, None, None, begin=2)


def test_a_text_that_fails_leaves_the_others_running(bart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an encoder without memory for one text, which ends the requests of all rows."""
    read = EncoderDecoderTarget.read_text

    def read_text(self: EncoderDecoderTarget, ids_S: torch.Tensor, backend: Any) -> torch.Tensor:
        if len(ids_S) == LONGEST:
            raise MemoryError("no room for this text")
        return read(self, ids_S, backend)

    monkeypatch.setattr(EncoderDecoderTarget, "read_text", read_text)
    with SpecDecoder.from_pretrained(bart, device="cpu", dtype="float32", max_batch_size=2, prefill_chunk=1) as decoder:
        with pytest.raises(RuntimeError, match="the request failed while it ran: no room for this text"):
            decoder.generate(sources(), SamplingParams(max_tokens=4))
        model = eager(bart)
        both = [sources()[2], sources()[4]]  # they fill all rows, so no place of a text may have been lost
        for source, out in zip(both, decoder.generate(both, SamplingParams(max_tokens=6)), strict=True):
            assert out.token_ids == greedy(model, source, 6)


def test_the_longest_output_counts_no_encoder_input(bart: Path) -> None:
    """Keeps out: a chat without max_tokens that is cut short by the length of a text which only the encoder reads."""
    with SpecDecoder.from_pretrained(bart, None, None, device="cpu", dtype="float32", max_seq_len=32) as decoder:
        short, long = ([3] * count for count in (1, 20))
        longest = decoder.longest_output(short)
        assert longest == decoder.longest_output(long) > 20
        decoder.new_request(long, SamplingParams(max_tokens=longest))
        with pytest.raises(ValueError, match="max_seq_len"):
            decoder.new_request(long, SamplingParams(max_tokens=longest + 1))


def test_the_encoder_s_text_has_no_log_probabilities(bart: Path) -> None:
    """Keeps out: numbers of the decoder's start token in place of the prompt's; hints that lead from one error to another, and
    back."""
    with SpecDecoder.from_pretrained(bart, device="cpu", max_seq_len=32) as decoder:
        said, prompt = (
            "prompt_logprobs needs a target whose decoder reads the prompt.*nearest .* a decoder-only target",
            [5, 6, 7],
        )
        with pytest.raises(ValueError, match=f"{said}; without .*prompt_logprobs=None and max_tokens=1$"):
            decoder.score(prompt)
        with pytest.raises(ValueError, match=f"{said}; without .*prompt_logprobs=None$"):
            decoder.generate(prompt, SamplingParams(3, prompt_logprobs=0))
        decoder.generate(prompt, SamplingParams(1, prompt_logprobs=None))
        with Served(decoder) as served:
            ask = {"model": "tiny", "prompt": prompt, "echo": True}
            for more in ({"max_tokens": 0}, {"max_tokens": 1, "logprobs": 1}):
                error = served.post("/v1/completions", {**ask, **more}).json()["error"]
                assert error["param"] == "echo" and error["message"].endswith("or max_tokens=1 without logprobs")
            assert served.post("/v1/completions", {**ask, "max_tokens": 1}).status_code == 200
            error = served.post("/v1/completions", {**ask, "max_tokens": 1, "prompt_logprobs": 1}).json()["error"]
            assert error["param"] == "prompt_logprobs" and error["message"].endswith("prompt_logprobs=None")
