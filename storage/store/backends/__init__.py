"""One module per kind of store: how bytes get there durably, and how one writer of many wins."""
