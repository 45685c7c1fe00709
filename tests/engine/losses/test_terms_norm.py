"""The KL and entropy terms with a norm of their own, by hand."""

from __future__ import annotations

import pytest
import torch

from engine.losses.base import TermsNorm
from engine.losses.inputs import Outputs
from engine.losses.policy_gradient import CISPOSpec, GRPOSpec, GSPOSpec
from tests.engine.losses.cases import loss_of, sample

COEFFICIENTS = {"kl_beta": 0.1, "kl_estimator": "k1", "entropy_coef": 0.5}
ENTROPIES = [1.0, 2.0, 3.0, 4.0]
# the policy does not move, so its part is -2 for the token of the first sequence and -4 for the three of the second
POLICY_PART = {"sequence_mean": -(2 + 4) / 2, "token_mean": -(2 + 3 * 4) / 4}
# k1 is 1 at each token of the first sequence and 3 at those of the second
TERMS = {
    "sequence_mean": 0.1 * (1 + 3) / 2 - 0.5 * (1 + 3) / 2,
    "token_mean": 0.1 * (1 + 9) / 4 - 0.5 * 10 / 4,
    "token_sum": 0.1 * 10 - 0.5 * 10,
}


@pytest.mark.parametrize("make", [GRPOSpec, GSPOSpec, CISPOSpec])
@pytest.mark.parametrize("terms_norm", TERMS)
@pytest.mark.parametrize("norm", POLICY_PART)
def test_the_terms_are_reduced_by_their_own_norm(
    make: type[GRPOSpec | GSPOSpec | CISPOSpec], norm: str, terms_norm: TermsNorm
) -> None:
    # CISPO's loss is the weight times the logprob, which is therefore 1
    logprobs = torch.ones(4, dtype=torch.float64)
    samples = []
    for tokens, kl, advantage in ((1, 1.0, 2.0), (3, 3.0, 4.0)):
        columns = {
            "old_logprobs": [1.0] * tokens,
            "reference_logprobs": [1.0 - kl] * tokens,
            "advantages": [advantage] * tokens,
        }
        samples.append(sample([1], [1.0] * tokens, str(tokens), **columns))
    outputs = Outputs(logprobs_N=logprobs, entropy_N=torch.tensor(ENTROPIES, dtype=torch.float64))
    spec = make(norm=norm, terms_norm=terms_norm, **COEFFICIENTS)  # type: ignore[arg-type]
    assert loss_of(spec, samples, outputs).item() == pytest.approx(POLICY_PART[norm] + TERMS[terms_norm])
    # without a norm of their own, the terms have the loss's
    plain = make(norm=norm, **COEFFICIENTS)  # type: ignore[arg-type]
    assert loss_of(plain, samples, outputs).item() == pytest.approx(POLICY_PART[norm] + TERMS[norm])
    assert "terms_norm" not in plain.model_dump()
