"""Tests that each mapped key of verl changes the config at the path that the table states."""

from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.losses.policy_gradient import TokenRatioMask
from flows.configs.common import GRPOConfig, SFTConfig
from flows.configs.ppo import PPOConfig
from flows.verl.keys import Mapped, key_tables
from flows.verl.read import VerlError
from tasks.datasets.spec import FileDataset
from tests.fixtures.verl_values import CRITIC, KINDS, KL_IN_REWARD, REWARD_MODELS, A, R, at, made

SAME_RESULT = {
    A + "strategy", "model.strategy", "engine.strategy", "trainer.device", A + "policy_loss.loss_mode", "model_engine",
}  # fmt: skip
ELSEWHERE = {*SAME_RESULT, "data.image_key", *chain.from_iterable(REWARD_MODELS)}
"""Keys whose effect has a test of its own."""


CASES: list[tuple[str, str, Mapped]] = []
for kind_of_trainer, table_of_kind in key_tables().items():
    CASES += [(kind_of_trainer, key, entry) for key, entry in table_of_kind.mapped.items() if entry.to]
HERE = [case for case in CASES if case[1] not in ELSEWHERE]


@pytest.mark.parametrize(("kind", "key", "entry"), HERE, ids=[f"{kind}-{key}" for kind, key, _ in HERE])
def test_a_mapped_key_has_an_effect_in_its_path(tmp_path: Path, kind: str, key: str, entry: Mapped) -> None:
    value, needed = KINDS[kind][0][key]
    before, after = made(tmp_path, kind, needed), made(tmp_path, kind, [*needed, f"{key}={value}"])
    changed = [path for path in entry.to if at(before.config, path) != at(after.config, path)]
    assert changed, f"{key}={value} changes none of {entry.to}"
    for line in after.mapped:
        if line.key == key:
            assert line.given
            assert all(at(after.config, path) == became for path, became in line.paths.items())


