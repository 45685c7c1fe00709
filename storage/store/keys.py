"""Makes and parses the keys of all objects. No other module spells a key.

A *logical key* (step_artifact, checkpoint, evaluation, dataset, model_version) names an artifact. The keys of its data
begin with the logical key. Its manifest is at `manifest(key)`, or at `manifest_of_files(key)` for a folder.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal, get_args

from storage.errors import InvalidKey

MAX_KEY = 900  # S3 allows 1,024 bytes, including the prefix of the store
MAX_SEGMENT = 200  # file systems allow 255
_KEY = re.compile(r"[A-Za-z0-9._=@+\-]+(/[A-Za-z0-9._=@+\-]+)*", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._=@+\-/]*", re.ASCII)


def is_key(key: str) -> bool:
    """Whether the text is a valid key: relative, with allowed characters, and not too long."""
    if not isinstance(key, str) or len(key) > MAX_KEY or _KEY.fullmatch(key) is None:
        return False
    return all(part not in (".", "..") and len(part) <= MAX_SEGMENT for part in key.split("/"))


def validate_key(key: str) -> str:
    """Returns the key. Raises InvalidKey unless is_key."""
    if not is_key(key):
        raise InvalidKey(
            f"{str(key)[:200]!r} is not a key; give relative segments of letters, digits and . _ = @ + - (at most "
            f"{MAX_SEGMENT} characters each, {MAX_KEY} in all), divided by single slashes, none of them . or .."
        )
    return key


def validate_prefix(prefix: str) -> str:
    """Returns the prefix. Raises InvalidKey unless it is empty or the beginning of a key."""
    if not _PREFIX.fullmatch(prefix) or prefix.startswith("/") or {".", ".."} & set(prefix.split("/")[:-1]):
        raise InvalidKey(f"{prefix[:200]!r} is not the beginning of a key; give relative segments, like 'runs/a/'")
    return prefix


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,127}", re.ASCII)
_NUMBERED = re.compile(r"(?:.*/)?(\d{6,})\.json", re.ASCII)
_RECORD = re.compile(r"runs/.+/stages/[^/]+/chains/[^/]+/(\d{6,})\.json", re.ASCII)
_REBASE = re.compile(r"runs/.+/stages/[^/]+/chains/[^/]+/rebases/(\d{6,})\.json", re.ASCII)
_REBASE_CHECKPOINT = re.compile(r"runs/(.+)/stages/([^/]+)/rebased/([^/]+)/(\d{6,})\.([0-9a-f]{32})", re.ASCII)
_CHECKPOINT = re.compile(r".*/checkpoints/[^/]+/(\d{6,})/manifest\.json", re.ASCII)
_CHAIN_OBJECT = re.compile(r"runs/.*/stages/([^/]+)/chains/([^/]+)/(?:root|\d{6,})\.json", re.ASCII)
_CHECKPOINT_KEY = re.compile(r"runs/(.+)/stages/([^/]+)/checkpoints/([^/]+)/\d{6,}", re.ASCII)
_SEGMENT = re.compile(r"runs/.+/stages/[^/]+/steps/\d{6,}/segments-\d{5,}/\d{5,}", re.ASCII)
_ROLLOUTS = re.compile(r"runs/.+/stages/[^/]+/steps/\d{6,}/rollouts/\d{5,}", re.ASCII)
_ALIAS = re.compile(r"models/([^/]+)/aliases/([^/]+)/\d{6,}\.json", re.ASCII)
_INDEXED = "@run.json"
_INDEX_RUN = re.compile(r"index/(?:runs|chains)/([^/]+(?:/[^/]+)?)@run\.json", re.ASCII)
RunList = Literal["runs", "chains"]
"""A list of runs in the index: of all runs, or of those with a chain."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
RunPart = Literal["run.json", "result.json", "fork.json", "report.html", "datasets", "leases", "loops", "stages"]
"""Names directly in the folder of a run. The folder of a run `x/y` lies there, too, so `y` may be none of them."""
RUN_PARTS: tuple[RunPart, ...] = get_args(RunPart)
_ANY_RUN_PART = "|".join(map(re.escape, RUN_PARTS))
_RUN_OBJECT = re.compile(rf"runs/([^/]+(?:/(?!(?:{_ANY_RUN_PART})/)[^/]+)?)/(?:{_ANY_RUN_PART})(?=/|$)", re.ASCII)
ModelPart = Literal["aliases", "claims", "decisions", "cards"]
"""Folders of the registry in a model's folder, next to the folders of its versions."""
RESERVED_VERSIONS = frozenset(get_args(ModelPart))


