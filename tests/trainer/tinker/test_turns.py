"""Whose turn it is."""

import asyncio

import pytest

from trainer.tinker.turns import Turns


async def test_lines_take_turns_whatever_each_has_sent() -> None:
    turns = Turns(in_order=True)
    for number in range(3):
        turns.add("busy", number)
    turns.add("other", 0)
    order = []
    for _ in range(4):
        line, number = await turns.take()
        order.append((line, number))
        turns.done(line, number)
    assert order == [("busy", 0), ("other", 0), ("busy", 1), ("busy", 2)]


async def test_an_operation_waits_for_those_before_it() -> None:
    turns = Turns(in_order=True)
    turns.start("run", 1)
    turns.add("run", 2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turns.take(), 0.01)
    turns.add("run", 1)
    assert await turns.take() == ("run", 1)
    with pytest.raises(TimeoutError):  # 2 waits until 1 is done
        await asyncio.wait_for(turns.take(), 0.01)
    turns.done("run", 1)
    assert await turns.take() == ("run", 2)


async def test_without_an_order_many_of_a_line_are_in_work() -> None:
    turns = Turns(in_order=False)
    for number in (5, 3):
        turns.add("a", number)
    turns.add("b", 9)
    assert [await turns.take() for _ in range(3)] == [("a", 3), ("b", 9), ("a", 5)]


async def test_a_dropped_one_has_no_turn() -> None:
    turns = Turns(in_order=False)
    turns.add("a", 1)
    turns.add("a", 2)
    assert turns.drop("a", 1)
    assert not turns.drop("a", 1)
    assert await turns.take() == ("a", 2)
    assert turns.waiting("a") == 0
