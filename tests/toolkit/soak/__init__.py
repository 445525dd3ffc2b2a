"""The soak of the HTTP server: thousands of requests of every kind, with faults, and what must be as before after them."""
