"""specdec's operators for torch.export and torch.compile, and a target's decode pass as a module that either can trace.

Importing this package registers every operator of torch.ops.specdec; a process that only runs an exported program needs no more
of specdec than this import.  The engine does not use it: it calls the same kernels without an operator's dispatch.
"""

from specdec.attention.operators import backend, sparse  # noqa: F401 (imported for the operators that it registers)
from specdec.operators.decode import DecodePass, export_decode
from specdec.operators.given_cache import GivenCache
from specdec.ops import norm, topk  # noqa: F401
from specdec.ops.products import dense  # noqa: F401

__all__ = ["DecodePass", "GivenCache", "export_decode"]
