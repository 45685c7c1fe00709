"""TRL's trainers on given tensors: what they would sample or tokenise is put in its place, and the loss of every
optimizer step is kept unrounded. Everything else, from the forward to AdamW, is TRL's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from bench.parity.fixture import LONGEST, Row

COMMON = {
    "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
    "bf16": False, "use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "seed": 0,
    "disable_tqdm": True, "gradient_checkpointing": False, "optim": "adamw_torch", "dataloader_pin_memory": False,
}  # fmt: skip


class Kept:
    """Mixed into a trainer: its losses."""

    losses: list[float]

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)  # type: ignore[misc]
        self.losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss


class GivenGRPO(Kept, GRPOTrainer):  # type: ignore[misc]
    given: dict[str, torch.Tensor]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        return self.given


class KeptDPO(Kept, DPOTrainer):  # type: ignore[misc]
    pass


class KeptSFT(Kept, SFTTrainer):  # type: ignore[misc]
    pass


def load(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model, AutoTokenizer.from_pretrained(folder)


def grpo(folder: Path, rows: list[Row], work: Path, *, steps: int, lr: float, **options: Any) -> list[float]:
    """Losses of `steps` optimizer steps over the same rows."""
    model, tokenizer = load(folder)
    arguments = GRPOConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(rows),
        num_generations=4, max_completion_length=LONGEST, **COMMON, **options,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": "x"}] * len(rows))
    trainer = GivenGRPO(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=prompts, processing_class=tokenizer,
    )  # fmt: skip
    trainer.losses, trainer.given = [], tensors_of(rows, tokenizer.pad_token_id)
    trainer.train()
    return trainer.losses


def tensors_of(rows: list[Row], pad: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right, as TRL lays them out."""
    before = max(len(row.prompt) for row in rows)
    after = max(len(row.completion) for row in rows)

    def right(values: list[Any], fill: Any) -> list[Any]:
        return [*values, *[fill] * (after - len(values))]

    counts = [len(row.completion) for row in rows]
    return {
        "prompt_ids": torch.tensor([[pad] * (before - len(r.prompt)) + r.prompt for r in rows]),
        "prompt_mask": torch.tensor([[0] * (before - len(r.prompt)) + [1] * len(r.prompt) for r in rows]),
        "completion_ids": torch.tensor([right(r.completion, pad) for r in rows]),
        "completion_mask": torch.tensor([right([1] * count, 0) for count in counts]),
        "advantages": torch.tensor([r.advantage for r in rows]),
        "old_per_token_logps": torch.tensor([right(r.old, 0.0) for r in rows]),
        "ref_per_token_logps": torch.tensor([right(r.reference, 0.0) for r in rows]),
        "num_items_in_batch": torch.tensor(float(sum(counts))),
    }


def sft(folder: Path, rows: list[Row], work: Path, *, steps: int, lr: float) -> list[float]:
    model, tokenizer = load(folder)
    arguments = SFTConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(rows),
        completion_only_loss=True, packing=False, **COMMON,
    )  # fmt: skip
    table = [
        {"input_ids": r.prompt + r.completion, "completion_mask": [0] * len(r.prompt) + [1] * len(r.completion)}
        for r in rows
    ]
    trainer = KeptSFT(
        model=model, args=arguments, train_dataset=Dataset.from_list(table), processing_class=tokenizer
    )
    trainer.losses = []
    trainer.train()
    return trainer.losses


def dpo(
    folder: Path, pairs: list[tuple[Row, Row]], work: Path, *, steps: int, lr: float, beta: float
) -> tuple[list[float], list[float], list[float]]:
    """(losses, rewards of the preferred, rewards of the others) by step; the reference is the model as it began."""
    model, tokenizer = load(folder)
    arguments = DPOConfig(
        output_dir=str(work), max_steps=steps, learning_rate=lr, per_device_train_batch_size=len(pairs), beta=beta,
        **COMMON,
    )  # fmt: skip
    words = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * len(pairs))
    trainer = KeptDPO(model=model, args=arguments, train_dataset=words, processing_class=tokenizer)
    trainer.train_dataset = Dataset.from_list(
        [
            {"prompt_ids": good.prompt, "chosen_ids": good.completion, "rejected_ids": bad.completion}
            for good, bad in pairs
        ]
    )
    trainer.losses = []
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "rewards/chosen" in entry]
    return trainer.losses, [e["rewards/chosen"] for e in logs], [e["rewards/rejected"] for e in logs]
