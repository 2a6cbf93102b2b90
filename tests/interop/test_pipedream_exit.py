"""Programs in PipeDream's way close nothing: what the end of a process does."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os
import sys

import torch

import stagelink
from stagelink.interop.pipedream import CommunicationHandler


def become(folder):
    # Both scenarios at once: a process for each rank, that has torch loaded already.
    for how in ("ends", "fails"):
        for rank in range(2):
            if os.fork() == 0:
                out = os.open(f"{folder}/{how}{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(out, 1)
                os.dup2(out, 2)
                return rank, how
    while True:
        try:
            os.wait()
        except ChildProcessError:
            sys.exit()


folder = sys.argv[1]
rank, how = become(folder)
CommunicationHandler.tables = {"limits": {"deadline_s": 20.0, "first_deadline_s": 20.0}}
handler = CommunicationHandler(
    master_addr=f"file://{folder}/store-{how}", master_port=1, rank=rank, local_rank=rank,
    num_ranks_in_server=1, world_size=2, fp16=False, backend="gloo",
)
tags, dtypes = {"out0": 1, "ack": 2}, {"out0": torch.float32}
if rank == 0:
    handler.initialize({}, {"out0": [1]}, tags, set(), dtypes, 0, 1, [], [1])
else:
    handler.initialize({"out0": [0]}, {}, tags, set(), dtypes, 0, 1, [0], [])
handler.start_helper_threads(3, forward_only=False)
if rank == 0:
    for f in range(3):
        handler.send("out0", torch.full((5000,), float(f)), f, 0)
    try:
        found = [handler.recv("out0", 3, b, backward=True)[0].item() for b in range(3)]
    except stagelink.StagelinkError as error:
        found = f"{type(error).__name__}: {error}"
    print(found)
else:
    for f in range(3):
        x = handler.recv("out0", f, f)
        handler.increment_messaging_index(sending=False)
        if how == "fails" and f == 1:
            raise RuntimeError("not to my liking")
        handler.send("out0", x.detach() + 1, f, f, backward=True)
        handler.increment_messaging_index(sending=True)
    # Rank 0 may not have taken anything yet: nothing of it may be lost.
"""


def test_the_end_of_a_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=50)
    said = {file.name: file.read_text() for file in tmp_path.iterdir() if "store" not in file.name}
    assert said["ends0"].endswith("[1.0, 2.0, 3.0]\n")
    assert "Error" not in said["ends1"]
    assert "AbortedError: " in said["fails0"]
    assert "rank 1 failed: RuntimeError: not to my liking" in said["fails0"]
    assert said["fails1"].endswith("RuntimeError: not to my liking\n")
