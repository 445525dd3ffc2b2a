"""Talks to a running `specdec serve` through the package openai: openai_client.py [http://127.0.0.1:8000/v1].

Start the server first, in another terminal; `pip install openai` brings the package.  SPECDEC_API_KEY in the environment is
the key, if the server has one.
"""

import os
import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = openai.OpenAI(base_url=url, api_key=os.environ.get("SPECDEC_API_KEY", "none"))  # the package wants some key

try:
    model = client.models.list().data[0].id
except openai.APIConnectionError:
    sys.exit(f"no server at {url}; start one with: specdec serve")
except openai.AuthenticationError as error:
    sys.exit(f"{error.message}; set SPECDEC_API_KEY to the server's key")

# A whole answer.  Its usage says how many draft tokens were accepted.
answer = client.completions.create(model=model, prompt="Once upon a time", max_tokens=32, temperature=0)
print(f"{model}: {answer.choices[0].text!r}")
print("draft tokens:", answer.usage.completion_tokens_details.model_dump(exclude_none=True))

# Two sampled choices: the seed fixes the text of each.  Extensions of specdec go through extra_body.
answer = client.completions.create(model=model, prompt="The sun", max_tokens=16, n=2, seed=7, extra_body={"top_k": 20})
for choice in answer.choices:
    print(f"choice {choice.index}: {choice.text!r}, ended by {choice.finish_reason}")

# A stream; its last chunk has the usage and no choices.
usage = {"include_usage": True}
for chunk in client.completions.create(model=model, prompt="The bear", max_tokens=32, stream=True, stream_options=usage):
    if chunk.choices:
        print(chunk.choices[0].text, end="", flush=True)
    else:
        print(f"\n{chunk.usage.completion_tokens} tokens streamed")

# A chat needs a model with a chat template; the shipped target has none, and the error says so.
try:
    messages = [{"role": "user", "content": "Tell me a story about a bear."}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=64)
    print("chat:", chat.choices[0].message.content)
except openai.BadRequestError as error:
    print(f"no chat: {error.body['message']}")

# What the server can't do is an error that names the field.  The package repeats a request by itself after 429 (busy).
try:
    client.completions.create(model=model, prompt="Once", best_of=3)
except openai.BadRequestError as error:
    print(f"refused: {error.param} ({error.code})")
