"""Rooms that serve every family know none: facts of a family are fields and properties of its config."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.paths import ROOT

from specdec.models.registry import FOLDERS, NATIVE, family_of

# The Llama family is not among them: draft heads of all kinds are made of its layers, and read by its parser.
OTHERS = sorted(FOLDERS.keys() - {"llama"})
# Whose business is a table by family: who computes it, how its MTP layers are called, what transformers and GGUF call it.
TABLES = ("specdec/models/registry.py", "draft/mtp/layouts.py")
ABOUT_KEYS = ("specdec/models/gguf/", "specdec/models/transformers_backend/", "specdec/models/checkpoints/mtp_names.py")
TYPES = [name for folder in OTHERS for name in FOLDERS[folder]]
NAMES = re.compile(r"deepseek|diff_?llama|gpt_?oss", re.IGNORECASE)


def generic_files() -> list[Path]:
    files = [path for room in ("specdec", "draft", "verify", "attention") for path in sorted((ROOT / room).rglob("*.py"))]
    own = tuple(f"specdec/models/{folder}/" for folder in FOLDERS)
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
        if not name.startswith(ABOUT_KEYS):
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
    folders = {path.parent.name for path in (ROOT / "specdec" / "models").glob("*/modules.py")}
    assert {*OTHERS} == folders and all(family_of(name) for name in NATIVE)
    assert family_of("gemma2") is None
