"""The commits of the hub's repositories that a run uses. A branch may move, so a run records the commit that a branch
meant at its start, and a resumed run and a fork use the recorded one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from engine.errors import BadModelFolder
from engine.models.hub import hub_repo_of_key
from flows.configs.common import ModelConfig
from flows.configs.overrides import ConfigError
from flows.parameters import Model
from flows.runs.input_checks import named_inputs
from flows.runs.recorded_config import HUB
from storage.chain.fork import read_fork
from storage.chain.run_record import find_run
from storage.registry.hub import HubError, HubRepo, resolve_commit
from storage.store.objects import ObjectStore
from tasks.datasets.errors import DatasetError
from tasks.datasets.spec import DeclaredDataset


def hub_commits(config: BaseModel, store: ObjectStore, run: str) -> dict[str, str]:
    """The commit of each branch of the hub that a config names, by the address of the branch: the one that the run
    recorded, or else the current one. Raises ConfigError, which names the fields."""
    recorded = _recorded_commits(store, run)
    commits: dict[str, str] = {}
    problems = []
    for path, value in named_inputs(config):
        try:
            repo = hub_repo_of_input(value)
            if repo is not None and not repo.is_pinned:
                commits[repo.uri] = recorded.get(repo.uri) or str(resolve_commit(repo).revision)
        except (HubError, BadModelFolder, DatasetError) as error:
            problems.append(f"{path}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return commits


def commits_entry(commits: dict[str, str]) -> dict[str, Any]:
    """The entry of run.json with the commits. Empty for a run that uses no hub."""
    return {HUB: commits} if commits else {}


def _recorded_commits(store: ObjectStore, run: str) -> dict[str, str]:
    """The commits that run.json holds or, for a fork that has not run yet, run.json of its origin."""
    origin = run
    while (info := find_run(store, origin)) is None:
        fork = read_fork(store, origin)
        if fork is None:
            return {}
        origin = fork.run
    recorded = info.other.get(HUB)
    if not isinstance(recorded, dict):
        return {}
    return {address: str(commit) for address, commit in recorded.items()}


def hub_repo_of_input(value: Any) -> HubRepo | None:
    """The repository that an input of a config names. None: it names none."""
    match value:
        case str() as key:
            return hub_repo_of_key(key)
        case ModelConfig(key=str() as key) | Model(key=key):
            return hub_repo_of_key(key)
        case DeclaredDataset():
            return value.hub_repo()
    return None
