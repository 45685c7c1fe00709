"""Storage of objects, artifacts, chains, leases, checkpoints and registered models. Imports no other package of the
project."""
