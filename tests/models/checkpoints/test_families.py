"""Rooms that serve every family know none: facts of a family are fields and properties of its config."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.native import NativeZoo
from toolkit.paths import ROOT

from specdec.models.causal_lm import DecoderLayer
from specdec.models.checkpoints.checkpoint import AssumedCheckpoint
from specdec.models.checkpoints.frame import empty, fill_target, open_target
from specdec.models.checkpoints.loader import build, fill_layer
from specdec.models.config import ModelConfig
from specdec.models.layers import RMSNorm
from specdec.models.mixtures.loader import FAMILIES as MIXTURES
from specdec.models.registry import FOLDERS, NATIVE, choose_target, family_of

# The Llama family is not among them: draft heads of all kinds are made of its layers, and read by its parser.
OTHERS = sorted(FOLDERS.keys() - {"llama"})
# Whose business is a table by family: who computes it, how its MTP layers are called, what transformers and GGUF call it.
TABLES = ("specdec/models/registry.py", "specdec/models/mixtures/loader.py", "draft/mtp/layouts.py")
ABOUT_KEYS = ("specdec/models/gguf/", "specdec/models/transformers_backend/", "specdec/models/checkpoints/mtp_names.py")
# The config.json of a draft head with latent attention has DeepSeek's keys, as others have the Llama family's.
LATENT_HEADS = "draft/eagle/formats/latent.py"
CHATS = "specdec/chat/formats/"  # a table of how families write calls of tools
TYPES = [*(name for folder in OTHERS for name in FOLDERS[folder]), *MIXTURES]
NAMES = re.compile(r"deepseek|diff_?llama|gpt_?oss|qwen_?hybrid", re.IGNORECASE)


def generic_files() -> list[Path]:
    files = [path for room in ("specdec", "draft", "verify", "attention") for path in sorted((ROOT / room).rglob("*.py"))]
    own = (*(f"specdec/models/{folder}/" for folder in FOLDERS), "specdec/models/mixtures/families/")
    return [path for path in files if not str(path.relative_to(ROOT)).startswith((*own, *TABLES))]


def mentions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where code imports from a family's folder, names one of its classes, or compares a model_type with a native family's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and NAMES.search(node.module or ""):
            yield node.lineno, f"imports {node.module}"
        elif isinstance(node, ast.Name | ast.Attribute) and NAMES.search(node.id if isinstance(node, ast.Name) else node.attr):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Compare) and re.search(r"family|model_type|architecture\b", ast.unparse(node.left)):
            texts = [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)]
            if any(text in TYPES for text in texts):
                yield node.lineno, ast.unparse(node)


def test_generic_code_names_no_family() -> None:
    """Keeps out: a fact of a family in a branch far from it, which the next family like it does not find."""
    found = []
    for path in generic_files():
        name = str(path.relative_to(ROOT))
        if not name.startswith((*ABOUT_KEYS, LATENT_HEADS, CHATS)):
            found += [f"{name}:{line} {what}" for line, what in mentions(ast.parse(path.read_text()))]
    assert found == []


def test_the_search_finds_what_it_is_for() -> None:
    """Keeps out: a rule that reads past every breach."""
    breaches = ("isinstance(c, DeepseekConfig)", "c.family == 'gpt_oss'", "if raw['model_type'] in ('glm_moe_dsa', 'x'): pass")
    for code in (*breaches, "from specdec.models.gpt_oss.config import GptOssConfig"):
        assert list(mentions(ast.parse(code))), code
    assert not list(mentions(ast.parse("c.keeps_latents and kind == 'linear'")))


def test_every_folder_has_a_family() -> None:
    """Keeps out: a line of the registry whose folder ends in no Family, and a folder that no line names."""
    folders = {path.parent.name for path in (ROOT / "specdec" / "models").glob("*/loader.py")}
    assert {*FOLDERS} == folders - {"checkpoints", "mixtures"} and all(family_of(name) for name in NATIVE)
    assert family_of("gemma2") is None


class LayerWithOneMoreNorm(DecoderLayer):
    """A decoder layer whose MLP has a norm after it, too."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def asked_of(layer: type[DecoderLayer]) -> dict[str, tuple[int, ...]]:
    config, asked = ModelConfig("llama", 24, 40, 1, 4, 2, 6, 30, 1e-5), AssumedCheckpoint()
    fill_layer(build(lambda: layer(config), torch.device("meta"), torch.float32), asked, "model.layers.0")
    return asked.shapes


def test_a_norm_of_a_layer_is_filled_by_its_name() -> None:
    """Keeps out: a dense family with one more norm that has to be told to the loader, too, or runs with a random one."""
    more, plain = asked_of(LayerWithOneMoreNorm), asked_of(DecoderLayer)
    assert more == plain | {"model.layers.0.post_mlp_layernorm.weight": (24,)}


@pytest.mark.parametrize("family", [name for name in NATIVE if name not in ("gpt_oss", "mimo")])  # quantised; as qwen2
def test_filling_asks_for_what_checkpoints_hold(tmp_path: Path, family: str) -> None:
    """Keeps out: a tensor that a target takes by another shape than it has: MTP layers are read strictly by this."""
    folder = NativeZoo(tmp_path).changed(family, {}, tmp_path / "copies")[0]
    choice, asked = choose_target(folder, "native"), AssumedCheckpoint()
    assert choice.native is not None
    fill_target(empty(choice.native, choice.config), asked, choice.native)
    held = open_target(folder, choice.config)
    assert asked.shapes == {name: held.shape(name) for name in held.names() if name in asked.shapes or "lm_head" not in name}
