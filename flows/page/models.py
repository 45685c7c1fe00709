"""The section Models: versions, champion, evaluations, lineage, downloads; promote, roll back, delete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse, StreamingResponse

from flows.cli.output import format_size
from flows.page.chat import how_to_call
from flows.page.security import Form
from flows.page.shared import Page, PageError, start_link
from flows.promotion.hand_decisions import account_name, card_text, promote_by_hand, roll_back_by_hand
from flows.runs.recorded_config import suite_of_run
from storage.chain.deletion import delete_model
from storage.errors import ModelInUse, ObjectNotFound
from storage.inspect.lineage import lineage_of
from storage.registry.decisions import (
    alias_log,
    decisions_of,
    is_in_force,
    previous_champion,
    resolve_model,
    summarize_model,
)
from storage.registry.models import list_models, list_versions, resolve_alias
from storage.store import keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.download import file_blocks, tar_blocks
from storage.store.index import run_entries
from storage.store.objects import ObjectStore
from tasks.evaluation.model_comparison import find_evaluations


def router(page: Page) -> APIRouter:
    """Returns the routes of the section."""
    router = APIRouter()
    store = page.store

    @router.get("/models")
    def show_models(request: Request) -> Response:
        models = [summarize_model(store, name) for name in list_models(store)]
        return page.render(request, "models.html", models=models)

    @router.get("/models/{name}")
    def show_model(request: Request, name: str) -> Response:
        return page.render(request, "model.html", **_model(store, name))

    @router.post("/models/{name}/rollback")
    def roll_back(request: Request, name: str) -> Response:
        form: Form = request.state.form
        if missing := _missing(form):
            return page.render(request, "model.html", status=422, **_model(store, name) | missing)
        roll_back_by_hand(store, keys.validate_name(name), **_decision(form))
        return RedirectResponse(f"/models/{name}", status_code=303)

    @router.get("/models/{name}/{version}")
    def show_version(request: Request, name: str, version: str) -> Response:
        version = resolve_model(store, f"{name}@{version}").partition("@")[2]
        return page.render(request, "version.html", **_version(page, name, version))

    @router.post("/models/{name}/{version}/promote")
    def promote(request: Request, name: str, version: str) -> Response:
        form: Form = request.state.form
        if missing := _missing(form):
            return page.render(request, "version.html", status=422, **_version(page, name, version) | missing)
        promote_by_hand(store, keys.validate_name(name), version, **_decision(form))
        return RedirectResponse(f"/models/{name}", status_code=303)

    @router.post("/models/{name}/{version}/delete")
    def delete(request: Request, name: str, version: str) -> Response:
        try:
            delete_model(store, keys.validate_name(name), keys.validate_name(version))
        except ModelInUse as error:
            raise PageError(f"{name}@{version} cannot be deleted: {error}.", "", 409) from error
        return RedirectResponse(f"/models/{name}" if list_versions(store, name) else "/models", status_code=303)

    @router.get("/models/{name}/{version}/tar")
    def download(name: str, version: str) -> Response:
        manifest = _manifest(store, name, version)
        return _download(tar_blocks(store, manifest, f"{name}-{version}"), f"{name}-{version}.tar", "application/x-tar")

    @router.get("/models/{name}/{version}/files/{path:path}")
    def download_file(name: str, version: str, path: str) -> Response:
        for entry in _manifest(store, name, version).files:
            if entry.name == path:
                return _download(file_blocks(store, entry), entry.name.rpartition("/")[2], size=entry.bytes)
        raise PageError(f"{name}@{version} has no such file.", "Use the links of its page.", 404)

    return router


def _missing(form: Form) -> dict[str, Any]:
    """What a decision's form lacks, with what was typed. Empty: nothing."""
    needed = {"who": "Give your name.", "why": "Give a reason: it is stored with the decision."}
    problems = {name: problem for name, problem in needed.items() if not form.get(name)}
    if not form.get("over").isdecimal():
        problems.setdefault("why", "The form was incomplete. Send it again.")
    return {"problems": problems, "typed": form} if problems else {}


