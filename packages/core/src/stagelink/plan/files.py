"""A plan's file: TOML, or a JSON configuration of PipeDream's; a `PlanError` names the place.

The latter maps modules to stages and stages to ranks, and may give each stage's warm-up
(``stage_to_depth_map``); numbers of stages may be written as strings or, as in one of the files
that PipeDream ships, as bare integers, which is no JSON. Nothing is said of tensors: each stage
gives ``out<i>`` to the next, and the first gives ``target`` to the last. A key ``routing`` of
ours may ask for PipeDream's ``"diagonal"``.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from stagelink.errors import PlanError
from stagelink.plan.model import most_microbatches
from stagelink.plan.problems import Problem, plan_error
from stagelink.plan.reading import problem_text
from stagelink.text import ranges, shown


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plan's mapping, of a TOML file or of a PipeDream configuration (``.json``)."""
    parse = parse_pipedream if is_json(path) else parse_toml
    return parse(read_text(path, "plan"), os.fspath(path))


def is_json(path: str | os.PathLike[str]) -> bool:
    """Whether a file is taken for a configuration of PipeDream's: by its name."""
    return Path(path).suffix.lower() == ".json"


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """The text of a file, which errors call ``what``."""
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"{path}: the {what} cannot be read: {reason}") from error
    try:
        # Editors on Windows like to begin a file with a byte order mark, which TOML does not know.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise PlanError(f"{path}: line {line} is not UTF-8 text, as a {what} must be") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The mapping that a TOML text stands for; errors begin with ``where``."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: not TOML: {_reason(error, text)}") from error


def _reason(error: Exception, text: str) -> str:
    if isinstance(error, RecursionError):
        return "its lists or tables are nested too deep"
    lines = text.count("\n") + 1
    return str(error).replace("at end of document", f"at line {lines}, the end of the document")


_BARE_NUMBER = re.compile(r"([{,]\s*)(\d+)(\s*:)")
_BY_STAGE = frozenset({"stage_to_rank_map", "stage_to_depth_map"})


