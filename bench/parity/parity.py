"""Compares our losses with TRL's over ten optimizer steps on the same model and the same batch, in float32.

    python bench/parity/parity.py [--model FOLDER] [--steps 10]        (default model: a tiny one, made here)

It prints one row for each loss: the largest relative difference over the steps, and the values at the first and the
last step. The exit status is 1 if a difference is above 1e-4.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.parity.fixture import Row, noise, sequence, token_rows
from engine.backends.protocol import Objective
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.tiny import build_tiny_model
from engine.backends.torch.trainer import TorchTrainer
from engine.losses.distillation import DistillationSpec, ForwardKLSpec, JSDSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.pairs import DPOSpec, KTOSpec, ORPOSpec, PreferenceSpec, SimPOSpec
from engine.losses.policy_gradient import CISPOSpec, GMPOSpec, GRPOSpec, GSPOSpec, SAPOSpec
from engine.losses.spec import LossSpec
from engine.models.samples import Sample
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import OptimizerSpec
from tasks.batches.advantages import group

TOLERANCE = 1e-4
MAX_TOKENS = 4096
BETA = 0.1


def new_trainer(folder: Path) -> TorchTrainer:
    return TorchBackend(LocalEngineSpec(compute_dtype="float32", threads=1)).load(folder)


def ours(
    folder: Path, samples: list[Sample], loss: LossSpec, *, steps: int, lr: float
) -> list[dict[str, float]]:
    """Returns the metrics of each optimizer step. All steps use the same samples, with the KL baseline of the policy
    before the step if the loss reads one."""
    trainer = new_trainer(folder)
    metrics, mismatched, reference = [], mismatched_pairs(samples), 0.0
    for step in range(steps):
        if loss.labelled:
            scored = trainer.logprobs(mismatched, temperature=1.0, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
            total = sum(float(logprobs.sum()) for logprobs in scored)
            reference = reference if step else total
            baseline = max(0.0, (total - reference) / len(samples))
            samples = [replace(sample, kl_baseline=baseline) for sample in samples]
        report = trainer.update(samples, Objective(loss), OptimizerSpec(lr=lr), max_tokens=MAX_TOKENS)
        metrics.append(report.metrics)
    return metrics


def mismatched_pairs(samples: list[Sample]) -> list[Sample]:
    """Returns the prompt of each sample with the completion of the one before it, as TRL's KTO pairs them."""
    pairs = []
    for number, sample in enumerate(samples):
        prompt, other = sample.token_ids[~sample.loss_mask], samples[number - 1]
        pairs.append(sequence(prompt.tolist(), other.token_ids[other.loss_mask].tolist(), group=""))
    return pairs


