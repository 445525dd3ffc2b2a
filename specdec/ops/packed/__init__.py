"""Products with bfloat16 weights packed into 12 bits a number, without loss."""
