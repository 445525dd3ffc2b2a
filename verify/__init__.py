"""The target side: prefill, verify, commit, and the acceptance rule.  Knows attention, not the draft."""
