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
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
from tritonclient.utils import serialize_byte_tensor

from tritonpilot.client import coalesce, endpoints, retry, served
from tritonpilot.client.endpoints import Endpoint
from tritonpilot.client.errors import (
    CallError,
    ClosedError,
    DeadlineError,
    DisconnectedError,
    InputError,
    ModelFaultError,
)
from tritonpilot.client.placement import Placement, place
from tritonpilot.client.served import Array, Checked, Served
from tritonpilot.client.shared_memory import Region, Regions, UnavailableError
from tritonpilot.client.transport import Answer, Place, Request, Transport, connect, reach
from tritonpilot.control_key import VARIABLE, control_key, key_file
from tritonpilot.errors import HostError
from tritonpilot.tritonserver import CONTROL_HEADER

DEADLINE_MS = 30_000.0
CLOSE_GRACE_S = 5.0
SMALL_CALL_BYTES = 1 << 18  # above that, the stack's share of a call is small, and joining only copies
SHARED_MEMORY_BYTES = 1 << 18  # measured: docs/client.md
DOUBTFUL_S = 60.0  # a request whose tensors lie in shared memory is waited for that long after its callers left
LATE_S = 0.005  # a refusal this close to the deadline is the deadline's

SharedMemory = Literal["auto", "off"] | int
T = TypeVar("T")


