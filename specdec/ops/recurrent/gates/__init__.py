"""What multiplies the outputs of recurrent layers, and of attention beside them, and norms them."""
