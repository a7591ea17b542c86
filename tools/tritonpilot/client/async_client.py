"""Predictions from asyncio: one call each, joined with others into requests, sent to one of several servers.

async with AsyncClient("127.0.0.1:8000") as client:
    answer = await client.predict("ctr", {"dense": ..., "categorical": ...}, deadline_ms=50, caller_class="realtime")
    answer["prob"]
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from tritonpilot.client import coalesce, endpoints, retry, served
from tritonpilot.client.calls import Call, Errand, Key, Lane, Route
from tritonpilot.client.endpoints import Endpoint
from tritonpilot.client.errors import (
    CallError,
    ClosedError,
    DeadlineError,
    DisconnectedError,
    InputError,
    ModelFaultError,
    RejectedError,
)
from tritonpilot.client.served import Array, Served
from tritonpilot.client.server import SHARED_MEMORY_BYTES, Server, SharedMemory, Sharing
from tritonpilot.client.transport import Request, reach

DEADLINE_MS = 30_000.0
CLOSE_GRACE_S = 5.0
SMALL_CALL_BYTES = 1 << 18  # above that, the stack's share of a call is small, and joining only copies
LONGEST_S = 7 * 86400.0  # a deadline beyond it is told to nobody: an entry takes it for a mistake
LATE_S = 0.005  # a refusal this close to the deadline is the deadline's

T = TypeVar("T")


class AsyncClient:
    """Calls the models of one server, or of several that serve the same ones. Used from the event loop of its first call.

    `servers`: "host:port" or URLs of the schemes http, https, grpc, grpcs. `deadline_ms` and `caller_class` hold for calls that
    state none. `coalesce` joins concurrent small calls into one request; while one of the same kind is on the way, a call
    waits for company for at most `coalesce_wait_ms`; `coalesce_rows` bounds a request's rows below the model's max_batch_size.
    `retries` says how retryable rejections are repeated.
    `shared_memory`: "auto" puts big tensors there when the server is on this machine and the control key is known (given,
    in TRITONPILOT_CONTROL_KEY, or in the state file), "off" never; a number is the index of the GPU to put them on.
    `key` says who calls: the API key that an entry (`tritonpilot entry`) knows.

    A client does not survive a fork: the child's calls raise ClosedError; make one per process.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        deadline_ms: float = DEADLINE_MS,
        caller_class: str | None = None,
        coalesce: bool = True,
        coalesce_wait_ms: float = 1.0,
        coalesce_rows: int = 0,
        retries: retry.Policy = retry.Policy(),  # noqa: B008  frozen
        shared_memory: SharedMemory = "auto",
        shared_memory_bytes: int = SHARED_MEMORY_BYTES,
        control_key: str | None = None,
        key: str = "",
    ) -> None:
        given = [servers] if isinstance(servers, str) else list(servers)
        if not given:
            raise InputError("No endpoint was given. Nothing was sent. Name one server at least.", "servers")
        self.endpoints = [endpoints.parse(each) for each in given]
        self.deadline_ms = deadline_ms
        self._caller_class = caller_class
        self._may_join = coalesce
        self._wait_s = coalesce_wait_ms / 1e3
        self._most_rows = coalesce_rows
        self._retries = retries
        self._budget = retry.Budget(retries)
        self._sharing = Sharing(shared_memory, shared_memory_bytes, control_key)
        if not _is_header(key):
            raise InputError("The key has characters that no key has. Nothing was sent. Correct it.", "key")
        self._key = key
        self._pid = os.getpid()
        self._is_closed = False
        self._servers: dict[int, Server] = {}  # by id of the endpoint
        self._served: dict[tuple[str, str], Served] = {}
        self._describing: dict[tuple[str, str], asyncio.Task[Served]] = {}
        self._lanes: dict[Key, Lane] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: set[Call] = set()
        self._asking: set[asyncio.Future[None]] = set()  # one for each call that waits for its model's description

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        deadline_ms: float | None = None,
        caller_class: str | None = None,
        priority: int | None = None,
        outputs: Sequence[str] = (),
        version: str = "",
    ) -> dict[str, Array]:
        """The model's outputs for these inputs, by name. Raises a CallError; see tritonpilot.client.errors.

        Inputs have the model's shape with the batch dimension first, [rows, ...], or without it for one row, whose answer has
        none either. The call ends at its deadline in any case, and the server drops it from the queue then.
        `outputs` names those that are wanted, () for all. Arrays of the answer may be read-only.
        """
        self._check_usable()
        loop = asyncio.get_running_loop()
        asked_s = (self.deadline_ms if deadline_ms is None else deadline_ms) / 1e3
        deadline = loop.time() + asked_s
        described = self._served.get((model, version)) or await self._described(model, version, deadline)
        checked = served.check(described, inputs)
        caller = caller_class if caller_class is not None or priority is not None else self._caller_class
        level = served.level(described, caller, priority)
        # A server that hides a model's classes decides what the name means.
        named = caller if caller is not None and priority is None and described.classes is None else ""
        if not _is_header(named):
            raise InputError(
                f"No server has a class of callers {named!r}. Nothing was sent. Correct it.", "caller_class"
            )
        if unknown := [name for name in outputs if name not in described.outputs]:
            raise InputError(
                f'"{unknown[0]}": the model {model} has no such output. Nothing was sent. Its outputs are '
                f"{', '.join(described.outputs)}.",
                unknown[0],
            )
        route = Route(described, level, named, tuple(outputs))
        call = Call(checked, loop.create_future(), deadline, asked_s)
        self._add(call, route, loop)
        timer = loop.call_at(deadline, call.expire)
        self._calls.add(call)
        try:
            return await call.future
        finally:
            timer.cancel()
            self._calls.discard(call)
            if call.errand is not None:
                call.errand.left()

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Take no new calls; pending ones are answered within `grace_s` seconds or raise ClosedError. May be called twice."""
        self._is_closed = True
        if self._pid != os.getpid():
            return
        for lane in list(self._lanes.values()):
            self._send_all(lane)
        until = time.monotonic() + grace_s
        while (left := until - time.monotonic()) > 0:
            # Callers, not tasks: a question or request that nobody waits for any more may be on its way for long.
            pending: list[asyncio.Future[Any]] = [
                *(call.future for call in self._calls if not call.future.done()),
                *self._asking,
            ]
            if not pending:
                break
            await asyncio.wait(pending, timeout=left)
        for call in list(self._calls):
            call.fail(
                ClosedError(f"The client was closed, and there was no answer within {grace_s:g} s. Make a new client.")
            )
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers.values():
            await server.close()
        self._servers.clear()

    # -- from calls to requests ----------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                "This client belongs to the process before the fork. Nothing was sent. Make a client in this process."
            )
        if self._is_closed:
            raise ClosedError("This client was closed. Nothing was sent. Make a new one.")

    def _add(self, call: Call, route: Route, loop: asyncio.AbstractEventLoop) -> None:
        model = route.served
        is_limited = model.is_limit_known or self._most_rows > 0
        if not (self._may_join and model.may_join and is_limited and call.bytes <= SMALL_CALL_BYTES):
            self._start(route, [call], None)
            return
        key = (
            model,
            route.level,
            route.caller_class,
            route.outputs,
            call.shapes(),
            coalesce.deadline_band(call.asked_s),
        )
        lane = self._lanes.get(key)
        if lane is None:
            rows = min(model.max_batch_size, self._most_rows or model.max_batch_size)
            limits = coalesce.Limits(rows=rows, wait_s=self._wait_s)
            lane = self._lanes[key] = Lane(key, route, limits)
        call.since = loop.time()
        lane.waiting.append(call)
        if not lane.is_looked_at:
            # At the end of this turn of the loop: tasks that were woken together call together.
            lane.is_looked_at = True
            loop.call_soon(self._look, lane)

    def _look(self, lane: Lane) -> None:
        lane.is_looked_at = False
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        loop = asyncio.get_running_loop()
        while True:
            while lane.waiting and lane.waiting[0].future.done():
                lane.waiting.popleft()
            age_s = loop.time() - lane.waiting[0].since if lane.waiting else 0.0
            decision = coalesce.decide(
                (call.size for call in lane.waiting), oldest_age_s=age_s, in_flight=lane.in_flight, limits=lane.limits
            )
            if not decision.count:
                break
            self._start(lane.route, [lane.waiting.popleft() for _ in range(decision.count)], lane)
        if lane.waiting:
            lane.timer = loop.call_later(decision.wait_s, self._look, lane)
        elif not lane.in_flight:
            self._lanes.pop(lane.key, None)

    def _send_all(self, lane: Lane) -> None:
        calls: list[Call] = []
        rows = 0
        while lane.waiting:
            call = lane.waiting.popleft()
            if calls and rows + call.size.rows > lane.limits.rows:
                self._start(lane.route, calls, lane)
                calls, rows = [], 0
            calls.append(call)
            rows += call.size.rows
        if calls:
            self._start(lane.route, calls, lane)

    def _start(self, route: Route, calls: list[Call], lane: Lane | None) -> None:
        errand = Errand(calls)
        task = asyncio.create_task(self._carry(route, calls, errand))
        errand.task = task
        self._tasks.add(task)
        if lane is not None:
            lane.in_flight += 1

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                for call in calls:  # a mistake of ours must not leave a caller without an answer
                    call.fail(error)
            if lane is not None:
                lane.in_flight -= 1
                self._look(lane)

        task.add_done_callback(ended)

    async def _carry(self, route: Route, calls: list[Call], errand: Errand) -> None:
        """Bring the calls their answers or errors, in one request or, when that is refused, in halves."""
        try:
            await self._anywhere(
                lambda endpoint: self._ask(endpoint, route, calls, errand),
                lambda: max((call.deadline for call in calls if not call.future.done()), default=0.0),
            )
        except (InputError, ModelFaultError) as error:
            self._served.pop((route.served.name, route.served.version), None)  # it may have been loaded anew
            if len(calls) == 1:
                calls[0].fail(error)
                return
            first, second = coalesce.halves(calls)
            await asyncio.gather(self._carry(route, first, errand), self._carry(route, second, errand))
        except CallError as error:
            now = asyncio.get_running_loop().time()
            for call in calls:
                is_late = error.is_retryable and call.deadline - now < LATE_S
                # A copy: an error that several tasks raise would gather the tracebacks of all.
                call.fail(call.late(f"; the last refusal was: {error}") if is_late else copy.copy(error))

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _anywhere(self, ask: Callable[[Endpoint], Awaitable[T]], deadline: Callable[[], float]) -> T:
        """Ask one endpoint, and others or again where that can help. Raises the last CallError."""
        loop = asyncio.get_running_loop()
        refused: set[int] = set()
        attempt = 0
        not_before = 0.0  # of the next attempt, when no other endpoint can be asked
        self._budget.sent()
        while True:
            attempt += 1
            endpoint = endpoints.choose(self.endpoints, now=loop.time(), avoid=refused)
            endpoint.in_flight += 1
            try:
                if not endpoint.is_proven:
                    await reach(endpoint)
                answer = await ask(endpoint)
                endpoints.answered(endpoint)
                return answer
            except CallError as error:
                now = loop.time()
                if isinstance(error, DisconnectedError):
                    endpoints.failed(endpoint, now=now)
                else:
                    endpoints.answered(endpoint)
                refused.add(id(endpoint))
                if isinstance(error, RejectedError):
                    not_before = max(not_before, now + error.retry_after_s)
                decision = retry.decide(
                    self._retries,
                    attempt=attempt,
                    is_retryable=error.is_retryable and not isinstance(error, DeadlineError),
                    left_s=deadline() - now,
                    tokens=self._budget.tokens,
                    draw=random.random(),
                    has_other_endpoint=endpoints.has_other(self.endpoints, now=now, avoid=refused),
                    retry_after_s=max(0.0, not_before - now),
                )
                if decision.wait_s is None:
                    raise
            finally:
                endpoint.in_flight -= 1
            self._budget.repeated()
            if decision.wait_s:
                await asyncio.sleep(decision.wait_s)

    async def _ask(self, endpoint: Endpoint, route: Route, calls: Sequence[Call], errand: Errand) -> None:
        """One request for those of the calls that still wait; gives each its rows. Raises a CallError."""
        waiting = [call for call in calls if not call.future.done()]
        if not waiting:
            return
        model = route.served
        if len(waiting) == 1:
            arrays = waiting[0].arrays
        else:
            arrays = {name: np.concatenate([call.arrays[name] for call in waiting]) for name in waiting[0].arrays}
        rows = sum(call.size.rows for call in waiting)
        # The latest of the deadlines: each call ends at its own here.
        left_s = max(call.deadline for call in waiting) - asyncio.get_running_loop().time()
        request = Request(
            model.name,
            model.version,
            {name: (model.inputs[name].data_type, array) for name, array in arrays.items()},
            route.outputs,
            route.level,
            max(1, int(left_s * 1e6)),
            time.monotonic_ns() + int(left_s * 1e9) if left_s < LONGEST_S else 0,
            route.caller_class,
        )
        found = await self._server(endpoint).infer(model, request, rows, errand)
        is_batched = model.max_batch_size > 0 and (model.is_limit_known or len(waiting) > 1 or waiting[0].is_single)
        if is_batched:
            for name, array in found.items():
                if not array.ndim or len(array) != rows:
                    raise ModelFaultError(
                        f"{endpoint.url} answered {rows} rows of the model {model.name} with {name} of shape "
                        f"{list(array.shape)}. Look at the model."
                    )
        for call, (start, stop) in zip(waiting, coalesce.spans([call.size.rows for call in waiting]), strict=True):
            call.answer(found, start, stop, is_shared=len(waiting) > 1, is_batched=is_batched)

    def _server(self, endpoint: Endpoint) -> Server:
        server = self._servers.get(id(endpoint))
        if server is None:
            server = self._servers[id(endpoint)] = Server(endpoint, self._sharing, self._key)
        return server

    # -- what a model takes --------------------------------------------------------------------------------------------

    async def _described(self, model: str, version: str, deadline: float) -> Served:
        """The model's description; concurrent first calls share the question."""
        if not _is_sendable(model + version):
            raise InputError(f"No server has a model {model!r}. Nothing was sent. Correct the name.", "model")
        task = self._describing.get((model, version))
        if task is None:
            task = asyncio.create_task(
                self._anywhere(lambda endpoint: self._describe(endpoint, model, version), lambda: deadline)
            )
            self._describing[model, version] = task
            self._tasks.add(task)

            def ended(task: asyncio.Task[Served]) -> None:
                self._tasks.discard(task)
                self._describing.pop((model, version), None)
                if not task.cancelled():
                    task.exception()  # whoever waited has it

            task.add_done_callback(ended)
        loop = asyncio.get_running_loop()
        asking: asyncio.Future[None] = loop.create_future()
        self._asking.add(asking)
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - loop.time()))
        finally:
            self._asking.discard(asking)
            asking.set_result(None)
        if not done:
            raise DeadlineError(
                f"The deadline passed before any server described the model {model}. Ask for more time."
            )
        if task.cancelled():
            raise ClosedError("The client was closed before the call was sent. Make a new client.")
        found = task.result()
        self._check_usable()
        return found

    async def _describe(self, endpoint: Endpoint, model: str, version: str) -> Served:
        found = self._served[model, version] = await self._server(endpoint).describe(model, version)
        return found


def _is_sendable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_header(text: str) -> bool:
    """Whether it can be sent as a header's value, over HTTP and gRPC, and arrives as it is."""
    return text.isascii() and text.isprintable() and text == text.strip()
