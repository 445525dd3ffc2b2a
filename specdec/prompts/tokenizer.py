"""A target's tokenizer: texts and chats to token ids, and back.  This module knows a folder of files and no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.checks import about
from specdec.models.gguf.file import is_gguf
from specdec.models.gguf.tokenizer import gguf_tokenizer
from specdec.prompts.chat import ChatPrompt, check_kwargs, with_objects

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a folder with one of them holds a tokenizer
OTHER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja")


class Tokenizer:
    """A target's Hugging Face tokenizer.  If its folder holds none, prompts must be token ids, and outputs have no text.

    folder: of the target, or its GGUF file.  template: a file with a chat template, in the place of the folder's.
    ValueError if a tokenizer is there that can't be read, or a template is given where there is none.
    """

    def __init__(self, folder: Path, template: str | Path | None = None) -> None:
        self._folder = folder
        self._inner: Any = None
        self._pieces: dict[int, str] = {}
        if is_gguf(folder):
            self._inner = gguf_tokenizer(folder)
        elif any((folder / name).is_file() for name in VOCABULARY_FILES):
            from transformers import AutoTokenizer

            try:
                self._inner = AutoTokenizer.from_pretrained(folder, config=_short_config(folder))
            except Exception as error:  # of any kind: transformers checks little of what the files hold
                raise ValueError(_broken_file(folder, error)) from error
        if self._inner is not None:
            # A text that is too long is refused; transformers would warn of it, besides, in words about other code.
            getattr(self._inner, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
        if template is not None:
            inner = self._need("chat_template")
            try:
                inner.chat_template = Path(template).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"chat_template: {template} is not UTF-8 text: {error}") from None
            except (OSError, ValueError) as error:  # the latter for a name that holds a zero
                said = f"chat_template must be a file that can be read, got {str(template)[:200]!r}"
                reason = getattr(error, "strerror", None) or error
                raise ValueError(f"{said}: {reason}; nearest setting that works: chat_template=None") from None
            if not inner.chat_template.strip():
                said = f"chat_template must be a file with a template, got {str(template)[:200]!r}, which is empty"
                raise ValueError(f"{said}; nearest setting that works: chat_template=None, for the target's own")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text.  ValueError without a tokenizer."""
        return list(self._need("a text prompt").encode(text))

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text, without tokens that begin or end texts.  ValueError without a tokenizer."""
        return list(self._need("a text").encode(text, add_special_tokens=False))

    def encode_pieces(self, pieces: list[str]) -> list[NDArray[np.int32]]:
        """Token ids of each piece of a longer text, without tokens that begin or end texts.  ValueError without a tokenizer."""
        inner = self._need("a corpus")
        return [np.asarray(ids, dtype=np.int32) for ids in inner(pieces, add_special_tokens=False)["input_ids"]]

    def encode_word(self, word: str) -> list[list[int]]:
        """Token ids of a word within a text: at its beginning, and after a space.  ValueError without a tokenizer."""
        inner = self._need("bad_words as texts")
        begin = word.lstrip(" ")
        texts = [begin, " " + begin] if begin else [word]  # a word of spaces is meant as it stands
        variants = [list(inner.encode(text, add_special_tokens=False)) for text in texts]
        if not variants[0]:
            raise ValueError(f"bad_words holds {word!r}, of which the tokenizer makes no token; leave it out")
        return variants

    def encode_answer(self, text: str) -> list[int]:
        """Token ids of a text that follows a prompt.  ValueError without a tokenizer."""
        ids = list(self._need("prediction as a text").encode(text, add_special_tokens=False))
        if not ids:
            raise ValueError(f"prediction is {text!r}, of which the tokenizer makes no token; leave it out")
        return ids

    def encode_chat(self, messages: Sequence[Any], name: str, chat: ChatPrompt | None = None) -> list[int]:
        """Token ids of a chat, up to where the answer begins.  name: what errors call the chat.  chat: what else is said of it.

        ValueError without a tokenizer or a chat template, and if the template refuses the messages or fails on them.
        """
        inner = self._need("chat messages")
        if not self.has_chat_template:
            raise ValueError(
                f"{name} holds chat messages, but the tokenizer in {self._folder} has no chat template: neither "
                "chat_template.jinja nor tokenizer_config.json there holds one; nearest things that work: a string or "
                "token ids, or a template's file as chat_template (--chat-template)"
            )
        told = ChatPrompt(messages) if chat is None else chat
        if told.kwargs:
            with about("chat_template_kwargs"):
                check_kwargs(told.kwargs, self.template_variables, "chat_template_kwargs")
        if self.takes_objects:
            messages = with_objects(messages)
        try:
            ids = inner.apply_chat_template(list(messages), tokenize=True, **told.settings)
        except Exception as error:  # of any kind: a template is a program
            raise ValueError(self._template_fault(name, error)) from error
        found = list(ids["input_ids"] if isinstance(ids, Mapping) else ids)
        if not found:
            raise ValueError(
                f"the chat template of {self._folder} writes nothing for {name}; expected one that writes "
                "the chat up to where the answer begins; nearest thing that works: a string or token ids"
            )
        return found

    @property
    def template(self) -> str | None:
        """The text of the chat template; None: there is none.  Of several it is the usual one."""
        found = None if self._inner is None else self._inner.chat_template
        return found.get("tool_use", found.get("default")) if isinstance(found, dict) else found

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The names that the chat template reads; none if there is none, or it is broken."""
        from jinja2 import TemplateError
        from jinja2.meta import find_undeclared_variables
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            compiled = _compile_jinja_template(self.template or "")
            return frozenset(find_undeclared_variables(compiled.environment.parse(self.template or "")))
        except TemplateError:
            return frozenset()

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the chat template takes arguments of calls as objects; some join them to other texts."""
        function = {"name": "look", "arguments": {"at": "it"}}
        call = {"id": "call00000", "type": "function", "function": function}
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        try:
            self._inner.apply_chat_template(chat, tokenize=False)
        except TypeError:
            return False
        except Exception:  # of any kind: a template is a program, and may refuse this chat
            return True
        return True

    def turn_end(self) -> int | None:
        """The special token that the chat template writes after an answer; None if it writes none, or there is no template.

        Where a template marks an answer's end by nothing but the next turn's beginning, that is the token.
        """
        if not self.has_chat_template:
            return None
        answer = "The answer."  # which no template would write by itself
        chat = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
        try:
            _, found, after = self._inner.apply_chat_template(chat, tokenize=False).rpartition(answer)
        except Exception:  # of any kind: a template is a program, and may refuse this chat
            return None
        ids = list(self._inner.encode(after.lstrip(), add_special_tokens=False)) if found else []
        added = self._inner.added_tokens_decoder
        return ids[0] if ids and ids[0] in added and added[ids[0]].special else None

    @property
    def begin(self) -> int | None:
        """The id of the token that begins texts; None if there is none."""
        return None if self._inner is None else self._inner.bos_token_id

    @property
    def eos(self) -> int | None:
        """The id of its eos_token, which transformers' generate does not read; None if it has none."""
        return None if self._inner is None else self._inner.eos_token_id

    def decode(self, token_ids: Any) -> str:
        """The text of the ids, without special tokens; empty without a tokenizer."""
        if self._inner is None:
            return ""
        return self._inner.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_all(self, token_ids: Any) -> str:
        """The text of the ids, with the names of special tokens; empty without a tokenizer."""
        if self._inner is None:
            return ""
        return self._inner.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The names of special tokens, which `decode` leaves out."""
        if self._inner is None:
            return ()
        added = self._inner.added_tokens_decoder.values()
        return tuple(sorted({*self._inner.all_special_tokens, *(token.content for token in added if token.special)}))

    def piece(self, token_id: int) -> str:
        """The text of one token within a text, of a special token too; "token_id:5" without a tokenizer."""
        if self._inner is None:
            return f"token_id:{token_id}"
        if token_id not in self._pieces:
            before = self._inner.encode("a", add_special_tokens=False)  # decoders strip the space of a text's first token
            alone, both = (
                self._inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                for ids in (before, [*before, token_id])
            )
            self._pieces[token_id] = both[len(alone) :] if both.startswith(alone) else self._inner.decode([token_id])
        return self._pieces[token_id]

    def tokens(self) -> dict[int, str] | None:
        """Each id's token as the vocabulary spells it, added tokens too; None without a tokenizer."""
        return None if self._inner is None else {index: token for token, index in self._inner.get_vocab().items()}

    def as_json(self, purpose: str = "a grammar") -> str:
        """The tokenizer as a tokenizer.json has it.  ValueError without one.  purpose: what needs it, for errors."""
        inner = self._need(purpose)
        if not getattr(inner, "is_fast", False):
            raise ValueError(
                f"{purpose} needs a tokenizer that can be written as a tokenizer.json, got {type(inner).__name__} in "
                f"{self._folder}; nearest thing that works: a folder with a tokenizer.json"
            )
        backend = copy(inner.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()

    @property
    def is_present(self) -> bool:
        """Whether the target's folder holds a tokenizer."""
        return self._inner is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be prompts."""
        return bool(self._inner is not None and self._inner.chat_template)

    def _need(self, what: str) -> Any:
        if self._inner is None:
            raise ValueError(f"{what} needs a tokenizer, but {self._folder} holds none; expected lists of token ids")
        return self._inner

    def without_folder(self, message: str) -> str:
        """An error's message for whoever must not learn where the files lie."""
        return message.replace(str(self._folder), "this model")

    def _template_fault(self, name: str, error: Exception) -> str:
        """One line about the error: what the template says against the messages, or what is wrong with the template itself."""
        from jinja2 import TemplateError, TemplateSyntaxError

        template = f"the chat template of {self._folder}"
        if isinstance(error, TemplateSyntaxError):
            return f"{template} is broken: line {error.lineno}: {error.message}"
        if type(error) is TemplateError:  # what `raise_exception` in a template raises
            return f"{template} refuses {name}: {error}"
        return f"{template} fails on {name}: {type(error).__name__}: {error}"


def _short_config(folder: Path) -> Any:
    """What AutoTokenizer asks of a target's config to choose a class: the model type.  None where it may ask for more.

    From the folder alone it would make the family's own config class, whose module imports transformers' modelling code: two
    seconds of a program's start.  A tokenizer that names its class and brings no code of its own does without it.
    """
    from transformers import PreTrainedConfig

    try:
        names = {name: json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json")}
        model, tokenizer = names["config.json"], names["tokenizer_config.json"]
        if "auto_map" in tokenizer or "auto_map" in model or not isinstance(tokenizer["tokenizer_class"], str):
            return None
        kind = model["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # AutoTokenizer reads the folder itself, and says what is wrong with it
    config = PreTrainedConfig()
    config.model_type = kind
    return config


def _broken_file(folder: Path, error: Exception) -> str:
    """A message that says which file makes the tokenizer unreadable, as far as that can be known, and why."""
    found = [folder / name for name in (*VOCABULARY_FILES, *OTHER_FILES) if (folder / name).is_file()]
    for path in found:
        if path.suffix == ".model":  # a binary file
            continue
        try:
            text = path.read_text(encoding="utf-8")
            held = json.loads(text) if path.suffix == ".json" else {}
        except UnicodeDecodeError as fault:
            return f"{path} is not UTF-8 text: {fault}"
        except json.JSONDecodeError as fault:
            return f"{path} is not JSON: {fault}"
        if not isinstance(held, dict):
            return f"{path} must hold a JSON object, got {type(held).__name__}"
    names = ", ".join(path.name for path in found)
    return f"transformers can't read the tokenizer in {folder} ({names}): {type(error).__name__}: {error}"
