"""DeepSeek's package flash_mla, which reads latents on Hopper GPUs: the attention backend and its calls."""
