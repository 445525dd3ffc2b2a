"""Faults that the soak puts into a running decoder, one at a time, and how many of them have happened."""

from __future__ import annotations

import linecache
import random
import time
from collections.abc import Callable
from typing import Any

from specdec.steps import RunChunk, RunMixed, RunRound, Step
from toolkit.driver import Driver

WINDOW = 10.0  # seconds for which a fault waits to happen


class InjectedFault(RuntimeError):
    """What the soak raises inside the decoder."""

    @property
    def was_raised(self) -> bool:
        """Whether it has a traceback, which the engine's thread turns into a note."""
        return self.__traceback__ is not None or bool(getattr(self, "__notes__", []))


class Faults:
    """Makes one thing at a time fail, once, in a decoder that serves nothing but the soak from now on.

    Of the engine: launching a round or a chunk of prompts, reading tokens back, and the models' phases, which a GPU runs inside
    captured graphs, where nothing can be made to fail.  Of the tokenizer: turning ids into text.
    """

    PHASES = ("prefill", "draft prefill", "draft", "verify", "extend")

    def __init__(self, driver: Driver, seed: int) -> None:
        linecache.getlines(__file__)  # which the first traceback would read, so that the process would hold more from then on
        self.happened: dict[str, str] = {}  # kinds by name
        self._planted = 0
        self.steps = 0  # that the engine was given
        self._driver, self._chance = driver, random.Random(seed)
        self._armed: str | None = None
        on_gpu = driver.decoder.settings.device.type == "cuda"
        self.kinds = ("round", "chunk", "read", "text", *(() if on_gpu else self.PHASES))

        tokenizer, kinds = driver.decoder.tokenizer, {RunRound: "round", RunMixed: "round", RunChunk: "chunk"}
        decode = tokenizer.decode

        def decode_or_fail(ids: Any) -> str:
            self._fail_if("text")
            return decode(ids)

        tokenizer.decode = decode_or_fail  # type: ignore[method-assign]

        def watch(step: Step) -> None:
            self.steps += 1
            self._fail_if(kinds.get(type(step), ""))

        driver.watch(watch)

    def one(self, is_over: Callable[[], bool]) -> None:
        """Lets one fault of a random kind happen; gives up after a while, or when everything is over."""
        kind = self._chance.choice(self.kinds)
        if kind in ("round", "chunk", "text"):
            self._armed = kind
            self._wait(lambda: self._armed is None or is_over())
            self._armed = None
        else:
            fault = InjectedFault(name := self._name(kind))
            with self._driver.fail_in(kind, fault, call=0):
                self._wait(lambda: fault.was_raised or is_over())
            if fault.was_raised:
                self.happened[name] = kind

    def _wait(self, is_enough: Callable[[], bool]) -> None:
        end = time.monotonic() + WINDOW
        while not is_enough() and time.monotonic() < end:
            time.sleep(0.002)

    def _fail_if(self, kind: str) -> None:
        if self._armed == kind:
            self._armed = None
            self.happened[name := self._name(kind)] = kind
            raise InjectedFault(name)

    def _name(self, kind: str) -> str:
        """Of the next fault, which stands in the error of every call that it ends."""
        self._planted += 1
        return f"fault {self._planted}: {kind}."
