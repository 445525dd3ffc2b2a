"""Who may use the server: pages in browsers, and the names under which it is asked for."""
