"""Datasets of threads: their declaration (files, reasoning-gym, a user's code, threads in process), loading into a
table whose version is a digest of its content, and the seeded order in which a run reads the rows."""
