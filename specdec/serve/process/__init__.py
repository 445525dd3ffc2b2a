"""The server's own process: what it writes, its files and its connections.  An application that embeds the
door uses none of it."""
