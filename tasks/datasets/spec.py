"""What a dataset is declared to be: a small frozen spec per kind of source."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, field_validator, model_validator

from engine.text.threads import StringThread
from storage.serialization import Frozen
from tasks import import_paths

DatasetUse = Literal["prompt", "completion", "preference", "rating"]
"""prompt: the model continues the thread. completion: the thread ends with the turn to learn. preference: two threads
that go on differently, one of them preferred. rating: a completion with a number, `res`, in its metadata."""

ColumnRole = Literal["messages", "prompt", "completion", "chosen", "rejected", "metadata"]


def _source_first(schema: dict[str, Any]) -> None:
    """In a form, what a dataset is comes before what is done with its rows."""
    common = {name: schema["properties"].pop(name) for name in RowsDataset.model_fields}
    schema["properties"].update(common)


class RowsDataset(Frozen):
    """What is said of rows, wherever they are from. A row has either `messages` or `prompt` (and `completion`); one of
    preferences has `chosen` and `rejected`, and `prompt` where they are only what follows it."""

    model_config = ConfigDict(json_schema_extra=_source_first)

    columns: dict[ColumnRole, str] = {}
    """Which column plays which role, where it is not named after it: {"prompt": "question"}."""
    metadata_columns: tuple[str, ...] = ()
    """Further columns to keep in each thread's metadata, where graders find them."""
    system_prompt: str | None = None
    """Put before the threads that begin with no system turn of their own."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What happens to a row that is no prompt or completion: error, or skip (counted)."""
    limit: int | None = Field(default=None, ge=1)
    """Use the first so many usable rows."""

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
    """A file, or a pattern such as data/*.parquet (the files are read in sorted order)."""
    further_paths: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), exclude_if=lambda paths: not paths)
    """More files or patterns, in the order in which they are read after the first."""
    format: Literal["auto", "jsonl", "parquet"] = "auto"
    """Of the files. auto: by how their names end."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All files and patterns, in reading order."""
        return self.path, *self.further_paths

    @property
    def source(self) -> str:
        """Where the rows come from, for people."""
        return ", ".join(self.paths)


class PythonDataset(RowsDataset):
    """Rows that a function or a class of the user's own gives: whatever can be iterated over, of dicts with the columns
    of a file, or of StringThreads."""

    kind: Literal["python"] = "python"
    path: str = Field(pattern=import_paths.PATTERN)
    """package.module:name of the function or class, which is called with `arguments`."""
    arguments: dict[str, JsonValue] = {}
    """Its keyword arguments."""

    @property
    def source(self) -> str:
        """Where the rows come from, for people."""
        return self.path


class ReasoningGymDataset(Frozen):
    """Problems made by reasoning-gym: offline, without end, a function of the seed.

    Two seeds are not two splits: reasoning-gym seeds row i with seed + i, so seed=1 is seed=0 moved by one row. Use
    `split`: a question belongs to the held-out part by its hash, whatever the seed, so that training and held-out
    questions are disjoint as long as both specs say the same `heldout_percent`. `held_out` makes the counterpart.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """A reasoning-gym dataset: chain_sum, gcd, products, count_bits, …"""
    size: int = Field(ge=1)
    """Rows after splitting and dropping duplicates."""
    seed: int = Field(default=0, ge=0)
    """Decides the problems. Another seed is no held-out part: see split."""
    config: dict[str, JsonValue] = {}
    """The dataset's own options, for instance {"max_terms": 2, "max_digits": 1}."""
    system_prompt: str | None = None
    """Put before every question."""
    split: Literal["all", "train", "heldout"] = "all"
    """all, or the one part or the other: a question is held out by its hash, whatever the seed."""
    heldout_percent: int = Field(default=10, ge=1, le=99)
    """Share of all questions that are held out. Training and held-out data must give the same."""
    unique: bool = False
    """Keep only the first row of each question."""

    @field_validator("config")
    @classmethod
    def _no_ambient_fields(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in ("seed", "size"):
            if name in config:
                raise ValueError(f"given {name!r} inside config; expected it beside config, as {name}=…")
        return config

    def held_out(self, size: int) -> "ReasoningGymDataset":
        """`size` rows of the other part. Only of a training split: split='all' contains every held-out question."""
        if self.split != "train":
            raise ValueError(f"given split={self.split!r}; expected 'train', which never contains them")
        return self.model_copy(update={"split": "heldout", "size": size})


class InlineDataset(Frozen):
    """Threads given in process."""

    kind: Literal["inline"] = "inline"
    threads: tuple[StringThread, ...]

    @classmethod
    def of(cls, threads: Iterable[StringThread]) -> "InlineDataset":
        return cls(threads=tuple(threads))


class InlinePairs(Frozen):
    """Preferences given in process: (preferred, dispreferred)."""

    kind: Literal["inline_pairs"] = "inline_pairs"
    pairs: tuple[tuple[StringThread, StringThread], ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[StringThread, StringThread]]) -> "InlinePairs":
        return cls(pairs=tuple(pairs))


DatasetSpec = Annotated[
    FileDataset | PythonDataset | ReasoningGymDataset | InlineDataset | InlinePairs, Field(discriminator="kind")
]
