"""A new kind of source is one class: everything that reads, checks, names and records datasets takes it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, TypeAdapter

from flows.configs.overrides import ConfigError
from flows.runs.events import announce_dataset
from flows.runs.input_checks import check_inputs, hub_commits
from storage.registry.datasets import list_datasets
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.convert import RowLocation
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset, ReadPosition, load_dataset
from tasks.datasets.load_order import load_order
from tasks.datasets.naming import row_name
from tasks.datasets.spec import DatasetUse, FileDataset, MixtureDataset, MixturePart, RowsDataset

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


class CountingDataset(RowsDataset):
    """Questions that count, as a source of one's own: this class, and its place in a union."""

    location_fields: ClassVar = frozenset({"label"})

    kind: Literal["counting"] = "counting"
    label: str = "numbers"
    last: int

    @property
    def source(self) -> str:
        return f"counting to {self.last}"

    @property
    def title(self) -> str:
        return self.label

    def check(self, store: ObjectStore) -> None:
        if self.last < 1:
            raise DatasetError(f"given last={self.last}; expected a positive number")

    def raw_rows(self, use: DatasetUse, position: ReadPosition) -> Iterator[tuple[RowLocation, Any]]:
        position.total = self.last
        for row in range(1, self.last + 1):
            position.read = row
            yield RowLocation(self.source, row), {"prompt": f"after {row}?", "completion": str(row + 1)}


class Config(Frozen):
    train: Annotated[FileDataset | CountingDataset, Field(discriminator="kind")]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


def load(store: ObjectStore, spec: Any, use: DatasetUse = "completion") -> LoadedDataset:
    return load_dataset(store, spec, use=use, provenance=PROVENANCE)


def test_a_new_source_is_loaded_checked_and_named(store: ObjectStore) -> None:
    config = TypeAdapter(Config).validate_python({"train": {"kind": "counting", "last": 3}})
    check_inputs(config, store)
    assert hub_commits(config, store, "run") == {} and config.train.title == "numbers"

    data = load(store, config.train)
    assert data.rows == 3 and data.new and load_order(store, data, seed=0)
    assert row_name(store, data.ref, 1) == "row 2 of counting to 3"
    assert [version.use for version in list_datasets(store, keys.dataset_of(data.ref.key)[0])] == ["completion"]
    announce_dataset(data, config.train, "completion")

    # what only says where the rows are does not change the version
    assert load(store, CountingDataset(label="other", last=3)).ref == data.ref
    assert load(store, CountingDataset(last=3), "prompt").ref != data.ref


def test_a_new_source_is_refused_by_its_own_check(store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match=r"train: given last=0; expected a positive number"):
        check_inputs(Config(train=CountingDataset(last=0)), store)


def test_a_new_source_can_be_a_part_of_a_mixture(store: ObjectStore) -> None:
    parts = [MixturePart.model_construct(dataset=CountingDataset(last=last), weight=1.0) for last in (2, 4)]
    mixture = MixtureDataset.model_construct(kind="mixture", parts=tuple(parts))
    data = load(store, mixture)
    assert data.rows == 6 and mixture.title == "numbers and 1 more"
    assert row_name(store, data.ref, 5) == "row 4 of counting to 4"