class AsyncClient:
    """Calls the models of one server, or of several that serve the same ones. Used from the event loop of its first call.

    `servers`: "host:port" or URLs of the schemes http, https, grpc, grpcs. `deadline_ms` and `caller_class` hold for calls that
    state none. `coalesce` joins concurrent small calls into one request; while one of the same kind is on the way, a call
    waits for company for at most `coalesce_wait_ms`. `retries` says how retryable rejections are repeated.
    `shared_memory`: "auto" puts big tensors there when the server is on this machine and the control key is known (given,
    in TRITONPILOT_CONTROL_KEY, or in the state file), "off" never; a number is the index of the GPU to put them on.

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
        retries: retry.Policy = retry.Policy(),  # noqa: B008  frozen
        shared_memory: SharedMemory = "auto",
        shared_memory_bytes: int = SHARED_MEMORY_BYTES,
        control_key: str | None = None,
    ) -> None:
        given = [servers] if isinstance(servers, str) else list(servers)
        if not given:
            raise InputError("No endpoint was given. Nothing was sent. Name one server at least.", "servers")
        self.endpoints = [endpoints.parse(each) for each in given]
        self.deadline_ms = deadline_ms
        self._caller_class = caller_class
        self._may_join = coalesce
        self._wait_s = coalesce_wait_ms / 1e3
        self._retries = retries
        self._budget = retry.Budget(retries)
        self._shared_memory = shared_memory
        self._shared_memory_bytes = shared_memory_bytes
        self._key = control_key if control_key is not None else None
        self._pid = os.getpid()
        self._is_closed = False
        self._transports: dict[int, Transport] = {}  # by id of the endpoint
        self._regions: dict[int, Regions] = {}
        self._served: dict[tuple[str, str], Served] = {}
        self._describing: dict[tuple[str, str], asyncio.Task[Served]] = {}
        self._lanes: dict[_Key, _Lane] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: set[_Call] = set()

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
        if unknown := [name for name in outputs if name not in described.outputs]:
            raise InputError(
                f'"{unknown[0]}": the model {model} has no such output. Nothing was sent. Its outputs are '
                f"{', '.join(described.outputs)}.",
                unknown[0],
            )
        route = _Route(described, level, tuple(outputs))
        call = _Call(checked, loop.create_future(), deadline, asked_s)
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
        while self._tasks and (left := until - time.monotonic()) > 0:
            await asyncio.wait(list(self._tasks), timeout=left)
        for call in list(self._calls):
            call.fail(
                ClosedError(f"The client was closed, and there was no answer within {grace_s:g} s. Make a new client.")
            )
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for regions in self._regions.values():
            await regions.close()
        for transport in self._transports.values():
            await transport.close()
        self._regions.clear()
        self._transports.clear()

    # -- from calls to requests ----------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                "This client belongs to the process before the fork. Nothing was sent. Make a client in this process."
            )
        if self._is_closed:
            raise ClosedError("This client was closed. Nothing was sent. Make a new one.")

    def _add(self, call: _Call, route: _Route, loop: asyncio.AbstractEventLoop) -> None:
        model = route.served
        if not (self._may_join and model.may_join and call.bytes <= SMALL_CALL_BYTES):
            self._start(route, [call], None)
            return
        key = (model, route.level, route.outputs, call.shapes(), coalesce.deadline_band(call.asked_s))
        lane = self._lanes.get(key)
        if lane is None:
            limits = coalesce.Limits(rows=model.max_batch_size, wait_s=self._wait_s)
            lane = self._lanes[key] = _Lane(key, route, limits)
        call.since = loop.time()
        lane.waiting.append(call)
        if not lane.is_looked_at:
            # At the end of this turn of the loop: tasks that were woken together call together.
            lane.is_looked_at = True
            loop.call_soon(self._look, lane)

    def _look(self, lane: _Lane) -> None:
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

    def _send_all(self, lane: _Lane) -> None:
        calls: list[_Call] = []
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

    def _start(self, route: _Route, calls: list[_Call], lane: _Lane | None) -> None:
        errand = _Errand(calls)
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

    async def _carry(self, route: _Route, calls: list[_Call], errand: _Errand) -> None:
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
                decision = retry.decide(
                    self._retries,
                    attempt=attempt,
                    is_retryable=error.is_retryable,
                    left_s=deadline() - now,
                    tokens=self._budget.tokens,
                    draw=random.random(),
                    has_other_endpoint=endpoints.has_other(self.endpoints, now=now, avoid=refused),
                )
                if decision.wait_s is None:
                    raise
            finally:
                endpoint.in_flight -= 1
            self._budget.repeated()
            if decision.wait_s:
                await asyncio.sleep(decision.wait_s)

    async def _ask(self, endpoint: Endpoint, route: _Route, calls: Sequence[_Call], errand: _Errand) -> None:
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
        left_s = max(call.deadline for call in waiting) - asyncio.get_running_loop().time()
        request = Request(
            model.name,
            model.version,
            {name: (model.inputs[name].data_type, array) for name, array in arrays.items()},
            route.outputs,
            route.level,
            max(1, int(left_s * 1e6)),
        )
        found = await self._infer(endpoint, route, request, rows, errand)
        if model.max_batch_size:
            for name, array in found.items():
                if not array.ndim or len(array) != rows:
                    raise ModelFaultError(
                        f"{endpoint.url} answered {rows} rows of the model {model.name} with {name} of shape "
                        f"{list(array.shape)}. Look at the model."
                    )
        for call, (start, stop) in zip(waiting, coalesce.spans([call.size.rows for call in waiting]), strict=True):
            call.answer(found, start, stop, is_shared=len(waiting) > 1, is_batched=model.max_batch_size > 0)

    async def _infer(
        self, endpoint: Endpoint, route: _Route, request: Request, rows: int, errand: _Errand
    ) -> Mapping[str, Array]:
        transport = self._transport(endpoint)
        regions = self._regions_of(endpoint, transport)
        if regions is not None and regions.is_available:
            model = route.served
            plan = _placement(model, request, rows, self._shared_memory_bytes)
            if plan.bytes:
                with suppress(UnavailableError):
                    async with regions.borrowed(plan.bytes) as region:
                        errand.is_doubtful = True  # the server reads and writes the region until it has answered
                        try:
                            return await _infer_through(region, plan, transport, model, request, rows)
                        except CallError as error:
                            if "shared memory region" not in str(error):
                                raise
                        finally:
                            errand.is_doubtful = False
                    await regions.forget()  # the server was started again: it has none of ours
        return (await transport.infer(request)).arrays

    def _transport(self, endpoint: Endpoint) -> Transport:
        transport = self._transports.get(id(endpoint))
        if transport is None:
            transport = self._transports[id(endpoint)] = connect(endpoint, self._control_header())
        return transport

    def _control_header(self) -> tuple[str, str] | None:
        if self._key is None:
            self._key = _known_key()
        return (CONTROL_HEADER, self._key) if self._key else None

    def _regions_of(self, endpoint: Endpoint, transport: Transport) -> Regions | None:
        if self._shared_memory == "off" or not endpoint.is_loopback:
            return None
        regions = self._regions.get(id(endpoint))
        if regions is None:
            device = None if self._shared_memory == "auto" else self._shared_memory
            regions = self._regions[id(endpoint)] = Regions(transport, device)
        return regions

    # -- what a model takes --------------------------------------------------------------------------------------------

    async def _described(self, model: str, version: str, deadline: float) -> Served:
        """The model's description; concurrent first calls share the question."""
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
        done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
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
        config = await self._transport(endpoint).config(model, version)
        found = self._served[model, version] = served.from_config(config, version)
        return found


_Key = tuple[Served, int, tuple[str, ...], tuple[Any, ...], int]


class _Route:
    """What every call of a request has in common."""

    __slots__ = ("level", "outputs", "served")

    def __init__(self, model: Served, level: int, outputs: tuple[str, ...]) -> None:
        self.served = model
        self.level = level
        self.outputs = outputs


