"""Ours and TRL's losses over ten optimizer steps on the same model and the same batch, in float32.

    python bench/parity/parity.py [--model FOLDER] [--steps 10]        (default model: a tiny one, made here)

One row per loss: the largest relative difference of the loss over the steps, and its values at the first and the last
step. Ends with status 1 when one is above 1e-4.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bench.parity.fixture import Row, noise, sequence, token_rows
from engine.backends.protocol import Objective
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.tiny import build_tiny_model
from engine.backends.torch.trainer import TorchTrainer
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.pairs import DPOSpec
from engine.losses.policy_gradient import CISPOSpec, GRPOSpec, GSPOSpec
from engine.losses.spec import LossSpec
from engine.models.samples import Sample
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import OptimizerSpec
from tasks.credit.advantages import group

TOLERANCE = 1e-4
MAX_TOKENS = 4096
BETA = 0.1


def fresh(folder: Path) -> TorchTrainer:
    return TorchBackend(LocalEngineSpec(compute_dtype="float32", threads=1)).load(folder)


def ours(
    folder: Path, samples: list[Sample], loss: LossSpec, *, steps: int, lr: float
) -> list[dict[str, float]]:
    """Metrics of each optimizer step over the same samples."""
    trainer, found = fresh(folder), []
    for _ in range(steps):
        report = trainer.update(samples, Objective(loss), OptimizerSpec(lr=lr), max_tokens=MAX_TOKENS)
        found.append(report.metrics)
    return found


def rows_of(folder: Path) -> list[list[Row]]:
    """[group][completion]: rewards of chance; old logprobs are the model's with noise, so that some ratios are clipped
    from the first step on, and so are the reference's."""
    trainer = fresh(folder)
    tokens = token_rows(7, trainer.model.vocab_size)
    found = []
    for number, members in enumerate(tokens):
        rewards = noise(number, len(members), 1.0)
        advantages = [float(a) for a in group(rewards) if a is not None]
        samples = [sequence(prompt, completion, group=str(number)) for prompt, completion in members]
        logprobs = trainer.logprobs(samples, temperature=1.0, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
        rows = []
        for index, ((prompt, completion), now) in enumerate(zip(members, logprobs, strict=True)):
            seed = 100 * number + index
            old = [logprob + n for logprob, n in zip(now, noise(seed, len(now), 0.3), strict=True)]
            reference = [logprob + n for logprob, n in zip(now, noise(seed + 50, len(now), 0.2), strict=True)]
            rows.append(Row(prompt, completion, advantages[index], old, reference))
        found.append(rows)
    return found


GRPO_CASES: dict[str, tuple[LossSpec, dict[str, object]]] = {
    "grpo, loss_type grpo": (
        GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.04, norm="sequence_mean"),
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "grpo, loss_type bnpo": (
        GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.04),
        {"loss_type": "bnpo", "epsilon": 0.2, "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "grpo, loss_type bnpo, KL under the ratio": (
        GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.04, kl_importance=True),
        {"loss_type": "bnpo", "epsilon": 0.2, "beta": 0.04},  # use_bias_correction_kl is on by default
    ),
    "grpo, loss_type dapo, clip-higher": (
        GRPOSpec(clip_low=0.2, clip_high=0.28, kl_beta=0.0),
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0},
    ),
    "grpo, loss_type dr_grpo": (
        GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.04, norm="constant", norm_constant=24),
        {"loss_type": "dr_grpo", "epsilon": 0.2, "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "gspo (importance_sampling_level sequence)": (
        GSPOSpec(clip_low=0.01, clip_high=0.02, kl_beta=0.04),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02,
         "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "cispo": (
        CISPOSpec(clip_low=1.0, clip_high=0.2, kl_beta=0.0),
        {"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.0},
    ),
}  # fmt: skip
"""Ours, and the arguments of TRL that mean the same."""


Curves = tuple[list[float], list[float]]
"""(ours, TRL's) by step."""


