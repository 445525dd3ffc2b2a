"""Replicas without a running Ray: what is refused at the door, what Ray is asked for, health, metrics of several replicas."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from toolkit.driver import Driver

from specdec import SamplingParams, SpecConfig, shipped
from specdec.engine.totals import Totals
from specdec.options import EngineOptions
from specdec.serve.metrics import TotalsCollector
from specdec.serve.options import KEY_VARIABLE, ServeOptions
from specdec.serve.replicas import application
from specdec.serve.replicas.application import options_for_ray
from specdec.serve.replicas.metrics import exposition
from specdec.serve.replicas.options import ReplicaOptions, ReplicaSettings
from specdec.serve.replicas.replica import Replica
from specdec.serve.state import Counts

KNOWN = ["num_replicas", "autoscaling_config", "ray_actor_options", "max_replicas_per_node", "health_check_period_s"]
CPU, GPU = {"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}


def settings(**given: Any) -> ReplicaSettings:
    return ReplicaSettings.of(given, None)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (
            {"num_replicas": 0},
            ValueError,
            "num_replicas must be in [1, 4096], got 0; nearest setting that works: num_replicas=1",
        ),
        ({"num_replicas": "two"}, TypeError, "num_replicas must be an int, got 'two'"),
        ({"num_gpus": 2}, ValueError, "num_gpus must be in [0, 1], got 2; nearest setting that works: num_gpus=1"),
        ({"num_gpu": 1}, TypeError, "there is no setting 'num_gpu'; nearest: num_gpus"),
        ({"max_batch_sizes": 1}, TypeError, "there is no setting 'max_batch_sizes'; nearest: max_batch_size"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size must be in [1, 4096], got 0"),
        ({"max_queue": -1}, ValueError, "max_queue must be in [0, 1048576], got -1"),
        ({"port": 80}, TypeError, "port is no setting of a replica: Ray's proxies listen"),
        ({"num_gpus": 0, "device": "cuda"}, ValueError, "nearest setting that works: num_gpus=1, device='auto'"),
        ({"device": "cpu"}, ValueError, "nearest setting that works: num_gpus=0, device='auto'"),
        ({"tensor_parallel_size": 2}, ValueError, "must be 1 in a replica, which has one GPU or none, got 2; nearest"),
        ({"device": "cuda:1"}, ValueError, "Ray chooses the GPU of each replica; nearest setting that works: device='auto'"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    """Keeps out: a replica that Ray starts again and again because a setting can't work, and a setting that does nothing."""
    with pytest.raises(kind, match=re.escape(said)):
        settings(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"draft": "head"}, "draft was given without target"),
        ({"target": "model", "spec": SpecConfig(2, 2)}, "spec would do nothing without draft"),
        ({"spec": (5, 4, 16)}, "spec must be a SpecConfig or None, got (5, 4, 16) of type tuple"),
    ],
)
def test_a_pair_that_is_none_is_refused(given: dict[str, Any], said: str) -> None:
    """Keeps out: the shipped target under a stranger's head, and a tree that nobody drafts."""
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        application(**given)


@pytest.mark.parametrize(
    ("options", "machines", "nearest"),
    [
        ({"num_gpus": 1}, [CPU, CPU], "num_gpus=0"),
        ({"num_gpus": 1}, [{"GPU": 1.0}], "num_cpus=1"),
        ({"num_gpus": 1, "num_cpus": 16}, [GPU], "num_cpus=1"),
        ({"num_gpus": 1, "num_replicas": 5}, [GPU, GPU, CPU], "num_replicas=4"),
        ({"num_gpus": 0, "num_replicas": 5, "num_cpus": 4}, [CPU, GPU], "num_replicas=4"),
        ({"num_gpus": 1, "num_cpus": 5, "num_replicas": 2}, [GPU], "num_replicas=1"),
    ],
)
def test_replicas_that_the_machines_have_no_room_for(options: dict[str, Any], machines: list[Any], nearest: str) -> None:
    """Keeps out: replicas that wait for ever for a GPU, and one that needs more CPUs than its machine has."""
    with pytest.raises(ValueError, match=f"nearest setting that works: {nearest}.*cluster_grows=True"):
        ReplicaOptions(**options).check_machines(machines)
    ReplicaOptions(**options, cluster_grows=True).check_machines(machines)
    fits = {**options, "num_replicas": 1, **dict([(nearest.split("=")[0], int(nearest.split("=")[1]))])}
    ReplicaOptions(**fits).check_machines([*machines, GPU])


