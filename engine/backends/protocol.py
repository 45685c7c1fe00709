"""The interfaces of trainers, of samplers, and of the backends that create them.

All calls are synchronous. The local engine calls trainers and `Sampler.stage` from its trainer lane. It loads and
samples with samplers that are `independent` in its sampler lane.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from engine.backends.weight_files.sketches import Sketch
from engine.errors import BadSpec, SamplerOutOfSync, SampleTooLong
from engine.losses.spec import LossSpec
from engine.models.folder import CONTEXT_SOURCE
from engine.models.samples import FloatArray, Sample
from engine.protocol import ActorCount, Completion, OnToken, SamplerScale, SamplingParams, TokenIds, TokenSequence
from engine.specs.adapters import Head, LoraSpec
from engine.text.tokenizers import Tokenizer
from storage.chain.records import Numerics, OptimizerSpec, StepOldLogprobs
from storage.serialization import FileDigest

UPDATE_REFUSED = "the frozen base of adapters cannot be updated; train an adapter on it instead"


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss that one optimizer update minimises, and its settings."""

    loss: LossSpec
    temperature: float = 1.0
    old_logprobs: StepOldLogprobs = "trainer"
    skip_nan_gradients: bool = False


@dataclass(slots=True)
class UpdateReport:
    """The metrics and the counts of one optimizer update."""

    metrics: dict[str, float] = field(default_factory=dict)
    skipped: bool = False
    micro_batches: int = 0
    max_tokens: int = 0
    """The limit of packed tokens per forward pass in this update: the requested one, or half of it after running out of
    memory."""


class FrozenBase(Protocol):
    """A frozen base model that adapters share."""

    @property
    def digest(self) -> str:
        """Digest of its weights as loaded."""
        ...

    @property
    def layers(self) -> Collection[str]:
        """Names of the linear layers that adapters may adapt."""
        ...

    @property
    def alive(self) -> bool:
        """False once the process that held the weights has ended."""
        ...

    def nbytes(self) -> int:
        """Bytes of its weights in memory now."""
        ...


