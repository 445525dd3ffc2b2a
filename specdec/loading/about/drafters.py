"""What users are told of a drafter when it is loaded: how it was read, and whether it seems to fit its target.

Knows a text, the target's tokenizer and settings; how a drafter is compared with its target is the drafter's own affair.
"""

from __future__ import annotations

import warnings

import torch

from specdec.draft.drafter import DraftModel
from specdec.loading.build import can_rehearse
from specdec.loading.resolve import EngineSettings
from specdec.models.target import Target
from specdec.ops.compiling.rehearsal import compile_ahead
from specdec.ops.cuda_graph import on_device
from specdec.ops.launch import launching
from specdec.prompts.tokenizer import Tokenizer

MAX_TOKENS = 256
# Plain prose that models of any size know the words of: a story, and facts of the kind that larger models are trained on.
TEXT = """Once upon a time there was a little girl who lived with her mother in a small house near the river. One day her \
mother gave her a red ball and said, "You may play in the garden, but do not go to the water." The girl was happy and ran \
outside. She played with her friend, a big brown dog. They ran and jumped all day. Then the ball rolled down the hill and \
fell into the river. The girl wanted to run after it, but she remembered what her mother had said. She sat down under a tree \
and started to cry. "Do not be sad," said the dog. "I can swim, and I will get the ball for you." The dog jumped into the \
water and came back with the red ball. The girl gave him a big hug. "Thank you, you are my best friend," she said. When the \
sun went down, they walked back to the house. Her mother made some warm soup, and the girl told her about the ball and the \
dog. Her mother smiled and said, "I am proud of you. You listened to me, and you stayed safe." Then the girl went to bed and \
slept until the next morning.

Water is made of two kinds of atoms, hydrogen and oxygen. When it is very cold, water becomes ice, and when it is hot, it \
becomes steam. The sun warms the sea, and some of the water goes up into the air and makes clouds. When the clouds are cold \
enough, the water falls down again as rain or snow. It runs into the rivers, and the rivers carry it back to the sea."""


def drafter_line(head: DraftModel, settings: EngineSettings) -> str:
    """What the drafter is, and what it does in texts longer than those it was trained on."""
    beyond = beyond_line(head, settings)
    return f"{head.description}; {beyond}" if beyond else head.description


def beyond_line(head: DraftModel, settings: EngineSettings) -> str:
    """What happens beyond the trained length; empty if no text can be longer."""
    length, policy = head.trained_length, settings.options.beyond_trained
    if length is None or settings.max_seq_len <= length:
        return ""
    does = {"draft": "it goes on there", "window": f"it reads the last {length} tokens alone", "stop": "it stops there"}[policy]
    texts = f"texts may have {settings.max_seq_len} tokens, and the head was trained on {length}"
    return f"{texts}: {does} (beyond_trained={policy!r})"


def smoke_check(model: Target, head: DraftModel | None, tokenizer: Tokenizer, settings: EngineSettings) -> float | None:
    """Warns of a drafter that does not fit its target as it was read, or that may go on beyond its trained length.

    Returns the share of its first drafts that the target would accept.  None, and no warning that it does not fit, without a
    tokenizer, for an encoder-decoder, and where ranks hold shares of the models: there that can't be told.
    """
    if head is None or not settings.options.smoke:
        return None
    if settings.options.beyond_trained == "draft" and (beyond := beyond_line(head, settings)):
        warnings.warn(f"{beyond}; see beyond_trained (--beyond-trained) for window and stop", stacklevel=3)
    if not tokenizer.is_present or model.config.encoder is not None or model.group.size > 1:
        return None
    ids = [token for token in tokenizer.encode(TEXT) if token < model.config.vocab_size]
    ids_T = torch.tensor(ids[: min(MAX_TOKENS, settings.max_seq_len)], dtype=torch.int64, device=settings.device)
    with launching(settings.device), on_device(settings.device):
        if can_rehearse(model, settings):
            compile_ahead(lambda: head.smoke(model, ids_T), settings.device)
        seen = head.smoke(model, ids_T)
    if seen.complaint:
        warnings.warn(f"{seen.complaint}; smoke=False (--no-smoke) leaves this check out", stacklevel=3)
    return seen.first
