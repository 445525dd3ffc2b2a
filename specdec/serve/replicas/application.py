"""Makes an application of Ray Serve out of a pair and its settings.  What a replica does is in replica.py; Ray does the rest:
it spreads requests over the replicas, starts new ones for those that fail, and drains those that it stops.

Ray is imported when `application` is called, not before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import shipped
from specdec.checks import nearest_name
from specdec.config import SpecConfig
from specdec.draft.kind import Draft
from specdec.serve.replicas.options import ReplicaOptions, ReplicaSettings

if TYPE_CHECKING:
    from ray.serve import Application

NAME = "specdec"  # of the deployment
NEEDED = {"ray": "ray[serve]", "fastapi": "fastapi", "prometheus_client": "prometheus-client"}
# Requests that a replica gets beyond those that its queue has places for: the replica itself answers them, with status 429,
# where a proxy of Ray would let them wait.
BEYOND_THE_QUEUE = 64
HEALTH_SECONDS = 2  # between two checks; Ray starts a new replica after three that fail
DRAIN_LOOK_SECONDS = 1  # between two looks of Ray at whether a replica's last request has ended
CLOSING_SECONDS = 6  # for a replica without requests to free its GPU
STARTS = 3  # a wrong setting fails every time
OURS = ("num_replicas", "max_ongoing_requests", "graceful_shutdown_timeout_s")  # decided by settings of specdec
OURS_OF_ACTORS = ("num_gpus", "num_cpus")


def application(
    target: str | Path | None = None,
    draft: Draft = None,
    spec: SpecConfig | None = None,
    *,
    ray_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Application:
    """An application for `ray.serve.run`, or for a builder that `serve run` and `serve deploy` call.

    target, draft: folders or hub ids, which every machine of the cluster must find; None: the shipped pair.
    settings: fields of ReplicaOptions, ServeOptions (but `host` and `port`) and EngineOptions.
    ray_options: more of what Ray's `Deployment.options` takes, such as autoscaling_config or ray_actor_options.

    ModuleNotFoundError without the extra `ray`; ValueError and TypeError for settings that can't work, and for replicas that
    the cluster, where one is connected, has no room for.
    """
    if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
        raise ModuleNotFoundError(
            f"replicas need {', '.join(missing)}; install the extra ray with: pip install '/path/to/the/clone[ray]', or in a "
            "clone ./scripts/setup.sh ray"
        )
    if target is None and draft is not None:
        raise ValueError("draft was given without target: the shipped target has a head of its own; nearest: target=...")
    if spec is not None and not isinstance(spec, SpecConfig):
        raise TypeError(f"spec must be a SpecConfig or None, got {spec!r} of type {type(spec).__name__}")
    if spec is not None and target is not None and draft is None:
        raise ValueError("spec would do nothing without draft; nearest setting that works: spec=None")
    checked = ReplicaSettings.of(settings, None if target is None else Path(target).resolve().name)
    pair = (shipped.target_folder(), shipped.draft_folder()) if target is None else (target, draft)

    import ray
    from ray import serve

    from specdec.serve.replicas.replica import Replica

    known = [name for name in inspect.signature(serve.Deployment.options).parameters if name != "self" and name[0] != "_"]
    options = options_for_ray(checked, dict(ray_options or {}), known, scales="num_replicas" not in settings)
    if ray.is_initialized():
        checked.replicas.check_machines(node["Resources"] for node in ray.nodes() if node["Alive"])
    return serve.deployment(serve.ingress()(Replica)).options(**options).bind(*pair, spec, checked.serve, checked.options)


def options_for_ray(settings: ReplicaSettings, more: dict[str, Any], known: list[str], scales: bool) -> dict[str, Any]:
    """What Ray is asked for.

    more: options of the caller.  TypeError for those that are not among the known, ValueError for those that settings of
    specdec decide.  scales: whether an autoscaling_config among them may decide how many replicas there are.
    """
    actor = dict(more.pop("ray_actor_options", None) or {})
    for name in (*more, *actor):
        if name in (*OURS, *OURS_OF_ACTORS):
            where = "grace_seconds" if name.startswith("graceful") else "max_queue" if name.startswith("max") else name
            raise ValueError(f"{name} is not for ray_options; nearest setting that works: {where}=... of `application`")
    for name in more:
        if name not in known:
            alike = nearest_name(name, known)
            hint = f"nearest: {alike}" if alike else f"known: {', '.join(known)}"
            raise TypeError(f"Ray Serve has no option {name!r}; {hint}")
    replicas: ReplicaOptions = settings.replicas
    own: dict[str, Any] = {
        "name": NAME,
        "max_ongoing_requests": settings.options.max_batch_size + settings.serve.max_queue + BEYOND_THE_QUEUE,
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_wait_loop_s": DRAIN_LOOK_SECONDS,
        "graceful_shutdown_timeout_s": settings.serve.grace_seconds + CLOSING_SECONDS,
        "max_constructor_retry_count": STARTS,
        "ray_actor_options": {"num_gpus": replicas.num_gpus, "num_cpus": replicas.num_cpus, **actor},
    }
    if more.get("autoscaling_config") is None:
        own["num_replicas"] = replicas.num_replicas
    elif not scales:
        raise ValueError(
            f"num_replicas={replicas.num_replicas} would do nothing beside autoscaling_config; nearest setting that works: "
            "min_replicas and max_replicas in autoscaling_config"
        )
    return {**own, **more}