@pytest.mark.parametrize(
    ("key", "value", "path", "ours"),
    [
        (A + "strategy", "fsdp2", "engine.trainer.kind", "deepspeed"),
        (A + "strategy", "megatron", "engine.trainer.kind", "deepspeed"),
        ("model_engine", "dp", "engine.trainer.kind", "deepspeed"),
        ("model_engine", "veomni", "engine.trainer.kind", "deepspeed"),
        ("model_engine", "veomni", "optimizer.schedule", "cosine"),
        ("model_engine", "megatron", "engine.trainer.kind", "deepspeed"),
        (R + "name", "sglang", "engine.sampler.kind", "vllm"),
        ("trainer.device", "npu", "engine.device", "cuda"),
        ("data.shuffle", "false", "data.train.order", "file"),
        ("trainer.device", "cpu", "engine.device", "cpu"),
        ("trainer.device", "cuda", "engine.device", "cuda"),
        ("data.train_batch_size", "500", "algorithm.samples_per_batch", 4000),
        (A + "ppo_mini_batch_size", "25", "algorithm.samples_per_mini_batch", 200),
        (A + "ppo_micro_batch_size_per_gpu", "3", "engine.max_tokens_per_forward", 3 * (512 + 512)),
        (R + "top_k", "-1", "sampling.top_k", 0),
        (A + "use_kl_loss", "false", "algorithm.kl_beta", 0.0),
        (A + "use_kl_loss", "true", "algorithm.kl_beta", 0.001),
        (A + "policy_loss.loss_mode", "cispo", "regularisation.policy_loss", "cispo"),
        (A + "policy_loss.loss_mode", "vanilla", "regularisation.policy_loss", "clip"),
        (A + "policy_loss.loss_mode", "geo_mean", "algorithm.loss_norm", "sequence_mean"),
        (A + "policy_loss.loss_mode", "sapo", "algorithm.loss_norm", "sequence_mean"),
        (A + "entropy_coeff", "0.01", "regularisation.entropy_coef", 0.01),
        (A + "loss_agg_mode", "seq-mean-token-sum-norm", "algorithm.loss_norm", "constant"),
        (A + "loss_agg_mode", "seq-mean-token-sum-norm", "regularisation.norm_constant", 512),
        (A + "loss_agg_mode", "seq-mean-token-sum", "regularisation.norm_constant", 1),
        (A + "optim.betas", "[0.8, 0.95]", "optimizer.beta2", 0.95),
        (A + "optim.lr_scheduler_type", "cosine", "optimizer.warmup_ratio", 0.0),
        (A + "optim.lr_scheduler_type", "cosine", "optimizer.min_lr_ratio", 0.0),
        ("algorithm.adv_estimator", "reinforce_plus_plus", "algorithm.advantage_estimator", "reinforce_plus_plus"),
        ("algorithm.adv_estimator", "grpo_passk", "algorithm.advantage_estimator", "pass_at_k"),
        ("algorithm.adv_estimator", "grpo_passk", "algorithm.pass_k", 8),
        ("algorithm.adv_estimator", "gdpo", "algorithm.advantage_estimator", "gdpo"),
        (A + "policy_loss.loss_mode", "clip_cov", "regularisation.policy_loss", "clip_cov"),
        (A + "policy_loss.loss_mode", "kl_cov", "regularisation.covariance", {"fraction": 2e-4, "kl": 0.1}),
        ("algorithm.use_kl_in_reward", "true", "algorithm.kl_beta", 0.001),
        ("algorithm.use_kl_in_reward", "true", "algorithm.kl_estimator", "k1"),
        ("algorithm.use_kl_in_reward", "true", "regularisation.kl_in", "reward"),
        ("algorithm.rollout_correction.rollout_is", "token", "regularisation.importance_cap", 2.0),
        ("algorithm.rollout_correction.bypass_mode", "true", "algorithm.old_logprobs", "sampler"),
        ("algorithm.filter_groups.enable", "true", "rules.dynamic_sampling", True),
        (A + "fsdp_config.reshard_after_forward", "true", "engine.trainer.zero_stage", 3),
        (A + "fsdp_config.reshard_after_forward", "false", "engine.trainer.zero_stage", 2),
        (A + "clip_ratio", "0.25", "algorithm.clip_range", 0.25),
        ("algorithm.norm_adv_by_std_in_grpo", "true", "algorithm.advantage_estimator", "group_sample_std"),
        ("algorithm.norm_adv_by_std_in_grpo", "false", "algorithm.advantage_estimator", "centred"),
        ("algorithm.adv_estimator", "rloo", "algorithm.advantage_estimator", "leave_one_out"),
        ("trainer.experiment_name", "Qwen 7B/run", "run", "qwen-7b-run"),
        ("trainer.logger", "[console, swanlab]", "logging.loggers", ["swanlab"]),
        ("trainer.logger", "[console]", "logging", None),
        ("trainer.logger", "wandb", "logging.loggers", ["wandb"]),
        ("trainer.save_freq", "-1", "checkpoints", {"frequency": None}),
        ("trainer.save_freq", "5", "checkpoints", {"frequency": None, "every_steps": 5}),
    ],
)
def test_values_of_verl_become_ours(tmp_path: Path, key: str, value: str, path: str, ours: Any) -> None:
    result = made(tmp_path, "ppo_trainer", [R + "n=8", f"{key}={value}"])
    assert at(result.config, path) == ours


@pytest.mark.parametrize(("enable", "path"), REWARD_MODELS)
def test_a_reward_model_grades(tmp_path: Path, enable: str, path: str) -> None:
    grader = made(tmp_path, "ppo_trainer", [f"{enable}=true", f"{path}=models/rm"]).config["grader"]
    assert grader["path"] == "tasks.graders.reward_model:RewardModelGrader"
    assert grader["arguments"] == {"grader_key": "reward_model", "model": "models/rm"}
    with pytest.raises(VerlError, match=f"{enable} = True"):
        made(tmp_path, "ppo_trainer", [f"{enable}=true"])
    with pytest.raises(VerlError, match="custom_reward_function.path is not given"):
        made(tmp_path, "ppo_trainer", [f"{path}=models/rm"])
    with pytest.raises(VerlError, match="a reward function and a reward model cannot be combined"):
        made(tmp_path, "ppo_trainer", [f"{enable}=true", f"{path}=models/rm", "custom_reward_function.path=r.py"])