# -- validation of names and run keys -------------------------------------------------------------------------


def validate_name(name: str) -> str:
    """Returns the name, which is one segment of a key. Raises InvalidKey."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidKey(
            f"{str(name)[:200]!r} is not a name; give 1 to 128 letters, digits, dots, underscores or hyphens, "
            "not beginning with a dot or a hyphen"
        )
    return name


def is_name(name: str) -> bool:
    """Whether validate_name accepts the name."""
    return _NAME.fullmatch(name) is not None


def is_run(run: str) -> bool:
    """Whether validate_run accepts the run key."""
    first, *rest = run.split("/")
    return len(rest) <= 1 and all(map(is_name, (first, *rest))) and not set(RUN_PARTS) & set(rest)


def validate_run(run: str) -> str:
    """Returns the run key: a name, or deployment/time. Raises InvalidKey."""
    first, *rest = str(run).split("/")
    validate_name(first)
    if len(rest) > 1:
        raise InvalidKey(f"{str(run)[:200]!r} is not a run key; give a name, or deployment/time")
    if rest and validate_name(rest[0]) in RUN_PARTS:
        raise InvalidKey(f"{str(run)[:200]!r} is not a run key: run {first!r} keeps its own {rest[0]} there; rename it")
    return run


def format_number(value: int) -> str:
    """Writes a number with at least six digits, so that names sort like numbers."""
    if value < 0:
        raise InvalidKey(f"{value} is not a number of a step or a version; give 0 or more")
    return f"{value:06d}"


def parse_number(key: str) -> int | None:
    """Returns 42 for a key like …/000042.json, and None for any other key."""
    return _number_in(_NUMBERED, key)


def _number_in(pattern: re.Pattern[str], key: str) -> int | None:
    return int(match[1]) if (match := pattern.fullmatch(key)) else None


def manifest(key: str) -> str:
    """Key of the manifest of a one-file artifact."""
    return f"{key}.json"


def manifest_of_files(key: str) -> str:
    """Key of the manifest of an artifact that is a folder."""
    return f"{key}/manifest.json"


def store_json() -> str:
    """Key of the object that holds the id of the store."""
    return "store.json"


# -- the index -----------------------------------------------------------------------------------------------


def index_complete() -> str:
    """Key of the mark that the index of a store has its entries. It is written with the id of a new store."""
    return "index/complete.json"


def index_runs_prefix(kind: RunList = "runs") -> str:
    """Prefix of the entries of all runs, or of all runs with a chain."""
    return f"index/{kind}/"


def index_run(run: str, kind: RunList = "runs") -> str:
    """Key of the entry of a run. No run's name has an @, so a run `a` and a run `a/b` do not collide in a folder."""
    return f"{index_runs_prefix(kind)}{validate_run(run)}{_INDEXED}"


def indexed_run(key: str) -> str | None:
    """Returns the run whose entry is at `key`, and None for any other key."""
    return match[1] if (match := _INDEX_RUN.fullmatch(key)) else None


def index_uses_prefix(used: str) -> str:
    """Prefix of the entries of what uses a run or a model. `used` is a run's prefix or a version's logical key."""
    return f"index/uses/{hashlib.sha256(used.encode()).hexdigest()}/"


def index_use(used: str, user: str) -> str:
    """Key of the entry that the object at the key `user` uses a run or a model."""
    return validate_key(f"{index_uses_prefix(used)}{user}")


# -- runs ----------------------------------------------------------------------------------------------------


def runs_prefix() -> str:
    """Prefix of all objects of runs."""
    return "runs/"


def run_prefix(run: str) -> str:
    return f"{runs_prefix()}{validate_run(run)}/"


def _of_run(run: str, part: RunPart) -> str:
    return f"{run_prefix(run)}{part}"


def run_json(run: str) -> str:
    return _of_run(run, "run.json")


def result_json(run: str) -> str:
    return _of_run(run, "result.json")


def report(run: str) -> str:
    """Key of the HTML page about the run. Each new report replaces it."""
    return _of_run(run, "report.html")


def fork_json(run: str) -> str:
    """Key of the object that says from which run and step this run was forked."""
    return _of_run(run, "fork.json")


