"""Several decoders behind Ray Serve, one address in front: ray_serve.py [NAME=VALUE ...], until Ctrl-C.

It needs the extra `ray`.  The values are the fields of Arguments: `ray_serve.py num_replicas=2 num_gpus=0` serves the pair that
ships with specdec from two processes on the CPU.  On a cluster, the same file is what Ray's own commands take:

    serve run --app-dir examples ray_serve:app target=/models/llama draft=/models/llama-eagle3 num_replicas=4
"""

import sys

import ray
from pydantic import BaseModel
from ray import serve
from ray.serve import Application

from specdec import SpecConfig
from specdec.serve.replicas import application


class Arguments(BaseModel, extra="forbid"):
    """What the command line may say.  Ray turns its texts into these types and refuses what is not here."""

    target: str | None = None  # a folder that every machine has, or a hub id; None: the shipped pair
    draft: str | None = None
    num_steps: int = 5
    topk: int = 4
    num_replicas: int = 1
    num_gpus: int = 1  # of each replica; 0 runs on the CPU
    max_batch_size: int = 8
    port: int = 8000


def app(args: Arguments) -> Application:
    """What `serve run` and `serve deploy` call.  More settings: docs/SCALING.md lists them."""
    return application(
        args.target,
        args.draft,
        None if args.target and not args.draft else SpecConfig(args.num_steps, args.topk),
        num_replicas=args.num_replicas,
        num_gpus=args.num_gpus,
        max_batch_size=args.max_batch_size,
        grace_seconds=60,  # for requests that run when Ray stops a replica
    )


if __name__ == "__main__":
    arguments = Arguments(**dict(given.split("=", 1) for given in sys.argv[1:]))
    ray.init()  # a Ray of this machine alone, or the cluster that RAY_ADDRESS names
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    serve.run(app(arguments), blocking=True)
