"""Trains one model with SFT and then GRPO, by Ostinato and by TRL, and compares the held-out rewards.

    python bench/parity/learning.py [--seeds 3] [--sft-steps 2] [--steps 20]

Both sides use the same base model, training and held-out sums, sampler settings, batch sizes, learning rates with their
schedule (warm-up, cosine), clip range, KL coefficient and normalisation. Both compute in bfloat16 with float32 master
weights. Each side is a process of its own, and the two sides of a seed run at the same time. One evaluator computes the
held-out rewards of both: greedy answers, graded by `tasks.graders.rules:LastNumber`. README.md lists what differs by
definition. The exit status is 1 if our mean reward is below TRL's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.learning.evaluate import heldout_scores
from bench.learning.measured import cpu_seconds
from flows.training.schedules import CosineScheduler
from tasks.graders.rules import LastNumber

BASE = Path(".ostinato/models/smollm2-135m-instruct")
DATA = Path("examples/data")
SFT_LR, GRPO_LR, CLIP, BETA = 5e-6, 3e-5, 0.2, 0.01
SAMPLES, COMPLETIONS, NEW_TOKENS = 48, 8, 20


@dataclass(frozen=True)
class Plan:
    """The seed and the length of one run."""

    seed: int
    sft_steps: int
    steps: int


def rows(name: str) -> list[dict[str, Any]]:
    """Reads one of the demo's data files."""
    return [json.loads(line) for line in (DATA / f"sums-{name}.jsonl").read_text().splitlines()]


# -- ours ----------------------------------------------------------------------------------------------------------


def train_ours(plan: Plan, work: Path) -> Path:
    """Trains by two runs on the command line. Returns the folder of the published model."""
    common = {
        "seed": plan.seed, "optimizer.schedule": "cosine", "checkpoints.frequency": "null",
        "storage.url": str(work / "data"), "engine.threads": 1,
    }  # fmt: skip
    # SFT from the base model
    model = str(BASE)
    if plan.sft_steps:
        sft = {
            "model.key": model, "model.publish_as": "sft", "algorithm.steps": plan.sft_steps,
            "algorithm.samples_per_batch": SAMPLES, "optimizer.lr": SFT_LR,
        }  # fmt: skip
        ostinato("sft", "examples/sft.yaml", common | sft)
        model = "sft"
    # GRPO from the result of SFT
    grpo = {
        "model.key": model, "model.publish_as": "grpo", "data.heldout": "null", "algorithm.steps": plan.steps,
        "algorithm.samples_per_batch": SAMPLES, "algorithm.samples_per_mini_batch": SAMPLES,
        "algorithm.completions_per_sample": COMPLETIONS, "algorithm.clip_range": CLIP, "algorithm.kl_beta": BETA,
        "algorithm.advantage_estimator": "group_sample_std", "optimizer.lr": GRPO_LR,
        "sampling.max_new_tokens": NEW_TOKENS,
    }  # fmt: skip
    ostinato("grpo", "examples/demo.yaml", common | grpo)
    (manifest,) = (work / "data" / "models" / "grpo").glob("*/config.json")
    return manifest.parent


