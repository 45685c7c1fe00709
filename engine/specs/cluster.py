"""`cluster` in the engine's config: the Ray cluster that runs trainer ranks, vLLM replicas and graders. Plain data."""

from __future__ import annotations

import re

from pydantic import field_validator

from storage.serialization import Frozen

ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
"""HOST:PORT, where HOST may be [IPv6]."""


class ClusterSpec(Frozen):
    """A private Ray on this machine, or an existing Ray cluster."""

    address: str | None = None
    """Address of an existing Ray cluster: HOST:PORT of its head node, or "auto" for the cluster that this machine
    belongs to. Unset: a private Ray on this machine, which listens on loopback only and ends with this process."""

    @field_validator("address")
    @classmethod
    def _is_of_a_head_node(cls, address: str | None) -> str | None:
        if address is None or address == "auto" or ADDRESS.fullmatch(address):
            return address
        raise ValueError(
            f"cluster.address={address!r} is no address of a Ray cluster; give HOST:PORT of its head node, without "
            "ray://, such as 10.0.0.1:6379, or 'auto'"
        )
