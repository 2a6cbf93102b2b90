"""The walk against a simulator too simple to be wrong, over random shapes, orders and windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from stagelink.plan import Plan, Stage
from stagelink.schedule import Action, Kind, Mode, walk

MakePlan = Callable[..., Plan]
Lists = Sequence[Sequence[Action]]
Programs = Callable[..., Lists]
Shapes = st.SearchStrategy[tuple[list[int], list[tuple[int, int, bool]]]]
Operation = tuple[str, int, int]
Facts = set[tuple[str, int, int, int]]
Freed = Counter[tuple[int, int, int]]


# Evaluation, where nothing comes back, is the smaller part of it.
MODES: tuple[Mode, ...] = ("train", "train", "evaluate")


class Simulator:
    """Runs lists of operations, in rounds that see only what happened in earlier rounds."""

    def __init__(
        self, plan: Plan, lists: Lists, windows: Sequence[int], mode: Mode, synchronise: bool
    ) -> None:
        self.plan = plan
        self.windows = windows
        self.returns = [mode == "train" and edge.tensor.grad for edge in plan.edges]
        self.facts: Facts = set()
        self.sent: Counter[tuple[int, int, int]] = Counter()
        self.freed: Freed = Counter()
        self.peaks = [0] * len(plan.edges)
        self.rounds = 0
        self.left = [self.operations(rank, lists, synchronise) for rank in range(len(lists))]

    def operations(self, rank: int, lists: Lists, synchronise: bool) -> list[list[Operation]]:
        stage = self.plan.stage_of(rank)
        ins, outs = self.plan.inputs(stage.index), self.plan.outputs(stage.index)
        actions: list[list[Operation]] = []
        turn = 0
        for action in lists[rank]:
            g = action.microbatch
            if action.kind is Kind.FORWARD:
                todo = [("receive", edge.index, g) for edge in ins]
                todo += [("send", edge.index, g) for edge in outs]
            else:
                todo = [("receive gradient", e.index, g) for e in outs if self.returns[e.index]]
                todo += [("synchronise", stage.index, turn)] if synchronise else []
                todo += [("send gradient", e.index, g) for e in ins if self.returns[e.index]]
                turn += 1
            actions.append(todo)
        turns = max(sum(a.kind is Kind.BACKWARD for a in lists[other]) for other in stage.ranks)
        if synchronise and turn < turns:
            actions = actions or [[]]
            actions[-1].append(("join", stage.index, turn))
        return actions

    def run(self) -> Simulator:
        moved = True
        while moved:
            facts, freed = set(self.facts), Counter(self.freed)
            moved = any([self.turn(rank, facts, freed) for rank in range(len(self.left))])
            self.rounds += moved
        return self

    def turn(self, rank: int, facts: Facts, freed: Freed) -> bool:
        """One action, or as much of it as can be; whether anything was done."""
        if not self.left[rank]:
            return False
        todo = self.left[rank][0]
        before = len(todo), len(self.facts)
        while todo and self.do(rank, todo[0], facts, freed):
            todo.pop(0)
        if todo:
            return (len(todo), len(self.facts)) != before
        self.left[rank].pop(0)
        return True

    def do(self, rank: int, operation: Operation, facts: Facts, freed: Freed) -> bool:
        what, index, number = operation
        if what in {"join", "synchronise"}:
            self.facts.add(("joined", index, number, rank))
            everybody = {("joined", index, number, r) for r in self.plan.stages[index].ranks}
            return what == "join" or everybody <= facts
        edge = self.plan.edges[index]
        source, target = self.plan.stages[edge.source], self.plan.stages[edge.target]
        channel = (index, holder(source, number), holder(target, number))
        if what == "send":
            return self.send(channel, number, freed)
        if what == "send gradient":
            self.facts.add(("gradient", index, number, 0))
            return True
        awaited = "message" if what == "receive" else "gradient"
        there = (awaited, index, number, 0) in facts
        frees = (what == "receive gradient") == self.returns[index]
        self.freed[channel] += there and frees
        return there

    def send(self, channel: tuple[int, int, int], microbatch: int, freed: Freed) -> bool:
        edge, _, _ = channel
        in_flight = self.sent[channel] - freed[channel]
        if in_flight == self.windows[edge]:
            return False
        self.sent[channel] += 1
        self.peaks[edge] = max(self.peaks[edge], in_flight + 1)
        self.facts.add(("message", edge, microbatch, 0))
        return True


def holder(stage: Stage, microbatch: int) -> int:
    return stage.ranks[microbatch % len(stage.ranks)]


@st.composite
def any_order(draw: st.DrawFn, plan: Plan, microbatches: int) -> list[list[Action]]:
    """Lists of actions that are right rank by rank, but may well deadlock together."""
    lists = []
    for rank in range(plan.world_size):
        stage = plan.stage_of(rank)
        own: list[Action] = []
        for g in range(plan.replica_of(rank), microbatches, stage.replicas):
            first = draw(st.integers(0, len(own)))
            own.insert(first, Action(Kind.FORWARD, stage.index, g))
            second = draw(st.integers(first + 1, len(own)))
            own.insert(second, Action(Kind.BACKWARD, stage.index, g))
        lists.append(own)
    return lists


@settings(max_examples=300)
@given(data=st.data())
def test_ends_as_the_simulator_does(
    data: st.DataObject, shapes: Shapes, make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan(*data.draw(shapes))
    microbatches = data.draw(st.integers(0, 11), "microbatches")
    warm_up = data.draw(st.lists(st.integers(0, 5), min_size=4, max_size=4), "warm-up")
    by_schedule = st.just(programs(plan, microbatches, warm_up))
    lists = data.draw(by_schedule | any_order(plan, microbatches), "lists")
    sizes = st.lists(st.integers(1, 5), min_size=len(plan.edges), max_size=len(plan.edges))
    windows = data.draw(st.none() | sizes, "windows")
    mode: Mode = data.draw(st.sampled_from(MODES), "mode")
    if mode == "evaluate":
        lists = [[a for a in actions if a.kind is Kind.FORWARD] for actions in lists]
    synchronise = mode == "train" and data.draw(st.booleans(), "synchronise")

    walked = walk(plan, lists, microbatches, windows, mode=mode, synchronise=synchronise)

    unlimited = [microbatches] * len(plan.edges)
    naive = Simulator(plan, lists, windows or unlimited, mode, synchronise).run()
    waiting = {wait.rank: wait for wait in walked.waits}
    assert list(waiting) == [rank for rank, left in enumerate(naive.left) if left]
    assert list(walked.peaks) == naive.peaks
    assert all(wait.blocker in waiting for wait in walked.waits)
    if not waiting:
        assert walked.rounds == naive.rounds


def test_takes_as_long_as_a_filled_line(make_plan: MakePlan, programs: Programs) -> None:
    plan = make_plan([1, 1, 1, 1])
    walked = walk(plan, programs(plan, 8, (3, 2, 1, 0)), 8)
    # 8 forwards and 8 backwards, behind 3 stages there and 3 back.
    assert walked.rounds == 2 * 8 + 2 * 3
    assert walked.peaks == (4, 3, 2)


def test_nothing_to_do_takes_no_time(make_plan: MakePlan, programs: Programs) -> None:
    plan = make_plan([2, 1])
    walked = walk(plan, programs(plan, 0, (1, 0)), 0, synchronise=True)
    assert (walked.waits, walked.peaks, walked.rounds) == ((), (0,), 0)


def test_a_place_without_gradient_is_free_once_received(
    make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan([1, 1], [(0, 1, False)])
    walked = walk(plan, programs(plan, 9, (9, 9)), 9, [1])
    assert (walked.waits, walked.peaks) == ((), (1,))


def test_a_replica_that_is_through_takes_part_idle(
    make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan([3, 1])
    for microbatches in (1, 2, 4, 5):
        walked = walk(plan, programs(plan, microbatches, (0, 0)), microbatches, synchronise=True)
        assert not walked.waits