def _with_numbers(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {int(k) if _is_number(k) else k: v for k, v in value.items()}


def _is_number(key: object) -> bool:
    return isinstance(key, str) and key.isdecimal() and key == str(int(key))


_Number = Annotated[int, Field(ge=0)]
_Ranks = Annotated[list[_Number], Field(min_length=1)]


class _Configuration(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    module_to_stage_map: Annotated[list[_Number], Field(min_length=1)]
    stage_to_rank_map: Annotated[
        dict[_Number, _Ranks], BeforeValidator(_with_numbers), Field(min_length=1)
    ]
    routing: str = "round_robin"
    stage_to_depth_map: (
        Annotated[dict[_Number, _Number], BeforeValidator(_with_numbers)] | None
    ) = None


def parse_pipedream(text: str, where: str) -> dict[str, Any]:
    """The plan that a configuration of PipeDream's stands for, as a TOML reader would give it.

    Errors begin with ``where``, its file, and the pipeline is named after it.
    """
    raw = _parsed(text, where)
    try:
        found = _Configuration.model_validate(raw)
    except ValidationError as error:
        keys = _Configuration.model_fields
        problems = [
            # Numbers of stages are keys here, not places in a list.
            Problem((*map(str, d["loc"][:2]), *d["loc"][2:]), problem_text(d, keys))
            if d["loc"] and d["loc"][0] in _BY_STAGE
            else Problem(d["loc"], problem_text(d, keys))
            for d in error.errors(include_url=False)
        ]
        raise plan_error(where, problems, raw) from None
    problems = [*_stages(found), *_ranks(found), *_depths(found)]
    if problems:
        raise plan_error(where, problems, raw)
    # A file's name may hold bytes that are no text, which no output could take.
    return _as_plan(found, PurePath(where).stem.encode(errors="replace").decode())


def _parsed(text: str, where: str) -> Any:
    try:
        return _loaded(text)
    except RecursionError:
        raise PlanError(f"{where}: not JSON: it is nested too deep") from None
    except ValueError as error:
        raise PlanError(f"{where}: not JSON: {error}") from error


def _loaded(text: str) -> Any:
    """JSON, where that fails with bare numbers for keys, as PipeDream's optimizer writes them."""
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError:
        return json.loads(_BARE_NUMBER.sub(r'\1"\2"\3', text), object_pairs_hook=_once_each)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} comes twice")
    return found


def _stages(found: _Configuration) -> Iterator[Problem]:
    """Stages without a place in the line, or without ranks or modules."""
    stages, modules = set(found.stage_to_rank_map), found.module_to_stage_map
    missing = set(range(len(stages))) - stages
    if missing:
        text = f"{len(stages)} stages are numbered from 0; missing: {ranges(sorted(missing))}"
        yield Problem(("stage_to_rank_map",), text)
    without = stages - set(modules)
    if without:
        yield Problem(("module_to_stage_map",), f"no module for stage {ranges(sorted(without))}")
    for place, stage in enumerate(modules):
        if stage not in stages:
            text = f"stage {stage} has no ranks in stage_to_rank_map"
            yield Problem(("module_to_stage_map", place), text)
    for place, (one, next_) in enumerate(pairwise(modules), start=1):
        if next_ < one:
            text = f"stage {next_} comes again after stage {one}: stages follow each other"
            yield Problem(("module_to_stage_map", place), text)


def _ranks(found: _Configuration) -> Iterator[Problem]:
    """Ranks that hold two places, and gaps in their numbers."""
    holders: dict[int, int] = {}
    for stage, ranks in found.stage_to_rank_map.items():
        for place, rank in enumerate(ranks):
            if rank in holders:
                text = f"rank {rank} is already one of stage {holders[rank]}"
                yield Problem(("stage_to_rank_map", str(stage), place), text)
            holders.setdefault(rank, stage)
    missing = set(range(len(holders))) - set(holders)
    if missing:
        text = f"{len(holders)} ranks are numbered from 0; missing: {ranges(sorted(missing))}"
        yield Problem(("stage_to_rank_map",), text)


def _depths(found: _Configuration) -> Iterator[Problem]:
    """Stages without a depth, depths without a stage, and those that no session has."""
    if found.stage_to_depth_map is None:
        return
    stages, depths = set(found.stage_to_rank_map), set(found.stage_to_depth_map)
    for text, wrong in (("no depth for", stages - depths), ("there is no", depths - stages)):
        if wrong:
            yield Problem(("stage_to_depth_map",), f"{text} stage {ranges(sorted(wrong))}")
    most = most_microbatches(len(stages))
    for stage in sorted(stages & depths):
        depth, replicas = found.stage_to_depth_map[stage], len(found.stage_to_rank_map[stage])
        if (depth + 1) * replicas > most:
            text = f"{shown(depth)}: no session has so many microbatches; at most {most} in all"
            yield Problem(("stage_to_depth_map", str(stage)), text)


def _as_plan(found: _Configuration, name: str) -> dict[str, Any]:
    ranks, depths = found.stage_to_rank_map, found.stage_to_depth_map or {}
    names = [f"stage{stage}" for stage in range(len(ranks))]
    stages: list[Mapping[str, Any]] = [
        {"name": names[stage], "ranks": ranks[stage]}
        | ({"warm_up": depths[stage]} if depths else {})
        for stage in range(len(ranks))
    ]
    tensors: list[dict[str, Any]] = [
        {"name": f"out{stage}", "from": one, "to": [next_]}
        for stage, (one, next_) in enumerate(pairwise(names))
    ]
    if tensors:
        tensors.append({"name": "target", "from": names[0], "to": [names[-1]], "grad": False})
    return {
        "pipeline": {
            "name": name or "pipeline",
            "schedule": "pipedream",
            "microbatches": 1,
            "routing": found.routing,
        },
        "stages": stages,
        "tensors": tensors,
    }
