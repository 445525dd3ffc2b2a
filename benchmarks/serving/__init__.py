"""Parts of `serve_load.py`: the work, the clients' processes, the HTTP door in a thread, what is computed of times."""