class Trainer(Protocol):
    """Weights, gradients and AdamW moments of one policy: a whole model, or an adapter on a shared base model."""

    @property
    def base(self) -> FrozenBase | None:
        """The base model that this policy shares with others. None: it has all its weights itself."""
        ...

    @property
    def adapter(self) -> LoraSpec | None:
        """The adapter that is trained on `base`. None: all weights are trained, or this is the base itself."""
        ...

    @property
    def scalar(self) -> bool:
        """Whether the model has a scalar head (`values`) rather than a language head (`logprobs`).

        The call that the head does not support raises BadSpec."""
        ...

    def update(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        optimizer: OptimizerSpec,
        *,
        max_tokens: int,
        on_micro_batch: Callable[[], None],
    ) -> UpdateReport:
        """Makes one optimizer update over `samples`. The loss is normalised over all samples, however they are split.

        If the device runs out of memory, the update is repeated once with half of `max_tokens`. Raises OutOfMemory if
        that does not fit either.
        """
        ...

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[FloatArray]:
        """Returns, for each sequence, the logprob in nats of each trained token."""
        ...

    def entropies(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[FloatArray]:
        """Returns, for each sequence, the entropy in nats of the distribution that each trained token was drawn from.
        """
        ...

    def top_logprobs(self, sequences: Sequence[TokenSequence], *, count: int, max_tokens: int) -> list[FloatArray]:
        """Returns, for each sequence, an array (trained tokens, 1 + 2 count): the logprob in nats of the token, those
        of the `count` most probable tokens in its place, and the ids of these."""
        ...

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[FloatArray]:
        """Returns, for each sequence, the output of the scalar head at the position before each trained token."""
        ...

    def reset_optimizer(self) -> None:
        """Drops the moments, so that the next update starts with fresh ones."""
        ...

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        """Returns the digest of all trained weights, and the digest of each tensor by name."""
        ...

    def weights_sketch(self) -> Sketch:
        """Returns the sketch of the weights of `weights_digest`, in the order of their names."""
        ...

    def add_rounding_noise(self, relative: float, *, seed: int) -> None:
        """Multiplies each of the weights of `weights_digest` by 1 + `relative` or by 1 - `relative`, at random."""
        ...

    def write_checkpoint(self, folder: Path) -> dict[str, Path]:
        """Writes the weights and the moments as safetensors files. Returns the files by name."""
        ...

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> None:
        """Loads files of `write_checkpoint`. With `optimizer=False` the moments are fresh ones."""
        ...

    def export(self, folder: Path) -> dict[str, Path]:
        """Writes the trained part without a tokenizer: a Hugging Face model folder, or for an adapter a peft folder.

        Returns the files by name."""
        ...

    def export_merged(self, folder: Path) -> dict[str, Path]:
        """Writes a complete Hugging Face model folder without a tokenizer. An adapter is merged into its base model."""
        ...

    def nbytes(self, *, training: bool = True) -> int:
        """Peak bytes that only this policy uses: its weights and, with `training`, its gradients and both moments."""
        ...

    @property
    def weights_nbytes(self) -> int:
        """Bytes in master precision of all weights that the policy computes with, including a shared base model."""
        ...

    @property
    def alive(self) -> bool:
        """False once the process that held the weights has ended. The trainer is then unusable."""
        ...

    def write_config(self, folder: Path) -> None:
        """Writes the config.json and generation_config.json of the model's folder."""
        ...

    def stage_weights(self, folder: Path, *, dtype: torch.dtype) -> list[Path]:
        """Writes every weight that a sampler needs into `folder` as safetensors files.

        Floating-point weights are written in `dtype`, under the names that `save_pretrained` uses. A tied head is not
        written a second time. For an adapter these are the weights of its base, or the merged weights unless it
        `is_sampled_on_base`."""
        ...


def is_sampled_on_base(trainer: Trainer) -> bool:
    """Whether a sampler in another process takes the base of this policy once, and then only the adapter. Not with
    DoRA, which vLLM does not serve: such a sampler takes the merged weights at each sync."""
    return trainer.base is not None and not (trainer.adapter is not None and trainer.adapter.use_dora)


class BaseGone(SamplerOutOfSync):
    """The sampler has lost the base model of an adapter since the adapter was staged. Both must be staged again."""


Interrupted = Callable[[], bool]
"""Whether a call of `Sampler.sample` must end at its next token. It is asked at every token, so it must be quick."""


class StagedWeights(Protocol):
    """The weights of one policy on their way from a trainer to a sampler."""

    state: str
    """State of the policy."""

    def close(self) -> None:
        """Frees the weights. Idempotent."""
        ...


class Sampler(Protocol):
    """Samples completions with the weights that it has loaded last."""

    @property
    def independent(self) -> bool:
        """Whether it may load weights and sample while the trainer computes. Otherwise it shares tensors or device
        memory with the trainer, and `load` must follow `stage` before the trainer does anything else."""
        ...

    @property
    def loaded_state(self) -> str | None:
        """State of the policy whose weights it holds. None before the first load, and after a failed one."""
        ...

    @property
    def base_group(self) -> Hashable | None:
        """Samplers of an equal group load and sample adapters of one base at the same time. None: it is in no group."""
        ...

    def in_same_group(self) -> Sampler:
        """A new sampler of the same base group, which holds no weights yet."""
        ...

    def stage(self, trainer: Trainer, state: str) -> Any:
        """Takes the trainer's weights, which are those of the policy `state`, and returns them as StagedWeights for
        `load`. It may run while the sampler samples. The caller closes them.

        Raises BadSpec if the sampler was created for a different model."""
        ...

    def load(self, staged: Any) -> None:
        """Loads weights of `stage` and checks them. No completion of this sampler may be in progress.

        Raises SamplerOutOfSync if they did not arrive complete, or compute something else than the trainer's, and
        BaseGone.
        """
        ...

    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        *,
        sampled: Sequence[TokenIds] | None = None,
        interrupted: Interrupted | None = None,
    ) -> list[Completion]:
        """Returns one completion per prompt. engine.text.stops.CompletionEnd defines where each of them ends.

        `sampled` are the tokens that each completion has already (`GenerateRequest.sampled`). Once `interrupted`
        returns true, the call ends at a token, and the completions that have not ended have the stop reason
        "interrupted".

        A sampler whose `accepts_images` is true also takes `images`, the images of each prompt. Other samplers are
        never called with images (engine.models.images.check_images_accepted). The same holds for trainers."""
        ...

    def nbytes(self) -> int:
        """Bytes of the engine's memory that only this sampler uses. 0 if it shares the trainer's weights, or if its
        memory is not counted in the engine's budget."""
        ...

    def close(self) -> None: ...


