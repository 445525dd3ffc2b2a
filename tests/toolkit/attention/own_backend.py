"""An attention backend that only a test has: the torch backend under a name of its own, without softcap."""

from specdec.attention.backend import Backend
from specdec.attention.capability import FLOATS, Capability, Feature, Requirements
from specdec.attention.eager.capability import TORCH
from specdec.attention.eager.torch_backend import TorchBackend


class OwnBackend(TorchBackend):
    name = "mine"


def make(by_rule: bool) -> Backend:
    return OwnBackend()


MINE = Capability(
    "mine",
    "a test",
    Requirements("nothing", devices=("cpu",)),
    make,
    dtypes=FLOATS,
    features=TORCH.features - {Feature.SOFTCAP},
)
