"""What a model's files say of one thing with several keys: which of them counts, or the error that names them all."""
