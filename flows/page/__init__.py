"""The page of Ostinato: runs, start, models, datasets and chat in a browser, rendered on the server."""
