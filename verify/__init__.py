"""The target side: prefill, verification of trees, the acceptance rule, and the commit of accepted tokens.

This package uses attention and does not know the drafter.
"""
