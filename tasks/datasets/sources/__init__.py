"""Raw rows of the source of a dataset: files, the hub, or a user's own code."""
