"""The head that this repository publishes for a real model (examples/heads) drafts for it, and its card is true of it."""

from pathlib import Path

from toolkit.checkpoints.real import smollm2

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.generation import Stats

HEAD = Path(__file__).resolve().parents[3] / "examples" / "heads" / "smollm2-135m-instruct-q4_1-eagle3"
ASKS = ["Write a Python function that adds two numbers.", "Why is the sky blue?"]


def test_it_drafts_what_the_model_writes() -> None:
    """Keeps out: a damaged or another model's file, and a reading of its layout that drafts badly: then a round makes about one
    token, where the card says 2.2 to 2.8."""
    with SpecDecoder.from_pretrained(
        smollm2(), HEAD, SpecConfig(5, 4, 16), device="cpu", dtype="float32", max_seq_len=128, max_batch_size=2, smoke=False
    ) as decoder:
        chats, params = [[{"role": "user", "content": ask}] for ask in ASKS], SamplingParams(max_tokens=20)
        prompts = [decoder.tokenizer.encode_chat(chat, "a chat") for chat in chats]
        drafted, plain = (decoder.generate(prompts, params, speculate=speculate) for speculate in (True, False))
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert Stats.total([each.stats for each in drafted]).accept_length > 1.8


def test_it_is_as_small_as_its_card_says() -> None:
    """Keeps out: a file that was changed without its card, and one that no repository should hold."""
    size = sum((HEAD / name).stat().st_size for name in ("config.json", "model.safetensors"))
    assert size < 16_000_000
    assert f"model.safetensors {(HEAD / 'model.safetensors').stat().st_size / 1e6:.1f} MB" in (HEAD / "README.md").read_text()
