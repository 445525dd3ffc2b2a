"""What `specdec plan` counts, for one GPU."""

from pathlib import Path

from specdec import EngineOptions, SpecConfig
from specdec.loading.plan import MemoryPlan, plan_memories


def plan_memory(
    target: str | Path, draft: str | Path | None, spec: SpecConfig | None, options: EngineOptions, memory: int
) -> MemoryPlan:
    """What this pair takes with these options, on a GPU of that many bytes."""
    return plan_memories(target, draft, spec, options, (memory,))[0]
