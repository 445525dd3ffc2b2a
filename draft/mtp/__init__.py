"""The target's own layers of multi-token prediction (MTP) as a drafter."""
