"""What every test shares: one thread, the markers, the shared folder, and tiny random models saved once a session."""

import functools
import gc
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if "SPECDEC_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:  # processes are divided among so many GPUs
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(os.environ["PYTEST_XDIST_WORKER"][2:]) % int(os.environ["SPECDEC_TEST_GPUS"]))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: transformers does

from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `toolkit`: what tests build their worlds from

from toolkit.inside.interpreter import quicken
from toolkit.models import TARGETS, Zoo
from toolkit.paths import ROOT
from toolkit.suite.leftovers import pytest_runtest_protocol as pytest_runtest_protocol
from toolkit.suite.turns import TURNS, at_its_turn, turn_of_day

from specdec.cli import entry
from specdec.screen.progress import Pace

gc.disable()  # until tests run: collecting them makes much that stays, in which Python would look for garbage again and again
if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
logging.disable_progress_bar()
entry.PACE = Pace(quiet=600.0)  # what a command says of a long start would depend on how busy the machine is
torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings, and much more on a busy machine


# The first tier, `-m quick`: the files that find most faults a second, but for their slow tests.
QUICK = """
attention/caches/test_quant_cache attention/context_parallel/test_all_to_all attention/context_parallel/test_sharding
attention/test_backends attention/test_cross attention/test_dense attention/test_matrix attention/test_plan
batch/test_draws batch/test_logprobs batch/test_masks batch/test_rules batch/test_sampling batch/test_state
door/test_cli_flags door/test_door_errors door/test_options door/test_prompts door/test_settings
draft/ngram/test_lookup draft/test_ancestry draft/test_kernels draft/test_load draft/test_rows draft/test_tree
engine/pages/test_copies engine/pages/test_mixed_windows::test_copies_are_evicted_before_anybody_waits
engine/pages/test_prefix_cache::test_any_order_of_use_keeps_the_books
engine/pages/test_kept_states engine/pages/test_page_groups engine/pages/test_pages engine/pages/test_shared_prefix
engine/speculation/test_estimates engine/speculation/test_pause
engine/test_chunks engine/test_detokenize engine/test_endings engine/test_engine engine/test_kept engine/test_not_finite
engine/test_scheduler engine/test_text
grammar/test_tree_completion grammar/test_grammar_rows grammar/test_keywords
lossless/check/test_reference lossless/test_alibi_target lossless/test_lossless lossless/test_lossless_families
lossless/test_random_traffic
models/test_config_values models/test_forward models/test_linear models/test_strict
ops/noise/test_approximate_cutoff ops/noise/test_gumbel ops/noise/test_gumbel_triton ops/noise/test_sample
runner/test_rehearsal
serve/test_metrics_and_log serve/test_refused serve/test_http_options::test_every_option_is_a_field
serve/test_http_options::test_a_wrong_option_is_named serve/test_http_options::test_every_field_has_a_reader
serve/wire/test_answers
verify/test_accept verify/test_commit verify/test_context_parallel verify/test_kernels
""".split()


QUICK_FILES, QUICK_PARTS = (frozenset(each for each in QUICK if ("::" in each) is part) for part in (False, True))


@functools.cache
def in_tests(path: Path) -> str:
    """The name of a file of tests as the list has it."""
    return str(path.relative_to(ROOT / "tests").with_suffix(""))


