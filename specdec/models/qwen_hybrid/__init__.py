"""Qwen's hybrids: Qwen3-Next and Qwen3.5 to 3.8, dense and mixtures: layers of the gated delta rule beside gated attention."""
