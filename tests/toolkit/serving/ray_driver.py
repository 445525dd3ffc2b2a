"""The process that owns a local Ray for tests: ray_driver.py FOLDER PORT PREFIX [NAME=VALUE ...], the values for the example.

It prints "ready" when the application of examples/ray_serve.py answers, and a line for each command it has carried out.  It is
a process of its own so that nothing of Ray stays in the test process, and it ends Ray when its input ends.

    kill NAME    ends a replica at once
    delete       takes the application away, as for an update: Ray drains its replicas
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve

from specdec.engine.loop import Engine
from specdec.serve.replicas import application, replica

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ray_serve.py"
APPLICATION = "tested"
SLOW, ROUND_SECONDS = "slow", 1.0  # a file in FOLDER; while it is there, every round takes so long


def main(folder: str, port: str, prefix: str, *given: str) -> None:
    spec = importlib.util.spec_from_file_location("ray_serve_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)

    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    settings = sys.modules[application.__module__]
    replica.Replica = slowed(Path(folder) / SLOW)  # type: ignore[misc]
    settings.HEALTH_SECONDS, settings.DRAIN_LOOK_SECONDS = 0.5, 0.2  # type: ignore[attr-defined]  # a test need not wait as long
    try:
        try:
            application(num_replicas=2)  # GPUs, unless it is told otherwise
        except ValueError as error:
            print(f"refused: {error}", flush=True)
        serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
        arguments = example.Arguments(**dict(item.split("=", 1) for item in given))
        serve.run(example.app(arguments), name=APPLICATION, route_prefix=prefix)
        print("ready", flush=True)
        for line in sys.stdin:
            carry_out(*line.split())
            print(f"done: {line.strip()}", flush=True)
    finally:
        ray.shutdown()  # of everything that Serve has started too


def slowed(file: Path) -> type[replica.Replica]:
    """Replicas whose texts last for as long as a test has questions, which is while the file is there."""

    class Slowed(replica.Replica):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            step = Engine.step

            def slow_step(engine: Engine[Any]) -> None:
                if engine.running and file.exists():
                    time.sleep(ROUND_SECONDS)
                step(engine)

            Engine.step = slow_step  # type: ignore[method-assign]

    return Slowed


def carry_out(command: str, replica: str = "") -> None:
    if command == "delete":
        serve.delete(APPLICATION)
    else:
        assert command == "kill", command
        (actor,) = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].endswith(f"#{replica}")]
        ray.kill(ray.get_actor(**actor))


if __name__ == "__main__":
    main(*sys.argv[1:])