def is_quick(path: Path, test: str = "") -> bool:
    """Whether the list has the file, or that test of it; without a test, whether it has any of the file's."""
    file = in_tests(path)
    if test:
        return file in QUICK_FILES or f"{file}::{test}" in QUICK_PARTS
    return file in QUICK_FILES or any(each.startswith(f"{file}::") for each in QUICK_PARTS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The first tier imports no other file of tests."""
    tests = collection_path.suffix == ".py" and collection_path.stem.startswith("test_")
    return True if tests and config.option.markexpr == "quick" and not is_quick(collection_path) else None


COLLECTED = pytest.StashKey[frozenset[str]]()  # the tests that a run has found, those included that it leaves out
TURN = pytest.StashKey[int | None]()  # which cases of those that take turns a run has; None: all


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Processes that share the tests take the same turn, though a day may end between their starts."""
    node.workerinput["turn"] = node.config.stash[TURN]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Nobody takes a part of the cases for all of them."""
    turn = config.stash[TURN]
    if turn is None:
        return None
    return f"cases that take turns: part {turn + 1} of {TURNS}, another part tomorrow; `./scripts/test tests` runs every case"


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share the files (`--dist loadfile`) take them as they are listed, not those of few tests last.

    The first tier loses no file because it was renamed.
    """
    if hasattr(config, "workerinput"):
        config.stash[TURN] = config.workerinput["turn"]
    else:
        config.stash[TURN] = None if config.args_source is pytest.Config.ArgsSource.ARGS else turn_of_day()
    config.option.loadscopereorder = False
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()  # other processes collect the tests and run them
    files = {each.partition("::")[0] for each in QUICK}
    if config.option.markexpr == "quick" and (gone := [file for file in files if not (ROOT / f"tests/{file}.py").is_file()]):
        raise pytest.UsageError(f"QUICK in tests/conftest.py names files that are gone: {', '.join(gone)}")


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are skipped.  Of a test marked `slow_cases` all but the first are slow.  In a run of the whole
    suite all of them take turns, so that each day has at least half as many as are first.  What is quick is marked.

    Processes that share the files begin with those that hold slow tests, so that none of them comes last and leaves a process
    with nothing to do.
    """
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    if hasattr(config, "workerinput"):
        long = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in long)
    kept, later = (defaultdict[str, list[pytest.Item]](list) for _ in range(2))
    for item in items:
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
            elif (ranks := item.get_closest_marker("ranks")) and torch.cuda.device_count() < ranks.args[0]:
                item.add_marker(pytest.mark.skip(reason=f"needs {ranks.args[0]} GPUs"))
        elif marker := item.get_closest_marker("slow_cases"):
            test = item.nodeid.partition("[")[0]
            if len(kept[test]) < marker.kwargs.get("keep", 1):
                kept[test].append(item)
            else:
                item.add_marker(pytest.mark.slow)
                later[test].append(item)
        if (
            is_quick(item.path, item.nodeid.split("::")[1].split("[")[0])
            and not item.get_closest_marker("slow")
            and not item.get_closest_marker("gpu")
        ):
            item.add_marker(pytest.mark.quick)
    if (turn := config.stash[TURN]) is not None:
        waiting = set[pytest.Item]()
        for test, cases in later.items():
            first = [] if config.option.markexpr else kept[test]  # the fast tests have the first cases every day
            waiting |= {*first, *cases} - {*at_its_turn(test, first + cases, turn, -(-len(first) // 2))}
        config.hook.pytest_deselected(items=[item for item in items if item in waiting])
        items[:] = [item for item in items if item not in waiting]


def pytest_collection_finish() -> None:
    """What was imported stays, and garbage is no longer looked for in it: a decoder looks for some when it is closed."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws at random does not depend on the tests that ran before it in the same process."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A kernel that reads where it must not breaks the process: every later test in it would fail with the same error.

    So the process ends here, after printing the fault.  Under xdist only this test counts as failed (its worker
    "crashed"), and a new worker runs the rest.
    """
    outcome = yield
    fault = call.excinfo and str(call.excinfo.value)
    if fault and any(
        words in fault for words in ("misaligned address", "illegal memory access", "device-side assert triggered")
    ):
        print(f"\n{item.nodeid} broke the device:\n{outcome.get_result().longreprtext}", file=sys.__stderr__, flush=True)
        os._exit(1)


@pytest.fixture(scope="session", autouse=True)
def _a_share_of_the_gpu() -> None:
    """Processes that run tests side by side share a GPU, of which an engine with prefix caching takes most for itself."""
    if torch.cuda.is_available():
        from specdec.loading import memory

        processes, gpus = (int(os.environ.get(name, "1")) for name in ("PYTEST_XDIST_WORKER_COUNT", "SPECDEC_TEST_GPUS"))
        memory.POOL_SHARE /= -(-processes // gpus)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """A shell script starts what runs in its background with Ctrl-C ignored, and some tests send that signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def collected(pytestconfig: pytest.Config) -> frozenset[str]:
    """The tests that this run has found, those included that it leaves out: where the whole suite runs, all."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Models, prompts and texts that lie beside the repository."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return folder


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Random targets of every family, heads for them, and their greedy text by transformers; made when first asked for."""
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session", params=TARGETS)
def any_target(request: pytest.FixtureRequest) -> str:
    """The name of every target in the zoo, one after the other."""
    return request.param


@pytest.fixture()
def poisoned_new_memory() -> Iterator[None]:
    """New tensors hold NaN, or the largest integer: what a kernel forgets to write shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
