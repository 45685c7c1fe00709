"""The model card of a promoted model, as a Hugging Face README.md: its training, its data and its evaluation.

A card is an artifact of the decision and not of the model version, because a version never changes and may be promoted
more than once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from storage.chain.records import Chain, CommitRecord
from storage.chain.run_record import read_run
from storage.errors import ObjectNotFound
from storage.inspect.lineage import Lineage, lineage_of, training_datasets
from storage.registry.decisions import Decision
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import Provenance, commit_bytes, find_artifact, read_bytes
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.model_comparison import compare, comparison_markdown


def commit_card(store: ObjectStore, decision: Decision, *, provenance: Provenance) -> str:
    """Writes the card of the decision's version and returns its text. If the decision has a card, returns that one."""
    # the first card stands: the store may hold more by the time of a retry
    key = keys.model_note(decision.model, "cards", decision.id)
    ref = find_artifact(store, key)
    if ref is None:
        text = render_card(store, decision.model, decision.version, decision)
        parents = [keys.model_note(decision.model, "decisions", decision.id)]
        ref = commit_bytes(
            store, key, text.encode(), kind="card", suffix=".md", parents=parents, provenance=provenance
        )
    return read_bytes(store, ref).decode()


def find_card(store: ObjectStore, decision: Decision) -> str | None:
    """Returns the card that was written when the decision was made, or None."""
    ref = find_artifact(store, keys.model_note(decision.model, "cards", decision.id))
    if ref is None:
        return None
    return read_bytes(store, ref).decode()


def render_card(store: ObjectStore, name: str, version: str, decision: Decision | None = None) -> str:
    """Renders the card from the present contents of the store. Raises ObjectNotFound, CorruptArtifact."""
    lineage = lineage_of(store, f"{name}@{version}")
    stages = [_read_stage(store, chain, until) for chain, until in lineage.chains(store)]
    sections = [
        _header(lineage, stages),
        f"# {name}@{version}\n",
        _origin(lineage),
        _training(stages),
        _data(store, name, version, lineage),
        _decision(decision),
        _evaluation(store, decision),
        _lineage(lineage, name, version),
    ]
    return "\n".join(section for section in sections if section)


@dataclass(frozen=True)
class _CardStage:
    """One training stage in the history of the model."""

    run: str
    stage: str
    algorithm: str
    steps: int
    head: str
    """The state after the last of the `steps`."""
    record: CommitRecord | None
    """The commit record of the last step. None if the stage has no step."""
    config: dict[str, Any]
    """The semantic config of the run. Empty if the store does not have it."""


def _read_stage(store: ObjectStore, chain: Chain, until: int) -> _CardStage:
    """Reads the stage of a chain up to and including step `until`."""
    return _CardStage(
        run=chain.run,
        stage=chain.stage,
        algorithm=keys.stage_kind(chain.stage),
        steps=until,
        head=chain.policy(until).state,
        record=chain.record(until) if until else None,
        config=_config(store, chain.run),
    )


def _config(store: ObjectStore, run: str) -> dict[str, Any]:
    try:
        return dict(read_run(store, run).semantic)
    except ObjectNotFound:
        return {}


def _header(lineage: Lineage, stages: list[_CardStage]) -> str:
    """The YAML header that model hubs read."""
    tags = ["ostinato", *dict.fromkeys(stage.algorithm for stage in stages)]
    body: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    if lineage.base is not None and stages:
        body["base_model"] = lineage.base
    return f"---\n{yaml.safe_dump(body, sort_keys=True)}---\n"


def _origin(lineage: Lineage) -> str:
    if lineage.policy is None:
        return "Imported into the registry as it is; nothing was trained here.\n"
    steps = sum(segment.until for segment in lineage.segments)
    noun = "gradient step" if steps == 1 else "gradient steps"
    return f"Trained from `{lineage.base}` by Ostinato in {steps} {noun}, each committed once.\n"


def _training(stages: list[_CardStage]) -> str:
    if not stages:
        return ""
    # one row per stage of the history
    columns = "| run | stage | algorithm | steps | learning rate | seed | chain head |"
    lines = ["## Training\n", columns, "|-|-|-|-:|-:|-:|-|"]
    for stage in stages:
        rate = f"{stage.record.request.optimizer.lr:.3g}" if stage.record else "–"
        seed = stage.config.get("seed", "–")
        lines.append(
            f"| `{stage.run}` | `{stage.stage}` | {stage.algorithm} | {stage.steps} | {rate} | {seed} | "
            f"`{stage.head[:16]}` |"
        )
    config = stages[-1].config
    if config:
        groups = {name: config[name] for name in ("algorithm", "optimizer", "sampling", "grader") if name in config}
        lines += ["", "Config of the last run:\n", f"```yaml\n{yaml.safe_dump(groups, sort_keys=True)}```"]
    return "\n".join(lines) + "\n"


def _data(store: ObjectStore, name: str, version: str, lineage: Lineage) -> str:
    if lineage.policy is None:
        return ""
    digests = sorted(training_datasets(store, f"{name}@{version}"))
    lines = [f"- dataset sha256 `{sha256}`" for sha256 in digests]
    return "## Data\n\n" + "\n".join(lines) + "\n"


def _decision(decision: Decision | None) -> str:
    if decision is None:
        return ""
    champion = f"`{decision.champion}`" if decision.champion else "no champion"
    source = f"decision `{decision.id}`"
    if decision.run:
        source += f", run `{decision.run}`"
    lines = [
        "## Decision\n",
        f"`{decision.action}` by {decision.who}, {decision.created[:19]} UTC, over {champion} ({source}):\n",
    ]
    lines += [f"- {reason}" for reason in decision.reasons]
    return "\n".join(lines) + "\n"


def _evaluation(store: ObjectStore, decision: Decision | None) -> str:
    if decision is None or decision.evaluation is None:
        return ""
    # the table may be in another store, or may have been deleted
    key, _, sha256 = decision.evaluation.partition("#")
    ref = find_artifact(store, key)
    if ref is None or ref.sha256 != sha256 or ref.kind != "comparison":
        return f"## Evaluation\n\n`{decision.evaluation}` (not in this store)\n"
    comparison = compare(read_table(store, ref).to_pylist())
    return f"## Evaluation\n\n{comparison_markdown(comparison)}\nTable: `{decision.evaluation}`\n"


def _lineage(lineage: Lineage, name: str, version: str) -> str:
    body = {
        "policy": lineage.policy.uri if lineage.policy else None,
        "base": lineage.base,
        "segments": [segment.model_dump(mode="json") for segment in lineage.segments],
    }
    commands = f"`ostinato runs lineage {name}@{version}` lists every step; `ostinato verify RUN` redoes a run.\n"
    return f"## Lineage\n\n```json\n{canonical_json(body).decode()}\n```\n\n{commands}"
