"""Target architectures of the Llama family, the layers both models share, and the strict checkpoint reader."""
