"""How far the shipped head's drafts are accepted, round by round: measures it, and writes specdec/pair/expected.json.

`scripts/expect_pair` runs this file.  It refuses prompts whose numbers rounding could decide: float32 at batch 1, float32 at
batch 4 and float64 must give the same.
"""

import json
from typing import Any

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.draft.eagle.worker import FEW_ROWS
from specdec.generation import Stats
from toolkit.driver import Driver
from toolkit.paths import PAIR

PROMPTS, MAX_TOKENS = 4, 48
SHAPES = [(5, 4, 16), (5, 1, 6), (3, 8, 32)]
WHAT = (
    "Greedy decoding of the first prompts of prompts.jsonl by the shipped pair on a CPU in float32, for three shapes of the "
    "draft tree. accepted_per_round: of each prompt, the draft tokens accepted in each round; rounds: their number over all "
    "prompts; accept_length: tokens emitted per round, the bonus token included. scripts/expect_pair writes this file."
)


def measure(
    shape: tuple[int, int, int], dtype: str = "float32", batch_size: int = PROMPTS, few_rows: int = FEW_ROWS
) -> dict[str, Any]:
    """One row of expected.json."""
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    decoder = SpecDecoder.from_pretrained(
        PAIR / "target",
        PAIR / "draft",
        SpecConfig(*shape),
        device="cpu",
        dtype=dtype,
        max_batch_size=batch_size,
        max_seq_len=128,
    )
    Driver(decoder).drafter.few_rows = few_rows
    prompts = [json.loads(line)["prompt"] for line in lines]
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    stats = Stats.total([out.stats for out in outputs])
    return {
        "num_steps": shape[0], "topk": shape[1], "num_draft_tokens": shape[2], "rounds": stats.rounds,
        "accept_length": round(stats.accept_length, 6),
        "accepted_per_round": [out.stats.accepted_per_round for out in outputs],
    }  # fmt: skip


def expected() -> dict[tuple[int, int, int], dict[str, Any]]:
    """The rows of expected.json by shape."""
    data = json.loads((PAIR / "expected.json").read_text())
    assert (data["prompts"], data["max_tokens"]) == (PROMPTS, MAX_TOKENS)
    return {(row["num_steps"], row["topk"], row["num_draft_tokens"]): row for row in data["rows"]}


def main() -> None:
    rows = []
    for shape in SHAPES:
        row = measure(shape)
        for other in (measure(shape, batch_size=1), measure(shape, "float64")):
            if other != row:
                raise SystemExit(f"expect_pair: {shape} depends on rounding; choose other prompts:\n{row}\n{other}")
        print({name: value for name, value in row.items() if name != "accepted_per_round"})
        rows.append(row)
    head = {"what": WHAT, "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'
    assert json.loads(text) == {**head, "rows": rows}
    (PAIR / "expected.json").write_text(text)


if __name__ == "__main__":
    main()
