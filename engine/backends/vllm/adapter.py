"""Everything the engine's side calls of vLLM itself, in one file: written for 0.32, held by tests/engine/vllm.

vLLM in this process takes liberties: it draws from the global generators, replaces `torch.set_num_threads` by a no-op,
and reads the environment at import. `_contained` gives back what it takes.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from engine.backends.protocol import OnToken
from engine.backends.torch.sampler import processed_logprobs
from engine.backends.vllm.serving.runtime import EngineOptions, Manifest, Receipt, Source
from engine.backends.vllm.weight_sync.receipts import receipt_of, refuse_wrong
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied
from engine.protocol import Completion, SamplingParams, StopReason, TokenIds

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's loop in this process: weights can be handed over as they are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes cores away from the trainer's threads
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the trainer's threads do not survive a fork
}
LOGGED = "ERROR"
"""The level of vLLM's own lines in this process, unless $VLLM_LOGGING_LEVEL says otherwise. What it warns of is what it
is told here on purpose (no tokenizer, no chunked prefill) or finds at every sync (a tied head that no tensor is for); a
server writes all of it into its log."""
CPU_KV_CACHE_BYTES = 1 << 30
MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this without a word."""
ADAPTERS_HELD = 8


class InProcess:
    """Implements runtime.Runtime: one vLLM engine in this process. With tensor_parallel > 1 its workers are processes
    of their own, and weights go to them as files."""

    wants_weights = False

    def __init__(self, config_folder: Path, options: EngineOptions) -> None:
        self.options = options
        self.takes_tensors = options.tensor_parallel == 1
        self.alive = True
        self._state: str | None = None
        self._boots: list[str] = []
        self._numbers = itertools.count(1)
        self._adapters: dict[str, Any] = {}
        self._ids = itertools.count()
        with _contained():
            self._llm: Any = _llm(config_folder, options)
        self._engine = self._llm.llm_engine

    # -- weights ----------------------------------------------------------------------------------------------

    def load(self, source: Source, manifest: Manifest, state: str, *, full: bool = False) -> Receipt:
        self._state = None
        given = source if isinstance(source, Mapping) else [str(path) for path in source]
        with _contained():
            answers = self._rpc("ostinato_load", given, manifest, state, full)
        self.alive = not any(answer.get("broken") for answer in answers)
        receipt = receipt_of(answers, state)
        self._boots = [answer["boot"] for answer in answers]
        self.reset_prefix_cache()
        self._state = state
        return receipt

    def check(self, state: str, *, full: bool = False) -> None:
        refuse_wrong(self._rpc("ostinato_check", state, full), self._boots)

    def reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise SamplerOutOfSync("vLLM did not reset its prefix cache: older weights' keys and values would be read")

    # -- adapters ---------------------------------------------------------------------------------------------

    def load_adapter(self, folder: Path, name: str, manifest: Manifest) -> None:
        number = next(self._numbers)
        refuse_wrong(self._rpc("ostinato_load_adapter", str(folder), name, number, manifest), self._boots)
        self._adapters[name] = lora_request(name, number, str(folder))

    def remove_adapter(self, name: str) -> None:
        request = self._adapters.pop(name, None)
        if request is not None:
            self._rpc("ostinato_remove_adapter", name)

    def check_adapter(self, name: str) -> None:
        refuse_wrong(self._rpc("ostinato_check_adapter", name), self._boots)

    # -- tokens -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        drawn: list[_Drawn] = [_Drawn() for _ in prompts]
        wanted = [vllm_params(params, seed, self.options, stream=on_token is not None) for seed in seeds]
        for index, output in self._run(list(prompts), wanted, adapter):
            fresh = sampled(output.outputs[0], params)
            drawn[index].take(fresh)
            if on_token is not None:
                for token, logprob in fresh:
                    on_token(index, token, logprob)
        return [d.completion(self.options.eos_token_ids, params) for d in drawn]

    def score(
        self, sequences: Sequence[TokenIds], *, temperature: float = 1.0, adapter: str | None = None
    ) -> list[list[float]]:
        if temperature != 1.0:
            raise BadSpec(f"vLLM scores at temperature 1 only; {temperature} was asked for")
        found: list[list[float]] = [[] for _ in sequences]
        for index, output in self._run(list(sequences), [scoring_params()] * len(sequences), adapter):
            found[index] = scored(output, sequences[index])
        return found

    def _run(
        self, prompts: Sequence[TokenIds], params: Sequence[Any], adapter: str | None
    ) -> Iterator[tuple[int, Any]]:
        """Submits all, steps until all are done, yields (place, RequestOutput). Closed early, it aborts the rest."""
        salt = f"{self._state} {adapter}"  # a cache entry of other weights can never be this state's
        lora = None if adapter is None else self._adapters[adapter]
        places: dict[str, int] = {}
        try:
            for place, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
                name = f"ostinato-{next(self._ids)}"
                places[name] = place
                self._engine.add_request(name, token_prompt(prompt, salt=salt), wanted, lora_request=lora)
            while places:
                for output in self._step():
                    yield places[output.request_id], output
                    if output.finished:
                        del places[output.request_id]
        finally:
            if places and self.alive:
                self._engine.abort_request(list(places))
                while self._engine.has_unfinished_requests():
                    self._step()

    def _step(self) -> list[Any]:
        try:
            return self._engine.step()
        except Exception as error:
            self.alive = False  # the boundary to vLLM's engine: after whatever it raises it cannot be trusted
            raise WorkerDied(f"vLLM's engine failed; the next sync starts another: {error!r}") from error

    # -- life -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Level 2: the weights are dropped, not kept in host memory. They come anew from the trainer."""
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


