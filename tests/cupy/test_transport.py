"""What the transport says of itself and of this machine, and which GPUs it links."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import stagelink_cupy
from stagelink.errors import PlanError
from stagelink.plugins.offers import parse_options
from stagelink.plugins.problems import transport_problems
from stagelink.transport.contract import Endpoint, Link
from stagelink_cupy import Cupy, CupyOptions
from tests.cupy.codes import Status
from tests.cupy.double import CudaDouble
from tests.cupy.machine import DoubleConfig, Gpu
from tests.cupy.on_double import CupyOnDouble

if TYPE_CHECKING:
    from pathlib import Path

    from stagelink.transport.contract import Verdict

LINK = Link(0, 1, "cupy", "cpu")
MIB = 1024 * 1024
ONE, OTHER = Gpu.numbered(1), Gpu.numbered(2)


# -- what it says of itself ----------------------------------------------------------------------


def test_the_hook_returns_the_class() -> None:
    assert stagelink_cupy.stagelink_register_transport() is Cupy
    assert transport_problems(Cupy) == []


def test_what_it_says_of_itself() -> None:
    assert Cupy.name == "cupy"
    assert Cupy.capabilities.devices == {"cuda"}
    assert Cupy.capabilities.same_server
    assert Cupy.capabilities.distinct_processes
    assert not Cupy.capabilities.copies_on_begin


@pytest.mark.parametrize("size", [0, -2 * MIB, MIB, 2 * MIB + 1, 3 * MIB])
def test_a_size_that_cannot_be(size: int) -> None:
    text = rf"region_bytes = {size}; a power of two is needed, at least 2097152"
    with pytest.raises(PlanError, match=text):
        parse_options(Cupy, {"region_bytes": size})


def test_it_is_imported_without_cupy() -> None:
    code = "import stagelink_cupy, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "stagelink_cupy" in loaded
    assert not {"cupy", "cupy_backends"} & set(loaded)


# -- whether it can be used here -----------------------------------------------------------------


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    reason = Cupy.probe(CupyOptions()).reason
    assert reason == "CuPy is not installed: pip install 'stagelink-cupy[cuda12]', or [cuda13]"


def test_a_cupy_that_does_not_load_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so: no such file')")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = Cupy.probe(CupyOptions()).reason
    assert reason == "CuPy cannot be imported: libcudart.so: no such file"


@pytest.mark.filterwarnings("ignore")  # which it may give as it likes
def test_with_cupy_and_without_a_driver() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.driverGetVersion():
        pytest.skip("here is a driver")
    assert Cupy.probe(CupyOptions()).reason == "there is no CUDA driver"


def _probed(monkeypatch: pytest.MonkeyPatch, config: DoubleConfig) -> Verdict:
    with CudaDouble(config) as rt:
        monkeypatch.setattr(CupyOnDouble, "rt", rt)
        return CupyOnDouble.probe(CupyOptions())


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _probed(monkeypatch, DoubleConfig())
    verdict = _probed(monkeypatch, DoubleConfig(gpus=()))
    assert verdict.reason == (
        "CUDA finds no GPU: cudaErrorNoDevice: no CUDA-capable device is detected"
    )
    assert _probed(monkeypatch, DoubleConfig(driver_version=0)).reason == "there is no CUDA driver"
    broken = DoubleConfig(fails={"getDeviceCount": Status.cudaErrorUnknown})
    assert "cudaErrorUnknown" in _probed(monkeypatch, broken).reason


def test_a_system_without_it_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert Cupy.probe(CupyOptions()).reason == "it needs Linux's CUDA IPC, this is win32"


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: False)
    monkeypatch.setattr(Cupy, "runtime", CupyOnDouble.runtime)
    assert Cupy.probe(CupyOptions()).reason == "this build of torch has no CUDA"
    assert CupyOnDouble.probe(CupyOptions())


# -- which GPUs are linked -----------------------------------------------------------------------


def _place(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    config: DoubleConfig,
    options: CupyOptions | None = None,
    *,
    device: int = 0,
) -> Endpoint:
    with CudaDouble(config) as rt:
        monkeypatch.setattr(CupyOnDouble, "rt", rt)
        monkeypatch.setattr(CupyOnDouble, "number", device)
        said = CupyOnDouble(options or CupyOptions()).describe()
    return Endpoint(rank, "server", f"process {rank}", said)


def _judged(one: Endpoint, other: Endpoint) -> str:
    """Why not, or nothing; both ends say the same."""
    transport = CupyOnDouble(CupyOptions())
    verdict = transport.can_connect(LINK, one, other)
    assert verdict == transport.can_connect(LINK, other, one)
    assert verdict.ok == (not verdict.reason)
    return verdict.reason


def test_two_processes_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _place(monkeypatch, 0, DoubleConfig(gpus=(ONE, OTHER)))
    # Whatever its number there.
    other = _place(monkeypatch, 1, DoubleConfig(gpus=(ONE,), denied=frozenset({(ONE, OTHER)})))
    assert _judged(one, other) == ""


def test_two_gpus_with_access(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DoubleConfig(gpus=(ONE, OTHER))
    one = _place(monkeypatch, 0, config)
    other = _place(monkeypatch, 1, config, device=1)
    assert one.description["gpu"] != other.description["gpu"]
    assert _judged(one, other) == ""


@pytest.mark.parametrize(("rank", "denied"), [(0, (ONE, OTHER)), (1, (OTHER, ONE))])
def test_two_gpus_without_access(
    monkeypatch: pytest.MonkeyPatch, rank: int, denied: tuple[Gpu, Gpu]
) -> None:
    config = DoubleConfig(gpus=(ONE, OTHER), denied=frozenset({denied}))
    one = _place(monkeypatch, 0, config)
    reason = _judged(one, _place(monkeypatch, 1, config, device=1))
    assert reason.startswith(f"rank {rank}: its GPU {denied[0].uuid.hex()}")
    assert "has no access to" in reason


def test_a_gpu_that_the_peer_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _place(monkeypatch, 0, DoubleConfig(gpus=(ONE,)))
    other = _place(monkeypatch, 1, DoubleConfig(gpus=(OTHER,)))
    reason = _judged(one, other)
    assert reason.startswith("rank 0: it does not see ")
    assert "CUDA_VISIBLE_DEVICES" in reason


def test_uuids_that_cupy_cuts_short(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(ONE, uuid=b"\0" + ONE.uuid[1:])
    also = replace(OTHER, uuid=b"\0" + OTHER.uuid[1:])
    one = _place(monkeypatch, 0, DoubleConfig(gpus=(short,)))
    assert _judged(one, _place(monkeypatch, 1, DoubleConfig(gpus=(short,)))) == ""
    assert _judged(one, _place(monkeypatch, 1, DoubleConfig(gpus=(also,))))
    longer = replace(ONE, luid=b"luid")
    one = _place(monkeypatch, 0, DoubleConfig(gpus=(longer,)))
    assert _judged(one, _place(monkeypatch, 1, DoubleConfig(gpus=(ONE,)))) == ""


def test_options_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _place(monkeypatch, 0, DoubleConfig())
    other = _place(monkeypatch, 1, DoubleConfig(), CupyOptions(device_ordered=True))
    assert "'device_ordered': True} on rank 1" in _judged(one, other)


def test_ranks_that_it_does_not_link() -> None:
    said: dict[str, Any] = {}
    assert not CupyOnDouble(CupyOptions()).can_connect(
        LINK, Endpoint(0, "server", "one", {"options": {}}), Endpoint(1, "server", "other", said)
    )
