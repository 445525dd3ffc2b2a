"""The server's own process: what it writes, its files, its connections.  Applications that embed the server use none of it."""