def ostinato(flow: str, config: str, values: dict[str, Any]) -> None:
    """Runs a flow by the command line, with these values set in its config."""
    sets = [f"--set={name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "flows.cli.main", "run", flow, "--config", config, *sets, "--new"]
    subprocess.run(command, check=True, stdout=sys.stderr)


# -- TRL -----------------------------------------------------------------------------------------------------------


def train_trl(plan: Plan, work: Path) -> Path:
    """Trains by TRL's trainers with the same settings. Returns the folder of the saved model."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    from bench.learning.trl_side import reward_function
    from bench.parity.peers import COMMON, load

    # SFT from the base model
    torch.set_num_threads(1)
    model, tokenizer = load(BASE)
    common = COMMON | {"bf16": True, "seed": plan.seed, "output_dir": str(work / "trl")}
    if plan.sft_steps:
        chats = []
        for row in rows("completions"):
            answer_message = {"role": "assistant", "content": row["completion"]}
            chats.append({"prompt": user(row["prompt"]), "completion": [answer_message]})
        arguments = SFTConfig(
            max_steps=plan.sft_steps, learning_rate=SFT_LR, per_device_train_batch_size=SAMPLES,
            completion_only_loss=True, **common,
        )  # fmt: skip
        sft = SFTTrainer(
            model, args=arguments, train_dataset=Dataset.from_list(chats), processing_class=tokenizer,
            optimizers=optimizer_and_schedule(model, SFT_LR, plan.sft_steps),
        )  # fmt: skip
        sft.train()
        sft.save_model(str(work / "sft"))
        # TRL loads the reference model of the KL term from the folder of the model, so load the model from there
        model, tokenizer = load(work / "sft")

    # GRPO from the result of SFT, with our grader as the reward function
    prompts = [{"prompt": user(r["prompt"]), "metadata": json.dumps(r["metadata"])} for r in rows("train")]
    arguments = GRPOConfig(
        max_steps=plan.steps, learning_rate=GRPO_LR, per_device_train_batch_size=SAMPLES, num_generations=COMPLETIONS,
        max_completion_length=NEW_TOKENS, temperature=1.0, epsilon=CLIP, beta=BETA, loss_type="bnpo",
        use_bias_correction_kl=False, **common,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=reward_function(LastNumber()), args=arguments, train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer, optimizers=optimizer_and_schedule(model, GRPO_LR, plan.steps),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(work / "saved"))
    tokenizer.save_pretrained(work / "saved")
    return work / "saved"


def optimizer_and_schedule(model: Any, lr: float, steps: int) -> tuple[Any, Any]:
    """Returns AdamW and the schedule of our side: warm-up over a tenth of the steps, then a cosine."""
    import torch

    shape = CosineScheduler(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: shape.at(min(k, steps - 1), steps))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- both ----------------------------------------------------------------------------------------------------------


def run_side(side: str, plan: Plan) -> None:
    """Trains one side in this process. Its last line is the held-out reward and the CPU-seconds of training, as
    JSON."""
    with tempfile.TemporaryDirectory(prefix=f"ostinato-{side}-") as folder:
        work = Path(folder)
        if side == "ours":
            trained = train_ours(plan, work)
        elif side == "trl":
            trained = train_trl(plan, work)
        else:
            trained = BASE
        cpu = cpu_seconds()
        measuring = heldout_scores([trained], rows("heldout"), LastNumber(), new_tokens=NEW_TOKENS, work=work)
        (reward,) = asyncio.run(measuring)
        print(json.dumps({"reward": reward, "cpu": cpu}))


def measure(side: str, plan: Plan) -> dict[str, float]:
    """Runs one side in a new process. Returns its held-out reward and CPU-seconds."""
    options = ["--side", side, "--seed", plan.seed, "--sft-steps", plan.sft_steps, "--steps", plan.steps]
    command = [sys.executable, __file__, *map(str, options)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sft-steps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--side", choices=["base", "ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return run_side(options.side, Plan(options.seed, options.sft_steps, options.steps))
    # the reward before training, then both sides for each seed
    before = measure("base", Plan(0, 0, 0))["reward"]
    print(f"held-out reward before training {before:.3f}; {options.sft_steps} steps of SFT, {options.steps} of GRPO")
    rewards: dict[str, list[float]] = {"ours": [], "trl": []}
    for seed in range(options.seeds):
        plan = Plan(seed, options.sft_steps, options.steps)
        with ThreadPoolExecutor() as sides:
            results = list(sides.map(measure, rewards, [plan] * len(rewards)))
        texts = []
        for side, result in zip(rewards, results, strict=True):
            rewards[side].append(result["reward"])
            texts.append(f"{side} {result['reward']:.3f} ({result['cpu']:.0f} CPU-s)")
        print(f"seed {seed}:", *texts, sep="  ", flush=True)
    ours, trl = statistics.mean(rewards["ours"]), statistics.mean(rewards["trl"])
    print(f"mean: ours {ours:.3f}, TRL {trl:.3f}")
    if ours < trl:
        sys.exit("our mean is below TRL's")


if __name__ == "__main__":
    main()
