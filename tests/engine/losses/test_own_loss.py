"""Losses by import path: what a request has of them, and a redo after a change of their source."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import BadSpec
from engine.local.engine import LocalEngine
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.policy_gradient import POLICY_LOSSES, CISPOSpec, OwnLossSpec, load_own_loss
from engine.losses.spec import parse_loss
from engine.protocol import LogprobsRequest, MeasureRequest, TokenSequence
from flows.configs.common import GRPOAlgorithm
from flows.configs.reinforcement import Regularisation
from flows.training.rollout_loop import policy_loss
from storage.serialization import canonical_json
from storage.store.objects import open_store
from tests.fixtures.engines import DETERMINISTIC, commit_batch, new_policy, request_after, row

PATH = "tests.fixtures.own_losses:Capped"
SOURCE = Path(__file__).parents[2] / "fixtures/own_losses.py"


def loss_of(path: str = PATH, arguments: dict[str, Any] | None = None, **algorithm: Any) -> OwnLossSpec:
    """The loss of a config of GRPO that names it."""
    regularisation = Regularisation(policy_loss=path, policy_loss_arguments=arguments or {}, entropy_coef=0.1)
    loss = policy_loss(POLICY_LOSSES, GRPOAlgorithm(**algorithm), regularisation)
    assert isinstance(loss, OwnLossSpec)
    return loss


def test_a_request_has_the_path_the_settings_and_the_digest_of_the_source() -> None:
    loss = loss_of(arguments={"cap": 3.0}, kl_beta=0.2, loss_norm="sequence_mean")
    settings = loss.model_dump()
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    assert (settings["kind"], settings["path"], settings["source_digest"]) == ("own", PATH, digest)
    given = {name: settings[name] for name in ("cap", "kl_beta", "entropy_coef", "norm")}
    assert given == {"cap": 3.0, "kl_beta": 0.2, "entropy_coef": 0.1, "norm": "sequence_mean"}
    assert parse_loss(json.loads(canonical_json(loss))) == loss
    assert loss.model_copy(update={"kl_beta": 0.3}).model_dump() == settings | {"kl_beta": 0.3}
    assert (loss.needs_reference, loss.needs_entropy, loss.uses_sampling_temperature) == (True, True, True)


def test_it_computes_what_its_class_says() -> None:
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    old, advantages = logprobs - torch.tensor([math.log(4), 0.0]), torch.tensor([1.0, -2.0], dtype=torch.float64)
    inputs = LossInputs(Outputs(logprobs), lengths_S=(2,), old_N=old, advantages_N=advantages)
    settings = loss_of(kl_beta=0.0).model_dump() | {"entropy_coef": 0.0}
    # ratios 4 and 1, the first capped at 2: 2 * 1 * 1 and 1 * -2 * 1
    assert parse_loss(settings).compute(inputs).values_N.tolist() == pytest.approx([2.0, -2.0])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("tests.fixtures.no_such:Loss", {}, "no module 'tests.fixtures.no_such'"),
        ("tests.fixtures.own_losses:Missing", {}, "has no 'Missing'"),
        ("tests.fixtures.own_losses:NOT_A_LOSS", {}, "expected a subclass of OwnLossSpec"),
        ("engine.losses.policy_gradient:OwnLossSpec", {}, "expected a subclass of OwnLossSpec"),
        (PATH, {"cap": -1}, "cap"),
        (PATH, {"cup": 1}, "cup"),
        (PATH, {"kl_beta": 1}, "kl_beta"),
    ],
)
def test_a_wrong_path_or_setting_is_refused(path: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of(path, arguments)
    with pytest.raises(ValueError, match="policy_loss_arguments"):
        Regularisation(policy_loss_arguments={"cap": 1.0})
    with pytest.raises(ValueError, match="clip_range has no effect"):
        loss_of(clip_range=0.3)


async def test_a_redo_after_a_change_of_the_source_is_refused(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget() -> None:
        """As a new process, which imports the module again."""
        load_own_loss.cache_clear()
        sys.modules.pop("my_loss_of_a_test", None)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source = tmp_path / "my_loss_of_a_test.py"
    source.write_text(SOURCE.read_text())
    url = f"file://{tmp_path}/store"
    store, engine = open_store(url), LocalEngine(url, DETERMINISTIC)
    policy = await new_policy(engine, tiny_folder)
    rows = [row([1, 2], [3, 4], advantages=1, old_logprobs=-5), row([1, 2], [5], advantages=-1, old_logprobs=-5)]
    batch = commit_batch(store, policy, rows)
    loss = loss_of("my_loss_of_a_test:Capped", {"cap": 1e3}, kl_beta=0.0).model_dump()
    measured = await engine.measure(MeasureRequest(policy=policy, batch=batch, loss=loss))
    record = await engine.take_gradient_step(request_after(policy, batch, loss=loss))
    assert measured.metrics["ratio_mean"] == pytest.approx(record.metrics["ratio_mean"], rel=1e-5)
    # the gradient is that of the built-in loss which this one is without clips
    built_in = CISPOSpec(kl_beta=0.0, entropy_coef=0.1, clip_low=1.0, clip_high=1e3).model_dump()
    rival = await new_policy(engine, tiny_folder, run="rival")
    same = await engine.take_gradient_step(request_after(rival, batch, loss=built_in))
    assert same.weights_digest == record.weights_digest
    await engine.close(checkpoint=False)

    async def redo() -> list[list[float]]:
        forget()
        engine = LocalEngine(url, DETERMINISTIC)
        try:
            return await engine.logprobs(LogprobsRequest(record.policy, [TokenSequence([1, 2, 3], [0.0, 1.0, 1.0])]))
        finally:
            await engine.close(checkpoint=False)

    original, expected = source.read_text(), await redo()
    source.write_text(original + "\n# changed\n")
    with pytest.raises(BadSpec, match="source file of 'my_loss_of_a_test:Capped' was changed.*restore the file"):
        await redo()
    source.unlink()
    with pytest.raises(BadSpec, match="no module 'my_loss_of_a_test'"):
        await redo()
    source.write_text(original)
    assert await redo() == expected
