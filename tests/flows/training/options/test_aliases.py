"""Tests of the aliases of arguments of the training classes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol import SamplingParams
from flows.dpo import DPO
from flows.grpo import GRPO
from flows.gspo import GSPO
from flows.ppo import PPO
from flows.training.arguments import accept_aliases
from flows.training.schedules import ConstantScheduler
from tasks.graders.spec import grader_spec


class Named:
    name = "policy"
    sampling = SamplingParams()


class Other(Named):
    name = "value"


GRADER = grader_spec("tests.fixtures.grading:even_share")
PAIRS: Any = []
MODEL: Any = Named()


def test_older_names_are_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="beta is called kl_beta now"):
        trainer = DPO(dataset=PAIRS, model=MODEL, beta=0.3)  # type: ignore[call-arg]
    assert trainer.loss.beta == 0.3
    for kind, length in ((GRPO, "max_num_grpo_steps"), (GSPO, "max_num_gspo_steps")):
        with pytest.warns(DeprecationWarning, match="policy_model is called model now"):
            trained: Any = kind(dataset=PAIRS, policy_model=MODEL, grader=GRADER, beta=0.5, **{length: 1})  # type: ignore
        assert trained.model is MODEL and trained.loss.kl_beta == 0.5


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(TypeError, match="beta is another name of kl_beta, and both were given"):
        DPO(dataset=PAIRS, model=MODEL, beta=0.3, kl_beta=0.3)  # type: ignore[call-arg]


def test_ppo_takes_its_schedules_under_the_documents_names(recwarn: pytest.WarningsRecorder) -> None:
    policy, value = ConstantScheduler(1e-4), ConstantScheduler(2e-4)
    trainer = PPO(
        PAIRS, MODEL, Other(), GRADER, max_num_ppo_steps=1,  # type: ignore[arg-type]
        lr_scheduler_policy=policy, lr_scheduler_value=value,
    )  # fmt: skip
    assert (trainer.schedule, trainer.critic.schedule) == (policy, value)
    assert not [warning for warning in recwarn if issubclass(warning.category, DeprecationWarning)]


def test_a_class_keeps_its_signature() -> None:
    @accept_aliases({"old": "new"})
    class Kind:
        def __init__(self, new: int = 1) -> None:
            """Doc."""
            self.new = new

    assert Kind().new == 1 and Kind(2).new == 2 and Kind.__init__.__doc__ == "Doc."
