"""The embedded engine: policies materialised in this process, brought to any `PolicyRef` that was committed."""