def _decision(form: Form) -> dict[str, Any]:
    """Reason, name and the champion's entry that the user saw, of a form in which nothing is missing."""
    return {"why": form.get("why"), "who": form.get("who"), "over": int(form.get("over"))}


def _model(store: ObjectStore, name: str) -> dict[str, Any]:
    """The values of a model's page."""
    versions = list_versions(store, keys.validate_name(name))
    log, decisions = alias_log(store, name), decisions_of(store, name)
    if not versions and not decisions:
        raise PageError(f"No model {name[:80]!r} is in {store.url}.", "Choose one under Models.", 404)
    manifests = [read_manifest(store, keys.model_version(name, version)) for version in versions]
    newest_first = sorted(zip(versions, manifests, strict=True), key=lambda row: row[1].created, reverse=True)
    rows = []
    for version, manifest in newest_first:
        run = next(filter(None, map(keys.run_of_parent, manifest.parents)), None)
        rows.append((version, manifest.created, run, format_size(manifest.bytes)))
    return {
        "name": name, "rows": rows, "runs": run_entries(store),
        "champion": log[-1].version if log else None, "latest": resolve_alias(store, name),
        "decisions": [(decision, is_in_force(decision, log)) for decision in reversed(decisions)],
        # a roll back is offered only where it works
        "previous": previous_champion(log, versions), "over": log[-1].number if log else 0,
        "problems": {}, "typed": {"who": account_name()},
    }  # fmt: skip


def _version(page: Page, name: str, version: str) -> dict[str, Any]:
    """The values of the page of a version."""
    store, model = page.store, f"{name}@{version}"
    manifest = _manifest(store, name, version)
    log = alias_log(store, name)
    evaluations, lineage = find_evaluations(store, model), _lineage(store, model)
    suite = suite_of_run(store, lineage["parts"][-1][0]) if lineage["parts"] else {}
    return {
        "name": name, "version": version, "model": model, "over": log[-1].number if log else 0,
        "created": manifest.created, "size": format_size(manifest.bytes),
        "files": [(entry.name, format_size(entry.bytes)) for entry in manifest.files],
        "is_champion": bool(log) and log[-1].version == version, "lineage": lineage,
        "evaluations": evaluations,
        "samples": [sample for one in evaluations for sample in one.samples if sample.model == model],
        "card": _card(store, name, version), "evaluate": start_link("evaluation", models=[model], **suite),
        "call": how_to_call(page.settings, model),
        "problems": {}, "typed": {"who": account_name()},
    }  # fmt: skip


def _lineage(store: ObjectStore, model: str) -> dict[str, Any]:
    """The base of a model and the runs that trained it, or why they are not known."""
    try:
        lineage = lineage_of(store, model)
    except ObjectNotFound as error:
        return {"base": None, "parts": [], "problem": str(error)}
    parts = [run for segment in lineage.segments for run in segment.runs]
    problem = f"The run {lineage.deleted}, which made it, was deleted." if lineage.deleted else ""
    return {"base": None if lineage.base == model else lineage.base, "parts": parts, "problem": problem}


def _card(store: ObjectStore, name: str, version: str) -> str:
    try:
        return card_text(store, name, version)
    except ObjectNotFound as error:
        return f"The card cannot be made: {error}"


def _manifest(store: ObjectStore, name: str, version: str) -> Manifest:
    """The manifest of a version. Raises PageError, InvalidKey."""
    try:
        return read_manifest(store, keys.model_version(name, version))
    except ObjectNotFound as error:
        raise PageError(f"The model {name!r} has no version {version!r}.", "Choose one under Models.", 404) from error


def _download(
    blocks: Iterator[bytes], name: str, media_type: str = "application/octet-stream", size: int | None = None
) -> Response:
    # the names of versions and files have no character that a header would need to escape
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    if size is not None:
        headers["Content-Length"] = str(size)
    return StreamingResponse(blocks, media_type=media_type, headers=headers)