@pytest.mark.parametrize("kind", ["ppo_trainer", "sft_trainer", "sft_trainer_engine"])
def test_several_files_are_read_one_after_the_other(tmp_path: Path, kind: str) -> None:
    words = ["data.train_files=[b.parquet, a.parquet, '~/c.parquet']", "data.val_files=[v.parquet, w.parquet]"]
    data = made(tmp_path, kind, words).config["data"]
    train, heldout = (FileDataset.model_validate(data[name]) for name in ("train", "heldout"))
    assert train.paths == ("b.parquet", "a.parquet", str(Path("~/c.parquet").expanduser()))
    assert heldout.paths == ("v.parquet", "w.parquet")
    assert "further_paths" not in made(tmp_path, kind, ["data.train_files=[a.parquet]"]).config["data"]["train"]


def test_stored_answers_of_several_files_are_one_dataset(tmp_path: Path) -> None:
    (answers,) = made(tmp_path, "evaluation", ["data.path=[a.parquet, b.parquet]"]).config["answers"]
    assert FileDataset.model_validate(answers["source"]).paths == ("a.parquet", "b.parquet")


def test_extra_info_is_kept_where_each_file_has_it(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "q"}], "data_source": "s", "reward_model": {"ground_truth": "1"}}
    for name, more in (("a", {"extra_info": {"index": 1}}), ("b", {"extra_info": {"index": 2}}), ("c", {})):
        pq.write_table(pa.Table.from_pylist([row | more]), tmp_path / f"{name}.parquet")

    def kept(*names: str) -> list[str]:
        files = ", ".join(str(tmp_path / f"{name}.parquet") for name in names)
        words = [f"data.train_files=[{files}]", "data.train_batch_size=1", f"{A}ppo_mini_batch_size=1"]
        data = made(tmp_path, "ppo_trainer", words).config["data"]
        return data["train"]["metadata_columns"]

    assert kept("a", "b") == ["data_source", "reward_model", "extra_info"]
    assert kept("a", "c") == kept("c", "a") == ["data_source", "reward_model"]


@pytest.mark.parametrize(
    ("kind", "words", "ours"),
    [
        ("sft_trainer", [], (1024, "error")),
        ("sft_trainer", ["data.max_length=64", "data.truncation=left"], (64, "left")),
        ("sft_trainer_engine", ["data.max_length=64", "data.pad_mode=right"], (64, "error")),
        # verl cuts rows that it does not pad at their ends, whatever else it is told
        ("sft_trainer_engine", ["data.max_length=64"], (64, "right")),
        ("sft_trainer_engine", ["data.truncation=left"], (1024, "right")),
    ],
)
def test_conversations_are_as_long_as_in_verl(
    tmp_path: Path, kind: str, words: list[str], ours: tuple[int, str]
) -> None:
    algorithm = SFTConfig.model_validate(made(tmp_path, kind, words).config).algorithm
    assert (algorithm.max_tokens, algorithm.truncation) == ours
    with pytest.raises(VerlError, match=r"data\.truncation = 'middle'"):
        made(tmp_path, kind, ["data.truncation=middle", *(["data.pad_mode=right"] if "engine" in kind else [])])


def test_gpus_that_share_a_sequence_share_the_pack(tmp_path: Path) -> None:
    words = [A + "use_dynamic_bsz=true", A + "ppo_max_token_len_per_gpu=9000", A + "ulysses_sequence_parallel_size=2"]
    assert made(tmp_path, "ppo_trainer", words).config["engine"]["max_tokens_per_forward"] == 18000


def test_checkpoints_that_verl_rotates_are_recovery_checkpoints(tmp_path: Path) -> None:
    result = made(tmp_path, "ppo_trainer", ["trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=3"])
    assert result.config["checkpoints"] == {"frequency": None, "recovery_steps": 10, "keep_last": 3}


def test_groups_are_drawn_again_as_often_as_verl_draws_them(tmp_path: Path) -> None:
    words = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=10"]
    rules = made(tmp_path, "ppo_trainer", words).config["rules"]
    assert rules == {"dynamic_sampling": True, "max_refill_rounds": 9, "refill_end": "fail"}


CORRECTION = "algorithm.rollout_correction."


