"""Tests of the tape: which samples become one batch, in which order, and what is refused."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BadSpec
from engine.models.tape import Tape, commit_tape, per_token, prompt_group, spread_sum
from engine.protocol import TokenSequence
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.tables import read_table
from tests.fixtures.spawning import context

CROSS_ENTROPY: dict[str, Any] = {"kind": "cross_entropy"}
DPO: dict[str, Any] = {"kind": "dpo", "beta": 0.1}
POLICY = PolicyRef(run="r", stage="0-recipe", model="policy", step=0, state="s")


def sequence(*ids: int, trained: int = 1) -> TokenSequence:
    return TokenSequence(list(ids), [0.0] * (len(ids) - trained) + [1.0] * trained)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return context(tmp_path).workspace


def committed(tape: Tape, workspace: Workspace) -> list[dict[str, Any]]:
    _, batch = commit_tape(tape.take(), workspace, POLICY)
    table: pa.Table = read_table(workspace.open_store(), batch)
    return table.to_pylist()


def test_a_pair_stays_together_under_a_group_of_its_own(workspace: Workspace) -> None:
    tape = Tape()
    for _ in range(2):  # the same pair twice is two pairs
        tape.add_pair(DPO, sequence(1, 9), sequence(1, 2), reference_logprobs=([-1.0], [-2.0]))
    tape.add_pair(DPO, sequence(1, 3), sequence(1, 9), reference_logprobs=([-1.0], [-2.0]))
    rows = committed(tape, workspace)
    pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    assert [[row["preferred"] for row in pair] for pair in pairs] == [[True, False]] * 3
    assert all(len({row["group"] for row in pair}) == 1 for pair in pairs)
    assert len({pair[0]["group"] for pair in pairs}) == 3
    told = {(pair[0]["token_ids"][1], pair[1]["token_ids"][1]) for pair in pairs}
    assert told == {(9, 2), (3, 9)}


def test_pairs_in_any_order_are_one_batch(workspace: Workspace) -> None:
    batches = []
    for order in ((3, 4, 3), (3, 3, 4), (4, 3, 3)):
        tape = Tape()
        for token in order:
            tape.add_pair(DPO, sequence(1, token), sequence(1, 2), reference_logprobs=([-1.0], [-2.0]))
        batches.append(commit_tape(tape.take(), workspace, POLICY)[1])
    assert len({batch.sha256 for batch in batches}) == 1


def test_samples_that_begin_alike_are_of_one_group(workspace: Workspace) -> None:
    tape = Tape()
    for ids in ((1, 2, 7), (1, 2, 8), (1, 3, 7)):
        tape.add(CROSS_ENTROPY, sequence(*ids))
    groups = {tuple(row["token_ids"]): row["group"] for row in committed(tape, workspace)}
    assert groups[1, 2, 7] == groups[1, 2, 8] == prompt_group(sequence(1, 2, 9)) != groups[1, 3, 7]


def test_what_was_taken_and_put_back_is_there_again(workspace: Workspace) -> None:
    tape = Tape()
    tape.add(CROSS_ENTROPY, sequence(1, 2))
    taken = tape.take()
    tape.add(CROSS_ENTROPY, sequence(1, 3))  # while a step is taken
    tape.put_back(taken)
    assert [row["token_ids"] for row in committed(tape, workspace)] == [[1, 2], [1, 3]]
    tape.add(DPO, sequence(1, 4))
    tape.put_back(taken)
    with pytest.raises(BadSpec, match=r"cross_entropy.*dpo"):
        committed(tape, workspace)


def test_refusals_leave_the_tape_as_it_was(workspace: Workspace) -> None:
    tape = Tape()
    tape.add(CROSS_ENTROPY, sequence(1, 2))
    for wrong in ([math.nan], [1.0, 2.0], []):
        with pytest.raises(BadSpec, match="advantages"):
            tape.add(CROSS_ENTROPY, sequence(1, 3), advantages=wrong)
    with pytest.raises(BadSpec, match="one loss"):
        tape.add(DPO, sequence(1, 3))
    with pytest.raises(BadSpec, match="dispreferred.*no trained token"):
        Tape().add_pair(DPO, sequence(1, 2), sequence(1, 3, trained=0))
    assert len(committed(tape, workspace)) == 1


def test_a_number_stands_for_every_token_and_numpy_is_welcome() -> None:
    for given_ in (2, 2.0, np.float32(2), [2, 2.0, np.int64(2)], np.full(3, 2.0)):
        assert per_token("advantages", given_, 3) == [2.0] * 3


@given(st.floats(-1e5, 0), st.integers(1, 4000))
def test_a_sum_that_is_spread_adds_up_in_float32(total: float, trained: int) -> None:
    shares = array("f", spread_sum("x", total, trained))  # as a batch stores them
    assert math.fsum(shares) == pytest.approx(total, rel=1e-7, abs=1e-30)
