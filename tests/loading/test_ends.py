"""Chats end with their turn, whichever of a model's files says so, and a difference between them is said."""

import json
import warnings
from pathlib import Path

import pytest
from toolkit.checkpoints.tokenizers import byte_tokenizer
from toolkit.models import save_target

from specdec import SamplingParams, SpecDecoder
from specdec.prompts import Tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
START, END = 382, 383


def save(folder: Path, template: str | None, eos: int | list[int] | None, generation_eos: int | None) -> Path:
    save_target(folder, "bytes", eos_token_id=eos)
    tokenizer = byte_tokenizer(START)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [START, END]
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return folder


def decoder(folder: Path) -> SpecDecoder:
    return SpecDecoder.from_pretrained(folder, device="cpu", max_seq_len=64)


@pytest.mark.parametrize(
    ("eos", "generation_eos", "ends"), [(END, 7, {7, END}), (None, None, {END}), ([3, 5], None, {3, 5, END})]
)
def test_the_templates_end_counts_where_no_file_names_it(tmp_path, eos, generation_eos, ends):
    """Keeps out: SmolLM2's folder, whose generation_config.json names another end, so that chats wrote on as the user."""
    folder = save(tmp_path, CHATML, eos, generation_eos)
    with pytest.warns(UserWarning, match=r"ends an answer with '<\|im_end\|>' \(383\), which .* do not name as an end"):
        made = decoder(folder)
    with made:
        assert made.eos_ids == ends
        chat = [{"role": "user", "content": "ab"}]
        (answer,) = made.generate([chat], SamplingParams(max_tokens=20, logit_bias={END: 100.0}))
        assert (answer.finish_reason, answer.token_ids) == ("eos", [END])
        (longer,) = made.generate([chat], SamplingParams(max_tokens=20, logit_bias={END: 100.0}, ignore_eos=True))
        assert len(longer.token_ids) == 20


def test_an_end_that_is_named_says_nothing(tmp_path):
    """Keeps out: a warning at every start of a model whose files agree."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with decoder(save(tmp_path, CHATML, END, None)) as made:
            assert made.eos_ids == {END}


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",  # no special token
        "{% for m in messages %}{{ raise_exception('no') }}{% endfor %}",
        "{% for m in messages %}{{ m.content",
        "{{ messages[0].content }}<|im_end|>",  # shows no answer
    ],
)
def test_a_template_that_says_no_end_changes_nothing(tmp_path, template):
    """Keeps out: a letter, or the token after another text, taken for the end of an answer; a start that a template breaks."""
    assert Tokenizer(save(tmp_path, template, 7, None)).turn_end() is None
    with decoder(tmp_path) as made:
        assert made.eos_ids == {7}


def test_of_several_messages_the_last_ones_end_counts(tmp_path):
    """Keeps out: gpt-oss's <|end|>, which ends each message within a turn, taken for the end of the turn."""
    harmony = "{% for m in messages %}<|im_start|>{{ m.content }}"
    harmony += "{% if loop.last %}<|im_end|>{% else %}<|im_start|>{% endif %}{% endfor %}"
    assert Tokenizer(save(tmp_path, harmony, 7, None)).turn_end() == END
