"""Field types for the config of a recipe: models, datasets and graders.

In a form or a file their values are strings and objects of JSON. In the code they are handles.

    class Config(InputConfig):
        model: Model                                        "name@version", a folder, or openai://NAME
        demonstrations: Dataset[dataset_kinds.Completion]   "data/train.jsonl", or any dataset spec
        graders: Set[Grader]                                "package.module:name", or {"path": …, "arguments": {…}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

import engine.handles
from engine.handles import HasWorkspace
from engine.text.threads import StringThread
from flows.configs.overrides import validation_lines
from storage.serialization import canonical_json
from storage.store.tables import RowReader
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import DatasetUse, MixtureDataset, TrainingSource
from tasks.graders.base import BaseGrader
from tasks.graders.spec import build, grader_spec
from tasks.load import load_prompts

Kind = TypeVar("Kind")

_SOURCE: TypeAdapter[TrainingSource] = TypeAdapter(TrainingSource)


class Model(engine.handles.Model):
    """A model, identified by its key: a folder, a registered model, a model of the hub. In a config it is a string."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(value: Any) -> Model:
            if isinstance(value, engine.handles.Model):
                return cls(value.key)
            if not isinstance(value, str) or not value:
                raise ValueError(f"given {value!r}; expected the key of a registered model, a folder, or openai://NAME")
            return cls(value)

        return _schema_with_parser(core_schema.str_schema(min_length=1), parse, lambda model: model.key)


class dataset_kinds:
    """The kinds of datasets, for annotations like `Dataset[dataset_kinds.Prompt]`."""

    class Prompt:
        """Conversations that the model continues."""

        use: DatasetUse = "prompt"

    class Completion:
        """Conversations that end with the turn to learn."""

        use: DatasetUse = "completion"

    class Metric:
        """Completions with a rating, the number `res` in their metadata."""

        use: DatasetUse = "rating"

    class Preference:
        """Pairs of conversations, one of them preferred."""

        use: DatasetUse = "preference"

    class Mixed:
        """Prompts and completions in one file. No training class accepts them."""


@dataclass(frozen=True)
class Dataset(Generic[Kind]):
    """A dataset of one kind, `Dataset[kind]`. In a config it is a path, or a dataset spec (tasks.datasets.spec)."""

    source: str
    """The spec in canonical JSON, which is hashable, and equal for equal specs."""
    use: ClassVar[DatasetUse | None] = None

    def __class_getitem__(cls, kind: type) -> type[Dataset[Any]]:
        return _dataset_of(kind)

    @property
    def spec(self) -> TrainingSource:
        return _SOURCE.validate_json(self.source)

    async def load(self, ctx: HasWorkspace) -> list[Any]:
        """Reads all threads into memory; those of a Preference dataset are pairs (preferred, dispreferred). Raises
        DatasetError, and TypeError for a mixture, whose shares a list does not have."""
        if isinstance(self.spec, MixtureDataset):
            raise TypeError("a mixture cannot be a list; give the training class the result of load_table(ctx)")
        table = await self.load_table(ctx)
        reader = RowReader(ctx.workspace.open_store(), table.ref)
        try:
            rows = reader.rows(range(len(reader)))
        finally:
            reader.close()
        # a pair is two threads in one row
        if self.use == "preference":
            return [tuple(StringThread.from_json(row[side]) for side in ("chosen", "rejected")) for row in rows]
        return [StringThread.from_json(row["thread"]) for row in rows]

    async def load_table(self, ctx: HasWorkspace) -> LoadedDataset:
        """Writes the dataset to the store. The training classes read it from there without holding it in memory."""
        if self.use is None:
            raise TypeError("the dataset has no kind; annotate the field with Dataset[dataset_kinds.Prompt], say")
        return load_prompts(ctx.workspace, self.spec, self.use)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(value: Any) -> Dataset[Any]:
            if isinstance(value, Dataset):
                return cls(value.source)
            body = {"kind": "file", "path": value} if isinstance(value, str) else value
            return cls(canonical_json(_validated_source(body)).decode())

        # a path, or a dataset spec
        shape = core_schema.union_schema(
            [core_schema.str_schema(min_length=1), handler.generate_schema(TrainingSource)]
        )
        return _schema_with_parser(shape, parse, lambda dataset: json.loads(dataset.source))


@dataclass(frozen=True)
class Grader:
    """A grader, identified by its import path. In a config it is the path, or `{"path": …, "arguments": {…}}`."""

    path: str
    arguments: str = "{}"
    """The arguments in canonical JSON, so that a grader is hashable and can be an element of a set."""

    def build(self) -> BaseGrader:
        """Creates the grader. The caller owns it and calls `await grader.setup()` before the first grade. Raises
        GraderSpecError."""
        return build(grader_spec(self.path, json.loads(self.arguments)))

    async def load(self, ctx: HasWorkspace) -> BaseGrader:
        """Creates the grader, like `build`, so that all fields of a config have a method `load`."""
        return self.build()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(value: Any) -> Grader:
            if isinstance(value, Grader):
                return value
            body = {"path": value} if isinstance(value, str) else value
            if not isinstance(body, dict) or "path" not in body or body.keys() - {"path", "arguments"}:
                raise ValueError(f"given {value!r}; expected an import path, or {{'path': …, 'arguments': {{…}}}}")
            try:
                arguments = canonical_json(dict(body.get("arguments") or {})).decode()
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"the arguments of {body['path']} cannot be written as JSON: {error}") from error
            return cls(str(body["path"]), arguments)

        # the form of JSON that is not a path alone
        with_arguments = core_schema.typed_dict_schema({
            "path": core_schema.typed_dict_field(core_schema.str_schema()),
            "arguments": core_schema.typed_dict_field(core_schema.dict_schema(), required=False),
        })  # fmt: skip
        return _schema_with_parser(
            core_schema.union_schema([core_schema.str_schema(), with_arguments]),
            parse,
            lambda grader: {"path": grader.path, "arguments": json.loads(grader.arguments)},
        )


@cache
def _dataset_of(kind: type) -> type[Dataset[Any]]:
    """The type `Dataset[kind]`. Cached, so that each kind has a single type and isinstance works."""
    name, use = getattr(kind, "__name__", str(kind)), getattr(kind, "use", None)
    if use is None:
        raise TypeError(
            f"Dataset[{name}]: no training class accepts it; use dataset_kinds.Prompt, Completion, Metric or "
            "Preference, in a file each"
        )
    return type(f"{name}Dataset", (Dataset,), {"use": use, "__doc__": kind.__doc__})


def _validated_source(body: Any) -> Any:
    """The dataset spec with its defaults, as JSON. Raises ValueError."""
    try:
        return _SOURCE.dump_python(_SOURCE.validate_python(body), mode="json")
    except ValidationError as error:
        # in one line, because the message appears at a field of a form
        raise ValueError("; ".join(validation_lines(error, TrainingSource, body, remedy="give it"))) from error


def _schema_with_parser(shape: CoreSchema, parse: Any, dump: Any) -> CoreSchema:
    """The schema of a type whose JSON has the schema `shape`, is read by `parse` and is written by `dump`."""
    return core_schema.json_or_python_schema(
        json_schema=core_schema.no_info_after_validator_function(parse, shape),
        python_schema=core_schema.no_info_plain_validator_function(parse),
        serialization=core_schema.plain_serializer_function_ser_schema(dump),
    )
