"""A tiny target that writes what a script says: the token after each one is fixed, so greedy texts are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.checkpoints.tokenizers import byte_tokenizer
from toolkit.models import COMMON

MARKS = ("</s>", "<think>", "</think>", "<tool_call>", "</tool_call>")
# It tells of Hermes' format and of thoughts, writes what it is told of tools, and can leave thoughts out.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content or '' }}{{ m.reasoning_content or '' }}{{ m.name or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.unit }}{% endfor %};{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ reasoning_effort or '' }}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}"
    "assistant:{% endif %}{% endif %}{# <tool_call> #}"
)


def save_scripted(folder: Path, script: Mapping[str, str], template: str = TEMPLATE) -> Path:
    """The target, with a tokenizer of bytes and MARKS.  script: texts of single tokens, and the text that follows each."""
    size = 384
    tokenizer = byte_tokenizer(300)
    tokenizer.add_special_tokens({"eos_token": MARKS[0], "additional_special_tokens": list(MARKS[1:])})
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids(MARKS[0])
    config = LlamaConfig(
        **{**COMMON, "vocab_size": size, "hidden_size": 64, "eos_token_id": end, "max_position_embeddings": 512}
    )
    model = LlamaForCausalLM(config)
    rows = torch.nn.functional.normalize(torch.randn(size, 64, generator=torch.Generator().manual_seed(1)), dim=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)  # layers add nothing to what a token brings
        model.model.embed_tokens.weight.copy_(rows)
        for before, after in script.items():
            (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
            model.lm_head.weight[b] += 2 * rows[a]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
