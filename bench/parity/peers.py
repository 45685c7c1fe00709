"""Runs TRL's trainers on prepared tensors, in place of what they would sample or tokenise.

The loss of every optimizer step is recorded without rounding. Everything else, from the forward pass to AdamW, is
TRL's.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from bench.parity.fixture import LONGEST, Row

COMMON = {
    "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
    "bf16": False, "use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "seed": 0,
    "disable_tqdm": True, "gradient_checkpointing": False, "optim": "adamw_torch", "dataloader_pin_memory": False,
}  # fmt: skip


class LossRecorder:
    """A mixin for a trainer, which records its losses."""

    losses: list[float]

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)  # type: ignore[misc]
        # some trainers also return the outputs of the model
        value = loss[0] if isinstance(loss, tuple) else loss
        self.losses.append(float(value.detach()))
        return loss


class Prepared(LossRecorder):
    """A mixin for GRPO on prepared tensors instead of sampled completions."""

    prepared: dict[str, torch.Tensor]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        return self.prepared


class PreparedGRPO(Prepared, GRPOTrainer):  # type: ignore[misc]
    pass


class PreparedGMPO(Prepared, GMPOTrainer):  # type: ignore[misc]
    pass


class RecordedDPO(LossRecorder, DPOTrainer):  # type: ignore[misc]
    pass


class RecordedCPO(LossRecorder, CPOTrainer):  # type: ignore[misc]
    pass


class RecordedORPO(LossRecorder, ORPOTrainer):  # type: ignore[misc]
    pass


class RecordedKTO(LossRecorder, KTOTrainer):  # type: ignore[misc]
    pass


class RecordedGKD(LossRecorder, GKDTrainer):  # type: ignore[misc]
    pass


class RecordedSFT(LossRecorder, SFTTrainer):  # type: ignore[misc]
    pass


def load(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model, AutoTokenizer.from_pretrained(folder)


def grpo(
    folder: Path, rows: list[Row], work: Path, *, steps: int, lr: float, gmpo: bool = False, **options: Any
) -> list[float]:
    """Returns the losses of `steps` optimizer steps. All steps use the same rows."""
    model, tokenizer = load(folder)
    kind, config = (PreparedGMPO, GMPOConfig) if gmpo else (PreparedGRPO, GRPOConfig)
    arguments = config(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(rows),
        num_generations=4, max_completion_length=LONGEST, **COMMON, **options,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": "x"}] * len(rows))
    trainer = kind(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=prompts, processing_class=tokenizer,
    )  # fmt: skip
    trainer.losses = []
    trainer.prepared = tensors_of(rows, tokenizer.pad_token_id)
    trainer.train()
    return trainer.losses


def tensors_of(rows: list[Row], pad: int) -> dict[str, torch.Tensor]:
    """Returns the tensors that TRL would sample: prompts padded on the left, completions padded on the right."""
    before = max(len(row.prompt) for row in rows)
    after = max(len(row.completion) for row in rows)

    def right(values: list[Any], fill: Any) -> list[Any]:
        return [*values, *[fill] * (after - len(values))]

    columns: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        padding, count = before - len(row.prompt), len(row.completion)
        columns["prompt_ids"].append([pad] * padding + row.prompt)
        columns["prompt_mask"].append([0] * padding + [1] * len(row.prompt))
        columns["completion_ids"].append(right(row.completion, pad))
        columns["completion_mask"].append(right([1] * count, 0))
        columns["advantages"].append(row.advantage)
        columns["old_per_token_logps"].append(right(row.old, 0.0))
        columns["ref_per_token_logps"].append(right(row.reference, 0.0))
    tensors = {name: torch.tensor(values) for name, values in columns.items()}
    completion_tokens = sum(len(row.completion) for row in rows)
    return tensors | {"num_items_in_batch": torch.tensor(float(completion_tokens))}


def sft(folder: Path, rows: list[Row], work: Path, *, steps: int, lr: float) -> list[float]:
    model, tokenizer = load(folder)
    arguments = SFTConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(rows),
        completion_only_loss=True, packing=False, **COMMON,
    )  # fmt: skip
    table = []
    for row in rows:
        mask = [0] * len(row.prompt) + [1] * len(row.completion)
        table.append({"input_ids": row.prompt + row.completion, "completion_mask": mask})
    trainer = RecordedSFT(
        model=model, args=arguments, train_dataset=Dataset.from_list(table), processing_class=tokenizer
    )
    trainer.losses = []
    trainer.train()
    return trainer.losses


def gkd(
    folder: Path, teacher: Path, rows: list[Row], work: Path, *, steps: int, lr: float, beta: float
) -> list[float]:
    """The losses with a frozen teacher on these rows (lmbda 0: nothing is sampled)."""
    model, tokenizer = load(folder)
    arguments = GKDConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(rows), beta=beta,
        lmbda=0.0, temperature=1.0, **COMMON,
    )  # fmt: skip
    longest = max(len(row.prompt) + len(row.completion) for row in rows)
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        tokens, padding = row.prompt + row.completion, longest - len(row.prompt) - len(row.completion)
        columns["input_ids"].append(tokens + [tokenizer.pad_token_id] * padding)
        columns["attention_mask"].append([1] * len(tokens) + [0] * padding)
        columns["labels"].append([-100] * len(row.prompt) + row.completion + [-100] * padding)
    batch = {name: torch.tensor(values) for name, values in columns.items()}
    trainer = RecordedGKD(
        model=model, teacher_model=load(teacher)[0], args=arguments, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"text": "x"}] * len(rows)), data_collator=lambda _: batch,
    )  # fmt: skip
    trainer.losses = []
    trainer.train()
    return trainer.losses


PairCurves = tuple[list[float], list[float], list[float]]
"""(losses, rewards of the preferred, rewards of the others), each with one value per step."""
TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}
"""The constructors tokenise texts, so the token ids replace these after it."""


def dpo(
    folder: Path, pairs: list[tuple[Row, Row]], work: Path, *, steps: int, lr: float, **options: Any
) -> PairCurves:
    """The reference is the model before the first step."""
    model, tokenizer = load(folder)
    arguments = DPOConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(pairs),
        **COMMON, **options,
    )  # fmt: skip
    words = Dataset.from_list([TEXTS] * len(pairs))
    trainer = RecordedDPO(model=model, args=arguments, train_dataset=words, processing_class=tokenizer)
    table = []
    for good, bad in pairs:
        table.append({"prompt_ids": good.prompt, "chosen_ids": good.completion, "rejected_ids": bad.completion})
    return curves_of(trainer, table)


def simpo(
    folder: Path, pairs: list[tuple[Row, Row]], work: Path, *, steps: int, lr: float, beta: float, gamma: float
) -> PairCurves:
    model, tokenizer = load(folder)
    arguments = CPOConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(pairs), beta=beta,
        loss_type="simpo", cpo_alpha=0.0, simpo_gamma=gamma, **COMMON,
    )  # fmt: skip
    return _curves_of_labels(RecordedCPO, model, arguments, tokenizer, pairs)


def orpo(
    folder: Path, pairs: list[tuple[Row, Row]], work: Path, *, steps: int, lr: float, beta: float
) -> PairCurves:
    model, tokenizer = load(folder)
    arguments = ORPOConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(pairs), beta=beta,
        **COMMON,
    )  # fmt: skip
    return _curves_of_labels(RecordedORPO, model, arguments, tokenizer, pairs)


def _curves_of_labels(
    kind: Any, model: Any, arguments: Any, tokenizer: Any, pairs: list[tuple[Row, Row]]
) -> PairCurves:
    """The curves of a trainer that reads whole sequences and their labels."""
    words = Dataset.from_list([TEXTS] * len(pairs))
    trainer = kind(model=model, args=arguments, train_dataset=words, processing_class=tokenizer)
    table = []
    for pair in pairs:
        columns: dict[str, Any] = dict(TEXTS)
        for side, row in zip(("chosen", "rejected"), pair, strict=True):
            tokens = row.prompt + row.completion
            columns |= {
                f"{side}_input_ids": tokens,
                f"{side}_attention_mask": [1] * len(tokens),
                f"{side}_labels": [-100] * len(row.prompt) + row.completion,
            }
        table.append(columns)
    return curves_of(trainer, table)


def kto(
    folder: Path, pairs: list[tuple[Row, Row]], work: Path, *, steps: int, lr: float, beta: float, undesirable: float
) -> PairCurves:
    """The rows of the pairs are answers of their own, in turn desirable and not. The reference is the model before the
    first step."""
    model, tokenizer = load(folder)
    rows = [row for pair in pairs for row in pair]
    arguments = KTOConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(rows), beta=beta,
        undesirable_weight=undesirable, **COMMON,
    )  # fmt: skip
    words = Dataset.from_list([{"prompt": "a", "completion": "b", "label": n % 2 == 0} for n in range(len(rows))])
    trainer = RecordedKTO(model=model, args=arguments, train_dataset=words, processing_class=tokenizer)
    table = []
    for number, row in enumerate(rows):
        other = rows[number - 1].completion
        columns = {"prompt_ids": row.prompt, "completion_ids": row.completion, "KL_completion_ids": other}
        table.append(columns | {"label": number % 2 == 0})
    return curves_of(trainer, table)


def curves_of(trainer: Any, table: list[dict[str, Any]]) -> PairCurves:
    """The curves of a trainer of pairs on these rows."""
    trainer.train_dataset = Dataset.from_list(table)
    trainer.losses = []
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "rewards/chosen" in entry]
    return trainer.losses, [e["rewards/chosen"] for e in logs], [e["rewards/rejected"] for e in logs]
