"""Which policy the `model` of an OpenAI request means."""

from __future__ import annotations

import asyncio

import openai
import pytest

from engine.protocol import PolicySpec
from storage.chain import leases
from storage.chain.records import Root
from storage.registry.decisions import commit_decision
from storage.registry.models import list_versions
from storage.store.artifacts import Provenance
from tests.fixtures.engines import (
    commit_batch,
    new_policy,
    request_after,
)
from tests.fixtures.servers.openai_calls import OpenAIRun, chat, client_of
from tests.fixtures.servers.openai_server import running_openai_server


def test_the_next_answer_after_a_step_is_the_new_policys(fresh_run: OpenAIRun) -> None:
    with running_openai_server(fresh_run.local, fresh_run.store) as url, client_of(url) as client:
        before = chat(client)
        first = fresh_run.step(fresh_run.policy)
        after = chat(client)
        assert after.policy == first.model_dump() and after.policy["step"] == 1
        assert after.choices != before.choices
        assert chat(client, model="r@0").choices == before.choices
        for name in ("r/0-s/policy", "r/0-s/policy@1"):
            assert chat(client, model=name).choices == after.choices


def test_the_head_is_that_of_the_last_stage(fresh_run: OpenAIRun) -> None:
    with running_openai_server(fresh_run.local, fresh_run.store) as url, client_of(url) as client:
        assert chat(client, max_tokens=1).policy["stage"] == "0-s"
        for stage in ("1-next", "10-last", "2-between"):
            root = Root(start=fresh_run.policy, base_digest=fresh_run.policy.state)
            asyncio.run(fresh_run.local.create_policy(PolicySpec(run="r", stage=stage, model="policy", root=root)))
        assert chat(client, max_tokens=1).policy["stage"] == "10-last"


def test_a_head_is_believed_for_a_while_and_a_run_key_may_have_two_parts(fresh_run: OpenAIRun) -> None:
    policy = asyncio.run(new_policy(fresh_run.local, fresh_run.folder, run="nightly/2026-01-01"))
    with running_openai_server(fresh_run.local, fresh_run.store, recent_seconds=3600) as url, client_of(url) as client:
        assert chat(client, model="nightly/2026-01-01", max_tokens=1).policy == policy.model_dump()
        fresh_run.step(policy)
        assert chat(client, model="nightly/2026-01-01", max_tokens=1).policy["step"] == 0


def test_a_registered_model_is_served_from_a_chain_of_its_own(client: openai.OpenAI, openai_run: OpenAIRun) -> None:
    answer = chat(client, model="tiny")
    version = next(iter(openai_run.store.list("models/tiny/claims/"))).key.rpartition("/")[2].removesuffix(".json")
    assert answer.policy["run"] == "served/tiny" and answer.policy["step"] == 0
    assert chat(client, model=f"tiny@{version}").policy == answer.policy == chat(client, model="served/tiny").policy
    assert answer.choices == chat(client).choices  # policy 0 of the run has the same weights


def test_the_champion_of_a_model_is_served_by_that_name(fresh_run: OpenAIRun) -> None:
    (version,) = list_versions(fresh_run.store, "tiny")
    with running_openai_server(fresh_run.local, fresh_run.store) as url, client_of(url) as client:
        with pytest.raises(openai.NotFoundError, match="name@champion"):
            chat(client, model="tiny@champion", max_tokens=1)
        provenance = Provenance(code_version="a", config_digest="0" * 64, seed=0)
        commit_decision(
            fresh_run.store, "tiny", version, "promote", over=None, reasons=["a start"], who="ada",
            provenance=provenance,
        )  # fmt: skip
        served = chat(client, model="tiny@champion", max_tokens=1).policy
        assert served == chat(client, model=f"tiny@{version}", max_tokens=1).policy


def test_models_are_listed_and_described(client: openai.OpenAI, openai_run: OpenAIRun) -> None:
    chat(client, model="tiny", max_tokens=1)  # what serves it is not listed
    cards = {card.id: card for card in client.models.list()}
    assert {name: card.owned_by for name, card in cards.items()} == {"r": "run", "tiny": "registry"}
    assert cards["r"].created > 0
    assert client.models.retrieve("r/0-s/policy@0").policy == openai_run.policy.model_dump()  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


def test_a_reader_acts_in_the_epoch_of_the_lease_and_never_ahead_of_it(fresh_run: OpenAIRun) -> None:
    epoch = leases.acquire_lease(fresh_run.store, "r", {})
    with running_openai_server(fresh_run.local, fresh_run.store, recent_seconds=3600) as url, client_of(url) as client:
        chat(client, max_tokens=1)
        request = request_after(fresh_run.policy, commit_batch(fresh_run.store, fresh_run.policy))
        first = asyncio.run(fresh_run.local.take_gradient_step(request, epoch=epoch)).policy  # not fenced by the reader
        successor = leases.acquire_lease(fresh_run.store, "r", {})
        second = request_after(first, commit_batch(fresh_run.store, first))
        asyncio.run(fresh_run.local.take_gradient_step(second, epoch=successor))
        assert chat(client, max_tokens=1).policy["step"] == 0  # heard of the new lease by being fenced
