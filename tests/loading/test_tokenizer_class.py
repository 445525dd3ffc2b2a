"""A target's tokenizer is the one that transformers' AutoTokenizer makes of the folder, without the family's modelling code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specdec.prompts.tokenizer import Tokenizer
from specdec.shipped import target_folder

CLASSES = ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", None]
KINDS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "deepseek_v3", "phi3", "glm4_moe", "no_such_family"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_transformers_makes(kind: str, tmp_path: Path) -> None:
    """Keeps out: a family whose registered tokenizer class differs from the one that the short config leads to."""
    shutil.copy(target_folder() / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    for name in CLASSES:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} if name else {}))
        try:
            expected = AutoTokenizer.from_pretrained(tmp_path)
        except Exception:  # of any kind: transformers fails on some pairs of family and class in its own ways
            with pytest.raises(ValueError, match="tokenizer"):
                Tokenizer(tmp_path)
            continue
        ours = Tokenizer(tmp_path)
        assert type(ours._inner) is type(expected), name
        assert ours._inner._tokenizer.to_str() == expected._tokenizer.to_str(), name


def test_a_start_imports_no_modelling_code() -> None:
    """Keeps out: two seconds of every start for modules of transformers that nothing uses."""
    code = f"""if True:
        import sys
        from pathlib import Path
        from specdec.prompts.tokenizer import Tokenizer
        assert Tokenizer(Path({str(target_folder())!r})).encode("Once")
        print([name for name in ("transformers.activations", "torch._dynamo") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
