"""Whether a drafter with a tokenizer of its own has its target's tokens: the same text behind each id.

Otherwise its drafts would mean other texts than the target's ids, and be turned down.
"""

from __future__ import annotations

from pathlib import Path

from specdec.draft.kind import OpenDrafter
from specdec.models.config import ModelConfig
from specdec.prompts.tokenizer import Tokenizer

SHOWN = 3  # tokens that differ, in an error


def check_vocabulary(drafter: OpenDrafter, target_folder: Path, target: ModelConfig) -> None:
    """ValueError if the drafter's tokens are not the target's.

    Ids beyond either vocabulary are padding of the other, as are ids that have no token in one of them.  Without both
    tokenizers there is nothing to compare but the number of ids, which must then be equal.
    """
    if drafter.own_text is None:
        return
    (config,) = drafter.model.needs.models
    sizes = f"{config.vocab_size} ids, and the target {target.vocab_size}"
    own, its = Tokenizer(drafter.own_text).tokens(), Tokenizer(target_folder).tokens()
    nearest = "nearest thing that works: a model with the target's tokenizer, or draft='ngram'"
    if own is None or its is None:
        without = drafter.own_text if own is None else target_folder
        if config.vocab_size != target.vocab_size:
            raise ValueError(
                f"draft: {drafter.own_text} has {sizes}, and {without} holds no tokenizer by which they could be told to mean "
                f"the same tokens; {nearest}"
            )
        return
    both = min(config.vocab_size, target.vocab_size)
    differ = sorted(token for token in own.keys() & its.keys() if token < both and own[token] != its[token])
    if differ:
        shown = ", ".join(f"{token} is {own[token]!r} there and {its[token]!r} here" for token in differ[:SHOWN])
        raise ValueError(
            f"draft: {drafter.own_text} must have the target's tokens, got other ones for {len(differ)} of the ids that both "
            f"have ({shown}); it has {sizes}; {nearest}"
        )
