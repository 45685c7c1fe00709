"""All calls of vLLM's own API outside of its workers. Written for vLLM 0.32 and tested by tests/engine/vllm.

vLLM changes global state of this process: it draws from the global random generators, replaces
`torch.set_num_threads` by a no-op, and reads the environment at import. `_restores_globals` undoes these changes.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from engine.backends.protocol import Interrupted, OnToken
from engine.backends.replicas.partial_completions import PartialCompletion
from engine.backends.replicas.runtime import (
    HeldWeights,
    LoadProof,
    Manifest,
    Source,
    any_broken,
    check_replies,
    proof_from_replies,
    worker_ids_of,
)
from engine.backends.torch.decoding.drawing import processed_logprobs
from engine.backends.vllm.architecture import EngineOptions
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied
from engine.protocol import Completion, SamplingParams, StopReason, TokenIds
from engine.text.stops import CompletionEnd, StopStrings

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process, so that it can take tensors directly
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it binds threads to cores that the trainer's threads use
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the trainer's threads do not survive a fork
}
LOG_LEVEL = "ERROR"
"""Level of vLLM's log lines in this process, unless $VLLM_LOGGING_LEVEL is set. Its warnings are about options that are
set here on purpose (no tokenizer, no chunked prefill), or repeat at every sync (a tied head without a tensor)."""
CPU_KV_CACHE_BYTES = 1 << 30
"""Default size of the KV cache on the CPU."""
MIN_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this."""
MAX_CPU_ADAPTERS = 32
"""Adapters that vLLM keeps in host memory; those of several policies and runs are loaded at the same time."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can be built for."""
MIN_BATCHED_TOKENS = 8192
"""Smallest value of vLLM's max_num_batched_tokens."""


class InProcessRuntime:
    """Implements runtime.Runtime with one vLLM engine in this process.

    With tensor_parallel > 1 its workers are separate processes, which take weights as files.
    """

    needs_weights = False

    def __init__(self, config_folder: Path, options: EngineOptions) -> None:
        self.options = options
        self.alive = True
        self._state: str | None = None
        self._worker_ids: list[str] = []
        self._adapter_numbers = itertools.count(1)
        self._adapters: dict[str, Any] = {}
        """LoRA requests by the adapter's name."""
        self._request_numbers = itertools.count()
        with _restores_globals():
            self._llm: Any = _start_llm(config_folder, options)
        self._engine = self._llm.llm_engine

    # -- weights ----------------------------------------------------------------------------------------------

    def load(self, source: Source, manifest: Manifest, state: str, *, full: bool = False) -> LoadProof:
        self._state = None
        if isinstance(source, HeldWeights):
            raise BadSpec("vLLM in the engine's process is no member of a broadcast group: stage the weights")
        worker_source = source if isinstance(source, Mapping) else [str(path) for path in source]
        with _restores_globals():
            replies = self._rpc("ostinato_load", worker_source, manifest, state, full)
        self.alive = not any_broken(replies)
        proof = proof_from_replies(replies, state)
        self._worker_ids = worker_ids_of(replies)
        self.reset_prefix_cache()
        self._state = state
        return proof

    def check(self, state: str, *, full: bool = False) -> None:
        check_replies(self._rpc("ostinato_check", state, full), self._worker_ids)

    def reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise SamplerOutOfSync("vLLM did not reset its prefix cache: it would use keys and values of older weights")

    # -- adapters ---------------------------------------------------------------------------------------------

    def load_adapter(self, folder: Path, name: str, manifest: Manifest) -> None:
        number = next(self._adapter_numbers)
        check_replies(self._rpc("ostinato_load_adapter", str(folder), name, number, manifest), self._worker_ids)
        self._adapters[name] = lora_request(name, number, str(folder))

    def remove_adapter(self, name: str) -> None:
        request = self._adapters.pop(name, None)
        if request is not None:
            self._rpc("ostinato_remove_adapter", name)

    def check_adapter(self, name: str) -> None:
        check_replies(self._rpc("ostinato_check_adapter", name), self._worker_ids)

    # -- tokens -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        *,
        adapter: str | None = None,
        stops: StopStrings | None = None,
        sampled: Sequence[TokenIds] | None = None,
        interrupted: Interrupted | None = None,
    ) -> list[Completion]:
        # vLLM ends a completion at its stop tokens and its length. For strings, each token must be seen here.
        stream = on_token is not None or stops is not None or interrupted is not None
        earlier = sampled or [[] for _ in prompts]
        ends = [CompletionEnd(params, self.options.eos_token_ids, stops, tokens) for tokens in earlier]
        request_params = []
        for seed, tokens in zip(seeds, earlier, strict=True):
            rest = params_after(params, len(tokens))
            request_params.append(vllm_params(rest, seed, self.options, stream=stream))
        whole_prompts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, earlier, strict=True)]
        buffers = [PartialCompletion() for _ in prompts]

        def has_ended(index: int) -> bool:
            return buffers[index].stop is not None

        # Closing the outputs aborts the completions that have not ended.
        with closing(self._run(whole_prompts, request_params, adapter, has_ended)) as outputs:
            for index, output in outputs:
                tokens, logprobs, stop = until_end(output_tokens(output.outputs[0], params), ends[index])
                for token, logprob in buffers[index].add_chunk(tokens, logprobs, stop):
                    if on_token is not None:
                        on_token(index, token, logprob)
                if interrupted is not None and interrupted():
                    for buffer in buffers:
                        buffer.interrupt()
                    break
        return [buffer.completion() for buffer in buffers]

    def score(
        self, sequences: Sequence[TokenIds], *, temperature: float = 1.0, adapter: str | None = None
    ) -> list[list[float]]:
        if temperature != 1.0:
            raise BadSpec(f"temperature={temperature} was given, and vLLM scores at temperature 1 only")
        scores: list[list[float]] = [[] for _ in sequences]
        for index, output in self._run(list(sequences), [scoring_params()] * len(sequences), adapter):
            scores[index] = scored(output, sequences[index])
        return scores

    def _run(
        self,
        prompts: Sequence[TokenIds],
        params: Sequence[Any],
        adapter: str | None,
        has_ended: Callable[[int], bool] = lambda index: False,
    ) -> Generator[tuple[int, Any]]:
        """Submits all prompts, and yields (index of the prompt, RequestOutput) until all are done. A prompt for which
        `has_ended(index)` is true after one of its outputs is aborted. Closing the iterator aborts the rest."""
        # With the state in the salt, a prompt never matches cache entries of other weights.
        salt = f"{self._state} {adapter}"
        lora = None if adapter is None else self._adapters[adapter]
        index_by_request: dict[str, int] = {}
        try:
            for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
                name = f"ostinato-{next(self._request_numbers)}"
                index_by_request[name] = index
                self._engine.add_request(name, token_prompt(prompt, salt=salt), prompt_params, lora_request=lora)
            while index_by_request:
                for output in self._step():
                    index = index_by_request[output.request_id]
                    yield index, output
                    if not output.finished and has_ended(index):
                        self._engine.abort_request([output.request_id])
                    if output.finished or has_ended(index):
                        del index_by_request[output.request_id]
        finally:
            if index_by_request and self.alive:
                self._engine.abort_request(list(index_by_request))
                while self._engine.has_unfinished_requests():
                    self._step()

    def _step(self) -> list[Any]:
        try:
            return self._engine.step()
        except Exception as error:
            # The boundary to vLLM's engine: it cannot be used after an exception of any kind.
            self.alive = False
            raise WorkerDied(f"vLLM's engine failed; the next sync starts another: {error!r}") from error

    # -- life -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Drops the weights (level 2) instead of keeping them in host memory. The trainer sends them again."""
        if self.options.sleep:
            self._llm.sleep(level=2)

    def wake(self) -> None:
        if self.options.sleep:
            self._llm.wake_up()

    def close(self) -> None:
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        self._engine = self._llm = None
        self.alive = False
        gc.collect()
        cleanup_dist_env_and_memory()

    def _rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        return self._llm.collective_rpc(method, args=args)


