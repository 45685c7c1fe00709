"""The embedded engine, which trains and samples in this process. It can load any committed policy."""
