"""Imports configs of verl: a table of verl's keys, and the conversions of their values."""
