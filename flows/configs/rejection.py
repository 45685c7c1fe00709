"""The config of the flow `rft`: rounds of rejection sampling."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from engine.protocol import SamplingParams
from flows.configs.common import GRPOConfig, StageConfig
from flows.configs.inputs import GraderConfig, PromptDataConfig
from flows.configs.optimizer import SFTOptimizer
from flows.configs.reinforcement import SamplingRules
from flows.configs.validation import EvaluationConfig
from storage.serialization import Frozen, default_of
from tasks.plans import KeepKind, KeepRule, RoundStart


class RFTAlgorithm(Frozen):
    """Rounds of rejection sampling (RFT, arXiv:2308.01825; RAFT, arXiv:2304.06767; ReST, arXiv:2308.08998)."""

    rounds: int = Field(3, ge=1)
    """Number of rounds. Each samples from the policy of the round before, and fine-tunes on what it keeps."""
    prompts_per_round: int | None = Field(None, ge=1)
    """Prompts that a round samples: the next ones in the order of the dataset. None: all prompts."""
    completions_per_sample: int = Field(8, ge=1)
    """Completions per prompt."""
    keep: KeepKind = "distinct"
    """Which completions of a prompt are kept. top: those with the highest rewards. threshold: those of them with a
    reward of at least min_reward. distinct: of these, one per distinct answer, as the grader extracts it, or else as
    the whole text is."""
    keep_per_prompt: int = Field(4, ge=1)
    """Largest number of completions of a prompt that are kept."""
    min_reward: float = 1.0
    """Smallest reward of a completion that is kept, with keep=threshold and keep=distinct."""
    start_from: RoundStart = "last"
    """Weights from which a round fine-tunes. base: those that the run starts from. last: those of the last round."""
    epochs: int = Field(1, ge=1)
    """Passes of a round over the completions that it keeps."""
    samples_per_batch: int = Field(64, ge=1)
    """Kept completions per gradient step."""
    prompts_per_shard: int = Field(16, ge=1)
    """Prompts per shard. A shard is sampled, graded and committed as a whole; a crash repeats at most one."""

    @property
    def rule(self) -> KeepRule:
        return KeepRule(kind=self.keep, per_prompt=self.keep_per_prompt, min_reward=self.min_reward)


class RFTConfig(StageConfig):
    """`ostinato run rft`: rounds of rejection sampling and fine-tuning."""

    flow: ClassVar[str] = "rft"

    data: PromptDataConfig
    grader: GraderConfig
    sampling: SamplingParams = default_of(GRPOConfig, "sampling")
    algorithm: RFTAlgorithm = RFTAlgorithm()
    optimizer: SFTOptimizer = SFTOptimizer()
    evaluation: EvaluationConfig = EvaluationConfig()
    rules: SamplingRules = SamplingRules()

    @property
    def measurements(self) -> EvaluationConfig:
        return self.evaluation

    @property
    def rows_per_step(self) -> int:
        return self.algorithm.samples_per_batch

    @property
    def passes_before_gradient(self) -> int:
        # all completions are sampled, and the best are trained
        return -(-self.algorithm.completions_per_sample // self.algorithm.keep_per_prompt)

    def tokens_per_step(self, rows: int, row_tokens: int) -> int:
        return self.rows_per_step * (row_tokens + self.sampling.max_new_tokens)

    def tokens_per_heldout_row(self, row_tokens: int) -> int:
        return row_tokens + self.evaluation.samples_per_prompt * self.sampling.max_new_tokens

    def count_steps(self, rows: int) -> int | None:
        """The largest number of steps: a round keeps at most keep_per_prompt completions of each prompt."""
        algorithm = self.algorithm
        kept = (algorithm.prompts_per_round or rows) * min(algorithm.keep_per_prompt, algorithm.completions_per_sample)
        return algorithm.rounds * -(-algorithm.epochs * kept // min(algorithm.samples_per_batch, kept))

    @model_validator(mode="after")
    def _patience_has_measurements(self) -> Self:
        if self.rules.patience is not None:
            raise ValueError(
                f"rules.patience={self.rules.patience} counts measurements during a stage, and each round is a stage; "
                "give algorithm.rounds, or leave patience out"
            )
        return self

    @model_validator(mode="after")
    def _rounds_can_be_taken(self) -> Self:
        if self.evaluation.every is not None or self.evaluation.every_steps is not None:
            raise ValueError(
                "evaluation.every and every_steps count steps, and rft evaluates after each round; leave them out"
            )
        if self.data.train.kind != "mixture" and self.data.train.order == "pools":
            raise ValueError("order='pools' goes by the grades of steps, and rft samples in rounds; leave it out")
        if self.sampling.temperature == 0 and self.algorithm.completions_per_sample > 1:
            raise ValueError("sampling.temperature=0 gives a prompt equal completions; use e.g. 1.0")
        return self
