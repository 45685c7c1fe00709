"""The loops a person runs, deploys and schedules; each reads like its algorithm."""
