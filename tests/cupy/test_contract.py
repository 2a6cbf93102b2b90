"""What the double says it has, CuPy has: the same functions, arguments, constants and errors.

CuPy is imported without a driver, in a process of its own: it may warn there as it likes.
"""

from __future__ import annotations

import inspect
import json
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.cupy.codes import CUDARuntimeError, Status
from tests.cupy.device import OWN
from tests.cupy.double import CudaDouble
from tests.cupy.machine import DoubleConfig

pytestmark = pytest.mark.skipif(
    find_spec("cupy") is None, reason="cupy is not installed; CI installs it (cupy-cuda12x)"
)

NAMES = sorted(name for name in dir(CudaDouble) if name[0] != "_" and name not in OWN)
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(CudaDouble, name))]
CONSTANTS = [name for name in NAMES if isinstance(getattr(CudaDouble, name), int)]

SCRIPT = """
import json, pickle, sys
from cupy.cuda import runtime

names, statuses = json.load(sys.stdin)

def refusal(handle):
    try:
        runtime.ipcOpenMemHandle(handle)
    except Exception as error:
        return type(error).__name__

def value(name):
    found = getattr(runtime, name, None)
    return found if isinstance(found, int) else None

error = runtime.CUDARuntimeError
again = pickle.loads(pickle.dumps(error(1)))
json.dump({
    "documented": {name: getattr(getattr(runtime, name, None), "__doc__", None) for name in names},
    "values": {name: value(name) for name in names},
    "errors": {status: str(error(status)) for status in statuses},
    "error": [vars(again), [base.__name__ for base in error.__mro__]],
    "refusals": [refusal(handle) for handle in (bytes(63), bytes(65), "handle")],
    "queries": [runtime.eventQuery(0), runtime.streamQuery(0), runtime.driverGetVersion()],
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def cupy() -> Any:
    """What CuPy says of all the names."""
    asked = json.dumps([NAMES, list(Status)])
    command = [sys.executable, "-P", "-c", SCRIPT]
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def parameters_of(documented: str, values: dict[str, int]) -> list[tuple[str, Any]]:
    """Names and defaults from a line such as ``f(intptr_t one, unsigned int flags=0) -> int``."""
    found = re.match(r"\w+\((.*?)\)", documented)
    assert found, documented
    parameters = []
    for text in filter(None, found[1].split(", ")):
        declared, _, default = text.partition("=")
        value = values.get(default, default)
        parameters.append((declared.split()[-1], int(value) if default else inspect._empty))
    return parameters


def test_there_is_something_to_compare() -> None:
    assert len(FUNCTIONS) >= 30
    assert len(CONSTANTS) > 10
    assert {*NAMES} == {*FUNCTIONS, *CONSTANTS, "CUDARuntimeError"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_same_parameters(cupy: Any, name: str) -> None:
    documented = cupy["documented"][name]
    assert documented, f"cupy.cuda.runtime has no {name}"
    _, *ours = inspect.signature(getattr(CudaDouble, name)).parameters.values()
    theirs = parameters_of(documented.partition("\n")[0], cupy["values"])
    assert [(one.name, one.default) for one in ours] == theirs


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_has_the_same_value(cupy: Any, name: str) -> None:
    assert getattr(CudaDouble, name) == cupy["values"][name]


def test_an_error_says_the_same(cupy: Any) -> None:
    assert {str(int(one)): str(CUDARuntimeError(one)) for one in Status} == cupy["errors"]
    again = pickle.loads(pickle.dumps(CUDARuntimeError(1)))
    bases = [base.__name__ for base in CUDARuntimeError.__mro__]
    assert [vars(again), bases] == cupy["error"]


def test_what_is_no_handle_is_refused_alike(cupy: Any) -> None:
    refusals = []
    with CudaDouble(DoubleConfig()) as rt:
        for handle in (bytes(63), bytes(65), "handle"):
            with pytest.raises((IndexError, TypeError)) as caught:
                rt.ipcOpenMemHandle(handle)  # type: ignore[arg-type]
            refusals.append(type(caught.value).__name__)
    assert refusals == cupy["refusals"]


def test_without_a_driver_queries_return_what_others_raise(cupy: Any) -> None:
    events, streams, driver = cupy["queries"]
    if driver:
        pytest.skip("there is a driver")
    with CudaDouble(DoubleConfig(driver_version=0)) as rt:
        assert [rt.eventQuery(0), rt.streamQuery(0)] == [events, streams]
        assert rt.driverGetVersion() == driver
