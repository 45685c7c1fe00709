"""How the servers of a pool are started: arguments, environment, GPUs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import engine
import storage
from engine.backends.vllm import adapter
from engine.backends.vllm.front import OPTIONS_ENV, TOKEN_ENV
from engine.backends.vllm.runtime import EngineOptions
from engine.backends.vllm.server import Launch
from engine.errors import BadSpec
from engine.sampler_spec import VllmSpec

IN_PROCESS = ("VLLM_ENABLE_V1_MULTIPROCESSING",)
"""What vLLM is told in the engine's own process only: a server answers while it computes, in two processes."""


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """vLLM's engine arguments, as its command line spells them. None and empty ones are left out."""
    spelled: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            spelled.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            spelled += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            spelled += [f"--{flag}", *map(str, value)] if value else []
        elif value is not None:
            spelled += [f"--{flag}", str(value)]
    return spelled


@dataclass(frozen=True, slots=True)
class Plan:
    """What all servers of a pool have in common."""

    spec: VllmSpec
    options: EngineOptions
    config_folder: Path
    folder: Path
    """Of the pool: logs, arguments."""
    token: str = field(repr=False)

    def launch(self, index: int, *, host: str = "127.0.0.1", port: int = 0) -> Launch:
        """Server `index`. Port 0 takes one that is free."""
        name, port = f"server-{index}", port or free_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = adapter.engine_arguments(self.config_folder, self.options)
        listen = ["--host", host, "--port", str(port), "--disable-uvicorn-access-log"]
        options = self.folder / f"{name}.json"
        options.write_text(json.dumps([*flags(arguments), *listen]))
        command = [self.spec.python or sys.executable, "-m", "engine.backends.vllm.serve", str(options)]
        return Launch(name, command, port, self._environment(index), self.folder, host)

    def _environment(self, index: int) -> dict[str, str]:
        """Of one server process and all that vLLM starts under it."""
        devices = devices_of(self.spec, index)
        return {
            **os.environ,
            **{name: value for name, value in adapter.ENVIRONMENT.items() if name not in IN_PROCESS},
            TOKEN_ENV: self.token,
            OPTIONS_ENV: json.dumps(asdict(self.options)),
            "PYTHONPATH": str(packages(self.folder)),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "HF_HUB_OFFLINE": "1",
            **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}),
        }


def devices_of(spec: VllmSpec, index: int) -> tuple[int, ...]:
    """The GPUs of server `index`; empty where it may see all."""
    if not spec.devices:
        return _seen(spec, index)
    return spec.devices[index * spec.tensor_parallel : (index + 1) * spec.tensor_parallel]


def _seen(spec: VllmSpec, index: int) -> tuple[int, ...]:
    """Of the GPUs that this process sees, the ones for server `index`. Raises BadSpec when they do not suffice."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return ()
    needed = spec.tensor_parallel * max(1, spec.servers)
    if needed > count:
        raise BadSpec(
            f"{spec.servers} servers of tensor_parallel={spec.tensor_parallel} take {needed} GPUs, and {count} are "
            "seen; ask for fewer, or name them in sampler.devices"
        )
    return tuple(range(index * spec.tensor_parallel, (index + 1) * spec.tensor_parallel))


def packages(folder: Path) -> Path:
    """A folder with our packages and nothing else, for the path of an interpreter that may be of another environment:
    whatever else is installed here must not hide what is installed there."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    for package in (engine, storage):
        link = path / package.__name__
        if not link.exists():
            link.symlink_to(Path(str(package.__file__)).parent, target_is_directory=True)
    return path


def free_port() -> int:
    """A port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_config(config_folder: Path, folder: Path) -> Path:
    """A copy of the model's config for as long as the servers are started again."""
    copy = folder / "config"
    copy.mkdir()
    for file in config_folder.glob("*.json"):
        shutil.copy(file, copy)
    return copy


def token_of(spec: VllmSpec) -> str:
    """The token of the servers at `urls`. Raises BadSpec when it is not set."""
    token = os.environ.get(spec.token_env, "")
    if not token:
        raise BadSpec(f"sampler.urls need a token: put the servers' token into ${spec.token_env} (sampler.token_env)")
    return token
