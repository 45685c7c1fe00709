"""The configs of the flows, one module per algorithm or group, and their forms, titles and overrides."""
