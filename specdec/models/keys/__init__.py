"""What a model's files say of one thing with several keys: which of them counts, or the error that names them all.

Also ALiBi's slopes, which files never name: families compute them of their number of heads.
"""