def until_end(
    new_tokens: Sequence[tuple[int, float]], end: CompletionEnd
) -> tuple[TokenIds, list[float], StopReason | None]:
    """The new (token, logprob) pairs up to the end of their completion, as (tokens, logprobs, stop reason or None)."""
    tokens: TokenIds = []
    logprobs: list[float] = []
    for token, logprob in new_tokens:
        tokens.append(token)
        logprobs.append(logprob)
        stop = end.after(token)
        if stop is not None:
            return tokens, logprobs, stop
    return tokens, logprobs, None


def params_after(params: SamplingParams, tokens: int) -> SamplingParams:
    """The parameters of the rest of a completion that has this many tokens already."""
    if not tokens:
        return params
    lengths = {
        "max_new_tokens": params.max_new_tokens - tokens,
        "min_new_tokens": max(0, params.min_new_tokens - tokens),
    }
    return params.model_copy(update=lengths)


def vllm_params(params: SamplingParams, seed: int, options: EngineOptions, *, stream: bool) -> Any:
    """Converts sampling parameters to vLLM's. End-of-sequence ids become stop tokens, unless they are to be ignored.

    Args:
        stream: whether outputs contain only the new tokens, instead of all tokens at the end.

    Raises:
        BadSpec: vLLM would change the temperature.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if 0 < params.temperature < MIN_TEMPERATURE:
        raise BadSpec(
            f"temperature {params.temperature} was given; vLLM samples at {MIN_TEMPERATURE} or more: give that, or 0 "
            "for greedy"
        )
    # A top_k of the whole vocabulary filters nothing. With one set of stop tokens, both kinds of ends have one rule.
    top_k = params.top_k if params.top_k < options.vocab_size else 0
    stop_token_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_token_ids.update(options.eos_token_ids)
    return VllmParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=top_k,
        seed=seed & ((1 << 63) - 1),
        max_tokens=params.max_new_tokens,
        min_tokens=min(params.min_new_tokens, params.max_new_tokens),
        stop_token_ids=sorted(stop_token_ids),
        ignore_eos=True,
        logprobs=-1 if _filters_greedy(params) else 0,
        detokenize=False,
        skip_clone=True,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        structured_outputs=None if params.json_schema is None else StructuredOutputsParams(json=params.json_schema),
    )


def scoring_params() -> Any:
    """vLLM's parameters of a request that scores its prompt. One token is sampled, since vLLM requires it."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scored(output: Any, tokens: TokenIds) -> list[float]:
    """Logprobs in nats of every token but the first, from the output of a scoring request."""
    return [entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]