def test_a_bypassed_trainer_needs_no_importance_weights(tmp_path: Path) -> None:
    """verl's ratio is then against the sampler's probability, and its loss adds no weights to it; ours likewise."""
    words = [CORRECTION + "bypass_mode=true", CORRECTION + "rollout_is=token", CORRECTION + "rollout_is_threshold=3.0"]
    result = made(tmp_path, "ppo_trainer", words)
    config = GRPOConfig.model_validate(result.config)
    assert (config.algorithm.old_logprobs, config.regularisation.importance_cap) == ("sampler", None)
    unread = set(chain.from_iterable(result.unread.values()))
    assert {CORRECTION + "rollout_is", CORRECTION + "rollout_is_threshold"} <= unread
    weighted = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words[1:]).config)
    assert (weighted.algorithm.old_logprobs, weighted.regularisation.importance_cap) == ("trainer", 3.0)


def test_importance_weights_with_two_limits_are_a_mask(tmp_path: Path) -> None:
    """verl sets weights outside the limits to 0 (August 2026, trainer/ppo/rollout_corr_helper.py)."""
    words = [CORRECTION + "rollout_is=token", CORRECTION + "rollout_is_threshold=0.5_4.0"]
    result = made(tmp_path, "ppo_trainer", words)
    regularisation = GRPOConfig.model_validate(result.config).regularisation
    assert (regularisation.importance_cap, regularisation.importance_mask) == (None, TokenRatioMask(low=0.5, high=4.0))
    assert CORRECTION + "rollout_is_threshold" not in {line.key for line in result.approximate}
    for threshold, message in (("high", "expected a number, or two as in '0.5_4.0'"), ("1.5_4.0", "expected 1 betw")):
        with pytest.raises(VerlError, match=message):
            made(tmp_path, "ppo_trainer", [words[0], CORRECTION + f"rollout_is_threshold={threshold}"])


@pytest.mark.parametrize("several", ["ppo_mini_batch_size=2", "ppo_epochs=2"])
def test_replayed_routes_are_the_same_only_in_the_first_update_of_a_step(tmp_path: Path, several: str) -> None:
    replay = A + "router_replay.mode="
    words = ["data.train_batch_size=4", A + "ppo_mini_batch_size=4"]
    result = made(tmp_path, "ppo_trainer", [*words, replay + "R2"])
    assert A + "router_replay.mode" in {line.key for line in result.approximate}
    later = [*words, replay + "R2", A + several]
    bypassed = [*words, replay + "R2", CORRECTION + "bypass_mode=true"]
    for refused in ([*words, replay + "R3"], later, bypassed):
        with pytest.raises(VerlError, match=r"router_replay\.mode = 'R[23]': mixture-of-experts: routing is neither"):
            made(tmp_path, "ppo_trainer", refused)


def test_the_speculation_of_heads_that_do_not_sample_is_not_read(tmp_path: Path) -> None:
    heads = "actor_rollout_ref.model.mtp."
    result = made(tmp_path, "ppo_trainer", [heads + "speculative_num_steps=5"])
    assert heads + "speculative_num_steps" in chain.from_iterable(result.unread.values())
    with pytest.raises(VerlError, match="speculative_num_steps = 5: multi-token-prediction heads"):
        words = [heads + "enable=true", heads + "enable_rollout=true"]
        made(tmp_path, "ppo_trainer", [*words, heads + "speculative_num_steps=5"])


@pytest.mark.parametrize("mode", ["gspo", "cispo"])
def test_a_bypass_does_not_silently_replace_the_loss(tmp_path: Path, mode: str) -> None:
    with pytest.raises(VerlError, match=f"loss_mode = '{mode}': verl's bypass_mode replaces it"):
        made(tmp_path, "ppo_trainer", [CORRECTION + "bypass_mode=true", f"{A}policy_loss.loss_mode={mode}"])


def test_the_kl_term_stands_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match=r"use_kl_in_reward = True: .*not in both"):
        made(tmp_path, "ppo_trainer", [*KL_IN_REWARD, A + "use_kl_loss=true"])


