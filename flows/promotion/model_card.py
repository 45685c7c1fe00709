"""The model card of a promoted model, as a Hugging Face README.md: its training, its data and its evaluation.

A card is an artifact of the decision and not of the model version, because a version never changes and may be promoted
more than once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from storage.chain.records import Chain
from storage.chain.run_record import read_run
from storage.errors import ObjectNotFound
from storage.inspect.lineage import ChainSegment, Lineage, differing_settings, lineage_of, training_datasets
from storage.registry.datasets import list_datasets
from storage.registry.decisions import Decision
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import Provenance, commit_bytes, find_artifact, read_bytes
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.model_comparison import compare, comparison_markdown
from tasks.evaluation.validation_curve import curves, read_validations

EVIDENCE = {
    "baseline": "compared with", "start": "trained from", "dataset": "training data", "training_run": "training run",
}  # fmt: skip
"""Key in a decision's evidence -> its title on the page."""


def commit_card(store: ObjectStore, decision: Decision, *, provenance: Provenance) -> str:
    """Writes the card of the decision's version and returns its text. If the decision has a card, returns that one."""
    # the first card stands: the store may hold more by the time of a retry
    key = keys.model_note(decision.model, "cards", decision.id)
    ref = find_artifact(store, key)
    if ref is None:
        text = render_card(store, decision.model, decision.version, decision)
        parents = [keys.model_note(decision.model, "decisions", decision.id)]
        ref = commit_bytes(store, key, text.encode(), kind="card", suffix=".md", parents=parents, provenance=provenance)
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
    stages: list[_CardStage] = []
    for segment in lineage.segments:
        stages += _read_stages(store, segment)
    sections = [
        _header(lineage, stages),
        f"# {name}@{version}\n",
        _origin(lineage),
        _training(stages),
        *(_fork(segment) for segment in lineage.segments),
        _held_out(store, stages),
        _config_of_last_run(stages),
        _data(store, name, version, lineage),
        *decision_sections(store, decision),
        _lineage(lineage, name, version),
    ]
    return "\n".join(section for section in sections if section)


@dataclass(frozen=True)
class _CardStage:
    """The steps of one training stage that one run took."""

    run: str
    stage: str
    algorithm: str
    first: int
    last: int
    """Last step. 0 if the stage has no step."""
    head: str
    """The state after the last step."""
    rates: tuple[float, ...]
    """Learning rates of the first and of the last step, if they differ. Empty if the stage has no step."""
    config: dict[str, Any]
    """The semantic config of the run. Empty if the store does not have it."""


def _read_stages(store: ObjectStore, segment: ChainSegment) -> list[_CardStage]:
    """Reads the steps of a segment: one entry per run that took some of them, oldest first."""
    chain = Chain(store, segment.run, segment.stage, segment.model)
    stages = []
    for run, first, last in segment.runs:
        ends = (chain.committed_record(step) for step in (first, last) if last)
        rates = tuple(dict.fromkeys(record.request.optimizer.lr for record in ends))
        stages.append(
            _CardStage(
                run=run,
                stage=segment.stage,
                algorithm=keys.stage_kind(segment.stage),
                first=first,
                last=last,
                head=chain.policy(last).state,
                rates=rates,
                config=_config(store, run),
            )
        )
    return stages


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
    deleted = f"`{lineage.base}` was made by run `{lineage.deleted}`, which was deleted.\n" if lineage.deleted else ""
    if lineage.policy is None:
        return deleted or "Imported into the registry as it is; nothing was trained here.\n"
    steps = sum(segment.until for segment in lineage.segments)
    noun = "gradient step" if steps == 1 else "gradient steps"
    return f"Trained from `{lineage.base}` by Ostinato in {steps} {noun}, each committed once.\n{deleted}"


