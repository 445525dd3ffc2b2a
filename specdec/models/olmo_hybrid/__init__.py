"""OLMo Hybrid: layers of the gated delta rule, normed before, beside attention that is normed after, as OLMo 2's."""
