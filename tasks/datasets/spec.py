"""Declarations of datasets: one frozen spec per kind of source. Loading is the job of `tasks.datasets.load`."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, field_validator, model_validator

from engine.text.threads import StringThread
from storage.serialization import Frozen
from tasks import import_paths

DatasetUse = Literal["prompt", "completion", "preference", "rating"]
"""prompt: the model continues the thread. completion: the thread ends with the assistant's turn that is trained.
preference: two threads with a common prompt, of which one is preferred. rating: a completion with a number, `res`, in
its metadata."""

RowOrder = Literal["shuffled", "file", "curriculum"]
"""The order of the rows in an epoch: see OrderedDataset."""

_DATASET_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,127}(@[0-9a-f]{1,64})?", re.ASCII)

ColumnRole = Literal["messages", "prompt", "completion", "chosen", "rejected", "label", "tools", "metadata"]


def _source_first(schema: dict[str, Any]) -> None:
    """Order the fields of a form: those of the source come before those that all sources share."""
    common = {name: schema["properties"].pop(name) for name in RowsDataset.model_fields}
    schema["properties"].update(common)
    _order_last(schema)


def _order_last(schema: dict[str, Any]) -> None:
    """Move the fields of the order to the end of a form."""
    fields = schema["properties"]
    fields.update({name: fields.pop(name) for name in OrderedDataset.model_fields})


class OrderedDataset(Frozen):
    """The settings of the order in which a run reads the rows of a dataset. They do not change which rows it has."""

    model_config = ConfigDict(json_schema_extra=_order_last)

    order: RowOrder = Field("shuffled", exclude_if=lambda order: order == "shuffled")
    """Order in which training reads the rows. shuffled: at random, differently in each epoch, by the run's seed. file:
    as they are in the source. curriculum: from the smallest to the largest value of curriculum_column."""
    curriculum_column: str | None = Field(None, min_length=1, exclude_if=lambda column: column is None)
    """Column with a number per row, for order=curriculum. It must be in the metadata of the rows: in the object
    metadata, or named in metadata_columns. Rows with equal numbers stay in the order of the source."""

    @model_validator(mode="after")
    def _column_of_the_curriculum(self) -> Self:
        if (self.order == "curriculum") != (self.curriculum_column is not None):
            raise ValueError(
                f"given order={self.order!r} and curriculum_column={self.curriculum_column!r}; expected a "
                "curriculum_column with order='curriculum', and with no other order"
            )
        return self


class RowsDataset(OrderedDataset):
    """The settings of rows that all sources share.

    A row has either `messages`, or `prompt` and, with an answer, `completion`. A row of preferences has `chosen` and
    `rejected`: whole conversations or, if it has a `prompt` too, answers to it. `conversations` in ShareGPT's layout
    stand for `messages`, or for the prompt of preferences. `label` is the rating of an answer, a number or true or
    false. `tools` are descriptions of tools, which are listed in the system turn.
    """

    model_config = ConfigDict(json_schema_extra=_source_first)

    columns: dict[ColumnRole, str] = {}
    """The column of each role, for columns that are not named like their role: {"prompt": "question"}. A dotted name is
    a field within the objects of a column: {"prompt": "extra_info.question"}."""
    metadata_columns: tuple[str, ...] = ()
    """Further columns to store in the metadata of each thread, where graders can read them."""
    system_prompt: str | None = None
    """System turn for the threads that do not begin with one."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be used. error: fail. skip: leave it out and count it."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to use: the first ones that can be used. Empty: all."""

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if "messages" in self.columns and {"prompt", "completion", "chosen", "rejected"} & set(self.columns):
            raise ValueError(
                f"given columns={self.columns}; expected either messages, or prompt and completion, or chosen and "
                "rejected (and prompt)"
            )
        return self


class FileDataset(RowsDataset):
    """Rows of JSON lines or Parquet files."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """A file, or a pattern such as data/*.parquet. The files of a pattern are read in sorted order."""
    further_paths: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), exclude_if=lambda paths: not paths)
    """More files or patterns, read after the first one in this order."""
    format: Literal["auto", "jsonl", "parquet"] = "auto"
    """Format of the files. auto: each file's suffix decides (.jsonl, .ndjson, .parquet, .pq)."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All files and patterns, in reading order."""
        return self.path, *self.further_paths

    @property
    def source(self) -> str:
        """The source of the rows, for error messages and provenance."""
        return ", ".join(self.paths)


class PythonDataset(RowsDataset):
    """Rows of a user's own function or class: its call returns an iterable of dicts, with columns as in a file."""

    kind: Literal["python"] = "python"
    path: str = Field(pattern=import_paths.PATTERN)
    """The function or class, as package.module:name. It is called with `arguments`."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the function or class."""

    @property
    def source(self) -> str:
        """The source of the rows, for error messages and provenance."""
        return self.path


class HubDataset(RowsDataset):
    """Rows of a dataset of the Hugging Face hub, or of a folder that the library datasets saved (save_to_disk)."""

    kind: Literal["hub"] = "hub"
    path: str = Field(min_length=1)
    """Dataset of the hub, as owner/name, or a folder that datasets saved with save_to_disk. A folder has precedence;
    hf://datasets/owner/name is always the hub's."""
    name: str | None = None
    """Configuration (subset) of the dataset. None: its only or its default one."""
    split: str = Field("train", min_length=1)
    """Split of the dataset: train, test, or a part such as train[:1000] or train[90%:]. A folder with one dataset that
    was saved without splits has only train."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of the dataset. None: the default branch. A run keeps the commit that it began with."""
    row_function: str | None = Field(None, pattern=import_paths.PATTERN)
    """Function that makes a row with the usual columns of a row of the dataset, as package.module:name. None: the
    rows are used as they are, with `columns`."""

    @property
    def source(self) -> str:
        """The source of the rows, for error messages and provenance."""
        return f"{self.path} ({self.split})"


class ReasoningGymDataset(OrderedDataset):
    """Problems generated by reasoning-gym, offline, in any number, as a function of the seed.

    Two seeds are not two splits: reasoning-gym seeds row i with seed + i, so the rows of seed=1 are those of seed=0
    moved by one. Use `split` for held-out data: the hash of a question decides whether it is held out, so the training
    and held-out questions are disjoint if both specs have the same `heldout_percent`. `held_out` returns the spec of
    the held-out part.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """Name of a reasoning-gym dataset: chain_sum, gcd, products, count_bits, …"""
    size: int = Field(ge=1)
    """Number of rows, counted after the split and after duplicates are dropped."""
    seed: int = Field(default=0, ge=0)
    """Seed of the problems. Another seed does not give held-out data; use split for that."""
    config: dict[str, JsonValue] = {}
    """Options of the reasoning-gym dataset, for instance {"max_terms": 2, "max_digits": 1}."""
    system_prompt: str | None = None
    """System turn before every question."""
    split: Literal["all", "train", "heldout"] = "all"
    """Part of the questions to use. The hash of a question, and not the seed, decides whether it is held out."""
    heldout_percent: int = Field(default=10, ge=1, le=99)
    """Percentage of all questions that are held out. Training and held-out data must have the same value."""
    unique: bool = False
    """Whether to leave out repeated questions."""

    @field_validator("config")
    @classmethod
    def _no_ambient_fields(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        # Both would silently replace the fields of this spec.
        for name in ("seed", "size"):
            if name in config:
                raise ValueError(f"given {name!r} inside config; expected it as a field of its own, {name}=…")
        return config

    def held_out(self, size: int) -> "ReasoningGymDataset":
        """The spec of `size` held-out rows. Raises ValueError unless split is 'train': 'all' contains them already."""
        if self.split != "train":
            raise ValueError(f"given split={self.split!r}; expected 'train', which never contains them")
        return self.model_copy(update={"split": "heldout", "size": size})


class RegisteredDataset(OrderedDataset):
    """A dataset of the store, as `ostinato data ls` lists them."""

    kind: Literal["registered"] = "registered"
    key: str
    """`name@version` of a dataset of the store; the first characters of the version are enough. `name` alone is its
    newest version. A run keeps the version that it began with."""

    @field_validator("key")
    @classmethod
    def _is_a_key(cls, key: str) -> str:
        if not _DATASET_KEY.fullmatch(key):
            raise ValueError(
                f"given {key!r:.200}; expected the name of a dataset, or name@version, as ostinato data ls lists them"
            )
        return key

    @property
    def name(self) -> str:
        return self.key.partition("@")[0]

    @property
    def version(self) -> str:
        """The version or its first characters. Empty: the newest one."""
        return self.key.partition("@")[2]


class InlineDataset(Frozen):
    """Threads of this process."""

    kind: Literal["inline"] = "inline"
    threads: tuple[StringThread, ...]

    @classmethod
    def of(cls, threads: Iterable[StringThread]) -> "InlineDataset":
        return cls(threads=tuple(threads))


class InlinePairs(Frozen):
    """Preference pairs of this process: (preferred, dispreferred)."""

    kind: Literal["inline_pairs"] = "inline_pairs"
    pairs: tuple[tuple[StringThread, StringThread], ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[StringThread, StringThread]]) -> "InlinePairs":
        return cls(pairs=tuple(pairs))


DatasetSpec = Annotated[
    FileDataset | HubDataset | PythonDataset | ReasoningGymDataset | RegisteredDataset | InlineDataset | InlinePairs,
    Field(discriminator="kind"),
]

DatasetSource = Annotated[
    FileDataset | HubDataset | PythonDataset | ReasoningGymDataset | RegisteredDataset, Field(discriminator="kind")
]
"""A dataset that a config can declare."""
RowsSource = Annotated[FileDataset | HubDataset | PythonDataset | RegisteredDataset, Field(discriminator="kind")]
"""A dataset of preferences or ratings that a config can declare."""


class MixturePart(Frozen):
    """A dataset of a mixture and its share."""

    dataset: DatasetSource
    """The dataset. It has its own order, and begins its next epoch when all its rows are read."""
    weight: float = Field(1.0, ge=1e-6, le=1e6, allow_inf_nan=False)
    """Weight of the dataset. Its share of the rows is its weight divided by the sum of the weights, of which six
    decimals count. The size of the dataset has no influence."""


class MixtureDataset(Frozen):
    """Several datasets, of which every batch has fixed shares."""

    kind: Literal["mixture"] = "mixture"
    parts: tuple[MixturePart, ...] = Field(min_length=2)
    """The datasets and their weights."""

    def check_batch(self, rows: int) -> None:
        """Raise ValueError if a batch of `rows` rows of the mixture is smaller than the number of its parts."""
        if rows < len(self.parts):
            raise ValueError(
                f"a batch has {rows} rows, fewer than the {len(self.parts)} datasets of the mixture, so that a batch "
                "would lack some of them; raise algorithm.samples_per_batch (divided by completions_per_sample where "
                "completions are sampled), or leave datasets out"
            )


TrainingSource = Annotated[
    FileDataset | HubDataset | PythonDataset | ReasoningGymDataset | RegisteredDataset | MixtureDataset,
    Field(discriminator="kind"),
]
"""A dataset to train on."""
RowsTrainingSource = Annotated[
    FileDataset | HubDataset | PythonDataset | RegisteredDataset | MixtureDataset, Field(discriminator="kind")
]
"""A dataset of preferences or ratings to train on."""


def _without_order(source: OrderedDataset) -> OrderedDataset:
    if source.order != "shuffled":
        raise ValueError(
            f"given order={source.order!r} for a dataset to evaluate on; leave it out: only training reads the rows in "
            "an order"
        )
    return source


HeldoutSource = Annotated[DatasetSource, AfterValidator(_without_order)]
"""A dataset to evaluate on."""
HeldoutRowsSource = Annotated[RowsSource, AfterValidator(_without_order)]
"""A dataset of preferences or ratings to evaluate on."""
