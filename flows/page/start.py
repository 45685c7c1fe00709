"""The section Start: a form of a training's config, its check with an estimate, and the start of a run of its Prefect
deployment. The fields are the keys that 'ostinato config' prints, and their values are written as for --set."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from prefect.exceptions import ObjectNotFound as NoSuchDeployment
from prefect.exceptions import PrefectHTTPStatusError
from pydantic import BaseModel
from starlette.responses import RedirectResponse

import tasks.graders
from engine.errors import EngineError
from engine.specs.engine import HttpEngineSpec, LocalEngineSpec
from flows.catalogue import TRAININGS
from flows.configs.common import TrainingConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.forms import FLOW_FIELDS_SHOWN, GROUP_FIELDS_SHOWN, FormConfig
from flows.configs.keys import ConfigKey, keys_of_group
from flows.configs.overrides import WHOLE, ConfigError, load_config, load_yaml
from flows.page.security import Form
from flows.page.shared import Page, PageError
from flows.runs.expected_errors import EXPECTED_ERRORS
from flows.runs.preflight import check_config, expected_of_run, field_texts, group_of_fields
from flows.runs.recorded_config import config_yaml, read_config
from storage.registry.datasets import list_datasets
from storage.registry.decisions import model_names
from storage.serialization import canonical_json, digest
from storage.store.objects import open_store

DATASETS = frozenset({"file", "registered"})
"""Kinds of a key that names a dataset."""
PREFIX = "v."
"""Before the dotted key in the name of a field of the form."""


class Startable(NamedTuple):
    """What the form can start: a flow with its deployment."""

    name: str
    config: type[FormConfig]
    summary: str


STARTABLE = {name: Startable(name, training.config, training.summary) for name, training in TRAININGS.items()}
STARTABLE["evaluation"] = Startable(
    "evaluation", EvaluationFlowConfig, "Models and datasets, graded and compared on the same prompts."
)


@dataclass
class StartForm:
    """What the form shows: the texts as they were typed, and what is wrong with them."""

    training: Startable
    texts: dict[str, str] = field(default_factory=dict)
    """Dotted key -> text."""
    yaml: str | None = None
    """The config as YAML, in place of the fields. None: the fields are shown."""
    problems: dict[str, str] = field(default_factory=dict)
    estimate: str = ""
    """What the run would take. Empty: not checked, or refused."""
    checked: str = ""
    """Digest of the values that the estimate is of. The button that starts the run sends it back."""
    key: str = field(default_factory=lambda: uuid4().hex)
    """Identifies this form, so that a second press of its button starts nothing."""
    notice: str = ""


def router(page: Page) -> APIRouter:
    """Returns the routes of the section."""
    router = APIRouter()
    page.templates.tests["first_field"] = _is_first

    @router.get("/start")
    def show(request: Request, training: str = "", copy: str = "", fork: int = 0) -> Response:
        if not training and not copy:
            return page.render(request, "start.html", trainings=STARTABLE.values(), form=None)
        form = _copied(page, copy, is_fork=bool(fork)) if copy else StartForm(_training(training))
        # links of other pages fill in some fields
        known = {key.path for key in _leaves(form.training.config)}
        form.texts |= {path: text for path, text in request.query_params.items() if path in known}
        return _render(page, request, form)

    @router.post("/start")
    async def submit(request: Request) -> Response:
        sent: Form = request.state.form
        form = StartForm(_training(sent.get("training")), key=sent.get("key") or uuid4().hex)
        names = [name for name in sent.fields if name.startswith(PREFIX)]
        form.texts = {name.removeprefix(PREFIX): sent.get(name) for name in names if sent.get(name)}
        form.yaml = sent.get("yaml") if "yaml" in sent.fields else None
        values, action, started = _values(form), sent.get("action"), sent.get("start")
        if action in ("yaml", "fields"):
            _switch(form, values, to_yaml=action == "yaml")
        else:
            await _check(page, form, values)
        if started and form.estimate and form.checked == started:
            if flow_run := await asyncio.to_thread(_start, page, form, values):
                return RedirectResponse(f"/runs/{flow_run}", status_code=303)
        elif started and form.estimate:
            form.notice = "Nothing was started: the values have changed since the estimate. This is the new one."
        return await asyncio.to_thread(_render, page, request, form)

    return router


def _training(name: str) -> Startable:
    if name not in STARTABLE:
        raise PageError(f"There is no training {name!r:.80}.", "Choose one under Start.", 404)
    return STARTABLE[name]


def _render(page: Page, request: Request, form: StartForm) -> Response:
    groups: dict[str, list[ConfigKey]] = {}
    for key in _leaves(form.training.config):
        groups.setdefault(key.path.rpartition(".")[0], []).append(key)
    # groups whose fields are all folded come last
    groups = dict(sorted(groups.items(), key=lambda group: not any(map(_is_first, group[1]))))
    shown = {key.path for keys in groups.values() for key in keys}
    elsewhere = {path: text for path, text in form.problems.items() if path not in shown or form.yaml is not None}
    choices = _choices(page) if form.yaml is None else {}
    values = {"form": form, "groups": groups, "choices": choices, "elsewhere": elsewhere, "prefix": PREFIX}
    return page.render(request, "start.html", status=422 if form.problems else 200, **values)


def _leaves(group: type[BaseModel], path: str = "") -> list[ConfigKey]:
    """The keys that have a field: those of a group of one kind, and any other value as a whole."""
    leaves = []
    for key in keys_of_group(group, path):
        inner = group_of_fields(group, key.name)
        leaves += [key] if inner is None else _leaves(inner, f"{key.path}.")
    return leaves


def _is_first(key: ConfigKey) -> bool:
    """Whether the field is shown before the others are unfolded."""
    group, name = key.path.partition(".")[0], key.name
    return key.default is None or (group in FLOW_FIELDS_SHOWN and (name == group or name in GROUP_FIELDS_SHOWN))


def _choices(page: Page) -> dict[str, list[str]]:
    """What the lists of a key offer, by its path. dataset: those of any other key that names one."""
    models = model_names(page.store)
    datasets = [f"{{kind: registered, key: {dataset.key}}}" for dataset in list_datasets(page.store)]
    graders = [name for name in dir(tasks.graders) if hasattr(getattr(tasks.graders, name), "grade")]
    return dict.fromkeys(("model.key", "value_model.key", "teacher.key"), models) | {
        "models": [f"[{model}]" for model in models],
        "dataset": [*reversed(datasets), "{kind: file, path: data/train.jsonl}"],
        "data.heldout": ["{split: 0.1}", *reversed(datasets)],
        "grader.path": [f"tasks.graders:{name}" for name in graders if name != "BaseGrader"],
    }


def _values(form: StartForm) -> dict[str, Any]:
    """The config of the form. Notes in the form what cannot be read."""
    datasets = {key.path for key in _leaves(form.training.config) if _is_dataset(key)}
    sets = []
    for path, text in form.texts.items() if form.yaml is None else ():
        # the path of a file stands for a dataset
        if path in datasets and not text.startswith("{") and text != "null":
            text = json.dumps({"kind": "file", "path": text})
        try:
            load_config(None, [f"{path}={text}"])
            sets.append(f"{path}={text}")
        except ConfigError as error:
            form.problems[path] = str(error)
    try:
        return load_config(None, sets) if form.yaml is None else load_yaml(form.yaml)
    except ConfigError as error:
        form.problems[WHOLE] = str(error)
        return {}


def _switch(form: StartForm, values: dict[str, Any], *, to_yaml: bool) -> None:
    """Shows the values as YAML, or in fields. The form stays as it is if it cannot be read, or a key has no field."""
    texts = field_texts(form.training.config, values)
    if not to_yaml:
        known = {key.path for key in _leaves(form.training.config)}
        form.problems |= dict.fromkeys(texts.keys() - known, "has no field; correct it, or start with the YAML")
    if not form.problems:
        form.texts, form.yaml = texts, (config_yaml(values) if values else "") if to_yaml else None


def _is_dataset(key: ConfigKey) -> bool:
    return {group.model_fields["kind"].default for group in key.groups if "kind" in group.model_fields} >= DATASETS


async def _check(page: Page, form: StartForm, values: dict[str, Any]) -> None:
    """Notes in the form all problems of the config or, if there are none, what the run would take."""
    checked = await asyncio.to_thread(check_config, form.training.config, values, page.store)
    # a value that cannot be read is no missing one
    form.problems = checked.problems | form.problems
    if checked.config is None or form.problems:
        return
    form.checked = digest(canonical_json(values))[:16]
    if not isinstance(checked.config, TrainingConfig):
        form.estimate = "no estimate: its length depends on the answers"
        return
    engine, url = checked.config.engine, page.settings.engine
    # a config names an address and a variable with a token: only the page's own engine is asked, with its own token
    if not url or (engine.url != url if isinstance(engine, HttpEngineSpec) else engine != LocalEngineSpec()):
        form.estimate = "no estimate: the run has an engine of its own; its log has the estimate"
        return
    engine = HttpEngineSpec(url=url, patience_seconds=5.0)  # a person waits
    try:
        form.estimate = await expected_of_run(checked.config, page.store, engine)
    except EngineError as error:
        form.estimate = f"no estimate: the engine at {engine.url} did not answer ({error})"
    except EXPECTED_ERRORS as error:
        form.problems[WHOLE] = str(error)


def _start(page: Page, form: StartForm, values: dict[str, Any]) -> str:
    """Creates a run of the training's deployment; returns the id of the flow run, or "" if Prefect refused it."""
    name = form.training.name
    # changed values are another run
    idempotency_key = f"{form.key}-{form.checked}"
    with page.prefect() as client:
        try:
            deployment = client.read_deployment_by_name(f"{name}/{name}")
            flow_run = client.create_flow_run_from_deployment(
                deployment.id, parameters={"config": values}, idempotency_key=idempotency_key
            )
        except NoSuchDeployment as error:
            what = f"Prefect at {page.settings.server} has no deployment {name}."
            raise PageError(what, "Run 'ostinato deploy --server URL', which creates it.", 409) from error
        except PrefectHTTPStatusError as error:
            form.problems[WHOLE] = f"Prefect refused the config: {error.response.text[:2000]}"
            return ""
    return str(flow_run.id)


def _copied(page: Page, run: str, *, is_fork: bool) -> StartForm:
    """The form with the recorded config of a run. The engine and the store of the deployment are left out."""
    recorded = read_config(page.store, run)
    if recorded.flow is None:
        raise PageError(f"Run {run} is that of a recipe, which has no form.", "Start its recipe with other values.")
    values = recorded.values if is_fork else recorded.copied(page.store)
    if values.get("engine", {}).get("url") == page.settings.engine:
        values.pop("engine", None)
    if "storage" in values and open_store(values["storage"]["url"]).url == page.store.url:
        del values["storage"]
    notice = f"The run {run} shares the steps up to the fork. Change what should differ after them, and start it."
    form = StartForm(STARTABLE[recorded.flow], notice=notice if is_fork else f"Copied from run {run}.")
    _switch(form, values, to_yaml=False)
    # a config that has no fields, such as a suite of lm_eval, is shown as YAML
    return form if not form.problems else StartForm(form.training, yaml=config_yaml(values), notice=form.notice)