def _training(stages: list[_CardStage]) -> str:
    if not stages:
        return ""
    # one row per stage of the history, and per run if the run is a fork
    columns = "| run | stage | algorithm | steps | learning rate | seed | chain head |"
    lines = ["## Training\n", columns, "|-|-|-|-:|-:|-:|-|"]
    for stage in stages:
        steps = f"{stage.first}–{stage.last}" if stage.last > stage.first else str(stage.last or "–")
        rate = " → ".join(f"{rate:.3g}" for rate in stage.rates) or "–"
        seed = stage.config.get("seed", "–")
        lines.append(
            f"| `{stage.run}` | `{stage.stage}` | {stage.algorithm} | {steps} | {rate} | {seed} | `{stage.head[:16]}` |"
        )
    return "\n".join(lines) + "\n"


def _held_out(store: ObjectStore, stages: list[_CardStage]) -> str:
    """The first and the last measurement on held-out rows in each stage: rewards and validation losses."""
    lines = []
    for stage in stages:
        for name, points in curves(read_validations(store, stage.run, stage.stage, last_step=stage.last)).items():
            (first, before), (last, after) = points[0], points[-1]
            cells = f"| `{stage.run}/{stage.stage}` | {name} | {before:.4g} (step {first}) |"
            lines.append(f"{cells} {after:.4g} (step {last}) |" if last > first else f"{cells} – |")
    if not lines:
        return ""
    return "\n".join(["## Held-out results\n", "| stage | measure | first | last |", "|-|-|-:|-:|", *lines]) + "\n"


def _fork(segment: ChainSegment) -> str:
    """Where the run was forked, and the settings in which the runs of its steps differ."""
    if not segment.forked:
        return ""
    parts = segment.forked
    lines = [f"`{segment.title}` is a fork: it consists of {', '.join(part.title for part in parts)}."]
    settings = differing_settings(parts)
    if settings:
        lines += ["", "These settings differ:\n", f"| | {' | '.join(part.title for part in parts)} |"]
        lines.append(f"|-|{'-:|' * len(parts)}")
        for name, values in settings:
            cells = [value.replace("|", r"\|") for value in values]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _config_of_last_run(stages: list[_CardStage]) -> str:
    """The settings of the last run's config that decide the result."""
    config = stages[-1].config if stages else {}
    groups = {name: config[name] for name in ("algorithm", "optimizer", "sampling", "grader") if name in config}
    if not groups:
        return ""
    return f"Config of the last run:\n\n```yaml\n{yaml.safe_dump(groups, sort_keys=True)}```\n"


def _data(store: ObjectStore, name: str, version: str, lineage: Lineage) -> str:
    if lineage.policy is None:
        return ""
    # equal rows may have been added under several names
    names: dict[str, set[str]] = {}
    for dataset in list_datasets(store):
        names.setdefault(dataset.ref.sha256, set()).add(f"`{dataset.name}`")
    lines = []
    for sha256 in training_datasets(store, f"{name}@{version}"):
        title = " or ".join(sorted(names.get(sha256, ("a dataset that is not in this store",))))
        lines.append(f"- {title} (sha256 `{sha256[:12]}`)")
    lines.sort()
    return "## Data\n\n" + "\n".join(lines) + "\n"


def decision_sections(store: ObjectStore, decision: Decision | None) -> list[str]:
    """The decision with its reasons, and the evaluation that it is based on, as sections in Markdown."""
    if decision is None:
        return []
    return [_decision(decision), _evaluation(store, decision)]


def _decision(decision: Decision) -> str:
    champion = f"`{decision.champion}`" if decision.champion else "no champion"
    source = f"decision `{decision.id}`"
    if decision.run:
        source += f", run `{decision.run}`"
    lines = [
        "## Decision\n",
        f"`{decision.action}` by {decision.who}, {decision.created[:19]} UTC, over {champion} ({source}):\n",
    ]
    lines += [f"- {reason}" for reason in decision.reasons]
    # what the challenger was compared with and made from
    facts = [f"{title}: `{decision.evidence[name]}`" for name, title in EVIDENCE.items() if name in decision.evidence]
    if facts:
        lines += ["", *(f"- {fact}" for fact in facts)]
    return "\n".join(lines) + "\n"


def _evaluation(store: ObjectStore, decision: Decision) -> str:
    if decision.evaluation is None:
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