def test_a_critic_has_an_optimizer_of_its_own(tmp_path: Path) -> None:
    """Of verl's defaults too: what the actor is given is not the critic's."""
    options = ["lr_scheduler_type=cosine", "lr_warmup_steps=5", "weight_decay=0.2", "betas=[0.8, 0.95]"]
    words = [*(f"{A}optim.{word}" for word in options), f"{A}grad_clip=0.3", "trainer.total_training_steps=50"]
    result = made(tmp_path, "ppo_trainer", [*CRITIC, *words])
    config = PPOConfig.model_validate(result.config)
    of_value = config.value_model.optimizer_over(config.optimizer)
    assert (of_value.schedule, of_value.warmup_steps, of_value.warmup_ratio) == ("constant", None, None)
    assert (of_value.weight_decay, of_value.beta1, of_value.beta2) == (0.01, 0.9, 0.999)
    assert (config.optimizer.schedule, config.optimizer.weight_decay) == ("cosine", 0.2)

    words = [*(f"critic.optim.{word}" for word in (*options, "min_lr_ratio=0.3")), "critic.grad_clip=0.3", words[-1]]
    config = PPOConfig.model_validate(made(tmp_path, "ppo_trainer", [*CRITIC, *words]).config)
    of_value = config.value_model.optimizer_over(config.optimizer)
    assert (of_value.schedule, of_value.min_lr_ratio, of_value.warmup_steps, of_value.lr) == ("cosine", 0.3, 5, 1e-5)
    assert (of_value.weight_decay, of_value.beta1, of_value.beta2) == (0.2, 0.8, 0.95)
    assert (config.optimizer.schedule, config.optimizer.weight_decay, config.optimizer.lr) == ("constant", 0.01, 1e-6)


KIND_OF_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@pytest.mark.parametrize(("verls", "ours"), KIND_OF_KL.items())
def test_kl_estimators_by_verls_names(tmp_path: Path, verls: str, ours: str) -> None:
    result = made(tmp_path, "ppo_trainer", [A + "use_kl_loss=true", f"{A}kl_loss_type={verls}"])
    assert result.config["algorithm"]["kl_estimator"] == ours


WITHOUT_COUNTERPART = [
    ("algorithm.rollout_correction.rollout_is", "sequence", "per token"),
    ("algorithm.rollout_correction.rollout_rs", "token_k1", "regularisation.importance_mask"),
    ("data.truncation", "middle", "middle"),
    ("data.train_files", "hdfs://cluster/x.parquet", "HDFS"),
    ("data.train_files", "[a.parquet, 3]", "expected a path, not int"),
    (A + "policy_loss.loss_mode", "dppo_tv", "dppo_tv"),
    ("data.apply_chat_template_kwargs.reasoning_effort", "high", "chat template"),
    (A + "optim.lr_scheduler_type", "polynomial", "polynomial"),
    (A + "fsdp_config.dtype", "float16", "float16"),
    ("algorithm.adv_estimator", "remax", "remax"),
    (A + "strategy", "torchtitan", "torchtitan"),
    (A + "optim.lr_warmup_init", "1e-7", "0"),
    (R + "name", "tgi", "tgi"),
    ("trainer.device", "tpu", "tpu"),
]


@pytest.mark.parametrize(("key", "value", "word"), WITHOUT_COUNTERPART)
def test_a_value_without_a_counterpart_is_refused_by_key(tmp_path: Path, key: str, value: str, word: str) -> None:
    with pytest.raises(VerlError) as caught:
        made(tmp_path, "ppo_trainer", [f"{key}={value}"])
    assert key in str(caught.value)
    assert word in str(caught.value)


def test_the_kl_over_the_whole_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match=r"kl_loss_type = 'full'.*vocabulary"):
        made(tmp_path, "ppo_trainer", [A + "use_kl_loss=true", A + "kl_loss_type=full"])


def test_a_dataset_class_makes_both_datasets(tmp_path: Path) -> None:
    words = ["data.custom_cls.path=rows.py", "data.custom_cls.name=Rows", "data.val_files=val.parquet"]
    data = made(tmp_path, "ppo_trainer", words).config["data"]
    for part, file in (("train", "train.parquet"), ("heldout", "val.parquet")):
        assert (data[part]["kind"], data[part]["path"]) == ("python", "tasks.datasets.verl:rows")
        expected = {"path": "rows.py", "name": "Rows", "files": [file], "prompt_key": "prompt", "tokenizer": "models/m"}
        assert data[part]["arguments"] == expected