def rows_of(folder: Path) -> list[list[Row]]:
    """Returns rows with random rewards, indexed by [group][completion].

    Old and reference logprobs are the model's with noise, so that some ratios are clipped from the first step on.
    """
    trainer = new_trainer(folder)
    tokens = token_rows(7, trainer.model.vocab_size)
    groups = []
    for number, members in enumerate(tokens):
        # advantages of the group, and logprobs of the model
        rewards = noise(number, len(members), 1.0)
        advantages = [float(a) for a in group(rewards) if a is not None]
        samples = [sequence(prompt, completion, group=str(number)) for prompt, completion in members]
        logprobs = trainer.logprobs(samples, temperature=1.0, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
        # noise for each completion by its own seeds
        rows = []
        for index, ((prompt, completion), now) in enumerate(zip(members, logprobs, strict=True)):
            seed = 100 * number + index
            old = [logprob + n for logprob, n in zip(now, noise(seed, len(now), 0.3), strict=True)]
            reference = [logprob + n for logprob, n in zip(now, noise(seed + 50, len(now), 0.2), strict=True)]
            rows.append(Row(prompt, completion, advantages[index], old, reference))
        groups.append(rows)
    return groups


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
    "sapo": (
        SAPOSpec(kl_beta=0.04),
        {"loss_type": "sapo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "gmpo": (
        GMPOSpec(clip_low=0.2, clip_high=0.25, kl_beta=0.04),
        {"gmpo": True, "epsilon": 0.2, "epsilon_high": 0.25, "beta": 0.04, "use_bias_correction_kl": False},
    ),
}  # fmt: skip
"""Name -> (our loss, the arguments of TRL's GRPOConfig with the same meaning)."""


Curves = tuple[list[float], list[float]]
"""(our values, TRL's values), one for each step."""


def cases(folder: Path, work: Path, *, steps: int, lr: float) -> dict[str, Callable[[], Curves]]:
    """Returns a function for each loss, by its name. The function runs both sides and returns their curves."""
    from bench.parity import peers

    # the rows as a list, as samples, and as pairs: the first two of each group
    groups = rows_of(folder)
    rows: list[Row] = []
    samples: list[Sample] = []
    for number, members in enumerate(groups):
        rows += members
        samples += [row.sample(str(number), index) for index, row in enumerate(members)]
    pairs = [(members[0], members[1]) for members in groups]

    def losses(step_metrics: list[dict[str, float]]) -> list[float]:
        return [metrics["loss"] for metrics in step_metrics]

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

    def of_gkd(loss: DistillationSpec, beta: float) -> Curves:
        teacher = build_tiny_model(work.parent / "teacher", seed=1)
        plain = [sequence(row.prompt, row.completion, group=str(n)) for n, row in enumerate(rows)]
        return (
            losses(ours(folder, with_teacher(plain, teacher), loss, steps=steps, lr=lr)),
            peers.gkd(folder, teacher, rows, work, steps=steps, lr=lr, beta=beta),
        )

    # one entry for each loss; a loss of pairs has one for each of its parts
    functions: dict[str, Callable[[], Curves]] = {"sft": of_sft}
    for name in PAIR_CASES:
        of_pairs = curves_of_pairs(name, folder, pairs, work, steps=steps, lr=lr)
        # TRL's rewards stay sums where its loss has means
        normalised = getattr(PAIR_CASES[name][0], "length_normalised", False)
        for part in ("loss",) if normalised else PAIR_PARTS:
            functions[f"{name}, {part}"] = lambda part=part, curves=of_pairs: curves()[part]  # type: ignore[misc]
    for name, (loss, options) in GRPO_CASES.items():
        functions[name] = of_grpo(loss, options)
    # a teacher with the tokens of another model than the tiny one would have to be given
    if folder == work.parent / "tiny":
        functions["forward_kl, whole vocabulary"] = partial(of_gkd, ForwardKLSpec(), 0.0)
        functions["jsd (beta 0.3), whole vocabulary"] = partial(of_gkd, JSDSpec(beta=0.3), 0.3)
    return functions


def with_teacher(samples: list[Sample], teacher: Path) -> list[Sample]:
    """Returns the samples with the logprobs of the teacher's whole vocabulary."""
    trainer = new_trainer(teacher)
    vocabulary = trainer.model.vocab_size
    tops = trainer.top_logprobs(samples, top=vocabulary, temperature=1.0, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
    taught = []
    for sample, top in zip(samples, tops, strict=True):
        ids = top[..., 0].astype("int32").ravel()
        taught.append(replace(sample, teacher_top_ids=ids, teacher_top_logprobs=top[..., 1].ravel()))
    return taught


PAIR_CASES: dict[str, tuple[PreferenceSpec, dict[str, Any]]] = {
    "dpo": (DPOSpec(beta=BETA), {"beta": BETA}),
    "dpo, means": (DPOSpec(beta=BETA, length_normalised=True), {"beta": BETA, "loss_type": ["sigmoid_norm"]}),
    "dpo, ipo of means": (
        DPOSpec(beta=BETA, length_normalised=True, variant="ipo"), {"beta": BETA, "loss_type": ["ipo"]},
    ),
    "dpo, rpo_alpha": (
        DPOSpec(beta=BETA, rpo_alpha=0.5),
        {"beta": BETA, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "simpo": (SimPOSpec(beta=2.0, gamma=1.0), {"beta": 2.0, "gamma": 1.0}),
    "orpo": (ORPOSpec(beta=BETA), {"beta": BETA}),
    "kto": (KTOSpec(beta=BETA, undesirable_weight=1.5), {"beta": BETA, "undesirable": 1.5}),
}  # fmt: skip
"""Name, with that of the function in bench.parity.peers before a comma -> (our loss, the function's arguments with the
same meaning)."""
WITH_SFT = ("dpo, rpo_alpha", "orpo")
"""Losses with a term of SFT. TRL's is a mean over all tokens of a batch, and for ORPO of the prompt as well. It is
ours for prompts of one token and preferred answers of equal length."""
PAIR_PARTS = {
    "loss": "loss",
    "rewards of the preferred": "reward_chosen_mean",
    "rewards of the others": "reward_rejected_mean",
}
"""Part of a loss of pairs -> name of our metric."""


def of_equal_length(pairs: list[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    """The pairs with prompts of one token, and with preferred answers that are cut to equal lengths."""
    length = min(len(good.completion) for good, _ in pairs)
    shorter = []
    for good, bad in pairs:
        prompt = good.prompt[:1]
        shorter.append((replace(good, prompt=prompt, completion=good.completion[:length]), replace(bad, prompt=prompt)))
    return shorter


def curves_of_pairs(
    name: str, folder: Path, all_pairs: list[tuple[Row, Row]], work: Path, *, steps: int, lr: float
) -> Callable[[], dict[str, Curves]]:
    """Returns a function that runs both sides at its first call, and then returns the curves of all parts.

    The reference, which SimPO does not read, is the model before the first step.
    """
    from bench.parity import peers

    loss, options = PAIR_CASES[name]
    memory: dict[str, Curves] = {}

    def run() -> dict[str, Curves]:
        if not memory:
            # the preferred and the other row of each pair, in turn
            pairs = of_equal_length(all_pairs) if name in WITH_SFT else all_pairs
            plain: list[Sample] = []
            for number, pair in enumerate(pairs):
                plain += [sequence(row.prompt, row.completion, group=str(number)) for row in pair]
            trainer = new_trainer(folder)
            reference = trainer.logprobs(plain, temperature=1.0, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
            samples = []
            for index, (sample, logprobs) in enumerate(zip(plain, reference, strict=True)):
                samples.append(replace(sample, reference_logprobs=logprobs, preferred=index % 2 == 0))
            # both sides
            mine = ours(folder, samples, loss, steps=steps, lr=lr)
            theirs = getattr(peers, name.partition(",")[0])(folder, pairs, work, steps=steps, lr=lr, **options)
            for (part, metric), values in zip(PAIR_PARTS.items(), theirs, strict=True):
                memory[part] = ([metrics[metric] for metrics in mine], values)
        return memory

    return run


def difference(mine: list[float], theirs: list[float]) -> float:
    """Returns the largest difference over the steps, relative to the largest magnitude of the curve. It is not relative
    to each value, because rewards and losses may be close to 0."""
    scale = max(map(abs, theirs))
    return max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) / scale


def disable_progress_bars() -> None:
    """Disables the progress bars of the libraries, which would break the printed table."""
    from datasets.utils.logging import disable_progress_bar as disable_datasets_bar
    from transformers.utils.logging import disable_progress_bar as disable_transformers_bar

    disable_transformers_bar()
    disable_datasets_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    torch.set_num_threads(1)
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="ostinato-parity-") as work:
        folder = options.model or build_tiny_model(Path(work, "tiny"), seed=0)
        print(f"{'loss':44} {'largest difference':>18} {'step 1: ours, TRL':>26} {f'step {options.steps}':>26}")
        for name, run in cases(folder, Path(work, "trl"), steps=options.steps, lr=options.lr).items():
            mine, theirs = run()
            largest = difference(mine, theirs)
            worst = max(worst, largest)
            first = f"{mine[0]:.6f}, {theirs[0]:.6f}"
            last = f"{mine[-1]:.6f}, {theirs[-1]:.6f}"
            print(f"{name:44} {largest:18.1e} {first:>26} {last:>26}", flush=True)
    if worst > TOLERANCE:
        sys.exit(f"the largest relative difference is {worst:.1e}, above {TOLERANCE:g}")


if __name__ == "__main__":
    main()
