"""Tests that an imported config gives the numbers of verl's own definitions, computed by hand.

The comments name verl's files and functions, at the commits b178a3c (January 2026) and 1dda039 (August 2026). They
agree on these definitions unless a comment says otherwise.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from engine.losses.inputs import Outputs
from engine.specs.engine import LocalEngineSpec
from engine.specs.trainer import DeepSpeedSpec
from flows.configs.common import GRPOConfig
from flows.configs.gspo import GSPOConfig
from flows.configs.ppo import PPOConfig, value_only_steps
from flows.gspo import GSPO
from flows.training.optimizer import schedule_of
from flows.training.rollout_loop import policy_loss
from flows.verl.read import VerlError
from tasks.credit.advantages import ESTIMATORS
from tasks.credit.rewards import reinforce_plus_plus
from tasks.datasets.read import read_threads
from tasks.datasets.spec import FileDataset, PythonDataset
from tasks.datasets.verl import image_rows
from tests.engine.losses.cases import loss_of, sample
from tests.fixtures.verl_values import CRITIC, A, R, made

# -- advantages ------------------------------------------------------------------------------------------------


def test_reinforce_plus_plus_discounts_by_gamma(tmp_path: Path) -> None:
    # trainer/ppo/core_algos.py, compute_reinforce_plus_plus_outcome_advantage: return = reward + gamma * next return
    words = ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.5"]
    config = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    gamma = config.regularisation.gamma
    advantages = reinforce_plus_plus(np.array([1.0, 0.0]), np.zeros(3), np.array([2, 1]), gamma=gamma)
    # returns 0.5, 1 | 0, whitened: mean 0.5, variance 1/6
    assert advantages == pytest.approx(np.array([0.0, 0.5, -0.5]) * np.sqrt(6), abs=1e-6)


def test_other_estimators_of_groups_do_not_read_gamma(tmp_path: Path) -> None:
    result = made(tmp_path, "ppo_trainer", ["algorithm.gamma=0.5"])
    assert "algorithm.gamma" in chain.from_iterable(result.unread.values())


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo"])
def test_the_only_completion_of_a_prompt_keeps_its_reward(tmp_path: Path, estimator: str) -> None:
    # core_algos.py, compute_grpo_outcome_advantage, compute_rloo_outcome_advantage; utils/groupwise.py, group_mean_std:
    # a group of one has the mean 0 and the standard deviation 1
    words = [f"algorithm.adv_estimator={estimator}"]
    algorithm = made(tmp_path, "ppo_trainer", [*words, R + "n=1"]).config["algorithm"]
    assert ESTIMATORS[algorithm["advantage_estimator"]]([0.75]) == [0.75]
    several = made(tmp_path, "ppo_trainer", [*words, R + "n=2"]).config["algorithm"]
    assert ESTIMATORS[several["advantage_estimator"]]([0.75]) == [0.0]


def test_a_baseline_of_one_completion_is_none(tmp_path: Path) -> None:
    # core_algos.py, compute_reinforce_plus_plus_baseline_outcome_advantage: the reward, whitened over the batch
    words = ["algorithm.adv_estimator=reinforce_plus_plus_baseline", R + "n=1"]
    config = made(tmp_path, "ppo_trainer", words).config
    assert config["algorithm"]["advantage_estimator"] == "reinforce_plus_plus"
    with pytest.raises(VerlError, match="with rollout.n=1 it has no baseline"):
        made(tmp_path, "ppo_trainer", [*words, "algorithm.use_kl_in_reward=true"])


# -- losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "terms"),
    [
        # KL 1 at one token and 3 at three tokens, times 0.1; entropy 1 and 2, 3, 4, times 0.5
        ("token-mean", 0.1 * 10 / 4 - 0.5 * 10 / 4),
        ("seq-mean-token-mean", 0.1 * (1 + 3) / 2 - 0.5 * (1 + 3) / 2),
    ],
)
def test_the_terms_of_gspo_are_reduced_by_the_mode_of_the_actor(tmp_path: Path, mode: str, terms: float) -> None:
    # core_algos.py, compute_policy_loss_gspo reduces its own part by seq-mean-token-mean; workers/utils/losses.py,
    # ppo_loss reduces the KL and the entropy term by actor.loss_agg_mode
    words = ["policy_loss.loss_mode=gspo", "use_kl_loss=true", "kl_loss_coef=0.1", "kl_loss_type=kl"]
    words = [A + word for word in (*words, "entropy_coeff=0.5", f"loss_agg_mode={mode}")]
    config = GSPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    loss = policy_loss(GSPO.policy_losses, config.algorithm, config.regularisation)
    samples = []
    for tokens, kl, advantage in ((1, 1.0, 2.0), (3, 3.0, 4.0)):
        logprobs = {"old_logprobs": [-1.0] * tokens, "reference_logprobs": [-1.0 - kl] * tokens}
        samples.append(sample([1], [1.0] * tokens, str(tokens), advantages=[advantage] * tokens, **logprobs))
    outputs = Outputs(
        logprobs_N=torch.full((4,), -1.0, dtype=torch.float64),
        entropy_N=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
    )
    # every ratio is 1, so the sequences' own parts are -2 and -4
    assert loss_of(loss, samples, outputs).item() == pytest.approx(-3.0 + terms)


def test_terms_of_gspo_that_cannot_be_reduced_like_verls_are_refused(tmp_path: Path) -> None:
    words = [A + "policy_loss.loss_mode=gspo", A + "loss_agg_mode=seq-mean-token-sum"]
    made(tmp_path, "ppo_trainer", words)
    with pytest.raises(VerlError, match="the KL and entropy terms of GSPO have no norm"):
        made(tmp_path, "ppo_trainer", [*words, A + "entropy_coeff=0.1"])


@pytest.mark.parametrize(
    ("words", "norm", "constant"),
    [
        ([], "token_mean", None),
        ([A + "loss_agg_mode=seq-mean-token-mean"], "sequence_mean", None),
        ([A + "loss_agg_mode=seq-mean-token-sum-norm"], "constant", 512.0),
        ([A + "loss_agg_mode=seq-mean-token-sum-norm", A + "loss_scale_factor=100"], "constant", 100.0),
        ([A + "loss_agg_mode=seq-mean-token-mean", "critic.loss_agg_mode=token-mean"], "token_mean", None),
    ],
)
def test_the_critics_norm_follows_the_actors(
    tmp_path: Path, words: list[str], norm: str, constant: float | None
) -> None:
    # trainer/config/critic/critic.yaml: loss_agg_mode is the actor's by default
    credit = PPOConfig.model_validate(made(tmp_path, "ppo_trainer", [*CRITIC, *words]).config).credit
    assert (credit.value_loss_norm, credit.value_norm_constant) == (norm, constant)


@pytest.mark.parametrize("start", [3.0, 1.0 + 1e-8])
def test_the_value_model_moves_as_with_half_of_our_loss(tmp_path: Path, start: float) -> None:
    # core_algos.py, compute_value_loss: 0.5 times the mean squared error; the optimizer is torch's AdamW
    words = [*CRITIC, "critic.grad_clip=0.5", "critic.optim.lr=0.1", "critic.optim.weight_decay=0.3"]
    config = PPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    ours = config.value_model.optimizer_over(config.optimizer)

    def train(factor: float, eps: float, max_norm: float) -> list[float]:
        value = torch.nn.Parameter(torch.tensor([start, -start], dtype=torch.float64))
        optimizer = torch.optim.AdamW([value], lr=0.1, weight_decay=0.3, eps=eps)
        for _ in range(3):
            optimizer.zero_grad()
            (factor * (value - torch.tensor([1.0, -1.0])).square().mean()).backward()
            torch.nn.utils.clip_grad_norm_([value], max_norm)
            optimizer.step()
        return value.tolist()

    # the second start has a gradient as small as epsilon
    assert train(1.0, ours.eps, ours.max_grad_norm) == pytest.approx(train(0.5, 1e-8, 0.5), rel=1e-6)
    assert (ours.lr, ours.weight_decay) == (0.1, 0.3)


# -- the length of the run, and its schedules ------------------------------------------------------------------


def rows(tmp_path: Path, count: int, batch: int) -> list[str]:
    """The words for a training file with `count` rows, and for batches of `batch` prompts."""
    pq.write_table(pa.table({"prompt": ["q"] * count}), tmp_path / "rows.parquet")
    return [
        f"data.train_files={tmp_path / 'rows.parquet'}",
        f"data.train_batch_size={batch}",
        f"{A}ppo_mini_batch_size={batch}",
    ]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        # 10 rows in batches of 4: two whole batches in each of three passes
        (["trainer.total_epochs=3"], 6),
        (["trainer.total_epochs=3", "trainer.total_training_steps=5"], 5),
        (["trainer.total_epochs=3", "trainer.total_training_steps=100"], 6),
        (["trainer.total_epochs=3", "data.train_max_samples=5"], 3),
    ],
)
def test_a_pass_has_whole_batches_only_and_the_passes_end_the_run(
    tmp_path: Path, words: list[str], steps: int
) -> None:
    # trainer/ppo/ray_trainer.py, _create_dataloader (drop_last=True) and fit (a loop over total_epochs)
    algorithm = made(tmp_path, "ppo_trainer", [*rows(tmp_path, 10, 4), *words]).config["algorithm"]
    assert (algorithm["steps"], algorithm.get("epochs")) == (steps, None)


def test_without_the_rows_the_length_is_said_to_be_approximate(tmp_path: Path) -> None:
    result = made(tmp_path, "ppo_trainer", ["trainer.total_epochs=3"])
    assert result.config["algorithm"]["epochs"] == 3
    # prompts that are filtered out cannot be counted without the tokenizer
    words = ["data.filter_overlong_prompts=true", "trainer.total_training_steps=50"]
    limited = made(tmp_path, "ppo_trainer", [*rows(tmp_path, 10, 4), *words])
    assert limited.config["algorithm"]["steps"] == 50
    differences = {line.key: line.difference for line in (*result.mapped, *limited.mapped)}
    assert "no batch" in differences["trainer.total_epochs"]
    assert "also ends after 30 passes" in differences["trainer.total_training_steps"]


def test_files_with_fewer_rows_than_a_batch_are_refused(tmp_path: Path) -> None:
    # ray_trainer.py, _create_dataloader asserts that there is a batch
    with pytest.raises(VerlError, match="fewer rows than a batch"):
        made(tmp_path, "ppo_trainer", rows(tmp_path, 3, 4))


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["lr_warmup_steps=4"], [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
        # int(0.38 * 10) = 3 steps
        (["lr_warmup_steps_ratio=0.38"], [0.0, 1 / 3, 2 / 3, 1.0, 1.0, 1.0]),
        # int(0.05 * 10) = 0 steps
        (["lr_warmup_steps_ratio=0.05"], [1.0] * 6),
        ([], [1.0] * 6),
    ],
)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_constant_rate_warms_up_from_zero(tmp_path: Path, role: str, words: list[str], rates: list[float]) -> None:
    # utils/torch_functional.py, get_constant_schedule_with_warmup: step k of W has k / W of the rate
    group = f"{A}optim." if role == "actor" else "critic.optim."
    words = [*CRITIC, "trainer.total_training_steps=10", f"{group}lr=0.5", *(group + word for word in words)]
    config = PPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    optimizer = config.optimizer if role == "actor" else config.value_model.optimizer_over(config.optimizer)
    schedule = schedule_of(optimizer)
    assert [schedule.at(step, 10) for step in range(6)] == pytest.approx([0.5 * rate for rate in rates])


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        # the actor is trained in the last of 50 steps, and never
        (["trainer.critic_warmup=50"], None),
        (["trainer.critic_warmup=51"], "critic_warmup = 51: the run ends after 50 steps.*never train the actor"),
        (["trainer.critic_warmup=5", "data.train_max_samples=1"], "critic_warmup = 5: the run ends after 0 steps"),
        (["trainer.critic_warmup=5", "data.train_batch_size=0"], "critic_warmup = 5: data.train_batch_size is 0; give"),
        # a null is refused at its own key, and no other key is blamed
        (["trainer.total_epochs=null", "trainer.total_training_steps=9"], "1 key .*total_epochs = None: .*a number"),
        ([f"{A}optim.lr_warmup_steps_ratio=null"], "1 key .*lr_warmup_steps_ratio = None: .*needs a number"),
    ],
)
def test_lengths_that_no_run_can_have(tmp_path: Path, words: list[str], refusal: str | None) -> None:
    words = [*CRITIC, *rows(tmp_path, 100, 2), "trainer.total_epochs=1", *words]
    if refusal is None:
        config = made(tmp_path, "ppo_trainer", words).config
        assert value_only_steps(config["credit"]["value_only_fraction"], 50) == 49
        return
    with pytest.raises(VerlError, match=f"(?s){refusal}"):
        made(tmp_path, "ppo_trainer", words)


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ([], "constant_with_warmup"),
        (["optim.warmup_steps_ratio=0"], "constant"),
        (["optim.warmup_steps_ratio=0", "optim.lr_warmup_steps_ratio=0.1"], "constant_with_warmup"),
        (["optim.warmup_steps_ratio=0.2", "optim.lr_warmup_steps_ratio=0"], "constant"),
    ],
)
def test_the_older_ratio_counts_if_the_new_one_is_not_given(tmp_path: Path, words: list[str], schedule: str) -> None:
    # both ratios are 0.1 by default
    words = ["optim.lr_scheduler=constant", *words]
    assert made(tmp_path, "sft_trainer", words).config["optimizer"]["schedule"] == schedule


def test_the_actor_is_trained_from_the_step_of_that_number_on(tmp_path: Path) -> None:
    # ray_trainer.py, fit: steps count from 1, and the actor is trained once critic_warmup <= global_steps
    words = [*CRITIC, "trainer.critic_warmup=10"]
    with pytest.raises(VerlError, match="trainer.critic_warmup = 10: .*total_training_steps"):
        made(tmp_path, "ppo_trainer", words)
    for steps in (40, 300):
        config = made(tmp_path, "ppo_trainer", [*words, f"trainer.total_training_steps={steps}"]).config
        assert value_only_steps(config["credit"]["value_only_fraction"], steps) == 9


# -- engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([R + "tensor_model_parallel_size=2"], {"tensor_parallel": 2, "replicas": 4}),
        ([R + "tensor_model_parallel_size=1"], {"tensor_parallel": 1, "replicas": 8, "placement": "colocated"}),
        ([R + "tensor_model_parallel_size=4", "trainer.nnodes=2"], {"tensor_parallel": 4, "replicas": 4}),
    ],
)
def test_all_gpus_sample(tmp_path: Path, words: list[str], expected: dict[str, Any]) -> None:
    # experimental/agent_loop/agent_loop.py, AgentLoopManager: as many servers as the GPUs of all nodes hold
    sampler = made(tmp_path, "ppo_trainer", words).config["engine"]["sampler"]
    assert {name: sampler[name] for name in expected} == expected


# -- rows ------------------------------------------------------------------------------------------------------


def test_rows_in_the_order_of_the_file_end_with_the_last_whole_batch(tmp_path: Path) -> None:
    # trainer/main_ppo.py, create_rl_sampler: a SequentialSampler if data.shuffle is false
    words = [*rows(tmp_path, 10, 4), "data.shuffle=false", "trainer.total_epochs=3"]
    config = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    assert (config.data.train.order, config.data.train.limit) == ("file", 8)  # type: ignore[union-attr]
    assert config.algorithm.steps == 6


@pytest.mark.parametrize(("model_type", "has_images"), [("smolvlm", True), ("llama", False)])
def test_images_belong_to_the_prompts_of_a_model_that_takes_them(
    tmp_path: Path, model_type: str, has_images: bool
) -> None:
    # utils/dataset/rl_dataset.py, _build_messages: each <image> stands for the next image of the row
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    row = {
        "prompt": [{"role": "user", "content": "<image>What is <image>?"}],
        "pictures": [{"bytes": b"\x89PNG1", "path": None}, {"bytes": b"\xff\xd82", "path": None}],
    }
    pq.write_table(pa.Table.from_pylist([row, {"prompt": row["prompt"], "pictures": []}]), tmp_path / "rows.parquet")
    words = [f"data.train_files={tmp_path / 'rows.parquet'}", f"actor_rollout_ref.model.path={tmp_path}"]
    words += ["data.image_key=pictures", "data.train_batch_size=2", A + "ppo_mini_batch_size=2"]
    source = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config).data.train
    assert source.kind == ("python" if has_images else "file")
    if isinstance(source, PythonDataset):
        first, second = image_rows(**source.arguments)  # type: ignore[arg-type]
        urls = ("data:image/png;base64,iVBORzE=", "data:image/jpeg;base64,/9gy")
        png, jpeg = ({"type": "image", "url": url} for url in urls)
        texts = [{"type": "text", "text": text} for text in ("What is ", "?")]
        assert first["prompt"] == [{"role": "user", "content": [png, texts[0], jpeg, texts[1]]}]
        assert second["prompt"] == row["prompt"]


def test_fields_of_a_column_are_found_by_the_names_that_lead_to_them(tmp_path: Path) -> None:
    # January: utils/dataset/sft_dataset.py, SFTDataset reads column[prompt_key][name] for each name of prompt_dict_keys
    words = ["data.prompt_key=extra", "data.prompt_dict_keys=[inner, question]"]
    columns = made(tmp_path, "sft_trainer", words).config["data"]["train"]["columns"]
    assert columns["prompt"] == "extra.inner.question"
    row = {"extra": {"inner": {"question": "q"}, "other": 1}, "answer": "a"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("rows.parquet", "rows.jsonl"):
        named = {"prompt": "extra.inner.question", "completion": "answer"}
        (thread,) = read_threads(FileDataset(path=str(tmp_path / name), columns=named), kind="completion")
        assert [turn.text for turn in thread.turns] == ["q", "a"]


@pytest.mark.parametrize("gpus", [1, 8])
def test_an_adapter_is_trained_on_the_ranks(tmp_path: Path, gpus: int) -> None:
    # workers/fsdp_workers.py, _build_model_optimizer: lora_rank above 0 wraps the model of every FSDP worker by peft
    words = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=32"]
    words.append(f"trainer.n_gpus_per_node={gpus}")
    config = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    assert isinstance(config.engine, LocalEngineSpec)
    assert isinstance(config.engine.trainer, DeepSpeedSpec)
    assert config.engine.trainer.ranks == gpus
    adapter = config.model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (8, 32, "all-linear")
