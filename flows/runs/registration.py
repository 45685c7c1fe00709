"""The event of a dataset version that came into the store."""

from __future__ import annotations

from flows.runs.events import dataset_registered
from storage.store import keys
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import DatasetSpec, DatasetUse, FileDataset, PythonDataset


def tell_registered(data: LoadedDataset, spec: DatasetSpec, use: DatasetUse) -> None:
    """Sends `ostinato.dataset.registered` for a version that is new; without a Prefect server nothing is sent."""
    if data.new:
        source = spec.source if isinstance(spec, FileDataset | PythonDataset) else spec.kind
        name, version = keys.dataset_of(data.ref.key)
        dataset_registered(name, version, use=use, rows=data.rows, source=source, uri=data.ref.uri)
