"""The peers: TRL's trainers, which take one optimizer step per turn, and transformers' generation.

All compute in bfloat16 autocast with float32 master weights, without gradient checkpointing, and with the fused AdamW.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from bench.speed.data import messages_of
from bench.speed.dataset_turns import load_in_turns
from bench.speed.turns import Setting, Turns

STEPS = 10_000
"""More steps than a bench takes. The bench ends the training."""
PREFILL_TOKENS = 1024
"""Most tokens of a forward pass of continuous batching."""
COMMON = {
    "max_steps": STEPS, "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "learning_rate": 1e-6,
    "bf16": True, "use_cpu": True, "report_to": "none", "logging_strategy": "no", "save_strategy": "no", "seed": 0,
    "disable_tqdm": True, "gradient_checkpointing": False, "optim": "adamw_torch_fused",
    "dataloader_pin_memory": False,
}  # fmt: skip


class Counted:
    """A mixin for a trainer, which counts the tokens of its batches."""

    tokens = 0

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        # the completions of GRPO; else all tokens but the padding
        mask = inputs.get("completion_mask") if isinstance(self, GRPOTrainer) else inputs.get("attention_mask")
        self.tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        return super().compute_loss(model, inputs, *arguments, **named)  # type: ignore[misc]


class CountedSFT(Counted, SFTTrainer):  # type: ignore[misc]
    pass


class CountedDPO(Counted, DPOTrainer):  # type: ignore[misc]
    pass


class CountedGRPO(Counted, GRPOTrainer):  # type: ignore[misc]
    pass


class EndOfStep(TrainerCallback):  # type: ignore[misc]
    """Reports each optimizer step as a turn, and waits for the next turn."""

    def __init__(self, trainer: Counted, turns: Turns, earlier_cpu: float) -> None:
        self.trainer, self.turns, self.earlier_cpu = trainer, turns, earlier_cpu

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.end(self.trainer.tokens, earlier_cpu=self.earlier_cpu)
        self.trainer.tokens = 0
        control.should_training_stop = not self.turns.begin()


def train(trainer: Any, turns: Turns, *, earlier_cpu: float = 0.0) -> None:
    """Trains one step per turn. The first turn also prepares the training."""
    trainer.add_callback(EndOfStep(trainer, turns, earlier_cpu))
    if turns.begin():
        trainer.train()


def load(setting: Setting, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype, attn_implementation="sdpa")
    return model, AutoTokenizer.from_pretrained(setting.model)


def sft(setting: Setting, turns: Turns) -> None:
    """SFTTrainer. With the option `packing`, a step has as many rows of `max_length` tokens as the conversations of a
    padded step would fill."""
    model, tokenizer = load(setting)
    rows = []
    for row in setting.rows:
        user, assistant = messages_of(row)
        rows.append({"prompt": [user], "completion": [assistant]})
    options = {"per_device_train_batch_size": setting.rows_per_step} | setting.options
    arguments = SFTConfig(
        output_dir=setting.folder, train_sampling_strategy="sequential", **(COMMON | options)
    )  # fmt: skip
    trainer = CountedSFT(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    train(trainer, turns)


def dpo(setting: Setting, turns: Turns) -> None:
    """DPOTrainer. With the option `precompute_ref_log_probs`, the CPU time of the reference is divided among the
    steps."""
    model, tokenizer = load(setting)
    rows = []
    for row in setting.rows:
        rows.append(
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "chosen": [{"role": "assistant", "content": row["chosen"]}],
                "rejected": [{"role": "assistant", "content": row["rejected"]}],
            }
        )
    arguments = DPOConfig(
        output_dir=setting.folder, per_device_train_batch_size=setting.rows_per_step, max_length=None,
        train_sampling_strategy="sequential", **(COMMON | setting.options),
    )  # fmt: skip

    class Timed(CountedDPO):
        reference_cpu = 0.0

        def _precompute_ref_logps(self, *positional: Any, **named: Any) -> Any:
            began = time.process_time()
            dataset = super()._precompute_ref_logps(*positional, **named)
            self.reference_cpu += time.process_time() - began
            return dataset

    trainer = Timed(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    steps = len(rows) / setting.rows_per_step
    train(trainer, turns, earlier_cpu=trainer.reference_cpu / steps)


def share_of_e(completions: list[Any], **_: Any) -> list[float]:
    """The reward of GRPO: the share of the letter e in each completion."""
    texts = [completion[0]["content"] for completion in completions]
    return [text.count("e") / max(1, len(text)) for text in texts]


def grpo(setting: Setting, turns: Turns) -> None:
    """GRPOTrainer, which samples with `generate`. Without a KL term."""
    model, tokenizer = load(setting)
    prompts = [{"prompt": messages_of(row)} for row in setting.rows]
    arguments = GRPOConfig(
        output_dir=setting.folder, per_device_train_batch_size=setting.rows_per_step * setting.completions,
        num_generations=setting.completions, max_completion_length=setting.new_tokens, beta=0.0, temperature=1.0,
        generation_kwargs={"min_new_tokens": setting.new_tokens}, **(COMMON | setting.options),
    )  # fmt: skip
    trainer = CountedGRPO(
        model=model, reward_funcs=share_of_e, args=arguments, train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
    )  # fmt: skip
    train(trainer, turns)


def generate(setting: Setting, turns: Turns) -> None:
    """`generate` of a bfloat16 model, or with the option `continuous` its continuous batching."""
    model, tokenizer = load(setting, torch.bfloat16)
    model.eval()
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=setting.new_tokens,
        min_new_tokens=setting.new_tokens, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    # A page of the cache holds 256 tokens, which is enough for a prompt and its completion. Without these limits the
    # cache takes most of the machine's memory.
    cache = ContinuousBatchingConfig(num_blocks=setting.rows_per_step + 8, max_batch_tokens=PREFILL_TOKENS)
    step = 0
    while turns.begin():
        texts = []
        for row in setting.step_rows(step):
            texts.append(tokenizer.apply_chat_template(messages_of(row), tokenize=False, add_generation_prompt=True))
        with torch.no_grad():
            if setting.options.get("continuous"):
                ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
                outputs = model.generate_batch(
                    ids, generation_config=config, continuous_batching_config=cache, progress_bar=False
                )
                tokens = sum(len(output.generated_tokens) for output in outputs.values())
            else:
                inputs = tokenizer(
                    texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
                )
                outputs = model.generate(**inputs, generation_config=config)
                tokens = (outputs.shape[1] - inputs["input_ids"].shape[1]) * outputs.shape[0]
        turns.end(tokens)
        step += 1


def logprobs(setting: Setting, turns: Turns) -> None:
    """The logprobs of every token by one padded forward pass under autocast, as TRL's trainers compute them."""
    from trl.trainer.utils import selective_log_softmax

    model, tokenizer = load(setting)
    model.eval()
    step = 0
    while turns.begin():
        texts = [tokenizer.apply_chat_template(messages_of(row), tokenize=False) for row in setting.step_rows(step)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(**inputs, use_cache=False).logits[:, :-1]
            selective_log_softmax(logits, inputs["input_ids"][:, 1:])
        turns.end(int(inputs["attention_mask"].sum()))
        step += 1


def dataset(setting: Setting, turns: Turns) -> None:
    """Loads a JSON lines file that no cache knows with `datasets`, and takes rows of a shuffled order."""
    from datasets import load_dataset

    def load(path: Path, folder: Path, chosen: int) -> tuple[int, int]:
        data = load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder))
        return len(data), len(data.shuffle(seed=0).select(range(chosen))[:]["prompt"])

    load_in_turns(setting, turns, load)
