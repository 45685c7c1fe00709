"""Tests of `ostinato models`: promotion, rollback, model cards and pushes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from flows.cli.main import app
from flows.promotion import hand_decisions
from flows.promotion.model_card import find_card
from storage.chain.deletion import delete_model
from storage.chain.listing import stored_checkpoint_steps
from storage.chain.records import Chain
from storage.errors import AliasMoved
from storage.inspect.audit import audit_store
from storage.registry.decisions import Decision
from storage.registry.models import find_model, list_models, list_versions, resolve_alias
from storage.store import keys
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.stores.s3 import KEY, SECRET


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


@pytest.fixture
def version(toy: ToyRun) -> str:
    (only,) = list_versions(toy.store, "toy")
    return only


@pytest.fixture
def second(toy: ToyRun, tmp_path: Path) -> str:
    """Another version of the model `toy`."""
    from storage.registry.models import publish_model
    from storage.store.artifacts import Provenance
    from storage.store.download import materialise_files

    (version,) = list_versions(toy.store, "toy")
    files = materialise_files(toy.store, keys.model_version("toy", version), tmp_path / "files")
    note = tmp_path / "note.txt"
    note.write_text("the same weights")
    provenance = Provenance(code_version="a", config_digest="0" * 64, seed=0)
    publish_model(toy.store, "toy", "again", files | {"note.txt": note}, provenance=provenance)
    return "again"


def ostinato(toy: ToyRun, *words: str) -> Result:
    return CliRunner().invoke(app, ["models", *words, "--storage", str(toy.folder)], env={"COLUMNS": "250"})


def answer(toy: ToyRun, *words: str) -> Any:
    result = ostinato(toy, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def done(toy: ToyRun, *words: str) -> str:
    result = ostinato(toy, *words)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(toy: ToyRun, *words: str) -> str:
    result = ostinato(toy, *words)
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def test_promote_promote_rollback(toy: ToyRun, version: str, second: str) -> None:
    assert "who" not in done(toy, "promote", f"toy@{version}", "--why", "first", "--who", "Ada")
    done(toy, "promote", "toy@again", "--why", "better", "--who", "Ada")
    rows = {row["model"]: row for row in answer(toy, "ls")}
    assert (rows["toy"]["champion"], rows["toy"]["by"], rows["toy"]["versions"]) == ("again", "Ada", 2)
    assert rows["tiny"]["champion"] is None

    output = done(toy, "rollback", "toy", "--why", "it repeats itself", "--who", "Bo")
    assert f"the champion of toy is {version}, after again" in output
    told = answer(toy, "show", "toy")
    assert [move["version"] for move in told["moves"]] == [version, "again", version]
    assert [move["action"] for move in told["moves"]] == ["promote", "promote", "rollback"]
    assert [(d["action"], d["who"], d["reasons"], d["in_force"]) for d in told["decisions"]] == [
        ("promote", "Ada", ["first"], True),
        ("promote", "Ada", ["better"], True),
        ("rollback", "Bo", ["it repeats itself"], True),
    ]
    assert "no previous champion" in refused(toy, "rollback", "toy")
    assert "made at entry 2 of its log, but the champion has changed" in refused(toy, "rollback", "toy", "--over", "2")
    assert audit_store(toy.store).problems == ()
    shown = done(toy, "show", "toy")
    assert "it repeats itself" in shown and "champion (entry 3)" in shown


def test_the_champion_again_is_no_decision(toy: ToyRun, version: str) -> None:
    done(toy, "promote", "toy")
    before = {info.key for info in toy.store.list()}
    assert "is the champion already" in done(toy, "promote", "toy@champion")
    assert {info.key for info in toy.store.list()} == before


def test_a_promotion_is_refused_after_another_one_and_completed_after_a_kill(
    toy: ToyRun, version: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def promote(version: str, over: int | None = None) -> Decision | None:
        return hand_decisions.promote_by_hand(toy.store, "toy", version, why="better", who="Ada", over=over)

    def kill(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hand_decisions, "commit_card", kill)
        promote(version, over=0)
    announced: list[Decision] = []
    monkeypatch.setattr(hand_decisions, "_announce", announced.append)
    # the retry writes the card, and tells of the promotion, once
    assert promote(version, over=0) is None and promote(version, over=0) is None
    (decision,) = announced
    assert find_card(toy.store, decision) is not None
    with pytest.raises(AliasMoved, match="made at entry 0 of its log, but the champion has changed since"):
        promote("again", over=0)
    assert promote("again", over=1) is not None


def test_what_is_not_there_is_refused(toy: ToyRun, version: str) -> None:
    assert f"no version or alias '9'; published: {version}" in refused(toy, "promote", "toy@9")
    assert "no model 'unknown'" in refused(toy, "show", "unknown")
    assert "published: tiny, toy" in refused(toy, "promote", "unknown")
    assert "there is no champion" in refused(toy, "rollback", "toy")
    assert ostinato(toy, "show", "../up").exit_code == 2


def test_a_card_has_a_header_that_hubs_read_and_says_what_made_the_model(toy: ToyRun, version: str) -> None:
    done(toy, "promote", "toy", "--why", "reads well", "--who", "Ada")
    text = done(toy, "card", "toy@champion")
    _, header, body = text.split("---\n", 2)
    fields = yaml.safe_load(header)
    assert fields["library_name"] == "transformers" and fields["pipeline_tag"] == "text-generation"
    assert fields["base_model"].startswith("tiny@") and fields["tags"] == ["ostinato", "grpo"]
    assert f"# toy@{version}" in body and "4 gradient steps" in body
    assert toy.chain.head().state[:16] in body and "reads well" in body and "by Ada" in body
    record = toy.chain.record(1)
    assert record is not None
    dataset = json.loads(toy.store.get(keys.run_json("toy")))["semantic"]["inputs"]["dataset"]
    assert re.search(rf"- `[\w-]+` \(sha256 `{dataset[:12]}`\)", body)
    model = find_model(toy.store, "toy", version)
    assert model is not None
    files = {info.key for info in toy.store.list(f"{model.key}/")}
    assert not any(key.endswith("README.md") for key in files)  # the version itself is as it was


def test_an_imported_model_has_a_card_too(toy: ToyRun) -> None:
    text = done(toy, "card", "tiny")
    assert "Imported into the registry" in text and "base_model" not in text


def test_push_copies_the_version_and_its_card_and_completes_what_was_interrupted(
    toy: ToyRun, version: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    target = tmp_path / "pushed"
    assert "files" in done(toy, "push", "toy", str(target))
    names = {path.name for path in target.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    source = toy.folder / "models" / "toy" / version / "model.safetensors"
    assert (target / "model.safetensors").read_bytes() == source.read_bytes()
    assert f"# toy@{version}" in (target / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(target).config.model_type == "llama"
    (target / "tokenizer.json").unlink()
    (target / "README.md").unlink()
    done(toy, "push", "toy", str(target))
    assert {path.name for path in target.iterdir()} == names


def test_a_folder_with_other_files_is_refused_unless_forced(toy: ToyRun, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    assert "holds other files (thesis.txt)" in refused(toy, "push", "toy", str(target))
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]
    done(toy, "push", "toy", str(target), "--force")
    assert (target / "thesis.txt").read_text() == "years of work" and (target / "config.json").is_file()


def test_push_to_another_scheme(toy: ToyRun) -> None:
    import fsspec

    done(toy, "push", "toy", "memory://bucket/toy")
    assert fsspec.filesystem("memory").exists("/bucket/toy/README.md")
    assert "nothing can be pushed to 'nonsense://x'" in refused(toy, "push", "toy", "nonsense://x")


def test_push_to_s3_takes_its_server_and_credentials_from_the_environment(
    toy: ToyRun, version: str, moto_endpoint: str, moto_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    for name, value in {"ENDPOINT_URL": moto_endpoint, "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for _ in range(2):  # again: the same files are no strangers
        done(toy, "push", "toy", f"s3://{moto_bucket}/models/toy")
    client = boto3.client("s3")
    keys = {each["Key"] for each in client.list_objects_v2(Bucket=moto_bucket)["Contents"]}
    assert {f"models/toy/{name}" for name in ("README.md", "config.json", "model.safetensors")} <= keys
    source = toy.folder / "models" / "toy" / version / "model.safetensors"
    copy = client.get_object(Bucket=moto_bucket, Key="models/toy/model.safetensors")["Body"].read()
    assert copy == source.read_bytes()
    client.put_object(Bucket=moto_bucket, Key="models/toy/thesis.txt", Body=b"years of work")
    assert "holds other files (thesis.txt)" in refused(toy, "push", "toy", f"s3://{moto_bucket}/models/toy")
    assert "cannot be written" in refused(toy, "push", "toy", "s3://no-such-bucket/toy")
    assert "no-such-bucket" not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}


def test_push_to_a_hub_is_one_commit(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls: list[Any] = []

    class Hub:
        def create_repo(self, repository: str, **options: Any) -> None:
            calls.append((repository, options))

        def create_commit(self, repository: str, operations: list[Any], **options: Any) -> None:
            calls.append((repository, sorted(operation.path_in_repo for operation in operations)))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    done(toy, "push", "toy", "hf://ada/toy")
    (created, options), (written, names) = calls
    assert created == written == "ada/toy"
    assert options == {"private": True, "exist_ok": True}
    assert names.count("README.md") == 1 and "model.safetensors" in names


def killed(failpoint: str) -> None:
    raise KeyboardInterrupt(failpoint)


def test_a_version_is_deleted_by_its_name_and_latest_names_the_one_that_is_left(
    toy: ToyRun, version: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_alias(toy.store, "toy") == second
    assert "nothing was deleted; give --yes to delete" in done(toy, "delete", f"toy@{second}")
    assert list_versions(toy.store, "toy") == sorted([version, second])
    # a call that was killed after it deleted the manifest
    monkeypatch.setattr("storage.chain.deletion.failpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_model(toy.store, "toy", second)
    monkeypatch.undo()
    assert f"deleted toy@{second}" in done(toy, "delete", f"toy@{second}", "--yes")
    assert list_versions(toy.store, "toy") == [version]
    assert resolve_alias(toy.store, "toy") == version
    assert not list(toy.store.list(f"models/toy/{second}/"))
    assert audit_store(toy.store).problems == ()
    # the only version: the name is free again
    assert f"deleted toy@{version}" in done(toy, "delete", f"toy@{version}", "--yes")
    assert resolve_alias(toy.store, "toy") is None and "toy" not in list_models(toy.store)
    assert audit_store(toy.store).problems == ()
    again = ostinato(toy, "delete", f"toy@{second}", "--yes")
    assert again.exit_code == 1 and f"has no version '{second}'; published: none" in again.output


def test_a_champion_and_the_base_of_a_run_are_not_deleted(toy: ToyRun, version: str, second: str) -> None:
    done(toy, "promote", f"toy@{second}")
    refused = ostinato(toy, "delete", f"toy@{second}", "--yes")
    assert refused.exit_code == 1 and "is the champion; promote another version first" in refused.output
    base = Chain(toy.store, "toy", "0-grpo", "policy").root().base
    _, name, base_version = base.key.split("/")
    refused = ostinato(toy, "delete", f"{name}@{base_version}", "--yes")
    assert refused.exit_code == 1 and f"toy began at {name}@{base_version}" in " ".join(refused.output.split())
    assert ostinato(toy, "delete", "toy", "--yes").exit_code == 2
    assert list_versions(toy.store, name) == [base_version] and second in list_versions(toy.store, "toy")


def test_the_average_of_the_last_checkpoints_is_published(toy: ToyRun, tmp_path: Path) -> None:
    """By hand: the mean of the tensors of the two policies, each of which is exported from its checkpoint."""
    from safetensors.torch import load_file

    from engine.local.redo import PolicyRebuilder, clean_backend
    from engine.local.verify import verify_run
    from storage.store.artifacts import read_manifest
    from storage.store.download import materialise_files

    policies = [toy.chain.policy(step) for step in stored_checkpoint_steps(toy.chain) if step][-2:]
    assert len(policies) == 2
    numerics = toy.chain.committed_record(policies[-1].step).numerics
    with clean_backend(numerics) as backend:
        rebuilder = PolicyRebuilder(toy.store, backend)
        weights = []
        for policy in policies:
            rebuilder.from_checkpoint(toy.chain, policy.step).export_merged(tmp_path / str(policy.step))
            weights.append(load_file(tmp_path / str(policy.step) / "model.safetensors"))
    steps = ", ".join(str(policy.step) for policy in policies)
    printed = done(toy, "average", "toy", "--last", "2")
    (version,) = list_versions(toy.store, "toy-mean")
    assert printed.strip() == f"published toy-mean@{version}, the average of the policies after steps {steps}"
    files = materialise_files(toy.store, keys.model_version("toy-mean", version), tmp_path / "mean")
    assert "tokenizer.json" in files and "config.json" in files
    for name, tensor in load_file(files["model.safetensors"]).items():
        expected = (weights[0][name].double() + weights[1][name].double()) / 2
        assert (tensor == expected.to(tensor.dtype)).all()
    manifest = read_manifest(toy.store, keys.model_version("toy-mean", version))
    assert list(manifest.parents) == [policies[1].uri, policies[0].uri]
    # it is published once, it is no policy for verify to compare with, and nothing is wrong with the store
    assert done(toy, "average", "toy", "--last", "2") == printed
    assert verify_run(toy.store, "toy").problems == []
    assert "the average of 9 was asked for; give a smaller --last" in refused(toy, "average", "toy", "--last", "9")


def test_a_version_is_exported(toy: ToyRun, version: str, tmp_path: Path) -> None:
    said = done(toy, "export", "toy", str(tmp_path / "half"), "--format", "float16")
    assert said.strip() == f"wrote toy@{version} as float16 to {tmp_path / 'half'}"
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    refused = ostinato(toy, "export", "toy", str(tmp_path / "lora"), "--format", "adapter")
    assert refused.exit_code == 1 and "has no adapter" in refused.output
