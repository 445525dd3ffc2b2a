"""Turns prompts, and the words that options name, into token ids.  This module knows a tokenizer and no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from specdec.checks import PromptTooLong, about, is_array, is_number
from specdec.config import SamplingParams
from specdec.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from specdec.prompts.chat import ChatPrompt
from specdec.prompts.tokenizer import Tokenizer

# str, token ids (a list, a tuple, a one-dimensional array of numpy or torch), or a list of {"role": ..., "content": ...}
Prompt = Any


def is_one_prompt(prompts: Any) -> bool:
    """Whether it is one prompt (a string, a list of token ids or chat messages) and not a list of prompts."""
    if isinstance(prompts, str):  # numpy's too, which looks like an array of no dimension
        return True
    if is_array(prompts):
        return prompts.ndim == 1
    return isinstance(prompts, list | tuple) and bool(prompts) and (_is_ids(prompts) or is_chat(prompts))


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list.  The rows of a two-dimensional array are prompts.

    TypeError for anything that is neither one prompt nor a list.  ValueError for an empty list.
    """
    if is_one_prompt(prompts):
        return [prompts]
    if is_array(prompts) and prompts.ndim == 2:
        prompts = prompts.tolist()
    if not isinstance(prompts, list | tuple):
        shape = f" of shape {tuple(prompts.shape)}" if is_array(prompts) and prompts.ndim else ""
        raise TypeError(
            "prompts must be a string, a list of token ids, chat messages, or a list of such; "
            f"got {type(prompts).__name__}{shape}"
        )
    if not prompts:
        raise ValueError("prompts is empty: expected a string, a list of token ids, chat messages, or a list of such")
    if fault := _fault(prompts, "prompts"):
        raise TypeError(f"{_expected('prompts[0]', prompts[0])}; or, as one prompt, {fault}")
    return list(prompts)