def pinned_datasets_prefix(run: str) -> str:
    """Prefix of the records of which version a run uses of each dataset that its config names without a version."""
    return f"{_of_run(run, 'datasets')}/"


def pinned_dataset(run: str, name: str, version: str, use: str) -> str:
    """Key of the record of one dataset. `version` is what the config says: the beginning of a version, or nothing."""
    return f"{pinned_datasets_prefix(run)}{validate_name(name)}@{version}.{validate_name(use)}.json"


def run_of(key: str) -> str | None:
    """Returns the run that the object at `key` belongs to, or None."""
    return match[1] if (match := _RUN_OBJECT.match(key)) else None


def run_of_parent(parent: str) -> str | None:
    """Returns the run of a parent of an artifact, which is the URI of a policy or of an artifact, or None."""
    if parent.startswith("policy:"):
        # policy:run/stage/model@step#state
        return parent.removeprefix("policy:").partition("@")[0].rsplit("/", 2)[0]
    return run_of(parent)


def chain_of(key: str) -> tuple[str, str, str] | None:
    """Returns (run, stage, model) for the key of a chain's root or record, and None for any other key."""
    run, match = run_of(key), _CHAIN_OBJECT.fullmatch(key)
    return (run, match[1], match[2]) if run and match else None


def leases_prefix(run: str) -> str:
    return f"{_of_run(run, 'leases')}/"


def lease(run: str, epoch: int) -> str:
    return f"{leases_prefix(run)}{format_number(epoch)}.json"


def deletion(run: str) -> str:
    return f"{leases_prefix(run)}deleting.json"


def lease_release(run: str, epoch: int) -> str:
    """Key of the note that the lease of an epoch was released. parse_number does not count it as an epoch."""
    return f"{leases_prefix(run)}{format_number(epoch)}.released.json"


def loops_prefix(run: str) -> str:
    """Prefix of the progress marks of all loops of a recipe."""
    return f"{_of_run(run, 'loops')}/"


def loop_prefix(run: str, loop: int) -> str:
    """Prefix of the progress marks of a recipe's loop number `loop`."""
    return f"{loops_prefix(run)}{format_number(loop)}/"


def loop_mark(run: str, loop: int, done: int) -> str:
    """Key of the record of a loop's policies after `done` iterations."""
    return f"{loop_prefix(run, loop)}{format_number(done)}.json"


# -- stages and steps ----------------------------------------------------------------------------------------


def stage_name(position: int, name: str) -> str:
    """Name of a stage with its position in the run: 0-sft."""
    return f"{int(position)}-{validate_name(name)}"


def stage_kind(stage: str) -> str:
    """Returns sft for 0-sft, and also for 0-sft.critic, the stage of a second model."""
    return stage.partition("-")[2].partition(".")[0]


def stages_prefix(run: str) -> str:
    """Prefix of all objects of the stages of the run."""
    return f"{_of_run(run, 'stages')}/"


def stage_prefix(run: str, stage: str) -> str:
    return f"{stages_prefix(run)}{validate_name(stage)}/"


def stage_json(run: str, stage: str) -> str:
    return f"{stage_prefix(run, stage)}stage.json"


def step_prefix(run: str, stage: str, step: int) -> str:
    """Prefix of the artifacts of a step."""
    return f"{stage_prefix(run, stage)}steps/{format_number(step)}/"


def step_artifact(run: str, stage: str, step: int, kind: str, shard: int) -> str:
    """Logical key of one shard: …/steps/000042/rollouts/00003."""
    if shard < 0:
        raise InvalidKey(f"{shard} is not the number of a shard; give 0 or more")
    return f"{step_prefix(run, stage, step)}{validate_name(kind)}/{shard:05d}"


def segment(run: str, stage: str, step: int, shard: int, number: int) -> str:
    """Logical key of one segment of a shard's completions: …/steps/000042/segments-00003/00000."""
    return segment_of(step_artifact(run, stage, step, "rollouts", shard), number)


def segment_of(rollouts: str, number: int) -> str:
    """Logical key of a segment of the shard whose rollouts have this key, which may be of another run (a fork)."""
    if number < 0:
        raise InvalidKey(f"{number} is not the number of a segment; give 0 or more")
    step, _, shard = rollouts.rpartition("/rollouts/")
    return f"{step}/segments-{shard}/{number:05d}"


