"""The object store: objects, artifacts, tables and the keys that name them."""
