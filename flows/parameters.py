"""Models, datasets and graders as fields of a recipe's config: plain values in a form or a file, handles in the code.

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
from flows.configs.common import DatasetSource
from storage.serialization import canonical_json
from storage.store.tables import RowReader
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import DatasetUse
from tasks.graders.base import BaseGrader
from tasks.graders.spec import build, grader_spec
from tasks.load import load_prompts

Kind = TypeVar("Kind")

_SOURCE: TypeAdapter[DatasetSource] = TypeAdapter(DatasetSource)


class Model(engine.handles.Model):
    """A model by its key; a string in a config."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(given: Any) -> Model:
            if isinstance(given, engine.handles.Model):
                return cls(given.key)
            if not isinstance(given, str) or not given:
                raise ValueError(f"given {given!r}; expected the key of a registered model, a folder, or openai://NAME")
            return cls(given)

        return _plain(core_schema.str_schema(min_length=1), parse, lambda model: model.key)


class dataset_kinds:
    """What a dataset's rows are for."""

    class Prompt:
        """Conversations that the model continues."""

        use: DatasetUse = "prompt"

    class Completion:
        """Conversations that end with the turn to learn."""

        use: DatasetUse = "completion"

    class Metric:
        """Completions with a number, `res`, in their metadata."""

        use: DatasetUse = "rating"

    class Preference:
        """Pairs of conversations, one of them preferred."""

        use: DatasetUse = "preference"

    class Mixed:
        """Prompts and completions in one file: no training class takes them."""


@dataclass(frozen=True)
class Dataset(Generic[Kind]):
    """A dataset of one kind, `Dataset[kind]`: a path, or a dataset spec (tasks.datasets.spec), in a config."""

    source: str
    """The spec, as canonical JSON: it is hashable, and equal for equal specs."""
    use: ClassVar[DatasetUse | None] = None

    def __class_getitem__(cls, kind: type) -> type[Dataset[Any]]:
        return _dataset_of(kind)

    @property
    def spec(self) -> DatasetSource:
        return _SOURCE.validate_json(self.source)

    async def load(self, ctx: HasWorkspace) -> list[Any]:
        """Its threads, in memory; of a Preference dataset, pairs (preferred, dispreferred). Raises DatasetError."""
        table = await self.load_table(ctx)
        reader = RowReader(ctx.workspace.open_store(), table.ref)
        try:
            rows = reader.rows(range(len(reader)))
        finally:
            reader.close()
        if self.use == "preference":
            return [tuple(StringThread.from_json(row[side]) for side in ("chosen", "rejected")) for row in rows]
        return [StringThread.from_json(row["thread"]) for row in rows]

    async def load_table(self, ctx: HasWorkspace) -> LoadedDataset:
        """The dataset in the store: what training classes read without holding it in memory."""
        if self.use is None:
            raise TypeError("the dataset has no kind; annotate the field with Dataset[dataset_kinds.Prompt], say")
        return load_prompts(ctx.workspace, self.spec, self.use)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(given: Any) -> Dataset[Any]:
            if isinstance(given, Dataset):
                return cls(given.source)
            body = {"kind": "file", "path": given} if isinstance(given, str) else given
            return cls(canonical_json(_checked(body)).decode())

        shape = core_schema.union_schema(
            [core_schema.str_schema(min_length=1), handler.generate_schema(DatasetSource)]
        )
        return _plain(shape, parse, lambda dataset: json.loads(dataset.source))


@dataclass(frozen=True)
class Grader:
    """A grader by import path; `{"path": …, "arguments": {…}}`, or the path alone, in a config."""

    path: str
    arguments: str = "{}"
    """As canonical JSON, so that graders can stand in a set."""

    def build(self) -> BaseGrader:
        """The grader. Whoever builds it owns it: `await grader.setup()` before its first grade. Raises
        GraderSpecError."""
        return build(grader_spec(self.path, json.loads(self.arguments)))

    async def load(self, ctx: HasWorkspace) -> BaseGrader:
        """`build`, under the name that the other fields have."""
        return self.build()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(given: Any) -> Grader:
            if isinstance(given, Grader):
                return given
            body = {"path": given} if isinstance(given, str) else given
            if not isinstance(body, dict) or "path" not in body or body.keys() - {"path", "arguments"}:
                raise ValueError(f"given {given!r}; expected an import path, or {{'path': …, 'arguments': {{…}}}}")
            try:
                arguments = canonical_json(dict(body.get("arguments") or {})).decode()
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"the arguments of {body['path']} are nothing that JSON can say: {error}") from error
            return cls(str(body["path"]), arguments)

        named = core_schema.typed_dict_schema({
            "path": core_schema.typed_dict_field(core_schema.str_schema()),
            "arguments": core_schema.typed_dict_field(core_schema.dict_schema(), required=False),
        })  # fmt: skip
        return _plain(
            core_schema.union_schema([core_schema.str_schema(), named]),
            parse,
            lambda grader: {"path": grader.path, "arguments": json.loads(grader.arguments)},
        )


@cache
def _dataset_of(kind: type) -> type[Dataset[Any]]:
    """The type of a dataset of that kind: one, however often it is asked for."""
    name, use = getattr(kind, "__name__", str(kind)), getattr(kind, "use", None)
    if use is None:
        raise TypeError(
            f"Dataset[{name}]: nothing trains on it; use dataset_kinds.Prompt, Completion, Metric or Preference, in a "
            "file each"
        )
    return type(f"{name}Dataset", (Dataset,), {"use": use, "__doc__": kind.__doc__})


def _checked(body: Any) -> Any:
    try:
        return _SOURCE.dump_python(_SOURCE.validate_python(body), mode="json")
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, given {first['input']!r:.80}") from error


def _plain(shape: CoreSchema, parse: Any, dump: Any) -> CoreSchema:
    """A value that JSON says as `shape` does."""
    return core_schema.json_or_python_schema(
        json_schema=core_schema.no_info_after_validator_function(parse, shape),
        python_schema=core_schema.no_info_plain_validator_function(parse),
        serialization=core_schema.plain_serializer_function_ser_schema(dump),
    )
