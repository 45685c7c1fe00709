"""Tests of the import of whole verl configs: the flow, the config, the refused keys, and the output of the command."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.import_verl import as_yaml, report
from flows.cli.main import app
from flows.configs.common import GRPOConfig, SFTConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import ConfigError, load_config, parse_config
from flows.configs.ppo import GSPOConfig, PPOConfig
from flows.verl.importer import import_verl, kind_of
from flows.verl.read import VerlError

DATA = Path(__file__).parents[2] / "data" / "verl"
ENGINE_FILES = "sft_trainer_engine_options.yaml"
LEAST = {
    "data": {"train_files": "train.parquet"},
    "actor_rollout_ref": {"model": {"path": "models/m"}},
    "algorithm": {"adv_estimator": "grpo"},
    "custom_reward_function": {"path": "r.py"},
}


def write(tmp_path: Path, body: dict[str, Any]) -> Path:
    path = tmp_path / "verl.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


def with_keys(**flat: Any) -> dict[str, Any]:
    """The least config with further keys, whose dots are written __."""
    body: dict[str, Any] = json.loads(json.dumps(LEAST))
    for name, value in flat.items():
        *groups, last = name.split("__")
        group_of_key = body
        for group in groups:
            group_of_key = group_of_key.setdefault(group, {})
        group_of_key[last] = value
    return body


def imported(tmp_path: Path, model: type[Any], path: Path, **options: Any) -> Any:
    """The config that `ostinato run` would read from what the import writes."""
    result = import_verl(path, **options)
    ours = tmp_path / "ours.yaml"
    ours.write_text(as_yaml(result, path.name), encoding="utf-8")
    return parse_config(model, ours)


# -- the samples -----------------------------------------------------------------------------------------------


def test_a_grpo_config(tmp_path: Path) -> None:
    config = imported(tmp_path, GRPOConfig, DATA / "grpo.yaml")
    # Model and data.
    assert config.run == "qwen2.5_7b_function_rm"
    assert config.model.key == "models/qwen2.5-7b-instruct"
    assert config.data.train.path == "data/gsm8k/train.parquet"
    assert config.data.train.columns == {"prompt": "prompt"}
    assert config.data.train.metadata_columns == ("data_source", "reward_model")
    assert config.data.heldout.path == "data/gsm8k/test.parquet"
    assert (config.data.max_prompt_tokens, config.data.truncation) == (512, "drop")
    assert (config.sampling.max_new_tokens, config.sampling.temperature) == (1024, 1.0)
    # Algorithm and optimizer.
    algorithm = config.algorithm
    assert algorithm.completions_per_sample == 8
    assert algorithm.samples_per_batch == 1024 * 8
    assert algorithm.samples_per_mini_batch == 256 * 8
    assert (algorithm.epochs, algorithm.steps) == (15, None)
    assert (algorithm.clip_range, algorithm.clip_range_high, algorithm.dual_clip) == (0.2, 0.2, 3.0)
    assert (algorithm.kl_beta, algorithm.kl_estimator) == (0.001, "k3")
    assert (algorithm.loss_norm, algorithm.advantage_estimator) == ("token_mean", "group_sample_std")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-6, 0.01)
    assert (config.optimizer.schedule, config.optimizer.max_grad_norm) == ("constant", 1.0)
    # Engine, checkpoints and grader.
    assert (config.engine.trainer.kind, config.engine.trainer.ranks, config.engine.trainer.zero_stage) == (
        "deepspeed", 8, 3,
    )  # fmt: skip
    assert config.engine.trainer.activation_checkpointing == "recompute"
    assert config.engine.max_tokens_per_forward == 16 * (512 + 1024)
    sampler = config.engine.sampler
    assert (sampler.kind, sampler.tensor_parallel, sampler.gpu_share) == ("vllm", 2, 0.6)
    assert (config.checkpoints.every_steps, config.checkpoints.frequency) == (20, None)
    assert config.grader.path == "tasks.graders.verl:VerlReward"
    assert config.grader.arguments == {"path": "rewards/gsm8k.py"}


def test_the_gpus_of_several_nodes_are_ranks_on_a_ray_cluster(tmp_path: Path) -> None:
    words = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    config = imported(tmp_path, GRPOConfig, DATA / "grpo.yaml", overrides=words)
    assert (config.engine.trainer.ranks, config.engine.cluster.address) == (8, "auto")
    one_node = imported(tmp_path, GRPOConfig, DATA / "grpo.yaml")
    assert (one_node.engine.trainer.ranks, one_node.engine.cluster.address) == (8, None)


def test_a_gspo_config_is_the_grpo_one_with_its_loss_mode(tmp_path: Path) -> None:
    words = ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor_rollout_ref.actor.clip_ratio_low=3e-4"]
    config = imported(tmp_path, GSPOConfig, DATA / "grpo.yaml", overrides=words)
    assert config.algorithm.clip_range == 3e-4
    assert config.algorithm.dual_clip is None
    assert config.algorithm.loss_norm == "sequence_mean"


def test_a_ppo_config(tmp_path: Path) -> None:
    config = imported(tmp_path, PPOConfig, DATA / "ppo.yaml")
    assert (config.model.key, config.value_model.key) == ("models/deepseek-7b-chat", "models/deepseek-7b-chat")
    assert (config.optimizer.lr, config.value_model.lr) == (1e-6, 1e-5)
    credit = config.credit
    assert (credit.gae_gamma, credit.gae_lambda) == (1.0, 1.0)
    assert (credit.value_clip, credit.value_only_fraction) == (0.5, 0.0)
    assert (credit.returns, credit.whiten_advantages) == ("advantages", True)
    assert (config.algorithm.completions_per_sample, config.algorithm.samples_per_batch) == (1, 1024)
    assert config.algorithm.advantage_estimator == "gae"
    assert (config.algorithm.clip_range, config.algorithm.kl_beta) == (0.2, 0.0)


@pytest.mark.parametrize(
    ("words", "place", "beta"),
    [
        (["actor_rollout_ref.actor.use_kl_loss=true"], "loss", 0.001),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.02"], "reward", 0.02),
    ],
)
def test_the_kl_term_of_ppo_stands_where_verl_puts_it(
    tmp_path: Path, words: list[str], place: str, beta: float
) -> None:
    config = imported(tmp_path, PPOConfig, DATA / "ppo.yaml", overrides=words)
    assert (config.regularisation.kl_in, config.algorithm.kl_beta) == (place, beta)


def test_an_sft_config(tmp_path: Path) -> None:
    config = imported(tmp_path, SFTConfig, DATA / "sft.yaml")
    assert config.model.adapter.rank == 32
    assert config.model.adapter.alpha == 16
    assert config.data.train.columns == {"prompt": "question", "completion": "answer"}
    assert (config.algorithm.samples_per_batch, config.algorithm.epochs) == (256, 2)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-4, 0.01)
    assert config.optimizer.schedule == "cosine"
    assert config.engine.trainer.sequence_parallel == 2
    assert config.engine.max_tokens_per_forward == 4 * 1024


def test_an_evaluation_config(tmp_path: Path) -> None:
    config = imported(tmp_path, EvaluationFlowConfig, DATA / "evaluation.yaml")
    (answers,) = config.answers
    assert (answers.column, answers.source.path) == ("responses", "data/math.parquet")
    assert answers.source.columns == {"prompt": "prompt"}
    assert config.models == () and config.suite.datasets == ()
    assert config.suite.graders[0].arguments["path"] == "rewards/maths.py"


def test_all_defaults_of_verl_written_out_say_what_leaving_them_out_says(tmp_path: Path) -> None:
    flat = load_config(DATA / "keys" / "ppo_trainer.yaml")
    words = [f"{name}={json.dumps(value)}" for name, value in flat.items()]
    placeholders = ("data.train_files=", "data.val_files=", "trainer.experiment_name=", "trainer.default_local_dir=")
    placeholders += ("actor_rollout_ref.model.path=", "algorithm.adv_estimator=", "custom_reward_function.path=")
    written = [word for word in words if not word.startswith(placeholders)]
    least = write(tmp_path, LEAST)
    config = import_verl(least, overrides=written).config
    assert config.pop("logging")["loggers"] == ["wandb"]  # only who writes a service down has it
    assert config == import_verl(least).config


@pytest.mark.parametrize(
    "name", ["page_ppo_trainer", "ppo_trainer_2026_01", "dapo", "ppo_trainer_megatron", "examples"]
)
def test_defaults_of_other_versions_written_out_are_not_refused(tmp_path: Path, name: str) -> None:
    words = [f"{key}={json.dumps(value)}" for key, value in load_config(DATA / "keys" / f"{name}.yaml").items()]
    needed = ("data.train_files=", "actor_rollout_ref.model.path=", "algorithm.adv_estimator=")
    needed += ("custom_reward_function.path=",)
    result = import_verl(write(tmp_path, LEAST), overrides=[word for word in words if not word.startswith(needed)])
    assert result.flow == "grpo"
    assert result.refused == []


def test_a_ppo_config_without_its_critic_is_refused() -> None:
    with pytest.raises(VerlError, match=r"critic\.model\.path = None: it is required"):
        import_verl(DATA / "grpo.yaml", overrides=["algorithm.adv_estimator=gae"])


def test_the_engine_files_of_the_sft_trainer_written_out_are_not_refused(tmp_path: Path) -> None:
    words = [f"{key}={json.dumps(value)}" for key, value in load_config(DATA / "keys" / ENGINE_FILES).items()]
    words += ["optim.optimizer=adam", "optim.override_optimizer_config={}", "engine.strategy=megatron"]
    path = write(tmp_path, {"data": {"train_files": "a.parquet"}, "model": {"path": "m"}})
    assert import_verl(path, overrides=words, kind="sft_trainer_engine").refused == []


def page_words(name: str) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in load_config(DATA / "keys" / f"{name}.yaml").items()]


def test_the_page_of_2025_lacks_only_the_grader(tmp_path: Path) -> None:
    # its critic is verl's default, which is the folder that the page gives for the actor
    path = write(tmp_path, {"algorithm": {"adv_estimator": "gae"}})
    words = page_words("page_ppo_trainer")
    with pytest.raises(VerlError) as caught:
        import_verl(path, overrides=words)
    assert len(str(caught.value).splitlines()) == 1
    assert "--set grader.path=" in str(caught.value)
    result = import_verl(path, overrides=words, sets=["grader.path=tasks.graders.rules:LastNumber"])
    assert result.flow == "ppo"
    assert result.config["value_model"]["key"] == result.config["model"]["key"]


def test_an_evaluation_without_a_reward_says_what_a_suite_is(tmp_path: Path) -> None:
    path = write(tmp_path, {"data": {"path": "answers.parquet", "response_key": "responses"}})
    with pytest.raises(VerlError, match="has a suite: its graders.*datasets of prompts.*--set suite.graders="):
        import_verl(path)
    result = import_verl(path, sets=["suite.graders=[{path: tasks.graders.rules:LastNumber}]"])
    assert result.config["suite"]["graders"] == [{"path": "tasks.graders.rules:LastNumber"}]


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, {"algorithm": {"adv_estimator": "gae"}, "actor_rollout_ref": {"model": {"path": "m"}}})
    with pytest.raises(VerlError) as caught:
        import_verl(path)
    for words in ("data.train_files = None: it is required", "critic.model.path = None", "--set grader.path="):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor_rollout_ref__model__lora_rank": [[]]}, r"lora_rank: given \[\[\]\]; expected a number"),
        ({"trainer__nnodes": {"a": 1}}, "trainer.nnodes"),
        ({"actor_rollout_ref__model__lora_rank": "a"}, "wrong type .* they are read unless lora_rank is 0"),
        ({"trainer__nnodes": float("nan")}, "nnodes: given nan; expected a number"),
        ({"custom_reward_function__path": "r" * 5000}, "custom_reward_function.path = .* cannot be converted"),
        ({"trainer__nnodes": 1e308, "trainer__n_gpus_per_node": 1e308}, "expected whole numbers"),
    ],
)
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VerlError, match=message):
        import_verl(write(tmp_path, with_keys(**changes)))


def test_a_default_whose_name_no_file_can_have_is_absent(tmp_path: Path) -> None:
    result = import_verl(write(tmp_path, with_keys(defaults=["a" * 300])))
    assert "a" * 300 in result.absent


def test_keys_of_a_critic_count_only_where_there_is_one(tmp_path: Path) -> None:
    result = import_verl(write(tmp_path, with_keys(critic__optim__lr=1e-5, critic__model__trust_remote_code=True)))
    unread = chain.from_iterable(result.unread.values())
    assert [key for key in unread if key.startswith("critic.")] == [
        "critic.optim.lr", "critic.model.trust_remote_code",
    ]  # fmt: skip


# -- which kind ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"algorithm.adv_estimator": "grpo"}, "ppo_trainer"),
        ({"model.partial_pretrain": "m", "data.train_files": "f"}, "sft_trainer"),
        ({"model.path": "m", "data.messages_key": "f"}, "sft_trainer_engine"),
        ({"data.path": "f", "data.response_key": "f"}, "evaluation"),
    ],
)
def test_the_kind_is_the_one_that_knows_the_keys(given: dict[str, Any], kind: str) -> None:
    assert kind_of(given) == kind


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match=r"none of the 2 keys is one of verl's"):
        import_verl(write(tmp_path, {"learning_rate": 1, "epochs": 2}))
    with pytest.raises(VerlError, match=r"no kind 'dpo'.*ppo_trainer"):
        import_verl(write(tmp_path, LEAST), kind="dpo")


def test_the_report_begins_with_the_keys_that_are_approximate(tmp_path: Path) -> None:
    lines = report(import_verl(write(tmp_path, LEAST))).splitlines()
    assert lines[1].startswith("APPROXIMATE")
    assert "actor_rollout_ref.actor.loss_agg_mode" in lines[1]


# -- refusals --------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    path = write(tmp_path, with_keys(data__train_batchsize=8, actor_rollout_ref__rollout__zzz=1))
    with pytest.raises(VerlError) as caught:
        import_verl(path, force=True)
    message = str(caught.value)
    assert "2 keys are none of verl's ppo_trainer" in message
    assert "data.train_batchsize: unknown key; did you mean 'data.train_batch_size'?" in message
    assert "actor_rollout_ref.rollout.zzz: unknown key" in message


def test_a_value_in_the_place_of_a_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match=r"actor_rollout_ref\.actor\.optim: 3 was given for a group"):
        import_verl(write(tmp_path, with_keys(actor_rollout_ref__actor__optim=3)))


def test_an_empty_group_says_nothing(tmp_path: Path) -> None:
    result = import_verl(write(tmp_path, with_keys(critic=None, actor_rollout_ref__ref={})))
    assert result.config == import_verl(write(tmp_path, LEAST)).config


REFUSED_WHEN_ON = [
    ("actor_rollout_ref.model.external_lib", "my.models", None),
    ("actor_rollout_ref.model.mtp.enable", True, False),
    ("trainer.default_hdfs_dir", "hdfs://c/x", None),
    ("distillation.enabled", True, False),
    ("algorithm.use_pf_ppo", True, False),
    ("actor_rollout_ref.rollout.multi_turn.enable", True, False),
    ("actor_rollout_ref.actor.freeze_vision_tower", True, False),
]


@pytest.mark.parametrize(("key", "on", "off"), REFUSED_WHEN_ON)
def test_what_is_not_here_is_refused_only_where_it_is_on(tmp_path: Path, key: str, on: Any, off: Any) -> None:
    name = key.replace(".", "__")
    with pytest.raises(VerlError) as caught:
        import_verl(write(tmp_path, with_keys(**{name: on})))
    assert f"{key} = {on!r}: " in str(caught.value)
    result = import_verl(write(tmp_path, with_keys(**{name: off})))
    assert key in chain.from_iterable(result.off.values())
    forced = import_verl(write(tmp_path, with_keys(**{name: on})), force=True)
    assert [(found, value) for found, value, _ in forced.refused] == [(key, on)]
    assert forced.config == result.config


def test_megatron_is_another_layout_of_the_same_sums(tmp_path: Path) -> None:
    """Its layout is dropped, its own clip counts, and a setting of its transformer that changes numbers is refused."""
    group = "actor_rollout_ref__actor__"
    keys = {group + "megatron__tensor_model_parallel_size": 4}
    keys |= {group + "optim__clip_grad": 0.5, group + "grad_clip": 2.0}
    fsdp = import_verl(write(tmp_path, with_keys(**keys)))
    assert fsdp.config["optimizer"]["max_grad_norm"] == 2.0
    megatron = import_verl(write(tmp_path, with_keys(**keys, **{group + "strategy": "megatron"})))
    assert megatron.config["optimizer"]["max_grad_norm"] == 0.5
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size" in chain.from_iterable(
        megatron.dropped.values()
    )
    (line,) = [line for line in megatron.mapped if line.key == "actor_rollout_ref.actor.strategy"]
    assert "ZeRO 3" in line.difference
    transformer = group + "megatron__override_transformer_config__"
    for name, value, same in (("normalization", "LayerNorm", "RMSNorm"), ("attention_dropout", 0.1, 0.0)):
        changing = {group + "strategy": "megatron", transformer + name: value}
        with pytest.raises(VerlError, match=f"{name} = {value!r}: it changes Megatron's numbers"):
            import_verl(write(tmp_path, with_keys(**changing)))
        import_verl(write(tmp_path, with_keys(**changing | {transformer + name: same})))


ROUTER_TERMS = [
    ("moe_aux_loss_coeff", "Megatron adds this times a loss of the router"),
    ("moe_z_loss_coeff", "Megatron adds this times a loss of the router"),
    ("moe_router_bias_update_rate", "Megatron adds a bias to the score of each expert"),
]


@pytest.mark.parametrize(("name", "difference"), ROUTER_TERMS)
def test_what_keeps_the_experts_load_even_is_said_to_be_missing(tmp_path: Path, name: str, difference: str) -> None:
    """The report gives its coefficient. At 0, or with another trainer, it has no effect."""
    group = "actor_rollout_ref__actor__"
    coefficient = group + "megatron__override_transformer_config__" + name
    key = coefficient.replace("__", ".")
    result = import_verl(write(tmp_path, with_keys(**{group + "strategy": "megatron", coefficient: 0.125})))
    (line,) = [line for line in result.approximate if line.key == key]
    assert line.difference.startswith(difference)
    assert f"{key} = 0.125 -> no key\n    approximate: {difference}" in report(result)
    zero = import_verl(write(tmp_path, with_keys(**{group + "strategy": "megatron", coefficient: 0})))
    fsdp = import_verl(write(tmp_path, with_keys(**{coefficient: 0.125})))
    assert key not in {line.key for line in (*zero.approximate, *fsdp.approximate)}


SAID_TO_DIFFER = [
    ("actor_rollout_ref.model.trust_remote_code", True, "class of transformers"),
    ("actor_rollout_ref.actor.fsdp_config.model_dtype", "bfloat16", "float32 here, bfloat16 in verl"),
    ("actor_rollout_ref.actor.optim.main_grads_dtype", "bf16", "are float32 here"),
    ("actor_rollout_ref.model.lora.merge", True, "merged into its weights"),
    ("actor_rollout_ref.model.override_config.max_position_embeddings", 4096, "config of the model folder"),
    ("actor_rollout_ref.actor.strategy", "megatron", "does not decay norms and biases"),
    ("actor_rollout_ref.actor.strategy", "veomni", "VeOmni's layout is replaced by ZeRO 3"),
]


@pytest.mark.parametrize(("key", "value", "difference"), SAID_TO_DIFFER)
def test_what_only_approximates_is_marked(tmp_path: Path, key: str, value: Any, difference: str) -> None:
    result = import_verl(write(tmp_path, with_keys(**{key.replace(".", "__"): value})))
    (line,) = [line for line in result.approximate if line.key == key]
    assert difference in line.difference


UNIMPORTANT = [
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size", 128),
    ("actor_rollout_ref.actor.ppo_micro_batch_size", 64),
    ("actor_rollout_ref.actor.fsdp_config.fsdp_size", 4),
    ("actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype", "fp32"),
    ("data.val_batch_size", 100),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache", True),
    ("actor_rollout_ref.rollout.multi_turn.format", "hermes_2"),
]


@pytest.mark.parametrize(("key", "value"), UNIMPORTANT)
def test_what_changes_no_number_is_not_refused(tmp_path: Path, key: str, value: Any) -> None:
    """verl reads them for memory, speed and placement (trainer/ppo/ray_trainer.py, workers/fsdp_workers.py), and the
    settings of turns only with multi_turn.enable."""
    result = import_verl(write(tmp_path, with_keys(**{key.replace(".", "__"): value})))
    assert result.config == import_verl(write(tmp_path, LEAST)).config


def test_defaults_of_older_versions_ask_for_nothing_either(tmp_path: Path) -> None:
    result = import_verl(write(tmp_path, with_keys(actor_rollout_ref__actor__optim__optimizer="adam")))
    assert result.off["the optimizer is AdamW"] == ["actor_rollout_ref.actor.optim.optimizer"]


def test_the_model_and_the_data_are_needed(tmp_path: Path) -> None:
    with pytest.raises(VerlError) as caught:
        import_verl(write(tmp_path, {"algorithm": {"adv_estimator": "grpo"}}))
    assert "data.train_files = None" in str(caught.value)
    assert "actor_rollout_ref.model.path = None" in str(caught.value)


def test_a_reward_that_verl_chooses_by_the_data_must_be_named(tmp_path: Path) -> None:
    body = {name: value for name, value in LEAST.items() if name != "custom_reward_function"}
    with pytest.raises(VerlError, match=r"custom_reward_function\.path is not given.*--set grader\.path="):
        import_verl(write(tmp_path, body))
    result = import_verl(write(tmp_path, body), sets=["grader.path=tasks.graders.rules:LastNumber"])
    assert result.config["grader"] == {"concurrency": 8, "path": "tasks.graders.rules:LastNumber"}


def test_what_our_config_refuses_is_said_by_our_keys(tmp_path: Path) -> None:
    path = write(tmp_path, with_keys(actor_rollout_ref__actor__clip_ratio_c=0.5))
    with pytest.raises(VerlError, match=r"(?s)are not a valid grpo config.*dual_clip: .*greater than 1"):
        import_verl(path)


def test_the_wrong_type_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match=r"data\.train_max_samples = 'many'"):
        import_verl(write(tmp_path, with_keys(data__train_max_samples="many")))
    with pytest.raises(VerlError, match=r"data\.train_batch_size = '64': a str is not a valid value"):
        import_verl(write(tmp_path, with_keys(data__train_batch_size="64")))


def test_a_set_of_ours_goes_over_the_import(tmp_path: Path) -> None:
    sets = ["engine={kind: http, url: 'http://127.0.0.1:8000'}", "optimizer.schedule=cosine"]
    result = import_verl(write(tmp_path, LEAST), sets=sets)
    assert result.config["engine"] == {"kind": "http", "url": "http://127.0.0.1:8000"}
    assert result.config["optimizer"]["schedule"] == "cosine"
    assert result.config["optimizer"]["lr"] == 1e-6


# -- the report and the command --------------------------------------------------------------------------------


def test_every_key_that_is_given_is_in_the_report_once() -> None:
    result = import_verl(DATA / "grpo.yaml")
    text = report(result).splitlines()
    body = yaml.safe_load((DATA / "grpo.yaml").read_text())
    body.pop("defaults")
    for key in _keys(body):
        assert len([line for line in text if line.strip().split(" = ")[0] == key]) == 1, key


def _keys(tree: dict[str, Any], at: str = "") -> list[str]:
    leaves = []
    for name, value in tree.items():
        leaves += _keys(value, f"{at}{name}.") if isinstance(value, dict) else [f"{at}{name}"]
    return leaves


def test_a_schedule_that_is_not_quite_verls_is_said(tmp_path: Path) -> None:
    result = import_verl(write(tmp_path, with_keys(actor_rollout_ref__actor__optim__lr_scheduler_type="cosine")))
    assert "approximate: " in report(result)


def test_the_command_writes_a_config_and_says_what_became_of_each_key(tmp_path: Path) -> None:
    out = tmp_path / "ours.yaml"
    done = CliRunner().invoke(app, ["import", "verl", str(DATA / "grpo.yaml"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert parse_config(GRPOConfig, out).algorithm.samples_per_batch == 8192
    assert "data.train_batch_size = 1024 -> algorithm.samples_per_batch = 8192" in done.stderr
    assert done.stdout == ""


def test_the_command_prints_the_config_alone_on_stdout() -> None:
    done = CliRunner().invoke(app, ["import", "verl", str(DATA / "grpo.yaml"), "--override", "data.seed=4"])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout)["seed"] == 4


def test_the_command_refuses_with_status_2_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "ours.yaml"
    words = ["--override", "reward_model.enable=true", "--out", str(out)]
    done = CliRunner().invoke(app, ["import", "verl", str(DATA / "grpo.yaml"), *words])
    assert done.exit_code == 2
    assert "reward_model.enable = True" in done.stderr
    assert not out.exists()


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["import", "verl", str(tmp_path / "none.yaml")])
    assert done.exit_code == 2
    assert "none.yaml cannot be read" in done.stderr
    with pytest.raises(ConfigError):
        import_verl(tmp_path / "none.yaml")


def test_a_refusal_does_not_print_a_value_of_any_length(tmp_path: Path) -> None:
    for body in (LEAST | {"custom_reward_function": ["x"] * 5_000}, with_keys(algorithm__adv_estimator="x" * 50_000)):
        with pytest.raises(VerlError) as refusal:
            import_verl(write(tmp_path, body))
        assert len(str(refusal.value)) < 2_000
