"""The `train_*` calls of hand-written algorithms: each puts its samples on the tape at once and may be awaited.

They add to the gradient of the next `optim_step` only. Normalisation is over the whole tape, whatever the order and
the micro-batches: a loss per token is a mean over all trained tokens of all calls, GSPO's one per sequence a mean over
sequences, DPO's and ranking's a mean over pairs; `train_tangents` is a plain sum, since the tangents say it all.

Numbers per token are those of the trained tokens (weight > 0), as `logprobs_per_token` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engine.errors import BadSpec, SampleTooLong
from engine.losses.spec import LossSpec
from engine.models.images import check_images_accepted
from engine.models.scores import last_token_sequence
from engine.models.tape import Enqueued, Loss, Tape, per_token, spread_sum
from engine.protocol import TokenSequence
from engine.specs.adapters import parse_trainable
from engine.text.errors import UnsupportedFragment
from engine.text.rendering import Renderer
from engine.text.threads import StringThread, TokenizedThread
from engine.validation_messages import describe_errors

_LOSS: TypeAdapter[LossSpec] = TypeAdapter(LossSpec)

Thread = StringThread | TokenizedThread
Numbers = Sequence[float]


class Primitives:
    """Mixed into training models (engine.models.training_model)."""

    name: str
    max_batch_size: int
    renderer: Renderer

    @property
    def tape(self) -> Tape:
        raise NotImplementedError

    @property
    def trainable(self) -> dict[str, Any]:
        raise NotImplementedError

    # -- policies ----------------------------------------------------------------------------------------------

    def train_language_modelling(self, thread: Thread) -> Enqueued:
        """-log p of the thread's trained tokens, as a mean over tokens."""
        return self._add({"kind": "cross_entropy"}, self._sequence(thread))

    def train_ppo(
        self, tokenized: TokenizedThread, logprobs: Numbers, advantages: Numbers | float, clip_range: float
    ) -> Enqueued:
        """PPO's clipped policy gradient (arXiv:1707.06347), as a mean over tokens; `logprobs` are the old policy's."""
        return self._policy_gradient("grpo", tokenized, logprobs, None, advantages, clip_range, clip_range, 0.0)

    def train_grpo(
        self,
        tokenized: TokenizedThread,
        logprobs: Numbers,
        ref_logprobs: Numbers,
        advantages: Numbers | float,
        clip_range: float,
        kl_beta: float,
    ) -> Enqueued:
        """The same with a KL term to the reference (arXiv:2402.03300, k3), as a mean over tokens."""
        return self._policy_gradient(
            "grpo", tokenized, logprobs, ref_logprobs, advantages, clip_range, clip_range, kl_beta
        )

    def train_gspo(
        self,
        tokenized: TokenizedThread,
        logprobs: Numbers,
        ref_logprobs: Numbers,
        advantages: Numbers | float,
        left_clip: float,
        right_clip: float,
        kl_beta: float,
    ) -> Enqueued:
        """One ratio per sequence, clipped to [1 - left_clip, 1 + right_clip] (arXiv:2507.18071), as a mean over
        sequences, with the same KL term. The advantage is a number, a list of that one number, or a list
        with one per trained token."""
        if not isinstance(advantages, int | float) and getattr(advantages, "ndim", None) != 0 and len(advantages) == 1:
            advantages = float(advantages[0])
        return self._policy_gradient(
            "gspo", tokenized, logprobs, ref_logprobs, advantages, left_clip, right_clip, kl_beta
        )

    def train_dpo(
        self,
        preferred: Thread,
        dispreferred: Thread,
        ref_logprobs_pos: float | Numbers,
        ref_logprobs_neg: float | Numbers,
        beta: float,
    ) -> Enqueued:
        """-log sigmoid(beta ((L+ - L-) - (Lref+ - Lref-))) of a pair (arXiv:2305.18290), as a mean over pairs. L is the
        sum over a thread's trained tokens. The reference's are sums, as `logprobs` gives them, or lists per token."""
        pair = self._sequence(preferred), self._sequence(dispreferred)
        given = ref_logprobs_pos, ref_logprobs_neg
        columns = [_reference(values, sequence) for values, sequence in zip(given, pair, strict=True)]
        return self._add_pair({"kind": "dpo", "beta": float(beta)}, pair, reference_logprobs=tuple(columns))

    def train_tangents(
        self, inp_tokens: Numbers, image_patches: Any, tangents: Numbers, tgt_tokens: Numbers
    ) -> Enqueued:
        """Any loss, by its derivative: `tangents[i]` is d(loss)/d(log p of tgt_tokens[i]), the derivative itself and
        not its negative, so that `optim_step` descends the loss. Calls add up: divide by what the loss is a mean over.
        The value that `optim_step` reports as the loss is the sum of tangent x logprob, and means nothing.

        `inp_tokens` and `tgt_tokens` are a serialized thread without its last, and without its first token. Tokens of
        tangent 0 have no part. `image_patches` are those of the same call of serialize_thread: None, or a tuple of
        engine.models.images.PlacedImage. Raises UnsupportedFragment for images of a model that takes text only.
        """
        images = tuple(image_patches or ())
        if images and self.renderer.tokenizer.images is None:
            raise UnsupportedFragment(
                f"{len(images)} image patches were given, and {self.name!r} takes text only; give None, or train a "
                "vision-language model"
            )
        inputs, targets = [int(token) for token in inp_tokens], [int(token) for token in tgt_tokens]
        if not targets or inputs[1:] != targets[:-1] or len(inputs) != len(targets):
            raise BadSpec(
                f"{len(inputs)} input and {len(targets)} target tokens; expected one sequence without its last and "
                "without its first token: tokens[:-1] and tokens[1:] of serialize_tokenized_thread"
            )
        numbers = per_token("tangents", tangents, len(targets))
        weights = [0.0, *(float(number != 0) for number in numbers)]
        if not any(weights):
            weights[-1] = 1.0  # a sample of no gradient is no error
        found = [number for number, weight in zip(numbers, weights[1:], strict=True) if weight]
        sequence = TokenSequence([inputs[0], *targets], weights, images=images)
        return self._add({"kind": "tangents"}, sequence, tangents=found)

    # -- scalar models -----------------------------------------------------------------------------------------

    def train_mse(self, thread: Thread, target: float) -> Enqueued:
        """(score of the last token - target)^2, as a mean over all scored tokens of the tape."""
        return self._add({"kind": "mse"}, self._scored(thread), returns=[float(target)])

    def train_mse_per_token(self, tokenized: TokenizedThread, targets: Numbers | float) -> Enqueued:
        """(value - target)^2 at the position before each trained token, as `score` lists them; mean over tokens."""
        return self._add({"kind": "mse"}, self._sequence(tokenized), returns=targets)

    def train_trust_region_mse(
        self, tokenized: TokenizedThread, old_values: Numbers, targets: Numbers | float, clip_range: float
    ) -> Enqueued:
        """PPO's clipped value loss: a value gains nothing by leaving the old one by more than `clip_range`; mean over
        tokens."""
        loss: Loss = {"kind": "trust_region_mse", "clip": float(clip_range)}
        return self._add(loss, self._sequence(tokenized), old_values=old_values, returns=targets)

    def train_ranking(self, preferred: Thread, dispreferred: Thread) -> Enqueued:
        """-log sigmoid(s+ - s-) of the scores at the last tokens (Bradley-Terry), as a mean over pairs."""
        return self._add_pair({"kind": "ranking"}, (self._scored(preferred), self._scored(dispreferred)))

    # -- onto the tape -----------------------------------------------------------------------------------------

    def _policy_gradient(
        self,
        kind: str,
        tokenized: TokenizedThread,
        logprobs: Numbers,
        ref_logprobs: Numbers | None,
        advantages: Numbers | float,
        clip_low: float,
        clip_high: float,
        kl_beta: float,
    ) -> Enqueued:
        loss: Loss = {
            "kind": kind,
            "clip_low": float(clip_low),
            "clip_high": float(clip_high),
            "kl_beta": float(kl_beta),
        }
        columns: dict[str, Numbers | float] = {"old_logprobs": logprobs, "advantages": advantages}
        if ref_logprobs is not None:
            columns["reference_logprobs"] = ref_logprobs
        return self._add(loss, self._sequence(tokenized), **columns)

    def _sequence(self, thread: Thread) -> TokenSequence:
        tokenized = self.renderer.tokenize(thread) if isinstance(thread, StringThread) else thread
        return self.renderer.sequence(tokenized)

    def _scored(self, thread: Thread) -> TokenSequence:
        sequence = self._sequence(thread)
        check_images_accepted(None, [sequence.images], "scored threads")  # no scalar model takes images
        return last_token_sequence(sequence.token_ids, end=self.renderer.tokenizer.eos_token_ids[0])

    def _add(self, loss: Loss, sequence: TokenSequence, **columns: Numbers | float) -> Enqueued:
        self._check(loss, sequence)
        return self.tape.add(loss, sequence, **columns)  # type: ignore[arg-type]  # a number stands for every token

    def _add_pair(
        self, loss: Loss, pair: tuple[TokenSequence, TokenSequence], **columns: Any
    ) -> Enqueued:
        for sequence in pair:
            self._check(loss, sequence)
        return self.tape.add_pair(loss, *pair, **columns)

    def _check(self, loss: Loss, sequence: TokenSequence) -> None:
        try:
            spec = _LOSS.validate_python(loss)
        except ValidationError as error:
            raise BadSpec(f"{loss['kind']}: {describe_errors(error.errors(), loss)}") from error
        head = parse_trainable(self.trainable).head
        if (spec.reads == "values") != (head == "scalar"):
            wanted = "a scalar head: builder.into_scoring_model()" if spec.reads == "values" else "a language head"
            raise BadSpec(f"{self.name!r} has a head of kind {head!r}, and the loss {spec.kind!r} needs {wanted}")
        if len(sequence.token_ids) > self.max_batch_size:
            raise SampleTooLong(
                f"the sample has {len(sequence.token_ids)} tokens, but {self.name!r} was spawned with "
                f"max_batch_size={self.max_batch_size}; shorten the sample, or spawn with a larger max_batch_size"
            )


def _reference(values: float | Numbers, sequence: TokenSequence) -> list[float]:
    trained = sum(weight > 0 for weight in sequence.weights)
    if isinstance(values, int | float) or getattr(values, "ndim", None) == 0:
        return spread_sum("the sum of the reference's logprobs", float(values), trained)  # type: ignore[arg-type]
    return per_token("reference_logprobs", values, trained)
