"""The Llama family: Llama 2, 3 and 3.x, Mistral, Qwen2, Qwen3 and MiMo, told apart by switches of their config."""
