"""What tests build their worlds from: random models, dense references, substitute drafters, tokenizers, statistics."""
