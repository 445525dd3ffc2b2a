"""Commands about draft heads: what a folder holds, how well a head drafts, and how one is trained."""