def test_a_replica_runs_where_ray_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a replica without a GPU on the GPU of another one, and a key that is lost on the way from the environment."""
    monkeypatch.setenv(KEY_VARIABLE, "from-env")
    assert settings().options.device == "cuda" and settings(num_gpus=0).options.device == "cpu"
    assert settings().serve.api_key == "from-env" and settings(api_key="given").serve.api_key == "given"
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ValueError, match="empty"):
        settings()


def test_what_ray_is_asked_for() -> None:
    """Keeps out: Ray's default of 5 requests a replica, and a replica that is killed before its grace period ends."""
    given = settings(num_replicas=3, num_gpus=0, num_cpus=2, max_batch_size=8, max_queue=100, grace_seconds=40)
    asked = options_for_ray(given, {"ray_actor_options": {"resources": {"fast": 1}}, "health_check_period_s": 9}, KNOWN, True)
    assert asked["num_replicas"] == 3 and asked["health_check_period_s"] == 9
    assert asked["ray_actor_options"] == {"num_gpus": 0, "num_cpus": 2, "resources": {"fast": 1}}
    assert asked["max_ongoing_requests"] > 108, "the replica itself must see the request that is too many"
    assert asked["graceful_shutdown_timeout_s"] > 40
    scaled = options_for_ray(settings(), {"autoscaling_config": {"max_replicas": 4}}, KNOWN, True)
    assert "num_replicas" not in scaled and scaled["autoscaling_config"] == {"max_replicas": 4}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_replicas": 2}, "num_replicas is not for ray_options; nearest setting that works: num_replicas=..."),
        ({"ray_actor_options": {"num_gpus": 0.5}}, "num_gpus is not for ray_options; nearest setting that works: num_gpus=..."),
        ({"graceful_shutdown_timeout_s": 5}, "nearest setting that works: grace_seconds=..."),
        ({"max_replica_per_node": 5}, "Ray Serve has no option 'max_replica_per_node'; nearest: max_replicas_per_node"),
        ({"autoscaling_config": {"max_replicas": 4}}, "num_replicas=2 would do nothing beside autoscaling_config"),
    ],
)
def test_wrong_options_for_ray_are_refused(more: dict[str, Any], said: str) -> None:
    """Keeps out: two places that say how many replicas there are, and a misspelled option that Ray would report late."""
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        options_for_ray(settings(num_replicas=2), more, KNOWN, scales=False)


def test_ray_is_imported_only_when_it_is_used(tmp_path: Path) -> None:
    """Keeps out: a server that needs Ray to start, and a traceback for whoever has not installed the extra."""
    code = """if True:
        import sys
        sys.modules["ray"] = None  # importing it raises ModuleNotFoundError
        import specdec.serve.replicas, specdec.serve.replicas.replica, specdec.serve.run
        try:
            specdec.serve.replicas.application()
        except ModuleNotFoundError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("replicas need ray[serve]; install the extra ray with:")


# ---- one replica, with a stand-in for Ray ----


@contextmanager
def replica(monkeypatch: pytest.MonkeyPatch, answers: Callable[[Replica], Any] | None = None) -> Iterator[Replica]:
    """A replica of the shipped pair.  answers: what a broadcast to all replicas gives; it may raise."""

    class Broadcast:
        async def results_async(self, **_: Any) -> Any:
            assert answers is not None
            return await answers(made)

    handle = SimpleNamespace(broadcast=lambda method: Broadcast())
    context = SimpleNamespace(replica_tag="one", deployment="specdec", app_name="app")
    serve = SimpleNamespace(get_replica_context=lambda: context, get_deployment_handle=lambda *_: handle)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    made = Replica(
        shipped.target_folder(), shipped.draft_folder(), None, ServeOptions(), EngineOptions(device="cpu", max_batch_size=2)
    )
    try:
        yield made
    finally:
        made.__del__()


def test_a_failed_engine_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a replica that answers every request with an error for ever, because Ray takes it for healthy."""
    with replica(monkeypatch) as made:
        decoder = made.decoder.decoder
        asyncio.run(made.check_health())
        with Driver(decoder).fail_every_step(RuntimeError("the GPU has fallen off the bus")), pytest.raises(RuntimeError):
            decoder.generate(["Once", "The", "A", "One"], SamplingParams(max_tokens=9))
        with pytest.raises(RuntimeError, match="the engine has failed for good: the GPU has fallen off the bus"):
            asyncio.run(made.check_health())
    with pytest.raises(RuntimeError, match="closed"):  # and Ray's call of __del__ has freed it
        decoder.generate("Once")


def test_a_replica_that_does_not_answer_hides_only_its_own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a scrape that fails altogether while one of many replicas dies or hangs."""

    async def one_is_dead(made: Replica) -> list[Any]:
        return [await made.numbers(), RuntimeError("the actor died")]

    async def one_hangs(made: Replica) -> list[Any]:
        raise TimeoutError

    for answers in (one_is_dead, one_hangs):
        with replica(monkeypatch, answers) as made:
            page = asyncio.run(made.all_metrics()).decode()
            assert "\nspecdec_replicas 1.0\n" in page and '\nspecdec_running{model="specdec",replica="one"} 0.0\n' in page


def test_metrics_of_replicas_stay_apart() -> None:
    """Keeps out: a family that stands on the page twice, which Prometheus refuses, and a label that swallows another."""
    by_replica = {}
    for name, running in (("b", 2), ("a", 3)):
        totals = Totals(running=running)
        totals.requests["eos"] = running
        totals.first_token.add(0.02, running)
        by_replica[name] = list(
            TotalsCollector(lambda totals=totals: totals, Counts(Counter({200: running})), ServeOptions()).collect()
        )
    page = exposition(by_replica).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert len(families) == page.count("# TYPE") and families["specdec_replicas"].samples[0].value == 2
    samples = [sample for family in families.values() for sample in family.samples]
    assert all(sample.labels.pop("model", "specdec") == "specdec" for sample in samples)
    values = {(s.name, *sorted(s.labels.items())): s.value for s in samples}
    assert values["specdec_running", ("replica", "a")] == 3 and values["specdec_running", ("replica", "b")] == 2
    assert values["specdec_requests_total", ("reason", "eos"), ("replica", "b")] == 2
    assert values["specdec_http_responses_total", ("replica", "a"), ("status", "200")] == 3
    assert values["specdec_first_token_seconds_bucket", ("le", "0.025"), ("replica", "b")] == 2
    assert families["specdec_requests"].type == "counter" and families["specdec_first_token_seconds"].type == "histogram"