def encode_prompt(prompt: Prompt, name: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids of one prompt, checked against the vocabulary.

    name: what errors call the prompt.

    TypeError if it is no prompt.  ValueError if it is empty, holds an id outside the vocabulary, or can't be encoded.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{name} is an empty string: expected some text")
        _check_unicode(prompt, name)
        ids = tokenizer.encode(prompt)
        if not ids:
            raise ValueError(f"{name} is {prompt[:100]!r}, of which the tokenizer makes no token; expected some text")
    elif isinstance(prompt, ChatPrompt) or is_chat(prompt):
        chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(prompt)
        if fault := chat_fault(chat.messages, name):
            raise TypeError(fault)
        for i, message in enumerate(chat.messages):
            _check_unicode(message["content"] or "", f"{name}[{i}]['content']")
        ids = tokenizer.encode_chat(chat.messages, name, chat)
    else:
        ids = prompt
    return checked_ids(ids, name, vocab_size)


def checked_ids(ids: Any, name: str, vocab_size: int) -> list[int]:
    """Token ids as a list of ints.  TypeError if they are none, ValueError for none at all or one outside the vocabulary."""
    given = ids.tolist() if is_array(ids) and ids.ndim == 1 else ids
    if not isinstance(given, list | tuple) or not _is_ids(given):
        fault = _fault(given, name)
        raise TypeError(_expected(name, given) + (f"; {fault}" if fault else ""))
    # A list of ints is copied at once: the GPU waits for this, and a call of int for each token takes more time.
    ids = list(given) if set(map(type, given)) == {int} else [int(token) for token in given]
    if not ids:
        raise ValueError(f"{name} is empty: expected at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"{name} holds the token id {wrong}; expected ids in [0, {vocab_size - 1}]")
    return ids


def check_encoder_input(ids: list[int], name: str, longest: int) -> None:
    """PromptTooLong if the prompt is longer than the encoder's texts may be.  name: what errors call it."""
    if len(ids) > longest:
        raise PromptTooLong(
            f"{name} has {len(ids)} tokens; expected at most {longest}, the smaller of max_seq_len and what the encoder "
            "reads; nearest thing that works: a shorter prompt, or a larger max_seq_len if that is the smaller one"
        )


def check_length(ids: list[int], sampling: SamplingParams, name: str, max_seq_len: int, reads: int) -> None:
    """PromptTooLong if the prompt and its longest output are longer than max_seq_len together.

    A prompt that is scored may fill max_seq_len: the one token that may follow comes from its own pass, and is read by none.

    name: what errors call the prompt.  reads: the most tokens that the target reads, which max_seq_len can be raised to.
    """
    if sampling.prompt_logprobs is not None and sampling.max_tokens <= 1:
        if len(ids) > max_seq_len:
            works = f", or max_seq_len={len(ids)}" if len(ids) <= reads else f": the target reads {reads} tokens"
            fault = f"{name} has {len(ids)} tokens; expected at most max_seq_len = {max_seq_len}"
            raise PromptTooLong(f"{fault}; nearest thing that works: a shorter prompt{works}")
        return
    if len(ids) >= max_seq_len:
        needs, works = len(ids) + sampling.max_tokens, f": the target reads {reads} tokens"
        if len(ids) < reads:
            works = f", or max_seq_len={min(needs, reads)}"
            works += "" if needs <= reads else f" with max_tokens={reads - len(ids)}"
        raise PromptTooLong(
            f"{name} has {len(ids)} tokens; expected at most max_seq_len - 1 = {max_seq_len - 1}, so that one can follow; "
            f"nearest thing that works: a shorter prompt{works}"
        )
    if len(ids) + sampling.max_tokens > max_seq_len:
        raise PromptTooLong(
            f"tokens of {name} + max_tokens must be at most max_seq_len = {max_seq_len}, got {len(ids)} + "
            f"{sampling.max_tokens}; nearest setting that works: max_tokens={max_seq_len - len(ids)}"
        )


def check_tokens(sampling: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The ids of all bad words.

    ValueError if an option names an id outside the vocabulary, needs a tokenizer that is missing, or names too many words.
    """
    for name, ids in (("stop_token_ids", sampling.stop_token_ids or ()), ("logit_bias", sampling.logit_bias or ())):
        _check_ids(name, ids, vocab_size)
    with about("stop"):
        if sampling.stop_strings and not tokenizer.is_present:
            raise ValueError("stop needs a tokenizer, but the target's folder holds none; nearest: stop_token_ids")
    with about("bad_words"):
        return _bad_word_ids(sampling.bad_words or (), tokenizer, vocab_size)


def prediction_of(sampling: SamplingParams, tokenizer: Tokenizer, vocab_size: int, longest: int) -> tuple[int, ...] | None:
    """The ids of the request's prediction; None: there is none.  ValueError if it is no text of this target.

    longest: the most tokens of a text.
    """
    if (given := sampling.prediction) is None:
        return None
    with about("prediction"):
        ids = tuple(tokenizer.encode_answer(given)) if isinstance(given, str) else tuple(given)
        _check_ids("prediction", ids, vocab_size)
        if len(ids) > longest:
            raise ValueError(
                f"prediction has {len(ids)} tokens; expected at most max_seq_len = {longest}; nearest setting that works: its "
                f"first {longest} tokens"
            )
    return ids


def _bad_word_ids(words: Sequence[str | Sequence[int]], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The distinct words as ids: a text as it stands at the beginning of a text, and as it stands after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        texts = tokenizer.encode_word(word) if isinstance(word, str) else [word]
        found.update(dict.fromkeys(tuple(ids) for ids in texts))
    for ids in found:
        _check_ids("bad_words", ids, vocab_size)
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"bad_words holds a word of {len(ids)} tokens, {list(ids)}; expected at most {MAX_BAD_WORD_TOKENS}; "
                f"nearest setting that works: its last {MAX_BAD_WORD_TOKENS} tokens"
            )
    if len(phrases := [ids for ids in found if len(ids) > 1]) > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words must hold at most {MAX_BAD_WORDS} words of several tokens, got {len(phrases)} (a text counts twice "
            "where a space before it changes its tokens); nearest: fewer words"
        )
    return tuple(found)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    with about(name):
        if beyond := [token for token in ids if token >= vocab_size]:
            raise ValueError(f"{name} holds {beyond[0]}; expected ids in [0, {vocab_size - 1}]")


def is_chat(value: Any) -> bool:
    """Whether the value is a list of mappings with a role and a content, whatever these are."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value)


def chat_fault(messages: Any, name: str) -> str:
    """A message that says why the value is no list of chat messages; empty if it is one."""
    if not isinstance(messages, list | tuple) or not messages:
        nearest = f"[{messages!r}]" if isinstance(messages, Mapping) else "[{'role': 'user', 'content': ...}]"
        expected = f"{name} must be a list of chat messages that is not empty, got {messages!r}"[:300]
        return f"{expected}; nearest thing that works: {nearest[:100]}"
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        if not isinstance(message, Mapping):
            return f"{where} must be a chat message, got {message!r}"[:400]
        if missing := [key for key in ("role", "content") if key not in message]:
            nearest = "'user'" if missing[0] == "role" else "''"
            return f"{where} lacks {missing[0]!r}; nearest setting that works: {nearest}"
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not role:
            return f"{where}['role'] must be a string such as 'user', got {role!r}"[:400]
        calls_tools = content is None and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not calls_tools:
            said = f"{where}['content'] must be a string, got {content!r} of type {type(content).__name__}"[:300]
            return f"{said}; nearest setting that works: {('' if content is None else str(content))[:100]!r}"
    return ""


def _expected(name: str, prompt: Any) -> str:
    return f"{name} must be a string, a list of token ids or a list of chat messages, got {prompt!r}"[:400]


def _fault(value: Any, name: str) -> str:
    """A message about the first element that does not fit the list's first one, which is a token id or a chat message.

    Empty if all elements fit, or if the first is neither.
    """
    if not isinstance(value, list | tuple) or not value:
        return ""
    if isinstance(value[0], Mapping):
        return chat_fault(value, name)
    if _is_ids(value[:1]):
        for i, token in enumerate(value):
            if not _is_ids([token]):
                return f"{name}[{i}] must be an int, got {token!r}"[:400]
    return ""


def _is_ids(value: list[Any] | tuple[Any, ...]) -> bool:
    kinds = set(map(type, value))  # each is asked about once, because prompts can be long
    return all(is_number(kind, Integral) for kind in kinds)


def _check_unicode(text: str, name: str) -> None:
    """ValueError if the text holds half of a surrogate pair, about which tokenizers raise errors that don't name the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no text that UTF-8 can hold: {error}") from error