def token_prompt(tokens: Sequence[int], *, salt: str) -> Any:
    """A prompt of token ids. Its prefix in the cache is shared only with prompts of the same salt."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(tokens), cache_salt=salt)


def lora_request(name: str, number: int, path: str) -> Any:
    """vLLM's reference to an adapter. `number` must be new in this engine."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, path)


def _filters_greedy(params: SamplingParams) -> bool:
    """Whether the logprobs must be computed here, from those of the whole vocabulary: vLLM's logprobs of greedy
    completions ignore top-k and top-p."""
    return params.temperature == 0 and (params.top_k > 0 or params.top_p < 1)


def output_tokens(output: Any, params: SamplingParams) -> list[tuple[int, float]]:
    """(token, logprob) of the new tokens in one vLLM output."""
    new_tokens = []
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        logprob = entry[token].logprob
        if _filters_greedy(params):
            row_1V = torch.tensor([[entry[token_id].logprob for token_id in range(len(entry))]])
            logprob = processed_logprobs(row_1V, params)[0, token].item()
        new_tokens.append((token, logprob))
    return new_tokens


def _start_llm(config_folder: Path, options: EngineOptions) -> Any:
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", LOG_LEVEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns about attributes that vLLM uses
        from vllm import LLM

        return LLM(**engine_arguments(config_folder, options))


def async_engine(config_folder: Path, options: EngineOptions, executor: str | None) -> Any:
    """Starts vLLM's AsyncLLM, whose engine runs in a process of its own.

    Args:
        executor: vLLM's distributed executor if several workers share the model.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(**engine_arguments(config_folder, options), distributed_executor_backend=executor)
    config = arguments.create_engine_config()
    if options.tensor_parallel == 1:
        # On the CPU vLLM would start a second process to set OpenMP's threads there; the environment has set them.
        config.parallel_config.distributed_executor_backend = "uni"
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def engine_arguments(config_folder: Path, options: EngineOptions) -> dict[str, Any]:
    """vLLM's engine arguments. They have the same names on vLLM's command line."""
    # vLLM gets either a fixed KV cache or a share of the GPU.
    optional: dict[str, Any] = {}
    if options.kv_cache_bytes is not None or not torch.cuda.is_available():
        optional["kv_cache_memory_bytes"] = options.kv_cache_bytes or CPU_KV_CACHE_BYTES
    else:
        optional["gpu_memory_utilization"] = options.gpu_share
    # LoRA costs decoding speed, so it is built in only if adapters are used.
    if options.max_lora_rank is not None:
        optional |= {
            "enable_lora": True,
            "max_lora_rank": lora_rank_of(options.max_lora_rank),
            "max_loras": options.max_loras,
            "max_cpu_loras": MAX_CPU_ADAPTERS,
            "lora_target_modules": list(options.lora_targets),
        }
    return dict(
        model=str(config_folder),
        load_format="dummy",
        # only the grammars of constrained completions need a tokenizer
        skip_tokenizer_init=not (config_folder / "tokenizer.json").is_file(),
        structured_outputs_config={"backend": "guidance"},
        generation_config="vllm",
        dtype=options.dtype,
        tensor_parallel_size=options.tensor_parallel,
        max_model_len=options.max_context,
        max_num_seqs=options.max_rows,
        max_num_batched_tokens=max(options.max_context, MIN_BATCHED_TOKENS),
        scheduling_policy="priority",  # of smaller numbers first, and of equal ones those that came first
        enable_chunked_prefill=False,  # on the CPU a seeded request with a split prompt crashes the engine
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # logprobs of the distribution that is sampled, after temperature
        max_logprobs=-1,
        enforce_eager=options.eager,
        enable_sleep_mode=options.sleep and torch.cuda.is_available(),
        worker_extension_cls=options.extension,
        disable_log_stats=True,
        seed=0,
        **optional,
    )


def lora_rank_of(rank: int) -> int:
    """The smallest rank that vLLM can be built for and that holds adapters of this rank."""
    return next((size for size in LORA_RANKS if size >= rank), rank)


@contextmanager
def _restores_globals() -> Iterator[None]:
    """Restores after the block what vLLM changes in this process: random generators, default dtype, gradients, threads.
    """
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    random_state, numpy_state = random.getstate(), numpy.random.get_state()
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            set_threads(threads)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(gradients)
            random.setstate(random_state)
            numpy.random.set_state(numpy_state)