class _Call:
    """One prediction that somebody waits for."""

    __slots__ = ("arrays", "asked_s", "bytes", "deadline", "errand", "future", "is_single", "since", "size")

    def __init__(
        self, checked: Checked, future: asyncio.Future[dict[str, Array]], deadline: float, asked_s: float
    ) -> None:
        self.arrays = checked.arrays
        self.is_single = checked.is_single
        self.bytes = served.size_of(checked.arrays)
        self.size = coalesce.Size(checked.rows, self.bytes)
        self.future = future
        self.deadline = deadline
        self.asked_s = asked_s
        self.since = 0.0
        self.errand: _Errand | None = None

    def shapes(self) -> tuple[Any, ...]:
        return tuple([(name, array.shape[1:]) for name, array in self.arrays.items()])

    def answer(self, found: Mapping[str, Array], start: int, stop: int, *, is_shared: bool, is_batched: bool) -> None:
        if self.future.done():
            return
        if not is_batched:
            self.future.set_result(dict(found))
            return
        part: Any = start if self.is_single else slice(start, stop)
        # A copy: nobody's answer keeps the rows of others in memory.
        self.future.set_result(
            {name: np.array(array[part]) if is_shared else array[part] for name, array in found.items()}
        )

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        self.fail(self.late())

    def late(self, more: str = "") -> DeadlineError:
        return DeadlineError(
            f"There was no answer within {self.asked_s * 1e3:g} ms{more}. Ask for more time, or send less."
        )


class _Errand:
    """The calls that were sent together; it ends when none of them waits any more."""

    __slots__ = ("calls", "is_doubtful", "task")

    def __init__(self, calls: Sequence[_Call]) -> None:
        self.calls = calls
        self.task: asyncio.Task[None] | None = None
        self.is_doubtful = False
        for call in calls:
            call.errand = self

    def left(self) -> None:
        """A caller went, with an answer or without: nobody needs the request when all are gone."""
        if self.task is None or self.task.done() or not all(call.future.done() for call in self.calls):
            return
        if self.is_doubtful:
            self.task.get_loop().call_later(DOUBTFUL_S, self.task.cancel)
        else:
            self.task.cancel()


class _Lane:
    """Calls that may share a request, and how many of its requests are on the way."""

    __slots__ = ("in_flight", "is_looked_at", "key", "limits", "route", "timer", "waiting")

    def __init__(self, key: _Key, route: _Route, limits: coalesce.Limits) -> None:
        self.key = key
        self.route = route
        self.limits = limits
        self.waiting: deque[_Call] = deque()
        self.in_flight = 0
        self.is_looked_at = False
        self.timer: asyncio.TimerHandle | None = None


def _placement(model: Served, request: Request, rows: int, threshold: int) -> Placement:
    inputs = {name: served.size_of({name: array}) for name, (kind, array) in request.inputs.items() if kind != "BF16"}
    wanted = request.outputs or tuple(model.outputs)
    outputs = {
        name: served.output_bytes(model.outputs[name], rows, model.max_batch_size > 0)
        for name in wanted
        if model.outputs[name].data_type != "BF16"
    }
    return place(inputs, outputs, threshold)


async def _infer_through(
    region: Region, plan: Placement, transport: Transport, model: Served, request: Request, rows: int
) -> Mapping[str, Array]:
    """The request with the placed tensors in the region instead of in the body."""
    placed_inputs = {}
    for name, offset in plan.inputs.items():
        array = request.inputs[name][1]
        if array.dtype.kind == "O":
            array = np.frombuffer(serialize_byte_tensor(array).item(), np.uint8)
        region.write(array, offset)
        placed_inputs[name] = Place(region.name, array.nbytes, offset)
    placed_outputs = {
        name: Place(region.name, served.output_bytes(model.outputs[name], rows, model.max_batch_size > 0), offset)
        for name, offset in plan.outputs.items()
    }
    answer: Answer = await transport.infer(
        Request(
            request.model,
            request.version,
            request.inputs,
            request.outputs or tuple(model.outputs),
            request.priority,
            request.timeout_us,
            placed_inputs,
            placed_outputs,
        )
    )
    arrays = dict(answer.arrays)
    for name, shape in answer.placed_shapes.items():
        arrays[name] = region.read(model.outputs[name].dtype, shape, plan.outputs[name])
    return arrays


def _known_key() -> str:
    """The control key of a server on this machine, "" when this user has none; never makes one."""
    try:
        return control_key().value if VARIABLE in os.environ or Path(key_file()).is_file() else ""
    except HostError:
        return ""
