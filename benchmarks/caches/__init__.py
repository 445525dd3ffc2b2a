"""Keys and values: in 8 bits, in rings of pages, shared between requests, and the memory that all of it takes."""