def is_segment(key: str) -> bool:
    """Whether this is the logical key of a segment."""
    return _SEGMENT.fullmatch(key) is not None


def is_rollouts(key: str) -> bool:
    """Whether this is the logical key of the rollouts of a shard."""
    return _ROLLOUTS.fullmatch(key) is not None


def calls_prefix(rollouts: str) -> str:
    """Prefix of the records of an agent's calls of the shard whose rollouts have this key."""
    step, _, shard = rollouts.rpartition("/rollouts/")
    return f"{step}/calls-{shard}/"


def agent_call(rollouts: str, digest: str) -> str:
    """Key of the record of one answered call. `digest` is that of its session, its content and its occurrence."""
    return f"{calls_prefix(rollouts)}call-{_validate_sha256(digest)}.json"


def step_metrics(run: str, stage: str, step: int) -> str:
    return f"{step_metrics_prefix(run, stage)}{format_number(step)}.json"


def step_metrics_prefix(run: str, stage: str) -> str:
    return f"{stage_prefix(run, stage)}metrics/"


def logger_progress(run: str, stage: str, logger: str) -> str:
    """Key of the record of the metrics of a stage that a logger has received."""
    return f"{stage_prefix(run, stage)}logged/{validate_name(logger)}.json"


# -- chains, rebases and checkpoints -------------------------------------------------------------------------


def chains_prefix(run: str, stage: str) -> str:
    return f"{stage_prefix(run, stage)}chains/"


def chain_prefix(run: str, stage: str, policy: str) -> str:
    return f"{chains_prefix(run, stage)}{validate_name(policy)}/"


def chain_root(run: str, stage: str, policy: str) -> str:
    return f"{chain_prefix(run, stage, policy)}root.json"


def chain_record(run: str, stage: str, policy: str, step: int) -> str:
    return f"{chain_prefix(run, stage, policy)}{format_number(step)}.json"


def record_step(key: str) -> int | None:
    """Returns the step of a chain record's key, and None for any other key."""
    return _number_in(_RECORD, key)


def rebases_prefix(run: str, stage: str, policy: str) -> str:
    return f"{chain_prefix(run, stage, policy)}rebases/"


def rebase(run: str, stage: str, policy: str, step: int) -> str:
    """Key of the record that a chain continues from a checkpoint of that step under other numerics."""
    return f"{rebases_prefix(run, stage, policy)}{format_number(step)}.json"


def rebase_step(key: str) -> int | None:
    """Returns the step of a rebase's key, and None for any other key."""
    return _number_in(_REBASE, key)


def rebase_checkpoint(run: str, stage: str, policy: str, step: int, attempt: str) -> str:
    """Logical key of the weights and moments from which a chain continues after a rebase that changed them.

    It is not under checkpoints_prefix, so that it neither hides a checkpoint of that step nor is pruned."""
    return f"{stage_prefix(run, stage)}rebased/{validate_name(policy)}/{format_number(step)}.{attempt}"


def rebase_of_checkpoint(key: str) -> tuple[str, str, str, int, str] | None:
    """Returns (run, stage, model, step, attempt) for a logical key of rebase_checkpoint, and None for any other key."""
    match = _REBASE_CHECKPOINT.fullmatch(key)
    return (match[1], match[2], match[3], int(match[4]), match[5]) if match else None


def checkpoints_prefix(run: str, stage: str, policy: str) -> str:
    return f"{stage_prefix(run, stage)}checkpoints/{validate_name(policy)}/"


def checkpoint(run: str, stage: str, policy: str, step: int) -> str:
    """Logical key of a checkpoint."""
    return f"{checkpoints_prefix(run, stage, policy)}{format_number(step)}"


def checkpoint_name(checkpoint_key: str) -> str:
    """Key of the name that was given to a checkpoint after it was written. Named checkpoints are not pruned."""
    return f"{checkpoint_key}/name.json"


def checkpoint_step(key: str) -> int | None:
    """Returns the step for the key of a checkpoint's manifest, and None for any other key."""
    return _number_in(_CHECKPOINT, key)


def checkpoint_chain(checkpoint_key: str) -> tuple[str, str, str]:
    """Returns (run, stage, model) for a checkpoint's logical key. Raises InvalidKey."""
    if not (match := _CHECKPOINT_KEY.fullmatch(checkpoint_key)):
        raise InvalidKey(f"{checkpoint_key[:200]!r} is not the key of a checkpoint")
    return match[1], match[2], match[3]


