"""The draft side: EAGLE heads, the multi-step draft worker, tree growth.  Knows attention, not the verifier."""