def cases(folder: Path, work: Path, *, steps: int, lr: float) -> dict[str, Callable[[], Curves]]:
    """Name -> (ours, TRL's) by step."""
    from bench.parity import peers

    groups = rows_of(folder)
    rows = [row for members in groups for row in members]
    samples = [row.sample(str(n), c) for n, members in enumerate(groups) for c, row in enumerate(members)]
    pairs = [(members[0], members[1]) for members in groups]

    def losses(found: list[dict[str, float]], name: str = "loss") -> list[float]:
        return [metrics[name] for metrics in found]

    def of_grpo(loss: LossSpec, options: dict[str, object]) -> Callable[[], Curves]:
        return lambda: (
            losses(ours(folder, samples, loss, steps=steps, lr=lr)),
            peers.grpo(folder, rows, work, steps=steps, lr=lr, **options),
        )

    def of_sft() -> Curves:
        plain = [sequence(row.prompt, row.completion, group=str(n)) for n, row in enumerate(rows)]
        return (
            losses(ours(folder, plain, CrossEntropySpec(), steps=steps, lr=lr)),
            peers.sft(folder, rows, work, steps=steps, lr=lr),
        )

    of_dpo = dpo_of(folder, pairs, work, steps=steps, lr=lr)
    found = {"sft": of_sft, **{f"dpo, {what}": (lambda what=what: of_dpo()[what]) for what in DPO_PARTS}}
    return found | {name: of_grpo(loss, options) for name, (loss, options) in GRPO_CASES.items()}


DPO_PARTS = {
    "loss": "loss",
    "rewards of the preferred": "reward_chosen_mean",
    "rewards of the others": "reward_rejected_mean",
}
"""Part -> our metric."""


def dpo_of(
    folder: Path, pairs: list[tuple[Row, Row]], work: Path, *, steps: int, lr: float
) -> Callable[[], dict[str, Curves]]:
    """Runs both once, whatever is asked of them. The reference is the model as it began."""
    from bench.parity import peers

    memory: dict[str, Curves] = {}

    def run() -> dict[str, Curves]:
        if not memory:
            plain = [
                sequence(row.prompt, row.completion, group=str(number))
                for number, pair in enumerate(pairs)
                for row in pair
            ]
            reference = fresh(folder).logprobs(plain, temperature=1.0, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
            samples = [
                replace(sample, reference_logprobs=values, preferred=index % 2 == 0)
                for index, (sample, values) in enumerate(zip(plain, reference, strict=True))
            ]
            mine = ours(folder, samples, DPOSpec(beta=BETA), steps=steps, lr=lr)
            theirs = peers.dpo(folder, pairs, work, steps=steps, lr=lr, beta=BETA)
            for (what, name), values in zip(DPO_PARTS.items(), theirs, strict=True):
                memory[what] = ([metrics[name] for metrics in mine], values)
        return memory

    return run


def difference(mine: list[float], theirs: list[float]) -> float:
    """The largest over the steps, relative to the largest magnitude of the curve: rewards and losses pass through 0."""
    scale = max(map(abs, theirs))
    return max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) / scale


def quiet() -> None:
    """Neither of the libraries' bars belongs into a table."""
    from datasets.utils.logging import disable_progress_bar as disable_datasets_bar
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    disable_datasets_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    quiet()
    torch.set_num_threads(1)
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="ostinato-parity-") as work:
        folder = options.model or build_tiny_model(Path(work, "tiny"), seed=0)
        print(f"{'loss':44} {'largest difference':>18} {'step 1: ours, TRL':>26} {f'step {options.steps}':>26}")
        for name, run in cases(folder, Path(work, "trl"), steps=options.steps, lr=options.lr).items():
            mine, theirs = run()
            found = difference(mine, theirs)
            worst = max(worst, found)
            first, last = (f"{mine[i]:.6f}, {theirs[i]:.6f}" for i in (0, -1))
            print(f"{name:44} {found:18.1e} {first:>26} {last:>26}", flush=True)
    if worst > TOLERANCE:
        sys.exit(f"the largest relative difference is {worst:.1e}, above {TOLERANCE:g}")


if __name__ == "__main__":
    main()