def evaluation(run: str, stage: str, name: str) -> str:
    """Logical key of an evaluation."""
    return f"{stage_prefix(run, stage)}evaluations/{validate_name(name)}"


def datasets_prefix(name: str | None = None) -> str:
    """Prefix of all datasets, or of the versions of one."""
    return "datasets/" if name is None else f"datasets/{validate_name(name)}/"


def dataset(key: str, version: str) -> str:
    """Logical key of a dataset."""
    return f"datasets/{validate_name(key)}/{validate_name(version)}/threads"


def short_key(key: str) -> str:
    """The `name@version` of a dataset or model with only the first letters of a long version."""
    name, separator, version = key.partition("@")
    return f"{name}{separator}{version[:8] if len(version) > 16 else version}"


def with_short_digest(key: str) -> str:
    """The version, or `name@version`, with only the first letters of a version that is a digest. Any other one stays
    whole."""
    return re.sub(r"(^|@)([0-9a-f]{12})[0-9a-f]{20,}$", r"\1\2", key)


def dataset_of(key: str) -> tuple[str, str]:
    """Returns (name, version) for the logical key of a dataset. Raises InvalidKey."""
    area, *names = key.split("/")
    if area != "datasets" or len(names) != 3:
        raise InvalidKey(f"{key[:200]!r} is not the key of a dataset")
    return names[0], names[1]


def seen_file(digest: str) -> str:
    """Key of the record of a file that was read for a dataset. `digest` is that of its machine and path."""
    return f"files/seen/{_validate_sha256(digest)}.json"


def loaded_files(digest: str) -> str:
    """Key of the record of the dataset or model made of some files. `digest` is that of their contents or commit."""
    return f"files/loaded/{_validate_sha256(digest)}.json"


def votes_prefix() -> str:
    """Prefix of the votes between two answers of a chat."""
    return "votes/"


def vote(comparison: str) -> str:
    """Key of the vote on a comparison of two answers."""
    return f"{votes_prefix()}{validate_name(comparison)}.json"


# -- registered models and uploads ---------------------------------------------------------------------------


def models_prefix() -> str:
    return "models/"


def model_prefix(key: str) -> str:
    return f"models/{validate_name(key)}/"


def model_version(key: str, version: str) -> str:
    """Logical key of a version of a registered model."""
    if validate_name(version) in RESERVED_VERSIONS:
        raise InvalidKey(f"{version!r} cannot be a model version: the registry keeps its own objects there")
    return f"{model_prefix(key)}{version}"


def model_part(key: str, part: ModelPart) -> str:
    """Prefix of one kind of the registry's objects about a model."""
    return f"{model_prefix(key)}{part}/"


def model_claim(key: str, version: str) -> str:
    """Key of the digest of the content that a version names. It is written before the upload begins."""
    return f"{model_part(key, 'claims')}{validate_name(version)}.json"


def model_aliases_prefix(key: str, alias: str) -> str:
    return f"{model_part(key, 'aliases')}{validate_name(alias)}/"


def model_alias(key: str, alias: str, number_in_log: int) -> str:
    return f"{model_aliases_prefix(key, alias)}{format_number(number_in_log)}.json"


def model_note(key: str, kind: Literal["decisions", "cards"], decision: str) -> str:
    """Logical key of a decision about a model, or of the model card that belongs to the decision."""
    if "." in validate_name(decision):  # data has dots after its key, and a manifest's key has none
        raise InvalidKey(f"{decision!r} cannot be the id of a decision; give one without dots")
    return f"{model_part(key, kind)}{decision}"


def alias_of(key: str) -> tuple[str, str] | None:
    """Returns (model, alias) for the key of an entry of an alias's log, and None for any other key."""
    return (match[1], match[2]) if (match := _ALIAS.fullmatch(key)) else None


def upload(name: str, digest: str) -> str:
    """Logical key of a model folder that a client uploads for import. The engine deletes it afterwards."""
    return f"uploads/{validate_name(name)}/{_validate_sha256(digest)}"


def _validate_sha256(digest: str) -> str:
    if not _SHA256.fullmatch(digest):
        raise InvalidKey(f"{digest[:80]!r} is not a digest; give the 64 hex digits of a sha256")
    return digest