def sync(sampler: Sampler, trainer: Trainer, state: str) -> None:
    """Lets the sampler take the trainer's weights, which are those of the policy `state`. Raises as `stage` and `load`.
    """
    with closing(sampler.stage(trainer, state)) as staged:
        sampler.load(staged)


class Transfers(Protocol):
    """Transfers the files of checkpoints to and from a store in the processes that hold the weights."""

    def upload(self, url: str, files: Mapping[str, tuple[str, Path]]) -> dict[str, FileDigest]:
        """Uploads files of `Trainer.write_checkpoint`, given as (key, path) by name, each from the process that wrote
        it, while the trainers may compute. May be called in any thread.

        Returns the digests of the uploaded files, by name. The caller uploads the others: those of processes that are
        gone or that cannot use the store, and all files of a store that other processes need not or cannot use."""
        ...

    def download(self, url: str, key: str, names: Sequence[str], folder: Path) -> bool:
        """Downloads the files of an artifact to `folder`, with checked digests, several processes at a time. Returns
        whether all of them are there. If not, the caller downloads the missing ones. Raises WorkerDied."""
        ...

    def discard(self, url: str, folder: Path) -> None:
        """Removes the folder of `Trainer.write_checkpoint` on the machines of the processes that upload to the store.
        May be called in any thread."""
        ...


class TrainerBackend(Protocol):
    """Creates the trainers of an engine, as `engine.trainer` in its config asks for them."""

    threads: int
    device: torch.device
    compute_dtype: torch.dtype
    master_dtype: torch.dtype

    @property
    def transfers(self) -> Transfers | None:
        """Transfers checkpoints in the processes of the trainers. None if there are no such processes."""
        ...

    @property
    def devices(self) -> int:
        """Number of GPUs that train. Without GPUs, each machine counts as one."""
        ...

    @property
    def actors(self) -> ActorCount:
        """Numbers of its Ray actors. May be read from any thread."""
        ...

    def numerics(self) -> Numerics:
        """Backend, precision, layout and library versions of the trainers, for commit records."""
        ...

    def prepare_thread(self) -> None:
        """Prepares a thread of the engine that computes. It is called once from each of them."""
        ...

    def threads_of(self, numerics: Numerics) -> AbstractContextManager[None]:
        """Within the block, the trainers compute with the thread count of a committed step."""
        ...

    def memory_bytes(self) -> int:
        """Bytes that weights, moments and gradients may fill."""
        ...

    def operations_per_second(self) -> float:
        """Measured speed of a large matrix product in the compute precision."""
        ...

    def load(self, folder: Path, *, head: Head = "lm", init_seed: int = 0) -> Trainer:
        """Loads a model whose weights are all trained.

        With `head="scalar"`, the language head is replaced by a new scalar head, initialised from `init_seed`. A folder
        that already has a scalar head keeps it.

        Raises:
            BadModelFolder: the folder does not load, or its architecture supports no scalar head.
            BadSpec: `head` is "lm", and the folder has a scalar head.
        """
        ...

    def try_load(self, folder: Path) -> None:
        """Raises BadModelFolder for a folder that `load` would reject with the head that the folder has."""
        ...

    def load_base(self, folder: Path, *, key: str = "", load_in_4bit: bool = False) -> FrozenBase:
        """Loads a frozen model that adapters share. `key` is its registry key. With `load_in_4bit`, its linear layers
        are held in 4 bits. Raises BadSpec if this backend or its device cannot."""
        ...

    def adapter(self, base: Any, spec: LoraSpec, *, init_seed: int) -> Trainer:
        """Creates a new adapter on a base model of `load_base`."""
        ...

    def adapter_off(self, base: Any) -> Trainer:
        """Returns the base model itself as a policy that is only read."""
        ...

    def close(self) -> None: ...


