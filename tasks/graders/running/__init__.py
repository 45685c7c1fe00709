"""Runs graders: many threads at a time, in this process or in worker processes."""
