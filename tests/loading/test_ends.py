"""Chats end with their turn, whichever of a model's files says so, and a difference between them is said."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from toolkit.checkpoints.tokenizers import byte_tokenizer
from toolkit.families import save_family
from toolkit.models import save_target
from toolkit.oracles.encoder_decoders import save_encoder_decoder
from toolkit.serving.server import Served
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specdec import SamplingParams, SpecDecoder
from specdec.models.registry import choose_target
from specdec.prompts.tokenizer import Tokenizer

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


def write(path: Path, changes: dict[str, Any] | None) -> None:
    """Changes a file's keys, of which "absent" goes; None: there is no such file."""
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.unlink(missing_ok=True)
    if changes is not None:
        path.write_text(json.dumps({key: value for key, value in {**old, **changes}.items() if value != "absent"}))


@pytest.mark.slow_cases
@pytest.mark.parametrize("family", ["llama", "mixtral", "olmo2"])  # the last one by transformers' code
def test_the_ends_are_those_of_transformers_generate(tmp_path: Path, family: str) -> None:
    """Keeps out: a class's default, which no file says (Mixtral's 2), taken for an end; ends of both files added up."""
    folder, tried = save_family(tmp_path, family, 1), 0
    for eos in ("absent", [5, 6]):
        write(folder / "config.json", {"eos_token_id": eos})
        for generation in (None, {}, {"eos_token_id": [8, 7]}, {"eos_token_id": 0}):
            write(folder / "generation_config.json", None)
            write(folder / "generation_config.json", generation)
            said = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
            theirs = (said,) if isinstance(said, int) else tuple(said or ())
            config = choose_target(folder).config
            if generation is not None and not theirs:  # generate would never end: config.json's are taken, and it is said
                theirs, tried = config.ends_by_file[1][1], tried + 1
                assert config.ends_by_file == (("generation_config.json", ()), ("config.json", theirs))
            assert config.eos_ids == theirs, (eos, generation)
    assert tried == 2


def test_the_ends_of_a_decoder_within_a_config(tmp_path: Path) -> None:
    """Keeps out: an end that stands in a part of config.json alone, passed over, or taken where the config says its own."""
    folder = save_encoder_decoder(tmp_path, "t5gemma")
    for top, inner in ((None, 5), (7, 5), ("absent", [5, 6]), (None, None)):
        raw = json.loads((folder / "config.json").read_text())
        write(folder / "config.json", {"eos_token_id": top, "decoder": raw["decoder"] | {"eos_token_id": inner}})
        write(folder / "generation_config.json", None)
        said = AutoModelForSeq2SeqLM.from_pretrained(folder).generation_config.eos_token_id
        assert choose_target(folder).config.eos_ids == ((said,) if isinstance(said, int) else tuple(said or ()))


def test_what_a_decoders_text_begins_with_is_generates(tmp_path: Path) -> None:
    """Keeps out: config.json's first token, or the one that it forces, where generate reads generation_config.json alone."""
    folder = save_encoder_decoder(tmp_path, "bart")
    write(folder / "config.json", {"decoder_start_token_id": 5, "forced_bos_token_id": 6})
    for generation, begun in (
        ({"decoder_start_token_id": 3, "forced_bos_token_id": 4, "bos_token_id": 9}, (3, 4)),
        ({"decoder_start_token_id": None, "forced_bos_token_id": None, "bos_token_id": 9}, (9,)),
        ({"decoder_start_token_id": None, "forced_bos_token_id": 4, "bos_token_id": None}, (5, 4)),  # generate refuses
        (None, (5, 6)),
    ):
        write(folder / "generation_config.json", generation)
        encoder = choose_target(folder).config.encoder
        assert encoder is not None and encoder.start_ids == begun, generation
        if generation is None or generation["decoder_start_token_id"] or generation["bos_token_id"]:
            model = AutoModelForSeq2SeqLM.from_pretrained(folder)
            ids = model.generate(model.dummy_inputs["input_ids"][:1, :3] % 40, max_new_tokens=1 + len(begun), do_sample=False)
            assert tuple(ids[0, : len(begun)].tolist()) == begun, generation


@pytest.mark.parametrize(
    ("eos", "generation_eos", "tokenizer_eos", "says"),
    [
        (5, 7, None, r"^config.json names '&' \(5\) as an end of texts, which is none here: the ends are '\(' \(7\), as in"),
        ([7, 5], 7, "<|im_end|>", r"config.json names .* and the tokenizer's eos_token names '<\|im_end\|>' \(383\) as an end"),
        (None, None, "<|im_end|>", r"eos_token names '<\|im_end\|>' \(383\) as an end of texts.*: the ends are none, as in"),
        (7, None, None, r"^texts end with '\(' \(7\), as config.json says, though transformers' generate would write on"),
    ],
)
def test_files_that_differ_are_named(
    tmp_path: Path, eos: Any, generation_eos: Any, tokenizer_eos: str | None, says: str
) -> None:
    """Keeps out: an end that one file names and that is passed over in silence, or that is taken where generate takes none."""
    folder = save(tmp_path, None, eos, generation_eos)
    write(folder / "tokenizer_config.json", {"eos_token": tokenizer_eos})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with decoder(folder) as made:
            assert made.eos_ids == {each for each in (generation_eos or eos,) if each is not None}
    (said,) = [str(each.message) for each in caught if "as an end" in str(each.message) or "texts end" in str(each.message)]
    assert re.search(says, said), said


def test_a_chat_over_http_ends_with_its_turn(tmp_path: Path) -> None:
    """Keeps out: a door with ends of its own, where a chat writes on as the user, streamed or not."""
    with (
        pytest.warns(UserWarning, match="ends an answer with"),
        decoder(save(tmp_path, CHATML, 5, 5)) as made,
        Served(made) as at,
    ):
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "ab"}],
            "max_tokens": 20,
            "logit_bias": {str(END): 100},
        }
        answer = at.post("/v1/chat/completions", asked).json()
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 1
        chunks = list(at.client().chat.completions.create(**asked, stream=True))
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop" and len(chunks) < 5
