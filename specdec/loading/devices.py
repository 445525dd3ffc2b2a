"""The numbers that depend on the kind of device, so that neither the scheduler nor the runner has to know the device."""

from __future__ import annotations

import math

# The first three fields of ChunkBudget, by kind of device.  On a CPU they also bound the size of a chunk's mask.  Measured:
# benchmarks/rounds/README.md, "Prompts in chunks".
CHUNK_COST = {"cuda": (2048, 3072, 8192), "cpu": (256, 1024, 1024)}
# Mixing.least by kind of device; None: chunks and rounds take turns.  For GPUs 1024 is best in a simulation over measured times
# (benchmarks/serving/README.md, "Chunks and rounds in one pass").
MIXED_COST: dict[str, int | None] = {"cuda": 1024, "cpu": None}
DEPTH = {"cuda": 1, "cpu": 0}  # launches that may be unread; on a CPU the host computes them itself and can't run ahead
CAPTURE_SECONDS = 0.2  # how long the capture of a round's graph takes on a slow host, warm-up included
# A threshold for the keys that a round need not read again if rows read common pages together, (rows - 1) * tokens.  Below it
# rows read alone, because reading together costs one or two more launches in each layer.  Measured:
# benchmarks/caches/README.md, "Shared prefixes".  On a CPU reading together gains nothing, because one dense product over all
# rows' keys serves all rows.
MIN_SAVED = {"cuda": 20_000.0, "cpu": math.inf}
# A threshold for queries x heads of a row that read each key.  Above it a row alone does so much arithmetic on each key that
# nothing is gained by reading the key less often.
MAX_QUERIES_A_KEY = 64
# Both decide whether a chunk is captured: the seconds that a slow host needs to launch a layer, and how many products of two
# numbers a GPU computes in a second.
LAUNCH_SECONDS_A_LAYER, PRODUCTS_A_SECOND = 1.2e-3, 3e14
ATTENTION_EFFICIENCY = 0.55  # operations per second in attention over long contexts / those in a layer's matrix products
# Share of the pool's memory that is for recurrent states kept for later prompts, and the most such states.
STATE_SHARE, MAX_KEPT_STATES = 0.1, 1024
POOL_SHARE = 0.85  # share of the GPU memory that is free after the weights; the rest is for activations and graphs
HOST_POOL_SHARE = 0.4  # share of the host's memory, where weights and everything else must fit too
# Limits of a pool with prefix caching.  KEPT_TOKENS bounds its tokens, so that lists of pages stay quick and slot numbers stay
# far below 2**31.  HOST_KEPT_BATCHES bounds it on a CPU, in full batches of longest sequences; the operating system provides
# that memory only as it is written.
KEPT_TOKENS, HOST_KEPT_BATCHES = 2**24, 16
