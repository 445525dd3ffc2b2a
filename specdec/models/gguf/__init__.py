"""Targets in GGUF files, as llama.cpp's tools write them, in the terms of a Hugging Face folder: config, tensors, tokenizer."""