class SamplerBackend(Protocol):
    """Creates the samplers of an engine, as `engine.sampler` in its config asks for them."""

    @property
    def devices(self) -> int:
        """Number of GPUs that sample. Without GPUs, each copy of the sampler counts as one."""
        ...

    @property
    def actors(self) -> ActorCount:
        """Numbers of its Ray actors. May be read from any thread."""
        ...

    @property
    def concurrent_calls(self) -> int:
        """Number of calls of `sample` that one of its independent samplers takes at the same time."""
        ...

    @property
    def tensor_parallel_from_config(self) -> bool:
        """Whether the config alone decides over how many devices a model is split. `tp(n)` of a call cannot change it.
        """
        ...

    def added_bytes(self, trainer: Trainer) -> int:
        """Bytes of the engine's memory that a new sampler for this trainer will use."""
        ...

    def new_sampler(
        self, trainer: Trainer, *, tensor_parallel: int | None = None, tokenizer: Tokenizer | None = None
    ) -> Sampler:
        """Returns a sampler for the trainer's model. Policies of the same model may share one sampler.

        `tokenizer` is the model's: its end-of-turn ids end completions, and it finds stop strings. Without one,
        completions end at the ids of the model's configs, and stop strings are refused with BadSpec."""
        ...

    def scale(self, count: int) -> SamplerScale:
        """Changes the number of replicas of each model, at least 1, while calls run. Returns at once. May be called in
        any thread.

        Raises BadSpec if the samplers are no replicas, or if so many can never run."""
        ...

    def offload_for_training(self) -> None:
        """Releases device memory before a gradient step, as far as the sampler can."""
        ...

    def close(self) -> None: ...


class ReadOnlyPolicy:
    """Mixin of a trainer that is the frozen base of adapters itself, which can only be read: logprobs, digest and
    export. Every call that would change or save it raises BadSpec."""

    def update(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        optimizer: OptimizerSpec,
        *,
        max_tokens: int,
        on_micro_batch: Callable[[], None] = lambda: None,
    ) -> NoReturn:
        raise BadSpec(UPDATE_REFUSED)

    def add_rounding_noise(self, relative: float, *, seed: int) -> NoReturn:
        raise BadSpec(UPDATE_REFUSED)

    def write_checkpoint(self, folder: Path) -> NoReturn:
        raise BadSpec("the frozen base of adapters has no checkpoint; it is a registered model: use that")

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> NoReturn:
        raise BadSpec("a checkpoint cannot be read into the frozen base of adapters; read it into an adapter")


def check_prompts(
    prompts: Sequence[TokenIds],
    seeds: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    context_length: int,
    eos_token_ids: Collection[int],
    sampled: Sequence[TokenIds] | None = None,
) -> None:
    """Checks a request for completions.

    Raises:
        BadSpec: empty prompts, ids outside the vocabulary (also of `sampled` tokens), unequal numbers of prompts and
            seeds, or stop tokens that leave nothing to sample.
        SampleTooLong: a prompt and `max_new_tokens` do not fit in the context.
    """
    # The request as a whole.
    if len(prompts) != len(seeds):
        raise BadSpec(f"{len(prompts)} prompts were given with {len(seeds)} seeds; give one seed per prompt")
    _check_stop_tokens(params, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    # Each prompt. The message names its index, since a call may have thousands.
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise BadSpec(f"prompt {index} has no tokens; there is nothing to continue")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise BadSpec(
                f"prompt {index} has token ids outside 0..{vocab_size - 1}; was it rendered with another model's "
                "tokenizer?"
            )
        if len(prompt) + params.max_new_tokens > context_length:
            raise SampleTooLong(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens={params.max_new_tokens} it passes the "
                f"model's context of {context_length}{CONTEXT_SOURCE}; truncate the prompt or ask for fewer tokens"
            )
    for index, tokens in enumerate(sampled or ()):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            raise BadSpec(
                f"completion {index} was given with sampled token ids outside 0..{vocab_size - 1}; give the tokens "
                "that this model's sampler returned"
            )


def _check_stop_tokens(params: SamplingParams, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    unknown = [token for token in params.stop_token_ids if not 0 <= token < vocab_size]
    if unknown:
        raise BadSpec(
            f"the stop token id {unknown[0]} is outside 0..{vocab_size - 1}; give ids of this model's tokenizer"
        )
    if params.min_new_tokens > 0 and len({*params.stop_token_ids, *eos_token_ids}) >= vocab_size:
        raise BadSpec(
            f"every token of the vocabulary of {vocab_size} ends a completion, and min_new_tokens="
            f"{params.min_new_tokens} forbids all of them; give fewer stop tokens, or min_new_tokens=0"
        )
