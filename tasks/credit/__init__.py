"""Turns rewards into advantages: normalisation, returns, GAE, KL controllers. Plain code without Prefect or torch."""
