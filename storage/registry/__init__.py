"""Models by name and version, and the decisions about which of them is champion."""