class _Drawn:
    """Tokens of one completion as they come."""

    def __init__(self) -> None:
        self.tokens: TokenIds = []
        self.logprobs: list[float] = []

    def take(self, fresh: Sequence[tuple[int, float]]) -> None:
        self.tokens += [token for token, _ in fresh]
        self.logprobs += [logprob for _, logprob in fresh]

    def completion(self, eos: Sequence[int], params: SamplingParams) -> Completion:
        return Completion(self.tokens, self.logprobs, stop_reason(self.tokens[-1], eos, params))


def stop_reason(last: int, eos: Sequence[int], params: SamplingParams) -> StopReason:
    """Why a completion ended with this token."""
    if last in eos and not params.ignore_eos:
        return "eos"
    return "stop" if last in params.stop_token_ids else "length"


def vllm_params(params: SamplingParams, seed: int, options: EngineOptions, *, stream: bool) -> Any:
    """Our meaning in vLLM's words. Ends of sequence are given as stop tokens, so that one rule holds for both, where
    they are not to be ignored.

    Raises:
        BadSpec: a temperature that vLLM would change.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    if 0 < params.temperature < MIN_TEMPERATURE:
        raise BadSpec(
            f"temperature {params.temperature} was given; vLLM draws at {MIN_TEMPERATURE} or more: give that, or 0 for "
            "greedy"
        )
    top_k = params.top_k if params.top_k < options.vocab_size else 0
    return VllmParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=top_k,
        seed=seed & ((1 << 63) - 1),
        max_tokens=params.max_new_tokens,
        min_tokens=min(params.min_new_tokens, params.max_new_tokens),
        stop_token_ids=sorted({*(() if params.ignore_eos else options.eos_token_ids), *params.stop_token_ids}),
        ignore_eos=True,
        logprobs=-1 if _filters_greedy(params) else 0,
        detokenize=False,
        skip_clone=True,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """Of a request that only scores its prompt; one more token is drawn, as vLLM wants it."""
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
    """Nats of every token but the first."""
    return [entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]


def token_prompt(tokens: Sequence[int], *, salt: str) -> Any:
    """A prompt whose prefix is shared only with prompts of the same salt."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(tokens), cache_salt=salt)


def lora_request(name: str, number: int, path: str) -> Any:
    """How vLLM is asked for an adapter; `number` is never used twice in one engine."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, path)


def _filters_greedy(params: SamplingParams) -> bool:
    """vLLM leaves top-k and top-p out of greedy logprobs: they are worked out here, from the whole vocabulary's."""
    return params.temperature == 0 and (params.top_k > 0 or params.top_p < 1)


def sampled(output: Any, params: SamplingParams) -> list[tuple[int, float]]:
    """(token, logprob) of what is new in one vLLM output."""
    found = []
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        logprob = entry[token].logprob
        if _filters_greedy(params):
            row_1V = torch.tensor([[entry[i].logprob for i in range(len(entry))]])
            logprob = processed_logprobs(row_1V, params)[0, token].item()
        found.append((token, logprob))
    return found


def _llm(config_folder: Path, options: EngineOptions) -> Any:
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", LOGGED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about what vLLM looks up in it
        from vllm import LLM

        return LLM(**engine_arguments(config_folder, options))


def async_engine(config_folder: Path, options: EngineOptions, executor: str | None) -> Any:
    """vLLM's AsyncLLM, whose engine computes in a process of its own. `executor`: what carries several workers."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(**engine_arguments(config_folder, options), distributed_executor_backend=executor)
    config = arguments.create_engine_config()
    if options.tensor_parallel == 1:
        # For the CPU vLLM chooses a second process, to set OpenMP's threads there. The environment has set them.
        config.parallel_config.distributed_executor_backend = "uni"
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def engine_arguments(config_folder: Path, options: EngineOptions) -> dict[str, Any]:
    """vLLM's engine arguments, by the names that its command line has too."""
    extra: dict[str, Any] = {}
    if options.kv_cache_bytes is not None or not torch.cuda.is_available():
        extra["kv_cache_memory_bytes"] = options.kv_cache_bytes or CPU_KV_CACHE_BYTES
    else:
        extra["gpu_memory_utilization"] = options.gpu_share
    if options.max_lora_rank is not None:
        extra |= {
            "enable_lora": True,
            "max_lora_rank": lora_rank_of(options.max_lora_rank),
            "max_loras": 1,
            "max_cpu_loras": ADAPTERS_HELD,
            "lora_target_modules": list(options.lora_targets),
        }
    return dict(
        model=str(config_folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=options.dtype,
        tensor_parallel_size=options.tensor_parallel,
        max_model_len=options.max_context,
        max_num_seqs=options.max_rows,
        max_num_batched_tokens=max(options.max_context, 8192),
        enable_chunked_prefill=False,  # on the CPU a seeded request whose prompt is split ends the engine
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled, temperature and all
        max_logprobs=-1,
        enforce_eager=options.eager,
        enable_sleep_mode=options.sleep and torch.cuda.is_available(),
        worker_extension_cls=options.extension,
        disable_log_stats=True,
        seed=0,
        **extra,
    )


def lora_rank_of(rank: int) -> int:
    """The smallest that vLLM is built for."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


@contextmanager
def _contained() -> Iterator[None]:
    """What vLLM changes in this process is as before: generators, default dtype, gradients, setting of threads."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), numpy.random.get_state()
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            set_threads(threads)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(gradients)
            random.setstate(states[0])
            numpy.random.set_state(states[1])
