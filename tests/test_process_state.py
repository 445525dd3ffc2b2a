"""What product code may not do: take torch's defaults for its own numbers, or change what all threads of a process share.

Rules on the syntax tree of all product code.  tests/loading/test_process_defaults.py holds what follows of them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolkit.paths import ROOT
from toolkit.rules.source import nodes, source_is_forgotten  # noqa: F401

FOLDERS = ("specdec", "attention", "draft", "verify")
# torch's constructors that take the default device and, for floats, the default dtype.  Integers name theirs too: a list may be
# empty, and then its tensor is one of floats.
CONSTRUCTORS = frozenset(
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace normal ones rand randint randn "
    "randperm range scalar_tensor tensor tril_indices triu_indices zeros".split()
)
TYPED = frozenset("Tensor FloatTensor DoubleTensor HalfTensor BFloat16Tensor IntTensor LongTensor BoolTensor".split())
MODULES = frozenset("Bilinear Conv1d Conv2d Embedding GroupNorm LSTM GRU LayerNorm Linear MultiheadAttention RMSNorm".split())
DRAWN = frozenset("normal rand randint randn randperm multinomial bernoulli".split())  # as torch.NAME
DRAWN_IN_PLACE = frozenset("bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split())
# What reads or changes something of the whole process, by the last name of the call.
SHARED = frozenset(
    "set_default_dtype get_default_dtype set_default_device get_default_device set_default_tensor_type "
    "set_float32_matmul_precision get_float32_matmul_precision set_num_threads get_num_threads set_num_interop_threads "
    "set_rng_state fork_rng use_deterministic_algorithms set_flush_denormal set_printoptions set_stance "
    "filterwarnings simplefilter catch_warnings resetwarnings basicConfig dictConfig setLevel addFilter addHandler "
    "set_verbosity set_verbosity_error disable_progress_bar enable_progress_bar set_tqdm_hook "
    "setlocale setrecursionlimit setswitchinterval set_int_max_str_digits set_start_method setdefaulttimeout chdir umask "
    "putenv unsetenv set_event_loop_policy".split()
)
MODULE_CALLS = {  # of modules whose functions have ordinary names
    "torch": {"manual_seed", "seed"},
    "cuda": {"manual_seed", "manual_seed_all"},
    "random": {"seed", "random", "shuffle", "choice", "randint", "sample"},
    "environ": {"setdefault", "update", "pop", "clear"},
    "gc": {"disable", "enable", "freeze", "unfreeze", "set_threshold"},
    "signal": {"signal"},
}
WRITTEN = ("os.environ", "torch.backends", "warnings.showwarning", "sys.stderr", "sys.stdout", "sys.path")
# Where it may be: (file, name) and why.
ALLOWED = {
    ("specdec/cli/entry.py", "sys.stderr"): "a command, whose process it is",
    ("specdec/cli/entry.py", "warnings.showwarning"): "a command, whose process it is; put back at its end",
    ("specdec/cli/serve.py", "signal.signal"): "a command, whose process it is; put back at its end",
    ("specdec/train/__main__.py", "disable_progress_bar"): "a command, whose process it is",
    ("specdec/train/__main__.py", "torch.manual_seed"): "a command, whose process it is",
    ("specdec/train/__main__.py", "get_float32_matmul_precision"): "a command, whose process it is; put back",
    ("specdec/train/__main__.py", "set_float32_matmul_precision"): "a command, whose process it is; put back",
    ("specdec/train/target.py", "set_stance"): "torch.compile has no other switch; put back",
    ("specdec/loading/threads.py", "get_num_threads"): "of one thread; new threads' number is put back",
    ("specdec/loading/threads.py", "set_num_threads"): "of one thread; new threads' number is put back",
    ("specdec/parallel/launched.py", "signal.signal"): "a rank's process does nothing else any more",
    ("specdec/parallel/processes.py", "signal.signal"): "a rank's process, which specdec has started",
    ("specdec/parallel/processes.py", "filterwarnings"): "a rank's process, which specdec has started",
    ("specdec/parallel/symmetric/measure.py", "catch_warnings"): "doctor alone calls it, a command",
    ("specdec/parallel/symmetric/measure.py", "simplefilter"): "doctor alone calls it, a command",
    ("specdec/parallel/nccl.py", "environ.setdefault"): "NCCL can be told in no other way; the page of settings says so",
    ("attention/flash/adapters.py", "filterwarnings"): "one message of flash-attn's, of its own argument",
    ("specdec/startup.py", "gc.disable"): "speed alone; put back",
    ("specdec/startup.py", "gc.enable"): "speed alone; put back",
    ("specdec/startup.py", "gc.freeze"): "speed alone; put back",
    ("specdec/startup.py", "gc.unfreeze"): "speed alone; put back",
    ("specdec/ops/cuda_graph.py", "gc.disable"): "a capture that a collection would break; put back",
    ("specdec/ops/cuda_graph.py", "gc.enable"): "a capture that a collection would break; put back",
    ("specdec/models/transformers_backend/make.py", "addFilter"): "asks the thread that logs",
    ("specdec/models/transformers_backend/make.py", "disable_progress_bar"): "under the lock of loads; put back",
    ("specdec/models/transformers_backend/make.py", "enable_progress_bar"): "under the lock of loads; put back",
}


def faults(root: Path) -> list[str]:
    """Every place of product code that breaks a rule: "file:line: what"."""
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            for node in nodes(path):
                found += [
                    f"{name}:{getattr(node, 'lineno', 0)}: {what}"
                    for what in (*_made_by_default(node), *(s for s in _shared(node) if (name, s) not in ALLOWED))
                ]
    return found


def _made_by_default(node: ast.AST) -> Iterator[str]:
    """What is wrong with a constructor."""
    if isinstance(node, ast.ImportFrom) and node.module == "torch":
        yield from (
            f"torch.{alias.name} by its own name" for alias in node.names if alias.name in CONSTRUCTORS | TYPED - {"Tensor"}
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        of, last, given = _last(node.func.value), node.func.attr, {keyword.arg for keyword in node.keywords}
        if (of == "torch" and last in CONSTRUCTORS) or (of == "nn" and last in MODULES):
            yield from (f"{of}.{last} names no {key}" for key in ("dtype", "device") if key not in given)
        if of == "torch" and last in TYPED:
            yield f"torch.{last}: its dtype or device is a default"
        if of == "torch" and last == "where" and len(node.args) == 3 and all(map(_is_number, node.args[1:])):
            yield "torch.where of two numbers makes floats of the default dtype"
        if of == "torch" and last in ("Generator", "finfo") and not node.args:
            yield f"torch.{last} of a default"
        if (of == "torch" and last in DRAWN) or last in DRAWN_IN_PLACE:
            yield from () if "generator" in given else (f"{last} draws from the process's generator",)


def _last(node: ast.AST) -> str:
    """The last part of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_number(node: ast.AST) -> bool:
    """Whether it is a number, a constant of a module, or the negative of one."""
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def _shared(node: ast.AST) -> Iterator[str]:
    """The names of what a node reads or changes of the whole process."""
    if isinstance(node, ast.Call):
        last, of = _last(node.func), _last(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if last in SHARED:
            yield last
        elif last in MODULE_CALLS.get(of, ()):
            yield f"{of}.{last}"
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    for target in [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]:
        if not isinstance(target, ast.Name):
            yield from (name for name in WRITTEN if ast.unparse(target).startswith(name))


def test_product_code_takes_no_default_and_shares_no_state() -> None:
    """Keeps out: floats of the dtype that a load beside them has set, and a setting that a load leaves changed."""
    assert faults(ROOT) == []


def test_what_is_allowed_is_there() -> None:
    """Keeps out: an exception that outlives its reason, and allows what nobody has judged."""
    seen = {(name, what) for name in {name for name, _ in ALLOWED} for node in nodes(ROOT / name)
            for what in _shared(node)}  # fmt: skip
    assert set(ALLOWED) - seen == set()


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.zeros(3, device=device)",
        "x = torch.tensor(ids, dtype=torch.int64)",
        "x = torch.ones(3)",
        "x = nn.Linear(2, 3, device=device)",
        "from torch import zeros",
        "x = torch.where(mask, -STOPPED, 0.0)",
        "x = torch.FloatTensor(3)",
        "g = torch.Generator()",
        "x = torch.randn(3, dtype=torch.float32, device='cpu')",
        "x.normal_(std=0.1)",
        "torch.set_default_dtype(dtype)",
        "with warnings.catch_warnings(): pass",
        "torch.manual_seed(0)",
        "os.environ['A'] = 'b'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "show, warnings.showwarning = warnings.showwarning, mine",
        "torch.set_num_threads(1)",
        "logging.set_verbosity_error()",
    ],
)
def test_each_rule_sees_its_fault(tmp_path: Path, line: str) -> None:
    """Keeps out: a rule that looks at nothing."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "draft" / "a.py").write_text(f"def f():\n    {line}\n")
    assert len(faults(tmp_path)) in (1, 2) and faults(tmp_path)[0].startswith("draft/a.py:2: ")
