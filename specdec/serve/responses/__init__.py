"""OpenAI's /v1/responses, without a memory: each request brings all of its history, and is answered as a chat."""
