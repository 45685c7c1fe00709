"""The engine as a service: wire format, server and client."""
