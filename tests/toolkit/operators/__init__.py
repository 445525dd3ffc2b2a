"""Small worlds for tests of attention: paged caches, the cells of the matrix, stand-ins for flash-attn."""
