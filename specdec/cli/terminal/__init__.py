"""What the command line writes where: messages, files, a text in colours, and what a slow start waits for."""
