"""Reading of a mapping as a sound document, or one error that tells all that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stagelink.plan.checks import cross_problems
from stagelink.plan.document import (
    OWN_TEXT,
    Control,
    Document,
    Limits,
    LinkTable,
    PipelineTable,
    StageTable,
    TensorTable,
)
from stagelink.plan.problems import Problem, plan_error
from stagelink.text import shown, unknown

_TABLES: Mapping[str | int, type[BaseModel]] = {
    "pipeline": PipelineTable,
    "stages": StageTable,
    "tensors": TensorTable,
    "links": LinkTable,
    "control": Control,
    "limits": Limits,
}

_DEMANDS: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be an integer",
    "invalid-json-value": "must be a string, a number, a boolean, a list or a table",
    "invalid_key": "a key must be a string",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "model_type": "must be a table",
    "string_too_short": "must not be empty",
    "string_type": "must be a string",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must not be empty",
}

_STAND_INS: Mapping[str, Any] = {
    "pipeline": {"microbatches": 1},
    "stages": [{"name": "stand-in", "ranks": [0]}],
}


def read_document(raw: object, where: str) -> Document:
    """Validate a plan's mapping, in itself and across its tables.

    Raises one `PlanError` with a line for every problem, which begins with ``where``.
    """
    plain = dict(raw) if isinstance(raw, Mapping) else raw
    document, problems = _validated(plain)
    first = next(problems, None)
    if first is not None:
        raise plan_error(where, chain([first], problems), plain)
    return document


def _validated(raw: object) -> tuple[Document, Iterator[Problem]]:
    try:
        document = Document.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return document, cross_problems(document, ())
    own = (Problem(d["loc"], problem_text(d, _keys(d["loc"][:-1]))) for d in details)
    unsound = {str(detail["loc"][0]) if detail["loc"] else "" for detail in details}
    found = raw if isinstance(raw, dict) and "" not in unsound else {}
    sound = {
        key: found[key] for key in Document.model_fields if key in found and key not in unsound
    }
    document = Document.model_validate({**_STAND_INS, **sound})
    return document, chain(own, cross_problems(document, unsound))


def problem_text(detail: ErrorDetails, keys: Iterable[str]) -> str:
    """Word what is wrong by the validator's account of it, and the keys that the table has."""
    kind = detail["type"]
    if kind == OWN_TEXT:
        return detail["msg"]
    if kind == "missing":
        return "missing; this key must be given"
    if kind == "extra_forbidden":
        return unknown("key", str(detail["loc"][-1]), keys, owner="this table")
    demand = _DEMANDS.get(kind, "{msg}").format(**detail.get("ctx", {}), msg=detail["msg"])
    return f"{shown(detail['input'])}: {demand}"


def _keys(path: Sequence[str | int]) -> list[str]:
    table = _TABLES.get(path[0], Document) if path else Document
    return [field.alias or name for name, field in table.model_fields.items()]
