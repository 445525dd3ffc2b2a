"""lm-eval over HTTP equals its own `hf` backend on the shipped target: multiple choice, perplexity and generation.

The tasks are made here, of texts as the target writes them, so nothing is fetched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toolkit.serving.server import Served

from specdec import shipped

TOLERANCE = 1e-4
QUESTIONS = [
    ("Once upon a time, there was a little", [" girl", " equation", " boy named Tim"]),
    ("Lily and her mom went to the park. Lily saw a big", [" tree", " dog in the", " quantum"]),
    ("The sun was", [" shining", " shining and the birds were singing.", " not"]),
    ("Tom was sad because he lost his", [" toy", " car", " ball in the big, dark forest"]),
]
STORIES = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sun. One day, she saw a big dog.",
    "Tom had a red ball. He liked to kick it high. The ball went over the fence and Tom was sad. " * 6,
]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": 0,
        "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "stories": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "endings": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Configurations of lm-eval whose documents are files."""
    folder = tmp_path_factory.mktemp("tasks")
    questions, stories = folder / "questions.jsonl", folder / "stories.jsonl"
    questions.write_text("".join(json.dumps({"question": ask, "choices": choices}) + "\n" for ask, choices in QUESTIONS))
    stories.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES))
    files = {"choices": questions, "endings": questions, "stories": stories}
    return [{"task": name, **task, **_documents(files[name])} for name, task in TASKS.items()]


def _documents(file: Path) -> dict[str, Any]:
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}


def answers(tasks: list[dict[str, Any]], backend: str, as_chat: bool = False, **arguments: Any) -> dict[str, list[Any]]:
    """What the model answered to each request of each task, in order."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=backend, model_args=arguments, tasks=[dict(task) for task in tasks], batch_size=1 if as_chat else 2,
        apply_chat_template=as_chat, log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
    samples = {name: sorted(each, key=lambda sample: sample["doc_id"]) for name, each in found["samples"].items()}
    return {name: [response for sample in each for response in sample["filtered_resps"]] for name, each in samples.items()}


def hold_equal(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    assert found.keys() == expected.keys() and all(expected.values())
    for name, wanted in expected.items():
        for mine, theirs in zip(found[name], wanted, strict=True):
            if isinstance(theirs, str):
                assert mine == theirs
                continue
            (mine_sum, *mine_greedy), (their_sum, *their_greedy) = (
                each if isinstance(each, tuple | list) else (each,) for each in (mine, theirs)
            )
            assert mine_sum == pytest.approx(their_sum, abs=TOLERANCE)
            assert mine_greedy == their_greedy


@pytest.fixture(scope="module")
def expected(asked_for: None, tasks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return answers(tasks, "hf", pretrained=str(shipped.target_folder()), dtype="float32", device="cpu", add_bos_token=True)


def test_local_completions(pair_served: Served, tasks: list[dict[str, Any]], expected: dict[str, list[Any]]) -> None:
    """Keeps out: a token more or less in a sum, a greedy answer called none, a window of a long text that is cut elsewhere."""
    settings = pair_served.decoder.settings
    found = answers(
        tasks, "local-completions", base_url=f"{pair_served.url}/v1/completions", model="tiny", num_concurrent=4,
        tokenizer=str(shipped.target_folder()), tokenizer_backend="huggingface", max_length=settings.max_seq_len,
        add_bos_token=True,
        max_retries=1,
    )  # fmt: skip
    hold_equal(found, expected)


def test_local_chat_completions(pair_served: Served, tasks: list[dict[str, Any]], chat_target: Path) -> None:
    """Keeps out: another rendering of the template than transformers', and stop texts that end elsewhere."""
    generated = [task for task in tasks if task["task"] == "endings"]
    url = f"{pair_served.url}/v1/chat/completions"
    found = answers(generated, "local-chat-completions", as_chat=True, base_url=url, model="tiny", max_retries=1)
    model = {"pretrained": str(chat_target), "dtype": "float32", "device": "cpu", "add_bos_token": False}
    hold_equal(found, answers(generated, "hf", as_chat=True, **model))
