"""Verbs, one retryable Prefect task each, and the nouns they use: graders, datasets, advantages, schedules."""
