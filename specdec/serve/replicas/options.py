"""What is asked of Ray for the replicas, and how settings of three kinds are told apart.  Imports neither Ray nor torch.

A keyword of `application` is a field of ReplicaOptions, of ServeOptions or of EngineOptions; the three have no name in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from specdec.checks import nearest_name, option, setting_of
from specdec.options import EngineOptions
from specdec.serve.options import ServeOptions, key_of_environment

# Fields of ServeOptions that are decided elsewhere, and where.
RAYS_OWN = {
    "host": "Ray's proxies listen, so it is http_options of ray.serve.start, or of the file for `serve deploy`",
    "port": "Ray's proxies listen, so it is http_options of ray.serve.start, or of the file for `serve deploy`",
    "allowed_hosts": "Ray's proxies listen, and a replica is asked under any name",
    "max_connections": "Ray's proxies hold the connections",
    "write_seconds": "Ray's proxies hold the connections",
}


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas run, and what Ray sets aside for each: checked when the object is made."""

    num_replicas: int = option(1, "decoders that run, each in a process of its own", bounds=(1, 4096))
    num_gpus: int = option(1, "GPUs of a replica: 1, or 0 for a replica on the CPU", bounds=(0, 1))
    num_cpus: int = option(1, "CPUs that Ray sets aside for a replica", bounds=(1, 4096))
    cluster_grows: bool = option(
        False, "whether Ray's autoscaler adds machines, so that replicas may wait for GPUs and CPUs that no machine has yet"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            setting_of(item).check(item.name, getattr(self, item.name), item.default)

    def check_machines(self, machines: Iterable[Mapping[str, float]]) -> None:
        """ValueError unless the machines have room for the replicas.

        machines: what each has altogether, used or not, as Ray counts it: {"CPU": 8.0, "GPU": 2.0}.
        """
        if self.cluster_grows:
            return
        each = {"GPU": self.num_gpus, "CPU": self.num_cpus}
        rooms = [{kind: machine.get(kind, 0) // n for kind, n in each.items() if n} for machine in machines]
        places = int(sum(min(room.values()) for room in rooms))
        if places >= self.num_replicas:
            return
        if places:
            nearest = f"num_replicas={places}"
        elif self.num_gpus and not any(room["GPU"] for room in rooms):
            nearest = "num_gpus=0, for replicas on the CPU"
        else:
            nearest = "num_cpus=1"
        raise ValueError(
            f"num_replicas={self.num_replicas}, but the machines of the Ray cluster have room for {places} replicas of "
            f"{self.num_gpus} GPU and {self.num_cpus} CPU; nearest setting that works: {nearest}; or cluster_grows=True if "
            "Ray's autoscaler adds machines"
        )


@dataclass(frozen=True)
class ReplicaSettings:
    """All settings of an application, checked."""

    replicas: ReplicaOptions
    serve: ServeOptions
    options: EngineOptions

    @classmethod
    def of(cls, given: Mapping[str, Any], model_name: str | None) -> ReplicaSettings:
        """Sorts keywords.  TypeError for an unknown one, ValueError for values that can't work, alone or together.

        model_name: what requests call the model where no keyword says so.
        """
        kinds = (ReplicaOptions, ServeOptions, EngineOptions)
        names = {kind: [item.name for item in fields(kind)] for kind in kinds}
        known = [name for kind in kinds for name in names[kind] if name not in RAYS_OWN]
        for name in given:
            if name in RAYS_OWN:
                raise TypeError(f"{name} is no setting of a replica: {RAYS_OWN[name]}")
            if name not in known:
                alike = nearest_name(name, [*known, "target", "draft", "spec", "ray_options"])
                hint = f"nearest: {alike}" if alike else f"known: {', '.join(known)}"
                raise TypeError(f"there is no setting {name!r}; {hint}")
        own, serve, engine = ({name: given[name] for name in names[kind] if name in given} for kind in kinds)
        serve = {"api_key": key_of_environment(), "model_name": model_name, **serve}
        replicas = ReplicaOptions(**own)
        return cls(replicas, ServeOptions(**serve), _on_its_device(EngineOptions(**engine), replicas.num_gpus))


def _on_its_device(engine: EngineOptions, num_gpus: int) -> EngineOptions:
    """The same with a device that is none of the replica's choice: Ray shows a replica its own GPU alone, as cuda:0."""
    device, own = str(engine.device), "cuda" if num_gpus else "cpu"
    if engine.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size must be 1 in a replica, which has one GPU or none, got {engine.tensor_parallel_size}; "
            "nearest thing that works for a model on several GPUs: specdec serve"
        )
    if device not in ("auto", own):
        wanted = int(device.startswith("cuda"))
        nearest = "device='auto'" if wanted == num_gpus else f"num_gpus={wanted}, device='auto'"
        raise ValueError(
            f"device={device!r} does not fit num_gpus={num_gpus}: Ray chooses the GPU of each replica; nearest setting that "
            f"works: {nearest}"
        )
    return replace(engine, device=own)
