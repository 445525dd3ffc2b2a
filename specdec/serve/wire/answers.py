"""Answers in OpenAI's form: whole ones, the chunks of streams, usage, and the list of models.  Knows no connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.chat.reply import ReplyReader, reply_of
from specdec.generation import Chunk, FinishReason, Generation
from specdec.serve.chats.parts import message_of
from specdec.serve.wire.errors import ApiError, json_bytes
from specdec.serve.wire.logprobs import Piece, chat_logprobs, completion_logprobs
from specdec.serve.wire.prompts_said import ChoicePrompt, said_of_prompt
from specdec.serve.wire.requests import RequestPlan
from specdec.trace.trace import round_as_json

FINISH_REASONS: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length"}
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerHeading:
    """What all chunks of one answer say of it."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def as_json(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def reason_of(reason: FinishReason, calls: bool) -> str:
    """Why an answer ended.  calls: whether it calls tools."""
    return "tool_calls" if calls and reason != "length" else FINISH_REASONS[reason]


def whole_answer(
    heading: AnswerHeading, plan: RequestPlan, generations: Sequence[Generation], prompts: Sequence[ChoicePrompt], piece: Piece,
    reader: Callable[[], ReplyReader] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The answer that is not streamed; generations and prompts are in the order of the choices.  piece: the text of a token.

    reader: makes what reads a chat's answer; None: its text is its content.
    """
    choices: list[dict[str, Any]] = []
    of_answer: dict[str, Any] = {}
    for index, (generation, prompt) in enumerate(zip(generations, prompts, strict=True)):
        of_prompt = said_of_prompt(plan, prompt, generation.prompt_logprobs, piece)
        said = _said_of(generation, plan, piece, len(of_prompt.text))
        said = {**said, "logprobs": of_prompt.before(said["logprobs"]), **of_prompt.choice}
        of_answer = of_prompt.answer
        reason = {**said, "finish_reason": FINISH_REASONS[generation.finish_reason]}
        if plan.is_chat:
            reply = reply_of(reader, generation.text)
            message, reason["finish_reason"] = message_of(reply), reason_of(generation.finish_reason, bool(reply.calls))
            choices.append({"index": index, "message": message, **reason})
        else:
            choices.append({"index": index, "text": of_prompt.text + generation.text, **reason})
    kind = "chat.completion" if plan.is_chat else "text_completion"
    return {**heading.as_json(kind), "choices": choices, "usage": usage(plan, generations), **of_answer}


def usage(plan: RequestPlan, generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of all choices.  A prompt with several choices counts once."""
    stats = [generation.stats for generation in generations]
    prompt_tokens = sum(len(generation.prompt_token_ids) for generation in generations[:: plan.n])
    completion_tokens = sum(len(generation.token_ids) for generation in generations)
    if plan.sampling.prediction is None:  # of all drafts
        accepted = sum(item.accepted for item in stats)
        rejected = sum(item.drafted for item in stats) - accepted
    else:  # of the request's own prediction, as OpenAI counts
        accepted = sum("prediction" in source.split("+") for generation in generations for source in generation.sources)
        rejected = max(0, sum(generation.predicted_tokens for generation in generations) - accepted)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(item.cached_tokens for item in stats[:: plan.n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


class ChunkWriter:
    """Writes the events of one stream.

    Where nothing is said of single tokens, only the text differs from one chunk of a choice to the next, so everything around
    it is made once.
    """

    def __init__(self, heading: AnswerHeading, plan: RequestPlan, prompts: Sequence[ChoicePrompt], piece: Piece) -> None:
        self._plan, self._prompts, self._piece = plan, prompts, piece
        self._offsets = [0] * plan.choices
        self._heading = heading.as_json("chat.completion.chunk" if plan.is_chat else "text_completion")
        self._tokens = 0  # of all choices, as far as they were written
        self._usage = self._usage_so_far() if plan.continuous_usage else {"usage": None} if plan.include_usage else {}
        self._unsaid = _said_of(Chunk("", [], []), plan, piece, 0)  # by a chunk without tokens of its own
        self._around = [self._split(index) for index in range(plan.choices)]
        self.has_begun = [not plan.is_chat] * plan.choices
        self._says_prompt = [plan.says_prompt] * plan.choices
        self._says_tokens = plan.return_origins or plan.return_trees or plan.return_token_ids

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """A piece of a choice's text; nothing where there is none yet, unless something is said of its tokens.

        What is said of the prompt comes first, in an event of its own.
        """
        if self._plan.continuous_usage:
            self._tokens += len(chunk.token_ids)
            self._usage = self._usage_so_far()
        before = self._of_prompt(index, chunk) if self._says_prompt[index] else b""
        return before + self._chunk(index, chunk)

    def _of_prompt(self, index: int, chunk: Chunk) -> bytes:
        self._says_prompt[index] = False
        said = said_of_prompt(self._plan, self._prompts[index], chunk.prompt_logprobs, self._piece)
        own = {**self._unsaid, "logprobs": said.logprobs, **said.choice}
        self._offsets[index] = len(said.text)
        if not self.has_begun[index]:
            return self._begin(index, said.text, own, said.answer)
        return self.event(index, self._content(said.text), None, own, said.answer)

    def _chunk(self, index: int, chunk: Chunk) -> bytes:
        if (said := self.said(index, chunk)) is not None:
            if not self.has_begun[index]:
                return self._begin(index, chunk.text, said)
            return self.event(index, self._content(chunk.text), None, said)
        if not chunk.text:
            return b""
        if not self.has_begun[index]:
            return self._begin(index, chunk.text)
        if self._plan.continuous_usage:
            return self.event(index, self._content(chunk.text), None)
        before, after = self._around[index]
        return f"{before}{json.dumps(chunk.text)}{after}".encode()

    def _usage_so_far(self) -> dict[str, Any]:
        prompts = sum(len(prompt.token_ids) for prompt in self._prompts[:: self._plan.n])
        used = {"prompt_tokens": prompts, "completion_tokens": self._tokens, "total_tokens": prompts + self._tokens}
        return {"usage": used}

    def said(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """What a chunk says of its tokens; None: nothing."""
        if not (chunk.logprobs or (self._says_tokens and chunk.token_ids)):
            return None
        said = _said_of(chunk, self._plan, self._piece, self._offsets[index])
        self._offsets[index] += sum(len(self._piece(each.token)) for each in chunk.logprobs or ())
        return said

    def finish(self, index: int, reason: FinishReason) -> bytes:
        """The last chunk of a choice."""
        begin = b"" if self.has_begun[index] else self._begin(index, "")
        return begin + self.event(index, {"delta": {}} if self._plan.is_chat else {"text": ""}, FINISH_REASONS[reason])

    def end(self, generations: Sequence[Generation]) -> bytes:
        """What follows the last chunk: the usage if it is wanted, and the mark of the end."""
        if not self._plan.include_usage:
            return DONE
        return _event({**self._heading, "choices": [], "usage": usage(self._plan, generations)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return _event(error.as_json())

    def _begin(
        self, index: int, text: str, said: dict[str, Any] | None = None, of_answer: dict[str, Any] | None = None
    ) -> bytes:
        """The first chunk of a chat answer, which names the role."""
        self.has_begun[index] = True
        return self.event(index, {"delta": {"role": "assistant", "content": text}}, None, said, of_answer)

    def _content(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self._plan.is_chat else {"text": text}

    def event(
        self,
        index: int,
        content: dict[str, Any],
        reason: str | None,
        said: dict[str, Any] | None = None,
        of_answer: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, **content, **(said or self._unsaid), "finish_reason": reason}
        return _event({**self._heading, "choices": [choice], **self._usage, **(of_answer or {})})

    def _split(self, index: int) -> tuple[str, str]:
        """What stands before and after the text in a choice's chunks."""
        mark = "\0"  # JSON writes it as \u0000, and nothing else here holds it: model names are printable
        before, _, after = self.event(index, self._content(mark), None).decode().partition(json.dumps(mark))
        return before, after


def _said_of(tokens: Generation | Chunk, plan: RequestPlan, piece: Piece, offset: int) -> dict[str, Any]:
    """What a choice says of single tokens: log-probabilities in the form of the plan's endpoint, and origins, an extension.

    Without being asked for, the former are null, and the latter are not there.  offset: see `completion_logprobs`.
    """
    logprobs = None
    if tokens.logprobs is not None:
        known = tokens.logprobs
        logprobs = chat_logprobs(known, piece) if plan.is_chat else completion_logprobs(known, piece, offset)
    said: dict[str, Any] = {"logprobs": logprobs}
    if plan.return_origins:
        said |= {"origins": tokens.origins, "sources": tokens.sources}
    if plan.return_token_ids:
        said["token_ids"] = tokens.token_ids
    if plan.return_trees:
        said["specdec"] = speculation_of(tokens, piece)
    return said


def speculation_of(tokens: Generation | Chunk, piece: Piece) -> dict[str, Any]:
    """What `return_trees` asks for, an extension: of each token its piece, origin and sources, and the rounds with their trees.

    texts: the pieces of all tokens that occur in the trees, by id.  The rest is as in docs/TRACE.md.
    """
    rounds = tokens.rounds or []
    ids = {token for each in rounds for token in (*each.tree.tokens, *each.tree.chosen) if token >= 0}
    return {
        "pieces": [piece(token) for token in tokens.token_ids],
        "origins": tokens.origins,
        "sources": tokens.sources,
        "rounds": [round_as_json(each) for each in rounds],
        "texts": {str(token): piece(token) for token in sorted(ids)},
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(content) + b"\n\n"


def model_card(name: str, created: int, max_seq_len: int) -> dict[str, Any]:
    """What /v1/models says of the model.  max_model_len, the most tokens of prompt and output together, is an extension."""
    return {"id": name, "object": "model", "created": created, "owned_by": "specdec", "max_model_len": max_seq_len}
